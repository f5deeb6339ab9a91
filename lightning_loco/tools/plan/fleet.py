"""Files with which a launcher starts the chosen option, from the templates of ``templates``.

A worker is a machine, with one or several GPUs. On clusters, where machines come and go, the
workers of a method for elastic members are jobs of their own, with a lighthouse.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.tools.plan.planner import Plan
from lightning_loco.tools.plan.text import overrides, settings, strategy

MAX_ISLANDS = 64
"""SkyPilot gets a file for each."""

_VAL_EVERY = 1000
"""Local steps between validations and checkpoints."""

_WIDTH = 76
"""Columns of a line of arguments."""


@dataclasses.dataclass(frozen=True)
class Launcher:
    """What is written for a launcher.

    Attributes:
        files: File names and their templates.
        start: Lines of text with the commands that start them.
        trainer: Choice of ``trainer`` of train.py.
        elastic: Whether the workers are elastic members.
    """

    files: dict[str, str]
    start: tuple[str, ...]
    trainer: str = "gpu"
    elastic: bool = False


def _torchrun(workers: int, elastic: bool) -> Launcher:
    return Launcher(
        {"loco_torchrun.sh": "torchrun.sh"},
        (
            "In a checkout on each machine, with HOST as the address of the first one, and its own",
            f"number from 0 to {workers - 1} as RANK:",
            "  bash loco_torchrun.sh RANK HOST",
        ),
    )


def _slurm(workers: int, elastic: bool) -> Launcher:
    if not elastic:
        files = {"loco_job.sbatch": "job.sbatch"}
        return Launcher(files, ("In a checkout:", "  sbatch loco_job.sbatch"), trainer="slurm")
    return Launcher(
        {"loco_lighthouse.sbatch": "lighthouse.sbatch", "loco_workers.sbatch": "workers.sbatch"},
        (
            "In a checkout:",
            "  lighthouse=$(sbatch --parsable loco_lighthouse.sbatch)",
            "  sbatch --dependency=after:$lighthouse --export=ALL,LIGHTHOUSE_JOB=$lighthouse "
            "loco_workers.sbatch",
            "  scancel $lighthouse  # when all workers have ended",
        ),
        trainer="slurm",
        elastic=True,
    )


def _kubernetes(workers: int, elastic: bool) -> Launcher:
    files = {"loco.yaml": "jobset.yaml" if elastic else "job.yaml"}
    where = "In a cluster with JobSet (https://jobset.sigs.k8s.io):" if elastic else "Start it:"
    return Launcher(files, (where, "  kubectl apply -f loco.yaml"), elastic=elastic)


def _skypilot(workers: int, elastic: bool) -> Launcher:
    if not elastic:
        files = {"loco_cluster.yaml": "cluster.yaml"}
        return Launcher(files, ("In a checkout:", "  sky launch -c loco loco_cluster.yaml"))
    if workers > MAX_ISLANDS:
        raise ValueError(
            f"--write skypilot writes a file for each of {workers} islands; at most {MAX_ISLANDS}. "
            "Make each island a worker of several GPUs, with fewer --workers and "
            "--ranks-per-worker, or use --write kubernetes or slurm."
        )
    launches = [
        f"  sky launch -c loco-{island} --env HOST=ADDRESS loco_island_{island}.yaml"
        for island in range(1, workers)
    ]
    return Launcher(
        {f"loco_island_{island}.yaml": "island.yaml" for island in range(workers)},
        (
            "In a checkout, first island 0, which has the lighthouse:",
            "  sky launch -c loco-0 loco_island_0.yaml",
            "Then the others, with the ADDRESS of island 0 that they reach; in one network it is "
            "the",
            "first of `ssh loco-0 hostname -I`:",
            *launches,
        ),
        elastic=True,
    )


def _ray(workers: int, elastic: bool) -> Launcher:
    return Launcher(
        {"loco_ray.py": "train.py"},
        ("On a node of the cluster:", "  python loco_ray.py"),
    )


LAUNCHERS: dict[str, Callable[[int, bool], Launcher]] = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
    "ray": _ray,
}
"""By name: what is written for a number of workers, whose method is for elastic members or not."""


def write_files(plan: Plan, name: str, folder: Path, ranks: int) -> str:
    """Write the files of a launcher. Returns text: what was written, and how to start it.

    Args:
        plan: The plan, whose chosen option is started.
        name: One of ``LAUNCHERS``.
        folder: Where the files are written; it is made if necessary.
        ranks: Ranks of a worker, the GPUs of its machine.

    Raises:
        ValueError: If there are too many workers for the launcher, or a file exists already (then
            nothing is written), or if a file cannot be written.
    """
    option, workers = plan.chosen, plan.job.num_workers
    if ranks < 1:
        raise ValueError(f"--ranks-per-worker must be at least 1, got {ranks}.")
    launcher = LAUNCHERS[name](workers, METHOD_TABLE[option.candidate.method].elastic)
    paths = [folder / file for file in launcher.files]
    if exists := [str(path) for path in paths if path.exists()]:
        raise ValueError(
            f"{', '.join(exists)} exists, and may have been "
            "edited. Name another folder with --to, or move what is there."
        )
    texts = _render(plan, launcher, ranks)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts, strict=True):
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ValueError(f"--to cannot write {error.filename}: {error.strerror}.") from None
    start = "\n".join(launcher.start)
    for path in paths:
        start = start.replace(path.name, str(path))
    return f"Wrote {', '.join(map(str, paths))}. Edit what is marked.\n{start}"


def _render(plan: Plan, launcher: Launcher, ranks: int) -> list[str]:
    """Return the text of each file."""
    import jinja2  # here, not at the top: a plan without files does not need it

    option, workers, steps = plan.chosen, plan.job.num_workers, plan.job.steps
    is_ddp, val_every = option.candidate.method == "ddp", min(_VAL_EVERY, steps)
    first = [f"trainer={launcher.trainer}"]
    if launcher.elastic:
        first += ["membership=elastic", "membership.min_workers=1"]
    method = overrides(option)
    if ranks > 1 and not is_ddp:
        method.append("algorithm.replica_size=node")
    length = [f"trainer.max_steps={steps}", f"trainer.val_check_interval={val_every}"]
    lines = [" ".join(words) for words in (first, method, ["data=stdlib"], length)]
    values: dict[str, Any] = {
        "title": f"{settings(option)}.",
        "layout": f"{workers} {'machines' if is_ddp else 'workers'} with {ranks} "
        f"GPU{'s' if ranks > 1 else ''} each",
        "workers": workers,
        "ranks": ranks,
        "arguments": [
            part for line in lines for part in textwrap.wrap(line, _WIDTH, break_on_hyphens=False)
        ],
        "strategy": strategy(option, ranks),
        "is_ddp": is_ddp,
        "steps": steps,
        "val_every": val_every,
    }
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # these are no pages
    )
    return [
        templates.get_template(f"{template}.jinja").render(
            values, file=file, files=list(launcher.files), island=island
        )
        for island, (file, template) in enumerate(launcher.files.items())
    ]

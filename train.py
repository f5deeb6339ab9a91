"""Command line: choose an algorithm, a topology, a model and data by name, and train.

``python train.py --help`` lists the choices. Nothing heavy is imported until a run really starts,
so that ``--help`` and ``--cfg job`` answer at once.
"""

from __future__ import annotations

import os
from datetime import datetime
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf


def conf_dir() -> str:
    """The folder of configurations: inside the package when installed, beside it in a checkout.

    Raises:
        FileNotFoundError: ``lightning_loco`` or its configurations are not there.
    """
    spec = find_spec("lightning_loco")
    package = (
        Path(spec.origin).parent
        if spec and spec.origin
        else Path(__file__).parent / "lightning_loco"
    )
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return str(folder)
    raise FileNotFoundError(
        f"No conf/train.yaml in {package} or {package.parent}. Install lightning_loco, or run in a"
        " checkout."
    )


def rank() -> int:
    """Rank of this process as its launcher tells: torchrun, SLURM, or Lightning's own."""
    return int(
        next(
            (
                os.environ[name]
                for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK")
                if name in os.environ
            ),
            0,
        )
    )


def run_stamp() -> str:
    """Name of the run's folder: the SLURM job, torchrun's id on several machines, or date and time.

    It is the same on all ranks of a run. Ranks that Lightning starts itself are told rank 0's.
    """
    env = os.environ
    if "SLURM_JOB_ID" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return f"slurm-{env['SLURM_JOB_ID']}-{env.get('SLURM_STEP_ID', '0')}"
    torchrun_id = env.get("TORCHELASTIC_RUN_ID")
    if torchrun_id and env.get("WORLD_SIZE") != env.get("LOCAL_WORLD_SIZE"):
        return f"torchrun-{torchrun_id}"
    start = parent_start() if torchrun_id else datetime.now()
    return start.strftime("%Y-%m-%d/%H-%M-%S")


def parent_start() -> datetime:
    """When the parent process started: the one time that all workers of torchrun share."""
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        machine = Path("/proc/stat").read_text().splitlines()
        boot_s = next(int(line.split()[1]) for line in machine if line.startswith("btime"))
    except (OSError, StopIteration):
        return datetime.now()
    return datetime.fromtimestamp(boot_s + int(fields[19]) // os.sysconf("SC_CLK_TCK"))


OmegaConf.register_new_resolver("loco_run_stamp", run_stamp, use_cache=True, replace=True)
OmegaConf.register_new_resolver(
    "loco_log_name", lambda: f"train-rank{rank()}.log" if rank() else "train.log", replace=True
)
OmegaConf.register_new_resolver(
    "loco_rank_zero", lambda value: None if rank() else value, replace=True
)


def unknown_key(cfg: DictConfig) -> str | None:
    """What is wrong with the keys at the top level: one that nothing reads; None if all is well.

    ``+algoritm=diloco`` would add a key and train the default algorithm. A key that another value
    refers to (``${width}``) is read.
    """
    default = OmegaConf.load(Path(conf_dir()) / "train.yaml")
    groups = {
        str(name) for entry in default.defaults if isinstance(entry, DictConfig) for name in entry
    }
    known = {str(name) for name in default} - {"defaults"} | groups
    text = OmegaConf.to_yaml(cfg)
    for key in map(str, cfg):
        if key not in known and f"${{{key}" not in text:
            close = get_close_matches(key, sorted(known), 1)
            meant = (
                f"Did you mean {close[0]}=...?"
                if close
                else f"There are {', '.join(sorted(known))}."
            )
            return f"{key} is no setting, and nothing refers to it. {meant}"
    return None


@hydra.main(version_base="1.3", config_path=conf_dir(), config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Train as configured; returns the final validation loss, for sweeps.

    A setting that cannot work ends the process with one line on stderr and status 1;
    HYDRA_FULL_ERROR=1 shows where it was found.
    """
    if mistake := unknown_key(cfg):
        raise SystemExit(f"error: {mistake}")
    from lightning_loco.chosen_strategy import SettingsError
    from lightning_loco.cli import run

    try:
        return run(cfg)
    except SettingsError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        prefix = f"[rank {rank()}] " if rank() else ""
        raise SystemExit(f"{prefix}error: {error}") from None


if __name__ == "__main__":
    main()

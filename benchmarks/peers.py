"""DiLoCo beside other libraries: the same model, data, seeds and local steps.

Every run trains the demo's GPT on the demo's text with its own worker processes, and the libraries
follow each other in turn, forwards and then backwards. All share one training loop
(``libraries/training.py``); each has one small adapter beside it. Libraries that are not installed
are listed as absent, and a run that fails or is not done by the deadline (in seconds) says so.

  no library   the local steps alone: what the other columns are compared with
  blocking     what the library does after the last local step of a phase, and elsewhere outside of
               the local steps, until the last worker is done. The workers wait for each other
               before, without the network and off the clock. DDP has no rounds: its steps minus the
               same number of steps of workers alone
  waited       of that, how long the training thread had no processor: it waited for the network, a
               lock or another process (or for a core, on a busy machine)
  sent         bytes on the interface for each worker and round, with headers and acknowledgements
  more         a local step that ends no phase, minus one of workers alone (whose time stands there)
  memory       highest resident memory of a worker and its child processes, minus a worker alone
  val loss     of the workers' own models at the end, mean over the workers. The DiLoCos should have
               the same; PostLocalSGD averages without an outer step, DDP averages gradients, dpwa
               gossips
  wall         seconds of all counted rounds with their local steps

The loopback is in its own network namespace, the shaped link joins a namespace for each
worker at a switch behind a token bucket (Linux, as root); without namespaces the loopback counts
the bytes of all processes, and the shaped link is skipped.

How to read it: times are medians over all rounds of all repetitions, with quartiles. ``ours / it``
is the ratio of the medians of one repetition, and should be at most 0.5 to torchft's bucketised
DiLoCo and at most 0.2 to its DiLoCo with one all-reduce per parameter, on the loopback. On the
shaped link the bytes decide. Use an idle machine with as many cores as workers.

``--only`` names some of the libraries; the first always runs, and the compressed ones only if they
are named. ``--dpwa`` is a checkout of dpwa, which has no package. ``--rate`` is what tc calls it.

  python benchmarks/peers.py --png peers.png
  python benchmarks/peers.py --workers 2 4 --models 0.8M 5M --dpwa ../dpwa
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import secrets
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness
from harness import RankFailed, spread
from libraries import links
from libraries.counters import marked
from libraries.library import Job
from libraries.training import Result, train


class Entry(NamedTuple):
    """One row of the table.

    Attributes:
        title: What is printed.
        adapter: ``"module:class"`` within the folder ``libraries``.
        package: What has to be installed for it; None for what is always there.
        part: A file or folder of the package that others of its name do not have.
        bound: Of our blocking round divided by this one's, on the loopback; None for none.
    """

    title: str
    adapter: str
    package: str | None = None
    part: str = "__init__.py"
    bound: float | None = None


ALONE, OURS = "alone", "ours"
ENTRIES = {
    ALONE: Entry("no library, every worker alone", "built_in:Alone"),
    OURS: Entry("lightning_loco DiLoCo", "built_in:Ours"),
    "ours_int8": Entry("lightning_loco DiLoCo, int8", "built_in:Ours"),
    "ours_e3m0": Entry("lightning_loco DiLoCo, e3m0", "built_in:Ours"),
    "ours_sparse": Entry("lightning_loco DiLoCo, sparse", "built_in:Ours"),
    "ddp": Entry("torch DDP, every step", "built_in:TorchDDP"),
    "post_local_sgd": Entry("torch PostLocalSGD", "built_in:TorchPostLocalSGD"),
    "torchft_buckets": Entry(
        "torchft DiLoCo, bucketised", "torchft_diloco:TorchftDiLoCoInBuckets", "torchft", bound=0.5
    ),
    "torchft": Entry(
        "torchft DiLoCo, per parameter", "torchft_diloco:TorchftDiLoCo", "torchft", bound=0.2
    ),
    "hivemind": Entry("hivemind averager", "hivemind_diloco:HivemindDiLoCo", "hivemind"),
    "exogym": Entry("exogym DiLoCo", "exogym_diloco:ExogymDiLoCo", "exogym", "strategy"),
    "dpwa": Entry("dpwa gossip", "dpwa_gossip:DpwaGossip", "dpwa"),
}
SIZES = {
    "0.8M": {"num_layers": 4, "num_heads": 4, "width": 128, "context": 128},
    "5M": {"num_layers": 6, "num_heads": 4, "width": 256, "context": 128},
    "tiny": harness.QUICK_SIZES,
}
HEADER = [
    *("library", "blocking ms", "waited ms", "sent MB a round", "more a local step, us"),
    *("memory MB", "val loss", "wall s", "ours / it", "bound"),
]
MARK = "LOCO_BENCHMARK_RUN"
MB = 1e6


def found(entry: Entry, dpwa: str | None) -> str | None:
    """The version of a library here; None if it is absent, "" if it does not say."""
    if entry.package is None:
        return ""
    if entry.package == "dpwa":
        return "" if dpwa and Path(dpwa, "dpwa", "dpwa.py").is_file() else None
    spec = importlib.util.find_spec(entry.package)
    folders = spec.submodule_search_locations if spec is not None else None
    if not any(Path(folder, entry.part).exists() for folder in folders or ()):
        return None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(entry.package)
    return ""


# ------------------------------------------------------------------------------------ the runs


class Run(NamedTuple):
    """One run, over its workers.

    Attributes:
        blocking_ms: Of each counted round, until the last worker is done.
        waited_ms: The training thread's waiting in it.
        sent: Bytes per worker and round.
        step_ms: Median of the local steps that end no phase.
        peak: Bytes of memory, of the worker that needs most.
        val_loss: Mean over the workers' models.
        wall_s: Of all counted rounds.
    """

    blocking_ms: list[float]
    waited_ms: list[float]
    sent: float
    step_ms: float
    peak: float
    val_loss: float
    wall_s: float


Runs = dict[str, list[Run | None]]
"""The runs of each library, one for each repetition; None for one that failed."""


def summarise(results: Sequence[Result], alone: Sequence[Result], every: int) -> Run:
    """Put the workers' results together.

    A library that communicates in every step has no rounds: its ``every`` steps minus the same
    number of steps of workers that are alone stand for one.
    """
    rounds = list(zip(*(result.rounds for result in results), strict=True))
    blocking = [1000 * max(span.wall_s for span in spans) for spans in rounds]
    waited = [1000 * max(span.waited_s for span in spans) for spans in rounds]
    if results[0].every_step:
        wall, base_wall = (middle(of, lambda span: span.wall_s) for of in (results, alone))
        wait, base_wait = (middle(of, lambda span: span.waited_s) for of in (results, alone))
        blocking, waited = [every * (wall - base_wall)], [every * (wait - base_wait)]
    return Run(
        blocking_ms=blocking,
        waited_ms=waited,
        sent=statistics.fmean(result.bytes_sent for result in results) / len(rounds),
        step_ms=middle(results, lambda span: span.wall_s),
        peak=max(result.peak_bytes for result in results),
        val_loss=statistics.fmean(result.val_loss for result in results),
        wall_s=max(result.wall_s for result in results),
    )


def middle(results: Sequence[Result], of: Callable[[Any], float]) -> float:
    """Median in milliseconds over the local steps of all workers."""
    return 1000 * statistics.median(of(span) for result in results for span in result.steps)


def run(key: str, link: links.Link, size: str, workers: int, folder: str, options: Any) -> Any:
    """Train once with a library; return the results of all workers."""
    names = ("rounds", "sync_every", "batch_size", "seed", "outer_lr", "outer_momentum")
    dpwa = options.dpwa and str(Path(options.dpwa).resolve())
    job = Job(
        **{name: getattr(options, name) for name in names},
        **{"entry": key, "size": SIZES[size], "folder": folder, "dpwa": dpwa},
        **{"interface": link.interface, "is_shared": link.is_shared},
    )
    mark = secrets.token_hex(8)
    try:
        return harness.run_workers(
            train,
            workers,
            *(job, ENTRIES[key].adapter),
            network=link,
            environ={"GLOO_SOCKET_IFNAME": link.interface, MARK: mark},
            limit_s=options.deadline,
        )
    finally:
        for process in marked(f"{MARK}={mark}"):  # those that have left the group of their worker
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def measure(
    link: links.Link, size: str, workers: int, present: list[str], options: argparse.Namespace
) -> tuple[Runs, dict[str, str]]:
    """All repetitions of all libraries on one link, and why the last of one failed."""
    runs: Runs = {key: [] for key in present}
    failed: dict[str, str] = {}
    others, alone = [key for key in present if key != ALONE], []
    for repetition in range(options.repetitions):
        for key in [ALONE, *(others[::-1] if repetition % 2 else others)]:
            try:
                with tempfile.TemporaryDirectory(prefix="loco-bench-") as folder:
                    results = run(key, link, size, workers, folder, options)
            except RankFailed as error:
                if key == ALONE:
                    raise SystemExit(f"the workers alone failed: {error}") from error
                runs[key].append(None)
                failed[key] = str(error)
                print(f"failed: {ENTRIES[key].title}: {error}", flush=True)
                continue
            alone = results if key == ALONE else alone
            runs[key].append(summarise(results, alone, options.sync_every))
        print(f"done: {link.name}, {size}, {workers} workers, {repetition + 1}", flush=True)
    return runs, failed


# ------------------------------------------------------------------------- table and picture


def ended(runs: Runs, key: str) -> list[Run]:
    """The runs of a library that came to an end."""
    return [run for run in runs.get(key, []) if run is not None]


def pairs(runs: Runs, key: str, other: str) -> list[tuple[Run, Run]]:
    """The repetitions in which two libraries came to an end."""
    both = zip(runs.get(key, []), runs.get(other, []), strict=False)
    return [(a, b) for a, b in both if a is not None and b is not None]


def row(key: str, runs: Runs, with_bound: bool) -> list[str]:
    """A library's line in the table."""
    title, done = ENTRIES[key].title, ended(runs, key)
    if not done:
        return [title, "failed" if key in runs else "absent", *["-"] * (len(HEADER) - 2)]
    if len(done) < len(runs[key]):
        title += f" ({len(done)} of {len(runs[key])} runs)"
    of_alone = pairs(runs, key, ALONE)
    cells = [
        spread([ms for run in done for ms in run.blocking_ms], 1),
        spread([ms for run in done for ms in run.waited_ms], 1),
        f"{statistics.median(run.sent for run in done) / MB:.2f}",
        spread([1000 * (run.step_ms - base.step_ms) for run, base in of_alone], 0),
        f"{statistics.median(run.peak - base.peak for run, base in of_alone) / MB:.0f}",
        spread([run.val_loss for run in done], 4),
        spread([run.wall_s for run in done], 1),
    ]
    if key == ALONE:
        peak = statistics.median(run.peak for run in done) / MB
        step_ms = statistics.median(run.step_ms for run in done)
        cells[:5] = ["-", "-", cells[2], f"({step_ms:.1f} ms)", f"({peak:.0f})"]
    medians = [[statistics.median(x.blocking_ms) for x in pair] for pair in pairs(runs, OURS, key)]
    # On a busy machine steps with communication may be shorter than those without.
    ratios = [ours / theirs for ours, theirs in medians if theirs > 0]
    if not ratios or key in (ALONE, OURS):
        return [title, *cells, "-", "-"]
    bound = ENTRIES[key].bound if with_bound else None
    judged = "-" if bound is None else harness.at_most(statistics.median(ratios), bound)
    return [title, *cells, spread(ratios), judged]


def draw(tables: dict[str, Runs], path: Path) -> None:
    """Bars of the blocking time and of the bytes of a round, for each library and link."""
    from matplotlib.figure import Figure

    keys = [
        key for key in ENTRIES if key != ALONE and any(ended(runs, key) for runs in tables.values())
    ]
    figure = Figure(figsize=(10, 1.5 + 0.35 * len(keys) * len(tables)), layout="constrained")
    time, size = figure.subplots(1, 2, sharey=True)
    thickness = 0.8 / len(tables)
    for index, (name, runs) in enumerate(tables.items()):
        shown = [(row, done) for row, key in enumerate(keys) if (done := ended(runs, key))]
        at = [row + (index - (len(tables) - 1) / 2) * thickness for row, _ in shown]
        blocking = [
            statistics.median(x for run in done for x in run.blocking_ms) for _, done in shown
        ]
        sent = [statistics.median(run.sent / MB for run in done) for _, done in shown]
        for axes, values in ((time, blocking), (size, sent)):
            bars = axes.barh(at, [max(value, 1e-3) for value in values], thickness, label=name)
            labels = [f"{value:,.3g}" if value < 100 else f"{value:,.0f}" for value in values]
            axes.bar_label(bars, labels, padding=2, fontsize=8)
    time.set(xscale="log", xlabel="blocking ms a round", yticks=range(len(keys)))
    time.set_yticklabels([ENTRIES[key].title for key in keys])
    time.invert_yaxis()
    size.set(xlabel="MB sent by a worker a round")
    for axes in (time, size):
        axes.margins(x=0.15)
    time.set_xlim(left=1)
    figure.legend(*size.get_legend_handles_labels(), loc="outside upper center", ncols=len(tables))
    figure.savefig(path, dpi=120)
    print(f"The picture is in {path}")


def main() -> None:
    options = harness.parse(
        __doc__,
        only=[key for key in ENTRIES if not key.startswith("ours_")],
        models=["0.8M"],
        workers=[2],
        rounds=10,  # counted in every run
        repetitions=3,
        sync_every=10,
        batch_size=8,
        seed=0,
        outer_lr=0.7,
        outer_momentum=0.6,
        links=["loopback", "shaped"],
        rate="100mbit",
        deadline=300.0,
        dpwa=str,
        png=Path,
        quick={"models": ["tiny"], "links": ["loopback"], "rounds": 2, "repetitions": 1},
        choices={"only": ENTRIES, "models": SIZES, "links": ["loopback", "shaped"]},
    )
    if min(options.workers) < 2 or options.rounds < 1 or options.sync_every < 2:
        raise SystemExit("it takes 2 workers, 1 round and 2 local steps a round at least")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # takes workers and networks down
    keys = [key for key in ENTRIES if key == ALONE or key in options.only]
    versions = {key: found(ENTRIES[key], options.dpwa) for key in keys}
    for key in keys:
        if ENTRIES[key].package:
            version = versions[key]
            print(f"{ENTRIES[key].title}: {'absent' if version is None else version or 'found'}")
    present = [key for key in keys if versions[key] is not None]
    for size in options.models:
        for workers in options.workers:
            tables: dict[str, Runs] = {}
            for name in options.links:
                try:
                    with links.opened(name, workers, options.rate) as link:
                        tables[link.name], failed = measure(link, size, workers, present, options)
                        print(f"\n{link.name}, {size}, {workers} workers:", end="")
                        rows = [row(key, tables[link.name], name == "loopback") for key in keys]
                        harness.print_table(HEADER, rows)
                        for key, why in failed.items():
                            print(f"{ENTRIES[key].title}: failed: {why}")
                except links.Unavailable as error:
                    print(f"{name}: skipped: {error}")
            if options.png and tables:
                draw(tables, options.png)


if __name__ == "__main__":
    main()

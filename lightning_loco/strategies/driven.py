"""The engines that drive the workers of a strategy, and what is said of them."""

from __future__ import annotations

from lightning_loco.distributed import Statistics
from lightning_loco.engine import Engine as RoundEngine
from lightning_loco.engine.membership import Link
from lightning_loco.gossip import PairwiseEngine
from lightning_loco.schedules import Schedule

Engine = RoundEngine | PairwiseEngine
"""What drives one worker: counts its local steps and makes exchanges when they are due."""


def link_of(engine: Engine | None) -> Link | None:
    """The connection with members that come and go; None if the workers stay."""
    return engine.link if isinstance(engine, RoundEngine) else None


def bytes_of_ddp(num_workers: int, num_bytes: int, steps: int) -> int:
    """What a worker sends in so many steps of DDP, if its gradients have so many bytes.

    A ring all-reduce takes ``2 (N - 1) / N`` times as many.
    """
    return 2 * (num_workers - 1) * num_bytes * steps // num_workers


def summarize(
    statistics: Statistics, steps: int, of_ddp: int, distance: float | None = None
) -> str:
    """A short table of what training took on this worker.

    Args:
        statistics: Of the worker.
        steps: Its local steps.
        of_ddp: Bytes that DDP would have sent; 0 if nobody knows.
        distance: The consensus distance at the end, if it was measured.
    """
    sent = in_units(statistics.bytes_sent)
    rows = {
        "local steps": f"{steps:,}",
        "rounds": f"{statistics.rounds:,}",
        "sent": f"{sent} (DDP: {in_units(of_ddp)})" if of_ddp else sent,
        "waited": f"{statistics.wait_s:.1f} s",
    }
    if statistics.emulated_s is not None:
        rows["on the link"] = on_the_link(statistics.emulated_s, statistics.emulated_wait_s)
    if distance is not None:
        rows["consensus distance"] = f"{distance:.3g}"
    lines = [f"  {name:<20}{value}" for name, value in rows.items()]
    return "\n".join(["Training is over. On worker 0:", *lines])


def in_units(num_bytes: int) -> str:
    """Bytes as people read them: 12.3 MB."""
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:,.{0 if unit == 'B' else 1}f} {unit}"


def on_the_link(under_way_s: float, waited_s: float) -> str:
    """What became of the seconds that messages were under way on a link that is emulated."""
    hidden_s = under_way_s - waited_s
    return f"{under_way_s:.1f} s: {hidden_s:.1f} s hidden, {waited_s:.1f} s waited"


def describe(engine: Engine, schedule: Schedule | None) -> str:
    """One line about a run: its algorithm, workers, parameters and rounds."""
    worker, settings = engine.worker, engine.settings
    group, membership = worker.group, getattr(settings, "membership", None)
    workers = f"{group.num_workers} workers" if membership is None else "workers that come and go"
    topology = getattr(settings, "topology", None)
    parts = [
        f"{settings.algorithm} on {workers}",
        f"{worker.replica.layout.numel:,} trainable parameters",
        *([] if schedule is None else [str(schedule)]),
        *([] if topology is None else [f"topology {topology}"]),
    ]
    return ", ".join(parts) + "."

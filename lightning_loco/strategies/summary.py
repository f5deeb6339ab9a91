"""What a strategy prints: the settings of a run, advice on them, and a table at its end.

Nothing that only shows or records a run ends it: see :func:`errors_as_warnings`.
"""

from __future__ import annotations

import dataclasses
import math
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_loco._util.goodput import PARTS
from lightning_loco._util.text import format_bytes, format_seconds
from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.engine import RoundSettings
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.model.flat import FlatLayout
from lightning_loco.model.participant import LocalParticipant, Participant
from lightning_loco.schedules import Schedule, Staggered
from lightning_loco.syncer.settings import DecoupledSettings

MAX_SAMPLED = 8192
"""Elements from which the consensus distance at the end of training is estimated."""

MIN_ROUNDS = 10
"""Outer momentum needs about this number of rounds to have an effect."""

NO_METRICS = (None, "step", "epoch")
"""Values of a callback's ``monitor`` that are not metrics."""

SHORT_ROUND = 20
"""Local steps. In rounds up to this length, outer momentum of 0.9 and more overshoots, and results
that are a round late give a higher loss than workers that train alone."""


@contextmanager
def errors_as_warnings(what: str) -> Iterator[None]:
    """A context, or decorator, of code that shows or records a run: an error in it is a warning.

    There must be no collective in it: other ranks would wait for one that is left out. Checks
    before training are outside of it, and raise.

    Args:
        what: The sentence that the warning begins with.
    """
    try:
        yield
    except Exception as error:
        # Unlike str(error), this cannot raise.
        reason = traceback.format_exception_only(error)[-1].strip()
        warnings.warn(f"{what} {reason}", stacklevel=1)


NOT_SHOWN = "The summary of this run cannot be shown."

# ------------------------------------------------------------ before training


def describe(engine: LocalParticipant, schedule: Schedule | None) -> str:
    """Return one line about a run: its algorithm, workers, parameters and rounds."""
    worker, settings = engine.worker, engine.settings
    group, membership = worker.group, getattr(settings, "membership", None)
    workers = f"{group.num_workers} worker{'' if group.num_workers == 1 else 's'}"
    if membership is not None:
        workers = "workers that come and go"
    elif isinstance(settings, PairwiseSettings) and settings.peers:
        workers = f"node {settings.name} of {len(settings.peers)}"
    elif isinstance(settings, DecoupledSettings) and settings.syncer is not None:
        workers = f"learner {settings.learner_name(0)} of the syncer at {settings.syncer}"
    if group.replica_size > 1:
        workers += f" of {group.replica_size} ranks each"
    topology = getattr(settings, "topology", None)
    parts = [
        f"{settings.algorithm} on {workers}",
        f"{worker.replica.num_parameters:,} trainable parameters",
        *([] if schedule is None else [str(schedule)]),
        *([] if topology is None else [f"topology {topology}"]),
    ]
    return ", ".join(parts) + "."


def show_settings(engine: LocalParticipant, schedule: Schedule | None) -> None:
    """Print the settings of a run whose length is not known, and advice on them."""
    worker = engine.worker.group.worker
    every = None if schedule is None else schedule.of_worker(worker).sync_every_of(worker)
    with errors_as_warnings(NOT_SHOWN):
        rank_zero_info(describe(engine, schedule))
        for line in momentum_advice(engine.settings, every or math.inf):
            rank_zero_info(line)


def momentum_advice(settings: Any, every: float) -> Iterator[str]:
    """Yield a line if the outer momentum is too high for so few local steps between rounds."""
    momentum = getattr(settings.algorithm, "outer_momentum", 0.0)
    if momentum != "auto" and momentum >= 0.9 and every <= SHORT_ROUND:
        yield (
            f"outer_momentum={momentum:g} suits hundreds of local steps between rounds, and "
            f'sync_every is {every}. Use outer_momentum="auto" or 0.5, or a longer sync_every.'
        )


def advice(
    trainer: pl.Trainer,
    settings: RoundSettings,
    worker: int,
    layout: FlatLayout,
    shown: Literal["average", "outer", "local"],
) -> Iterator[str]:
    """Yield one line for each setting that works but is likely to give poor results.

    ``shown`` is the model that a validation sees: the average of all workers' parameters, outer
    parameters, or this worker's own.
    """
    schedule = settings.schedule.of_worker(worker)
    every = schedule.sync_every_of(worker)
    if every is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    steps = trainer.estimated_stepping_batches
    batches = trainer.num_training_batches / trainer.accumulate_grad_batches
    if steps < MIN_ROUNDS * every:
        rounds, fitting = (int(steps) - 1) // every, int(steps) // MIN_ROUNDS  # none at the end
        setting = f"sync_every={fitting}" + (" or less" if fitting > 1 else "")
        of_each, most = "", rounds
        if isinstance(schedule, Staggered) and schedule.fragments > 1:
            of_each = " of each fragment"
            most = (int(steps) - 1 + every - every // schedule.fragments) // every  # of the first
        counted = f"{rounds} or {most}" if most > rounds else f"{rounds}"
        counted += f" round{'' if most == rounds == 1 else 's'}{of_each}"
        yield (
            f"sync_every={every} leaves {counted} in this run of "
            f"{steps:.0f} local steps, and the workers train mostly alone. Use at least "
            f"{MIN_ROUNDS * every} local steps" + (f", or {setting}." if fitting else ".")
        )
    elif every > batches:
        yield (
            f"sync_every={every} is longer than an epoch of {batches:.0f} local steps: workers are "
            f"far apart in validations at the ends of epochs. Use sync_every={batches:.0f} or less."
        )
    yield from momentum_advice(settings, every)
    is_round_late = settings.is_overlapped and schedule.staleness_of(worker) >= 1
    merge_policy = settings.merge_policy
    loses_progress = merge_policy is not None and not merge_policy.keeps_progress
    if is_round_late and loses_progress and every <= SHORT_ROUND:
        yield (
            f"Results are applied a whole round late, which costs more than averaging gains with "
            f"sync_every={every}. Use a sync_every of some hundreds, or AsyncDiLoCoStrategy with "
            "fragments, whose results are late by a part of a round."
        )
    between = _steps_between_validations(trainer)
    monitors = _monitors(trainer) if shown == "outer" else []
    staggered = schedule if isinstance(schedule, Staggered) else None
    gap = every if staggered is None else staggered.shortest_gap
    if monitors and between < gap:
        yield (
            "Validations show the outer parameters, which only rounds change: "
            f"{' and '.join(monitors)} may see the same value again and again. "
            f"Validate every {gap} local steps or less often."
        )
    is_measured = layout.numel > 0 and math.isfinite(between)
    if shown == "average" and settings.compression is not None and is_measured:
        of_rounds = settings.compression.codec.num_bytes(layout.numel) * between / every
        times = layout.num_bytes / of_rounds
        if times > 1:
            yield (
                f"The average of the workers that a validation needs takes {times:.1f} times the "
                "bytes of the compressed rounds between two validations. Validate every "
                f"{math.ceil(between * times)} local steps or less often, or use evaluate='outer'."
            )


def _monitors(trainer: pl.Trainer) -> list[str]:
    """Describe the callbacks that monitor a metric."""
    callbacks = [*trainer.early_stopping_callbacks, *trainer.checkpoint_callbacks]
    found = [(type(one).__name__, getattr(one, "monitor", None)) for one in callbacks]
    return [f"{kind}(monitor={name!r})" for kind, name in found if name not in NO_METRICS]


def _steps_between_validations(trainer: pl.Trainer) -> float:
    """Return the number of local steps; infinite if there is no validation."""
    batches = trainer.val_check_batch
    if not trainer.enable_validation or batches is None:
        return math.inf
    is_at_end = batches == trainer.num_training_batches
    epochs = trainer.check_val_every_n_epoch or 1
    return batches * (epochs if is_at_end else 1) / trainer.accumulate_grad_batches


# ------------------------------------------------------------- during training


def round_metrics(statistics: Statistics, participant: Participant | None) -> dict[str, float]:
    """Return what :class:`~lightning_loco.CommunicationMonitor` logs of this worker, by name."""
    metrics = {
        "loco/round": float(statistics.rounds),
        "loco/bytes_sent": float(statistics.worker_bytes_sent),
        "loco/wait_s": statistics.worker_wait_s,
        "loco/staleness": float(statistics.staleness),
    }
    if (goodput := statistics.goodput) is not None:
        metrics |= {f"loco/{part}": share for part, share in goodput.parts.items()}
    if statistics.participation is not None:
        metrics["loco/participation"] = statistics.participation
    if statistics.outer_grad_norm is not None:
        metrics["loco/outer_grad_norm"] = statistics.outer_grad_norm
    if statistics.persistence is not None:
        metrics["loco/persistence"] = statistics.persistence
    if statistics.members is not None:
        metrics["loco/members"] = float(statistics.members)
        metrics["loco/repaired"] = float(statistics.repaired)
    if participant is not None:
        metrics |= {f"loco/{name}": value for name, value in participant.metrics().items()}
    known = [loss for loss in statistics.losses if math.isfinite(loss)]
    if known:
        metrics["loco/train_loss_mean"] = sum(known) / len(known)
    return metrics


# ------------------------------------------------------------- after training


def measure_distance(engine: LocalParticipant) -> None:
    """Measure the consensus distance for the summary, unless it is known; all ranks must call it.

    The model must hold the local parameters.
    """
    statistics, worker = engine.statistics, engine.worker
    if worker.group.num_workers > 1 and statistics.consensus_distance is None:
        statistics.consensus_distance = worker.measure_consensus(MAX_SAMPLED)


def show_summary(engine: LocalParticipant) -> None:
    """Print a table of steps, rounds, bytes and seconds on rank 0; all ranks must call it."""
    statistics, worker, group = engine.statistics, engine.worker, engine.worker.group
    # A collective: an error in it must not become a warning.
    means, steps, parts = mean_of_workers(statistics, worker.steps, group)
    with errors_as_warnings(NOT_SHOWN):
        num_bytes = worker.replica.num_parameters * worker.replica.layout.dtype.itemsize
        count, (name, *_) = group.num_workers, group.rank_names
        of_ddp = bytes_of_ddp(count, num_bytes, steps)
        whose = f"Mean of {count} workers" if count > 1 else f"On {name}"
        rank_zero_info(summarize(means, steps, of_ddp, whose, parts))


def mean_of_workers(
    own: Statistics, steps: int, group: WorkerGroup
) -> tuple[Statistics, int, dict[str, float]]:
    """Return the means over all workers: statistics, local steps, and parts of the time.

    Bytes are the sum over the ranks of a worker, seconds the mean over the ranks. Worker 0 warns of
    workers without local steps. All ranks must call it.
    """
    mine = [steps, own.bytes_sent, own.wait_s, *parts_of_time(own).values()]
    ranks = group.gather_from_ranks(mine, "the summary of training")
    idle = [name for name, rank in zip(group.rank_names, ranks, strict=True) if rank[0] == 0]
    if 0 < len(idle) < len(ranks):
        rank_zero_warn(
            f"No local step was taken on {', '.join(idle)}. The training data had no batches there."
        )
    mean_steps, sent, wait_s, *parts = (
        math.fsum(values) / len(ranks) for values in zip(*ranks, strict=True)
    )
    means = dataclasses.replace(
        own,
        bytes_sent=round(sent * group.replica_size),
        wait_s=wait_s,
    )
    return means, round(mean_steps), dict(zip(PARTS, parts, strict=True))


def parts_of_time(statistics: Statistics) -> dict[str, float]:
    """Return what this worker's time was for, by name; all 0 without a local step."""
    goodput = statistics.goodput
    return dict.fromkeys(PARTS, 0.0) if goodput is None else goodput.parts


def summarize(
    statistics: Statistics,
    steps: int,
    of_ddp: int,
    whose: str = "On worker 0",
    parts: Mapping[str, float] | None = None,
) -> str:
    """Return a short table of steps, rounds, bytes and seconds; ``whose`` says of which worker.

    ``of_ddp`` are the bytes that DDP would have sent, 0 if unknown; ``parts`` those of the time, by
    default of ``statistics``.
    """
    (_, goodput), *others = (parts or parts_of_time(statistics)).items()
    rest = ", ".join(f"{part} {share:.0%}" for part, share in others if share >= 0.005)
    sent = format_bytes(statistics.bytes_sent)
    rows = {
        "local steps": f"{steps:,}",
        "rounds": f"{statistics.rounds:,}",
        "sent": f"{sent} (DDP: {format_bytes(of_ddp)})" if of_ddp else sent,
        "waited": format_seconds(statistics.wait_s),
        "goodput": f"{goodput:.0%}" + (f" ({rest})" if rest else ""),
    }
    if statistics.consensus_distance is not None:
        rows["consensus distance"] = f"{statistics.consensus_distance:.3g}"
    if statistics.straggler is not None:
        rows["straggler"] = str(statistics.straggler)
    lines = [f"  {name:<20}{value}" for name, value in rows.items()]
    return "\n".join([f"Training is over. {whose}:", *lines])


def bytes_of_ddp(num_ranks: int, num_bytes: int, steps: int) -> int:
    """Return the bytes that a rank would send with DDP, whose gradients have ``num_bytes``.

    A ring all-reduce over ``R`` ranks sends ``2 (R - 1) / R`` times the bytes of the gradients.
    """
    return 2 * (num_ranks - 1) * num_bytes * steps // num_ranks

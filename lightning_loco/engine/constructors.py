"""Engines and settings of rounds from single arguments, such as those of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from typing_extensions import Unpack

from lightning_loco.algorithms import (
    SPARTA,
    Algorithm,
    DelayedNesterov,
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    LocalSGD,
    MergePolicy,
    Mix,
    ModelAverage,
    NeighborAverage,
    NoLoCo,
)
from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.algorithms.outer_optimizer import OuterOptimizer
from lightning_loco.algorithms.robust import Aggregate
from lightning_loco.costs import LinkLike
from lightning_loco.distributed.devices import CPU
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.settings import WHOLE_MODEL_BYTES, RoundOptions, RoundSettings
from lightning_loco.schedules import (
    EveryInterval,
    Schedule,
    SyncEvery,
    by_steps,
    hidden_rounds,
    streaming_rounds,
)


class StepEngine(Engine):
    """An engine whose rounds begin after every H local steps, for plain loops and Lightning.

    Call :meth:`step` after every step of the optimizer, on every rank, and in the end
    :meth:`finish`, which leaves the consensus in the model, and :meth:`close`.

    Args:
        model: The module to train; its trainable parameters are exchanged.
        algorithm: What a round computes.
        sync_every: Local steps between rounds, at least 1; or a list with one entry per worker; or
            as it changes, ``{0: 10, 1000: 50}``.
        overlap: Apply a round's result one round later, and hide its communication.
        warm_start: With overlap, make the first round a blocking one.
        topology: The neighbours of each worker. Default: the algorithm's own.
        group: The workers. Default: all ranks of the default process group, with groups of its own.
        options: ``compression``, ``bucket_bytes``, ``membership``, ``link`` and ``outer_device``,
            as in :class:`~lightning_loco.strategies.RoundArguments`. With a ``membership`` this job
            is one worker; call :meth:`join` before the first step.

    Raises:
        ValueError: On every worker, if the model or the settings do not fit.

    Example:
        >>> import torch
        >>> from lightning_loco.algorithms import DiLoCo
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> engine = StepEngine(model, DiLoCo(outer_lr=0.5, outer_momentum=0.0), sync_every=2)
        >>> start = model.weight.item()
        >>> for _ in range(2):  # stands for two optimizer steps
        ...     _ = model.weight.data.add_(1.0)
        ...     _ = engine.step()
        >>> round(model.weight.item() - start, 6)  # one worker: half of the drift
        1.0
        >>> engine.close()
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm,
        *,
        sync_every: SyncEvery = 100,
        overlap: bool = False,
        warm_start: bool = True,
        topology: Any | None = None,
        group: WorkerGroup | None = None,
        **options: Unpack[RoundOptions],
    ) -> None:
        def make_settings() -> RoundSettings:
            schedule = by_steps(sync_every, overlap, warm_start)
            return RoundSettings(algorithm, schedule, topology).with_options(**options)

        if group is None and options.get("outer_device") is not None:
            group = WorkerGroup.create(device=CPU)
        super().__init__(model, make_settings, group)


class ClockEngine(Engine):
    r"""An engine that averages the workers' models again and again during training.

    A round begins at the end of a local step: a snapshot of the parameters is sent. It ends at the
    end of the first local step after the mean of all snapshots has arrived: the parameters then
    move by ``mean - snapshot``, so that local steps made in between are kept. Meanwhile the
    backend's thread communicates. Only the training thread changes parameters, between local steps,
    so no lock is needed. Use it like a :class:`~lightning_loco.engine.StepEngine`; each worker
    makes as many steps as it has batches.

    Args:
        model: The module to train; its trainable parameters are exchanged.
        interval_s: Seconds between the end of a round and the next one; 0 for no pause.
        warmup_steps: Local steps at the start in which :meth:`average_gradients` is to be called
            before the optimizer's step, which makes them steps of DDP.
        topology: Average with the neighbours of a topology only. Default: with all workers.
        compression: How messages are compressed, e.g. ``"int8"``. Default: not at all.
        group: The workers. Default: all ranks of the default process group, with groups of its own.
        link: Links to emulate, as in :func:`~lightning_loco.costs.as_links`. Default: none.

    Raises:
        ValueError: On every worker, if the model or the settings do not fit.

    Source:
        Bagua's Asynchronous Model Average; see :class:`~lightning_loco.algorithms.ModelAverage`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> engine = ClockEngine(model, interval_s=0)
        >>> [engine.step() for _ in range(4)]  # a round begins, ends, begins, ends
        [True, True, True, True]
        >>> engine.statistics.rounds
        2
        >>> engine.close()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        interval_s: float = 0.5,
        warmup_steps: int = 0,
        topology: Any | None = None,
        compression: Any | None = None,
        group: WorkerGroup | None = None,
        link: LinkLike | None = None,
    ) -> None:
        def make_settings() -> RoundSettings:
            return async_model_average(interval_s, warmup_steps, topology, compression, link)

        super().__init__(model, make_settings, group)


# ------------------------------------------------ settings of each method, from its own arguments


def local_sgd(sync_every: SyncEvery) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.LocalSGDStrategy`."""
    return RoundSettings(LocalSGD(), by_steps(sync_every))


def sparta(sync_every: SyncEvery, fraction: float, seed: int) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.SPARTAStrategy`."""
    return RoundSettings(SPARTA(fraction, seed), by_steps(sync_every))


def diloco(
    sync_every: SyncEvery,
    outer_lr: OuterLR,
    outer_momentum: float,
    nesterov: bool,
    outer_optimizer: OuterOptimizer | None,
    aggregate: Aggregate,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.DiLoCoStrategy`."""
    algorithm = DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer, aggregate)
    return RoundSettings(algorithm, by_steps(sync_every))


def async_diloco(
    sync_every: SyncEvery,
    outer_lr: OuterLR | None,
    outer_momentum: float | None,
    nesterov: bool,
    outer_optimizer: OuterOptimizer | None,
    warm_start: bool | None,
    fragments: int | Literal["auto"] | None,
    delay: int | None,
    mix: float | None,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.AsyncDiLoCoStrategy`."""
    is_one_round_late = fragments is None and delay is None
    algorithm = DiLoCo(
        (0.7 if is_one_round_late else 0.6) if outer_lr is None else outer_lr,
        (0.0 if is_one_round_late else 0.8) if outer_momentum is None else outer_momentum,
        nesterov,
        outer_optimizer,
    )
    warm_start = is_one_round_late if warm_start is None else warm_start
    schedule = hidden_rounds(sync_every, fragments, delay, warm_start)
    share = (0.0 if is_one_round_late else 0.25) if mix is None else mix
    return RoundSettings(algorithm, schedule, merge_policy=_merge_policy(share, schedule))


def streaming_diloco(
    sync_every: int | Sequence[int],
    fragments: int | Literal["auto"],
    delay: int | Literal["auto"],
    mix: float,
    outer_lr: float,
    outer_momentum: float,
    nesterov: bool,
    outer_optimizer: OuterOptimizer | None,
    pattern: Literal["strided", "contiguous", "even"] | Sequence[str],
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.StreamingDiLoCoStrategy`."""
    algorithm = DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer)
    schedule = streaming_rounds(sync_every, fragments, delay, pattern)
    return RoundSettings(algorithm, schedule, merge_policy=_merge_policy(mix, schedule))


def eager_diloco(
    sync_every: SyncEvery,
    outer_lr: OuterLR,
    outer_momentum: float,
    nesterov: bool,
    warm_start: bool,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.EagerDiLoCoStrategy`."""
    algorithm = EagerDiLoCo(outer_lr, outer_momentum, nesterov)
    return RoundSettings(algorithm, by_steps(sync_every, overlap=True, warm_start=warm_start))


def delayed_nesterov(
    sync_every: SyncEvery,
    outer_lr: OuterLR,
    outer_momentum: float,
    every: int,
    between: float,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.DelayedNesterovStrategy`."""
    algorithm = DelayedNesterov(outer_lr, outer_momentum, every, between)
    return RoundSettings(algorithm, by_steps(sync_every))


def gasloc(
    topology: Any,
    sync_every: SyncEvery,
    outer_lr: OuterLR,
    gossip_step: float | Literal["auto"],
    momentum: float | Literal["auto"],
    momentum_on: Literal["local", "gossiped"],
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.GASLoCStrategy`."""
    algorithm = GASLoC(outer_lr, gossip_step, momentum, momentum_on)
    return RoundSettings(algorithm, by_steps(sync_every), topology)


def noloco(
    topology: Any | None,
    sync_every: SyncEvery,
    outer_momentum: float,
    outer_lr: float,
    gossip_step: float | None,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.NoLoCoStrategy`."""
    algorithm = NoLoCo(outer_momentum, outer_lr, gossip_step)
    return RoundSettings(algorithm, by_steps(sync_every), topology)


def async_model_average(
    interval_s: float,
    warmup_steps: int,
    topology: Any | None,
    compression: Any | None,
    link: LinkLike | None,
) -> RoundSettings:
    """Return the settings of :class:`~lightning_loco.AsyncModelAverageStrategy`."""
    algorithm = ModelAverage() if topology is None else NeighborAverage()
    schedule = EveryInterval(interval_s, warmup_steps)
    settings = RoundSettings(algorithm, schedule, topology, bucket_bytes=WHOLE_MODEL_BYTES)
    return settings.with_options(compression=compression, link=link)


def _merge_policy(mix: float, schedule: Schedule) -> MergePolicy | None:
    """Return the merge policy for a share of the local parameters; None for the algorithm's own.

    With ``mix=0`` and results that are a whole round late, the algorithm's ``Restart()`` loses no
    local steps: they are in the next message, which is computed before the result is applied.
    """
    merge_policy = Mix(mix)
    return None if mix == 0 and schedule.is_whole_phase else merge_policy

"""Engines and settings of rounds from single arguments, such as those of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

from lightning_loco.algorithms import (
    Algorithm,
    DiLoCo,
    MergePolicy,
    Mix,
    ModelAverage,
    NeighborAverage,
)
from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.algorithms.outer_optimizer import OuterOptimizer
from lightning_loco.distributed.devices import CPU
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.membership import Membership
from lightning_loco.engine.settings import BUCKET_BYTES, WHOLE_MODEL_BYTES, RoundSettings
from lightning_loco.links import LinkLike, as_links
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
        bucket_bytes: Memory for messages that are being sent, in bytes.
        compression: How messages are compressed: ``"int8"``, another name of
            :data:`~lightning_loco.compression.CODECS`, a codec, an ``ErrorFeedback`` or
            ``Compensated``. Default: not at all.
        group: The workers. Default: all ranks of the default process group, with groups of its own.
        membership: ``Elastic(...)`` if workers join and leave. This job is then one
            worker; call :meth:`join` before the first step.
        link: Links to emulate, as in :func:`~lightning_loco.links.as_links`. Default: none.
        outer_device: ``"cpu"`` to keep the state of rounds and all messages in the host's memory,
            and send them by gloo. Default: where the parameters are.

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
        bucket_bytes: int = BUCKET_BYTES,
        compression: Any | None = None,
        group: WorkerGroup | None = None,
        membership: Membership | None = None,
        link: LinkLike | None = None,
        outer_device: Literal["cpu"] | None = None,
    ) -> None:
        def make_settings() -> RoundSettings:
            schedule = by_steps(sync_every, overlap, warm_start)
            return RoundSettings(
                algorithm,
                schedule,
                topology,
                compression,
                bucket_bytes=bucket_bytes,
                membership=membership,
                link=as_links(link),
                outer_device=outer_device,
            )

        if group is None and outer_device is not None:
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
        link: Links to emulate, as in :func:`~lightning_loco.links.as_links`. Default: none.

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
            return clock_settings(interval_s, warmup_steps, topology, compression, link)

        super().__init__(model, make_settings, group)


def clock_settings(
    interval_s: float,
    warmup_steps: int,
    topology: Any | None,
    compression: Any | None = None,
    link: LinkLike | None = None,
) -> RoundSettings:
    """Settings for averaging over all workers, or with the neighbours of a topology."""
    algorithm = ModelAverage() if topology is None else NeighborAverage()
    schedule = EveryInterval(interval_s, warmup_steps)
    return RoundSettings(
        algorithm,
        schedule,
        topology,
        compression,
        bucket_bytes=WHOLE_MODEL_BYTES,
        link=as_links(link),
    )


class HiddenRounds(NamedTuple):
    """The parts of the settings that async and streaming DiLoCo determine."""

    algorithm: DiLoCo
    schedule: Schedule
    merge_policy: MergePolicy | None


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
) -> HiddenRounds:
    """Return the parts of :class:`~lightning_loco.AsyncDiLoCoStrategy`."""
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
    return HiddenRounds(algorithm, schedule, _merge_policy(share, schedule))


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
) -> HiddenRounds:
    """Return the parts of :class:`~lightning_loco.StreamingDiLoCoStrategy`."""
    algorithm = DiLoCo(outer_lr, outer_momentum, nesterov, outer_optimizer)
    schedule = streaming_rounds(sync_every, fragments, delay, pattern)
    return HiddenRounds(algorithm, schedule, _merge_policy(mix, schedule))


def _merge_policy(mix: float, schedule: Schedule) -> MergePolicy | None:
    """Return the merge policy for a share of the local parameters; None for the algorithm's own.

    With ``mix=0`` and results that are a whole round late, the algorithm's ``Restart()`` loses no
    local steps: they are in the next message, which is computed before the result is applied.
    """
    merge_policy = Mix(mix)
    return None if mix == 0 and schedule.is_whole_phase else merge_policy

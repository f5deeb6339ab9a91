"""``StepEngine`` and ``ClockEngine``: engines from single arguments instead of settings."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from lightning_loco.algorithms import Algorithm, ModelAverage, NeighborAverage
from lightning_loco.distributed.devices import CPU
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.membership import Membership
from lightning_loco.engine.settings import BUCKET_BYTES, WHOLE_MODEL_BYTES, RoundSettings
from lightning_loco.links import LinkLike, as_links
from lightning_loco.schedules import EveryInterval, SyncEvery, by_steps


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

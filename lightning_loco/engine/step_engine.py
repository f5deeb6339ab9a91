"""An engine whose rounds begin after a number of local steps."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import Unpack

from lightning_loco.algorithms import Algorithm
from lightning_loco.distributed.devices import CPU
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.settings import RoundOptions, RoundSettings
from lightning_loco.schedules import SyncEvery, by_steps


class StepEngine(Engine):
    """An engine whose rounds begin after every H local steps, for plain loops and Lightning.

    Call :meth:`step` after every step of the optimizer, on every rank. After the last one, call
    :meth:`finish`, which leaves the consensus in the model, and :meth:`close`.

    Args:
        model: The module to train; its trainable parameters are exchanged.
        algorithm: What a round computes.
        sync_every: Local steps between rounds, at least 1; or a list with one entry per worker; or
            as it changes, ``{0: 10, 1000: 50}``.
        overlap: Apply a round's result one round later, and hide its communication.
        warm_start: With overlap, run the first round as a blocking one.
        topology: The neighbours of each worker. Default: the algorithm's own.
        group: The workers. Default: all ranks of the default process group, in new groups.
        options: ``compression``, ``bucket_bytes``, ``membership``, ``link`` and ``outer_device``,
            as in :class:`~lightning_loco.strategies.RoundArguments`. With a ``membership`` this job
            is one worker; call :meth:`start` before the first step.

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

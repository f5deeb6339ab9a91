"""An engine whose rounds begin after a time."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_loco.costs import LinkLike
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.method_settings import async_model_average
from lightning_loco.engine.settings import RoundSettings


class ClockEngine(Engine):
    r"""An engine that averages the workers' models again and again during training.

    A round begins at the end of a local step: a snapshot of the parameters is sent. It ends at the
    end of the first local step after the mean of all snapshots has arrived: the parameters then
    move by ``mean - snapshot``, which keeps the local steps in between. Meanwhile the
    backend's thread communicates. Only the training thread changes parameters, between local steps,
    so no lock is needed. Use it like a :class:`~lightning_loco.engine.StepEngine`; each worker
    takes as many steps as it has batches.

    Args:
        model: The module to train; its trainable parameters are exchanged.
        interval_s: Seconds between the end of a round and the next one; 0 for no pause.
        warmup_steps: Local steps at the start in which :meth:`average_gradients` is to be called
            before the optimizer's step, which makes them steps of DDP.
        topology: Average with the neighbours of a topology only. Default: with all workers.
        compression: How messages are compressed, e.g. ``"int8"``. Default: not at all.
        group: The workers. Default: all ranks of the default process group, in new groups.
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

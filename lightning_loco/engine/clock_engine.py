"""Rounds by the clock, while training goes on: no worker ever waits for another one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_loco.algorithms import ModelAverage, NeighborAverage
from lightning_loco.distributed.work import AllReduceSum
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.settings import WHOLE_MODEL_BYTES, RoundSettings
from lightning_loco.links.links import LinkLike, as_links
from lightning_loco.schedules import EveryInterval


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


class ClockEngine(Engine):
    r"""Average the workers' models again and again while training goes on.

    A round begins at the end of a local step: a snapshot of the parameters leaves. It ends at the
    end of the first local step after all snapshots have come together: the parameters then move by
    ``mean - snapshot``, so that what was learned meanwhile stays. In between, the backend's thread
    communicates. Parameters are only touched between local steps and only by the training thread,
    so nothing can be torn or lost, and no lock is needed. It is driven like a
    :class:`~lightning_loco.engine.StepEngine`; each worker makes as many steps as it has batches.

    Args:
        model: The module to train; its trainable parameters are exchanged.
        interval_s: Pause between the end of a round and the next one, in seconds; 0 for none.
        warmup_steps: Local steps at the start in which :meth:`average_gradients` is to be called
            before the optimizer's step, which makes them steps of DDP.
        topology: Average with the neighbours of a topology only. Default: with all workers.
        compression: How messages are written on the wire, ``"int8"`` say. Default: as they are.
        group: The workers. Default: all ranks of the default process group, with groups of its own.
        link: Links that rounds are to take as long as on, as in
            :func:`~lightning_loco.links.links.as_links`. Default: those that there are.

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

    @property
    def is_warming_up(self) -> bool:
        """Whether gradients are to be averaged in the coming step."""
        schedule = self.settings.schedule
        return isinstance(schedule, EveryInterval) and self.worker.steps < schedule.warmup_steps

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace gradients by their mean over the workers; a missing one counts as zero.

        Args:
            parameters: The same ones, in the same order, on all workers. Those without a gradient
                on any worker stay without.

        Raises:
            RuntimeError: If a worker is missing or has failed.
        """
        group, label = self.worker.group, f"warm-up step {self.worker.steps}"
        trainable = [p for p in parameters if p.requires_grad]
        if group.data is None or not trainable:
            return
        wide = torch.promote_types(torch.float32, trainable[0].dtype)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
        present = torch.tensor([p.grad is not None for p in trainable], device=gradients[0].device)
        flat = torch.cat([*(g.reshape(-1).to(wide) for g in gradients), present.to(wide)])
        AllReduceSum(group, self.statistics, flat, label).wait().div_(group.num_workers)
        lengths = [*(g.numel() for g in gradients), len(trainable)]
        *means, counts = torch.split_with_sizes(flat, lengths)
        pairs = zip(trainable, gradients, means, counts.tolist(), strict=True)
        for p, gradient, mean, count in pairs:
            if count > 0:
                p.grad = gradient.copy_(mean.view(gradient.shape))

    def abort(self) -> None:
        """Stop making rounds; all workers must call it, twice does no harm."""
        if not self.paused:
            self.worker.sync_point("abort of the averaging")
            self.paused = True

    def resume(self) -> None:
        """Make rounds again after :meth:`abort`; all workers must call it, twice does no harm."""
        if self.paused:
            self.worker.sync_point("resumption of the averaging")
            self.paused = False

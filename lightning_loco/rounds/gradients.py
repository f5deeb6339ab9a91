"""Averaging gradients in every step, as DDP does: for the warm-up of asynchronous training."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import Explained, Timed


@torch.no_grad()
def average_gradients(
    parameters: Iterable[Tensor], group: WorkerGroup, statistics: Statistics, place: str
) -> None:
    """Replace the gradients by their mean over the workers; a missing one counts as zero.

    Args:
        parameters: The same ones, in the same order, on all workers. Those without a gradient on
            any worker stay without.
        group: The workers.
        statistics: Where bytes and seconds are counted.
        place: Where this worker is, in words.

    Raises:
        RuntimeError: If a worker is missing or has failed; the message names it.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if group.data is None or not trainable:
        return
    wide = torch.promote_types(torch.float32, trainable[0].dtype)
    lengths = [p.numel() for p in trainable]
    flat = torch.zeros(sum(lengths) + len(trainable), dtype=wide, device=trainable[0].device)
    *parts, present = torch.split_with_sizes(flat, [*lengths, len(trainable)])
    for index, (part, p) in enumerate(zip(parts, trainable, strict=True)):
        if p.grad is not None:
            part.view(p.shape).copy_(p.grad)
            present[index] = 1
    with Timed(statistics), Explained(group, place):
        work = group.start_sum(flat, statistics)
        if work is not None:
            work.wait()
    flat.div_(group.num_workers)
    for part, p, count in zip(parts, trainable, present.tolist(), strict=True):
        if count > 0:
            mean = part.view(p.shape).to(p.dtype)
            if p.grad is None:
                p.grad = mean.clone()
            else:
                p.grad.copy_(mean)

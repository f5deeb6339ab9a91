"""The consensus of all workers: put into the model of each, and how far they are from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lightning_loco.comm.flat import are_finite
from lightning_loco.comm.replica import average
from lightning_loco.comm.rows import meeting_number
from lightning_loco.comm.waiting import Sum

if TYPE_CHECKING:
    from lightning_loco.comm.worker import Worker


def show_consensus(worker: Worker, purpose: str) -> None:
    """Put the consensus into the model; as :meth:`~lightning_loco.comm.Worker.show_consensus`."""
    if worker.replica.shows_consensus:
        return
    worker.meet(purpose)
    replica, group, statistics = worker.replica, worker.group, worker.statistics
    valid = are_finite(replica.layout.chunks())
    row = worker.row(meeting_number(purpose))
    row = row._replace(finite=float(valid), scalars=worker.companions.look())
    rows = worker.tell(row, purpose).wait()
    num_valid = round(sum(row.finite for row in rows))
    if num_valid == 0:
        raise no_consensus()
    replica.keep_local()
    replica.running.leave_since_round()
    others, buffers = replica.find_differing(group)
    outer = worker.engine.outer() if worker.engine is not None and worker.shows_outer else None
    if outer is not None:
        replica.layout.write(outer)
    else:
        average(replica.layout, group, statistics, valid, num_valid)
    average(buffers, group, statistics, valid, num_valid)
    average(others, group, statistics, valid, num_valid)
    worker.companions.agree(rows, group, statistics)


def measure_consensus(worker: Worker, max_elements: int) -> float:
    """Root mean square distance to the mean, from a sample of elements, the same everywhere."""
    sample = worker.replica.sample(max_elements, worker.round_index)
    n = worker.group.num_workers
    sums = torch.cat([sample, sample.square().sum().view(1)])
    Sum(worker.group, worker.statistics, sums, "the consensus distance").wait()
    variance = (sums[-1] / n - (sums[:-1] / n).square().sum()).clamp_(min=0)
    return math.sqrt(float(variance) * worker.replica.layout.numel / max(sample.numel(), 1))


def no_consensus() -> RuntimeError:
    """What to raise when no worker's parameters are finite."""
    return RuntimeError(
        "The parameters hold NaN or infinity on every worker, so there is no consensus. "
        "Lower the learning rate, or go back to the last checkpoint."
    )

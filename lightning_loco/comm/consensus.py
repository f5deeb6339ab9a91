"""The consensus of all workers: put into the model of each, and how far they are from it."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch

from lightning_loco.comm.flat import FlatLayout, are_finite, schema_crc
from lightning_loco.comm.groups import WorkerGroup
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
    scalars = (*worker.companions.look(), float(schema_crc(replica.buffers)))
    row = row._replace(finite=float(valid), scalars=scalars)
    rows = worker.tell(row, purpose).wait()
    num_valid = round(sum(row.finite for row in rows))
    if num_valid == 0:
        raise no_consensus()
    buffers = replica.buffers
    if len({row.scalars[-1] for row in rows}) > 1:
        buffers = _alike(buffers, group)
    others = replica.others.compare(group)
    replica.keep_local()
    outer = None if worker.engine is None else worker.engine.outer()
    if outer is not None:
        replica.layout.write(outer)
    else:
        average(replica.layout, group, statistics, valid, num_valid)
    average(buffers, group, statistics, valid, num_valid)
    average(others, group, statistics, valid, num_valid)
    worker.companions.agree(rows, group, statistics)


def _alike(buffers: FlatLayout, group: WorkerGroup) -> FlatLayout:
    """Those that have one shape and dtype on all workers; of others there is no mean."""
    own = [[name, str(rest)] for name, *rest in buffers.schema()]
    everyone = [dict(one) for one in group.gather_objects(own, "the comparison of buffers")]
    alike = {name for name, what in own if all(one.get(name) == what for one in everyone)}
    unlike = sorted(set().union(*everyone) - alike)
    if group.worker == 0:
        warnings.warn(
            f"{', '.join(unlike)}: the shape or dtype of these buffers is not the same on all "
            "workers, so each keeps its own, and a checkpoint has those of worker 0.",
            stacklevel=2,
        )
    named = zip(buffers.names, buffers.tensors, strict=True)
    return FlatLayout([(name, buffer) for name, buffer in named if name in alike])


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

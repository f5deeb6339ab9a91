"""Fragments of whole parameters, read from the ranks of a worker and written into their shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_loco.distributed import WorkerGroup
from lightning_loco.model.whole_fragments import WholeFragments
from tests.harness.pool import Pool
from tests.strategies.families import whole


class Layers(nn.Module):
    """Parameters of all ranks of dimension, some of them with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.filters = nn.Parameter(torch.zeros(5, 2, 3))
        self.scale = nn.Parameter(torch.zeros(()))
        with torch.no_grad():
            for start, parameter in zip(range(0, 900, 100), self.parameters(), strict=False):
                values = torch.arange(parameter.numel()) + start
                parameter.copy_(values.view(parameter.shape))


def by_fsdp(model: Layers, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, ignored_params={model.scale})


def by_columns(model: Layers, mesh: DeviceMesh) -> None:
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    model.filters = nn.Parameter(distribute_tensor(model.filters.data, mesh, [Shard(2)]))


def in_two_ways(model: Layers, mesh: DeviceMesh) -> None:
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    model.filters = nn.Parameter(
        distribute_tensor(model.filters.data, mesh, [Shard(0), Replicate()])
    )
    fully_shard(model, mesh=mesh["data"], ignored_params={model.scale, model.filters})


def not_at_all(model: Layers, mesh: DeviceMesh) -> None:
    pass


def read_and_write(
    rank: int, world: int, divide: Callable[[Layers, DeviceMesh], None], lengths: list[int]
) -> tuple[list[Tensor], Tensor]:
    model, size = Layers(), world
    group = WorkerGroup.create(timeout_s=30, replica_size=size)
    shape, names = (
        ((2, size // 2), ("data", "tensor")) if divide is in_two_ways else ((size,), None)
    )
    divide(model, init_device_mesh("cpu", shape, mesh_dim_names=names))
    slices, start = [], 0
    for length in lengths:
        slices.append(range(start, start + length))
        start += length
    fragments = WholeFragments(dict(model.named_parameters()), slices, group)
    assert fragments.are_sharded == (divide is not not_at_all)
    read = [fragments.read(number) for number in range(len(slices))]
    for number, part in enumerate(slices):
        # Only what the first rank has counts.
        values = torch.arange(part.start, part.stop) if rank == 0 else torch.full((len(part),), 7)
        fragments.write(number, values.to(fragments.dtype))
    written = whole(model)
    group.close()
    return read, written


@pytest.mark.parametrize(
    ("divide", "world"),
    [
        (by_fsdp, 2),
        (by_fsdp, 4),
        (by_columns, 2),
        (by_columns, 3),
        (in_two_ways, 4),
        (not_at_all, 2),
    ],
)
@pytest.mark.parametrize("lengths", [[82], [1, 30, 7, 20, 23, 1]])
def test_the_first_rank_reads_and_all_are_written(
    pool: Pool, divide: Callable[[Layers, DeviceMesh], None], world: int, lengths: list[int]
) -> None:
    results = pool.run(read_and_write, divide, lengths, world=world)
    expected = torch.cat([p.detach().reshape(-1) for p in Layers().parameters()])
    assert sum(lengths) == len(expected)
    assert torch.equal(torch.cat(results[0][0]), expected)
    for _, written in results:
        assert torch.equal(written, torch.arange(float(len(expected))))


def test_values_as_the_parameters_store_them() -> None:
    parameters = {
        "a": torch.zeros(2, 2, dtype=torch.bfloat16),
        "b": torch.zeros(3, dtype=torch.float64),
    }
    group = WorkerGroup(0, 1, ["worker 0"])
    fragments = WholeFragments(parameters, [range(3), range(3, 7)], group)
    values = torch.full((4,), 1 / 3, dtype=torch.float64)
    rounded = float(torch.tensor(1 / 3, dtype=torch.bfloat16))
    assert fragments.is_rounded
    assert fragments.as_stored(1, values).tolist() == [rounded, *values[1:].tolist()]
    assert fragments.as_stored(0, values[:3]).tolist() == [rounded] * 3

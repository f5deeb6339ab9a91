"""Vectors of a worker of several ranks: gathered from the parts of all ranks, and split again."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_loco.distributed import WorkerGroup
from lightning_loco.model import worker_vectors
from lightning_loco.model.ownership import find_ownership
from lightning_loco.model.worker_vectors import WorkerVectors
from tests.harness.pool import Pool

NUMEL = 23
FRAGMENTS = [[range(0, 5), range(11, 20)], [range(5, 11)], [range(20, 23)]]
KINDS = [None, *range(len(FRAGMENTS))]


def elements(fragment: int | None) -> list[int]:
    if fragment is None:
        return list(range(NUMEL))
    return [position for part in FRAGMENTS[fragment] for position in part]


def gather_and_cut(
    rank: int, world: int, granularity: int | None, replica_size: int, chunk: int
) -> list[tuple[Tensor, Tensor | None]]:
    """Return this rank's part of the whole vectors, and the gathered vectors, for each kind."""
    group = WorkerGroup.create(timeout_s=30, replica_size=replica_size)
    named = {"a": torch.zeros(4, 3), "b": torch.zeros(11)}
    ownership = find_ownership(named, FRAGMENTS, granularity, group)
    vectors = WorkerVectors(ownership, group, holds_shards=False)
    found = []
    with mock.patch.object(worker_vectors, "CHUNK_ELEMENTS", chunk):
        for kind in KINDS:
            whole = torch.tensor(elements(kind), dtype=torch.float64) + 100 * group.worker
            assert vectors.length(kind) == len(whole)
            part = vectors.cut(whole, kind)
            found.append((part, vectors.gather(part, kind)))
    group.close()
    return found


@pytest.mark.parametrize(
    ("granularity", "replica_size", "chunk"), [(1, 2, 100), (4, 2, 3), (4, 4, 2), (None, 2, 5)]
)
def test_the_first_rank_gathers_what_all_have_cut(
    pool: Pool, granularity: int | None, replica_size: int, chunk: int
) -> None:
    results = pool.run(gather_and_cut, granularity, replica_size, chunk, world=4)
    for first in range(0, 4, replica_size):
        ranks = results[first : first + replica_size]
        for index, kind in enumerate(KINDS):
            expected = torch.tensor(elements(kind), dtype=torch.float64)
            expected += 100 * (first // replica_size)
            parts = [found[index][0] for found in ranks]
            assert torch.equal(torch.cat(parts).sort().values, expected)
            whole, *others = [found[index][1] for found in ranks]
            assert whole is not None
            assert torch.equal(whole, expected)
            assert others == [None] * (replica_size - 1)
    if granularity is None:
        assert [len(found[0][0]) for found in results] == [NUMEL, 0, NUMEL, 0]


def test_a_fragment_is_spread_into_a_vector_of_all_and_read_from_it() -> None:
    group = WorkerGroup(0, 1)
    ownership = find_ownership({"a": torch.zeros(NUMEL)}, FRAGMENTS, 1, group)
    vectors, whole = WorkerVectors(ownership, group, holds_shards=True), torch.arange(float(NUMEL))
    for fragment in range(len(FRAGMENTS)):
        expected = whole[elements(fragment)]
        assert torch.equal(vectors.part_of(whole, fragment), expected)
        spread = vectors.spread(expected, fragment)
        assert torch.equal(spread[elements(fragment)], expected)
        assert spread.sum() == expected.sum()  # zero elsewhere


def gather_shards(rank: int, world: int) -> str:
    group = WorkerGroup.create(timeout_s=30, replica_size=2)
    mesh = DeviceMesh.from_group(group.inner, "cpu")
    shard = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)], src_data_rank=None)
    named = {"a": nn.Parameter(shard)}
    ownership = find_ownership(named, [[range(12)]], 1, group)
    vectors = WorkerVectors(ownership, group, holds_shards=False)
    with pytest.raises(ValueError, match="holds a shard") as error:
        vectors.gather(torch.zeros(6))
    group.close()
    return str(error.value)


def test_shards_are_refused(pool: Pool) -> None:
    assert len(set(pool.run(gather_shards, world=4))) == 1

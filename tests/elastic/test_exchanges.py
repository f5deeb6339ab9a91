"""What a member receives of a round in which messages are added up, and what it counts as sent."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_loco.algorithms import DiLoCo
from lightning_loco.distributed.worker_status import IN_ROUND, WorkerStatus
from lightning_loco.elastic.elastic_round import ElasticRound
from lightning_loco.elastic.exchanges import Summing
from lightning_loco.elastic.group import Groups
from lightning_loco.engine import StepEngine
from tests.elastic.test_group import plan_of
from tests.pool import Pool

NUMEL = 1000
"""Elements of a message."""


class Round(NamedTuple):
    """How one member has seen it."""

    sent: Tensor
    received: Tensor
    lost: Tensor | None
    bytes_sent: int
    bytes_saved: int


def make_round(rank: int, world: int, compression: str | None) -> Round:
    """One round of as many members as there are ranks."""
    engine = StepEngine(nn.Linear(NUMEL, 1, bias=False), DiLoCo(), compression=compression)
    groups = Groups("127.0.0.1", timeout_s=60.0)
    stores: list[str] = [""] * world
    dist.all_gather_object(stores, groups.address)
    plan = plan_of(rank, tuple(stores))
    groups.open(plan)
    pending = ElasticRound(0, WorkerStatus(IN_ROUND, 0, steps=1))
    pending.message = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    pending.is_sent.set()
    sent = pending.message.clone()
    received = Summing(groups, engine).exchange(pending, plan)
    dist.barrier()
    groups.close()
    engine.close()
    return Round(sent, received, pending.lost, pending.bytes_sent, pending.bytes_saved)


@pytest.mark.parametrize("members", [1, 2, 3])
def test_a_sum_is_counted_as_a_ring_all_reduce(pool: Pool, members: int) -> None:
    rounds = pool.run(make_round, None, world=members)
    total = torch.stack([one.sent for one in rounds]).sum(0)
    for one in rounds:
        torch.testing.assert_close(one.received, total)
        assert one.lost is None
        assert one.bytes_sent == 2 * (members - 1) * 4 * NUMEL // members
        assert one.bytes_saved == 0


def test_what_is_lost_by_compression_is_known_to_its_member(pool: Pool) -> None:
    rounds = pool.run(make_round, "e3m0", world=3)
    for one in rounds:
        assert one.lost is not None
        assert one.lost.any()
        assert torch.equal(one.received, rounds[0].received)
        assert 0 < one.bytes_sent < 4 * NUMEL
        assert one.bytes_sent + one.bytes_saved == 2 * 2 * 4 * NUMEL // 3


def test_a_member_alone_receives_its_message_and_loses_nothing(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for compression in ("int8", "e3m0"):
        with subtests.test(compression):
            [alone] = pool.run(make_round, compression, world=1)
            assert torch.equal(alone.received, alone.sent)
            assert alone.lost is None or not alone.lost.any()
            assert (alone.lost is None) == (compression == "int8")
            assert alone.bytes_sent == alone.bytes_saved == 0

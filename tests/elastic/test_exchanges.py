"""What a member receives when messages are summed, and which bytes it counts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_loco.algorithms import DiLoCo
from lightning_loco.elastic.exchanges import SumExchange
from lightning_loco.elastic.group import MemberGroup
from lightning_loco.elastic.round_request import RoundResult
from lightning_loco.engine import StepEngine
from tests.elastic.test_group import plan_of
from tests.harness.pool import Pool

NUMEL = 1000
"""Elements of a message."""


class Weighted(DiLoCo):
    """DiLoCo with weights of its own."""

    def weight(self, steps: float) -> float:
        return steps


def run_exchange(
    rank: int, world: int, compression: str | None, weights: tuple[float, ...] | None = None
) -> tuple[Tensor, RoundResult]:
    """Return the message of a member, and the result of one exchange of all ranks."""
    algorithm = DiLoCo() if weights is None else Weighted()
    engine = StepEngine(nn.Linear(NUMEL, 1, bias=False), algorithm, compression=compression)
    group = MemberGroup("127.0.0.1", timeout_s=60.0)
    stores: list[str] = [""] * world
    dist.all_gather_object(stores, group.address)
    plan = plan_of(rank, tuple(stores))
    group.open(plan)
    message = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    sent = message.clone()
    weight = 1.0 if weights is None else weights[rank]
    exchanged = SumExchange(group, engine).exchange(message, weight, plan)
    assert torch.equal(message, sent)
    dist.barrier()
    group.close()
    engine.close()
    return sent, exchanged


@pytest.mark.parametrize("members", [1, 2, 3])
def test_a_sum_counts_the_bytes_of_a_ring_all_reduce(pool: Pool, members: int) -> None:
    results = pool.run(run_exchange, None, world=members)
    total = torch.stack([sent for sent, _ in results]).sum(0)
    for _, exchanged in results:
        torch.testing.assert_close(exchanged.received, total)
        assert exchanged.residual is None
        assert exchanged.bytes_sent == 2 * (members - 1) * 4 * NUMEL // members
        assert exchanged.bytes_saved == 0


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_messages_have_weights(pool: Pool, compression: str | None) -> None:
    for weights in ((1 / 3, 1e6, 2.0), (5.0,)):
        results = pool.run(run_exchange, compression, weights, world=len(weights))
        total = sum(w * sent for w, (sent, _) in zip(weights, results, strict=True))
        for _, exchanged in results:
            torch.testing.assert_close(
                exchanged.received, total, rtol=2e-3, atol=1e-3 * sum(weights)
            )


def test_a_member_gets_what_compression_removed_from_its_message(pool: Pool) -> None:
    results = [exchanged for _, exchanged in pool.run(run_exchange, "e3m0", world=3)]
    for exchanged in results:
        assert exchanged.residual is not None
        assert exchanged.residual.any()
        assert torch.equal(exchanged.received, results[0].received)
        assert 0 < exchanged.bytes_sent < 4 * NUMEL
        assert exchanged.bytes_sent + exchanged.bytes_saved == 2 * 2 * 4 * NUMEL // 3


def test_a_single_member_receives_its_own_message_unchanged(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    for compression in ("int8", "e3m0"):
        with subtests.test(compression):
            [(sent, exchanged)] = pool.run(run_exchange, compression, world=1)
            assert torch.equal(exchanged.received, sent)
            assert exchanged.residual is None or not exchanged.residual.any()
            assert (exchanged.residual is None) == (compression == "int8")
            assert exchanged.bytes_sent == exchanged.bytes_saved == 0

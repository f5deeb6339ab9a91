"""Send times: every worker records when a message was sent, and receivers read it."""

from __future__ import annotations

import torch.distributed as dist

from lightning_loco.distributed import WorkerGroup
from lightning_loco.engine import link_emulator
from lightning_loco.engine.link_emulator import SendTimes
from tests.harness.pool import Pool


def record_and_read(rank: int, world: int) -> list[float]:
    """Return times of message 5, and of a later message that reuses its slot."""
    group = WorkerGroup.create(timeout_s=20)
    times = SendTimes(group)
    others = [worker for worker in range(world) if worker != rank]
    found = [times.latest(5, others, own=7.5)]  # nothing is recorded
    dist.barrier()
    times.record(5, 100.0 + rank)
    dist.barrier()
    found += [times.latest(5, others, own=100.0 + rank), times.latest(5, [], own=7.5)]
    found += [times.latest(5, others, own=1000.0), times.latest(5, others[:1], own=7.5)]
    dist.barrier()
    later = 5 + link_emulator._SLOTS
    times.record(later, 200.5 + rank)
    dist.barrier()
    found += [times.latest(5, others, own=7.5), times.latest(later, others, own=7.5)]
    group.close()
    return found


def test_the_latest_send_time_counts(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(record_and_read, world=3)):
        last, first = [102.0, 102.0, 102.0], [101.0, 100.0, 100.0]
        highest = [202.5, 202.5, 201.5]
        assert found == [7.5, last[rank], 7.5, 1000.0, first[rank], 7.5, highest[rank]]

"""Send times: every worker records when a message was sent, and receivers read it."""

from __future__ import annotations

import torch.distributed as dist

from lightning_loco.distributed import WorkerGroup
from lightning_loco.engine import link_emulator
from lightning_loco.engine.link_emulator import SendTimes
from tests.pool import Pool


def note_and_read(rank: int, world: int) -> list[float]:
    """Times of message 5 and of one a whole circle of slots later."""
    group = WorkerGroup.create(timeout_s=20)
    told = SendTimes(group)
    others = [worker for worker in range(world) if worker != rank]
    found = [told.latest(5, others, own=7.5)]  # nothing is recorded
    dist.barrier()
    told.record(5, 100.0 + rank)
    dist.barrier()
    found += [told.latest(5, others, own=100.0 + rank), told.latest(5, [], own=7.5)]
    found += [told.latest(5, others, own=1000.0), told.latest(5, others[:1], own=7.5)]
    dist.barrier()
    later = 5 + link_emulator._SLOTS
    told.record(later, 200.5 + rank)
    dist.barrier()
    found += [told.latest(5, others, own=7.5), told.latest(later, others, own=7.5)]
    for garbage in ("", "6", "6 inf", "6 nan", "6 -1", "x 3", "6 1e400", "6 3 9", "9" * 50 + " 1"):
        told._store.set(told._key(rank, 6), garbage)
        dist.barrier()
        found.append(told.latest(6, others, own=7.5))
        dist.barrier()
    group.close()
    return found


def test_the_last_departure_counts(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(note_and_read, world=3)):
        last, first = [102.0, 102.0, 102.0], [101.0, 100.0, 100.0]
        highest = [202.5, 202.5, 201.5]
        assert found == [7.5, last[rank], 7.5, 1000.0, first[rank], 7.5, highest[rank], *[7.5] * 9]

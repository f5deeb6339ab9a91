"""Leaving groups in which something is under way; for NCCL see tests/strategies/test_gpu.py."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_loco.distributed.abandon import abandon, abandon_default_group
from tests.limits import LONG_S, SOON_S
from tests.pool import Pool
from tests.strategies.remote_runs import all_ranks


def leave_while_waiting(rank: int, world: int) -> tuple[float, int]:
    """Rank 0 waits for a message and a sum that rank 1 has no part in, and leaves first."""
    groups = [dist.new_group(timeout=timedelta(seconds=LONG_S))]
    dist.barrier()
    if rank == 0:
        dist.irecv(torch.zeros(3), 1, group=groups[0])
        dist.all_reduce(torch.zeros(3), group=groups[0], async_op=True)
    else:
        dist.barrier()
    began = time.monotonic()
    abandon(groups)
    lasted_s = time.monotonic() - began
    if rank == 0:
        dist.barrier()
    return lasted_s, len(groups)


def test_nobody_waits_for_what_never_comes(pool: Pool) -> None:
    for lasted_s, left in pool.run(leave_while_waiting, world=2):
        assert lasted_s < SOON_S
        assert left == 0


def renew_default_group(rank: int, world: int) -> tuple[bool, float]:
    with all_ranks() as environment:
        init = f"tcp://127.0.0.1:{environment.main_port}"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
        abandon_default_group()
        is_left = not dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        value = torch.ones(3)
        dist.all_reduce(value)
        return is_left, value.sum().item()


def test_a_default_group_makes_room_for_another(pool: Pool) -> None:
    assert pool.run(renew_default_group, world=2) == [(True, 3.0)] * 2

"""The ranks of an elastic worker decide together: all get the same answer or error."""

from __future__ import annotations

import os
import signal

import pytest

from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.elastic.places import Places
from tests.harness.pool import Pool, PoolError


def make_places(world: int, timeout_s: float = 60.0) -> tuple[Places, WorkerGroup]:
    group = WorkerGroup.create(timeout_s=timeout_s, replica_size=world)
    return Places(group, timeout_s), group


def decide(rank: int, world: int) -> list[object]:
    places, group = make_places(world)

    def ask() -> str:
        return f"asked by {rank}"

    def fail_on_1() -> None:
        if rank == 1:
            raise RuntimeError("no connection\nand a second line")

    def refuse() -> str:
        raise ValueError(f"refused by {rank}")

    found: list[object] = [places.gather([rank]), places.ask_first(ask)]
    for act in (lambda: places.together(fail_on_1), lambda: places.ask_first(refuse)):
        try:
            act()
        except (RuntimeError, ValueError) as error:
            found.append((type(error), str(error).partition("\n")[0]))
    found.append(places.together(lambda: rank))
    places.close(has_failed=False)
    with pytest.raises(RuntimeError, match="has left the run"):
        places.ask_first(ask)
    group.close()
    return found


def test_an_answer_and_an_error_are_those_of_all(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(decide, world=3)):
        everyone, answer, error, refusal, own = found
        assert everyone == [[0], [1], [2]]
        assert answer == "asked by 0"
        text = "no connection" if rank == 1 else "worker 0, place 1 (rank 1): no connection"
        assert error == (RuntimeError, text)
        text = "refused by 0" if rank == 0 else "worker 0, place 0 (rank 0): refused by 0"
        assert refusal == (ValueError, text)
        assert own == rank


def wait_for_a_dead_rank(rank: int, world: int) -> None:
    places, group = make_places(world)
    places.gather(None)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        places.gather(None)
    finally:
        places.close(has_failed=True)
        group.close()


def test_a_rank_that_is_killed_is_named(pool: Pool) -> None:
    with pytest.raises(PoolError) as found:
        pool.run(wait_for_a_dead_rank, world=2)
    assert found.value.failures[0].type_name == "WorkerFailure"
    assert "worker 0, place 1 (rank 1) (no sign of life" in found.value.failures[0].message

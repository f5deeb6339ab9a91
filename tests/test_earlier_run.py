"""What another run has saved: its means, and words for what is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_loco.earlier_run import EarlierRun, mean_of_states
from tests.pool import Pool, PoolError
from tests.test_worker import joined


def state_of(worker: int, **others: Any) -> dict[str, Any]:
    vector = torch.arange(4.0) + worker
    return {
        "vector": vector,
        "nested": [{"inner": vector.double() ** 2, "none": None, "count": worker}],
        "integers": torch.tensor([worker]),
        "steps_since_round": 3,
        **others,
    }


def saved_by(writers: int, own: dict[str, Any], **others: Any) -> EarlierRun:
    read = others.pop("read", state_of)
    return EarlierRun(own, "DiLoCo", {}, writers, "outer", True, **{"read": read, **others})


def means(rank: int, world: int, writers: int, broken: int | None) -> dict[str, Any]:
    worker = joined(nn.Linear(1, 1))

    def read(number: int) -> dict[str, Any]:
        state = state_of(number)
        if number == broken:
            state["vector"][1] = float("nan")
        return state

    saved = saved_by(writers, read(rank if rank < writers else 0), read=read)
    try:
        return mean_of_states(worker, saved, ("vector", "nested", "integers"))
    finally:
        worker.group.close()


def test_vectors_become_means_and_numbers_stay(pool: Pool, subtests: pytest.Subtests) -> None:
    for world, writers in ((2, 5), (3, 3), (4, 1), (1, 4), (4, 2)):
        with subtests.test(world=world, writers=writers):
            for rank, found in enumerate(pool.run(means, writers, None, world=world)):
                every = torch.stack([state_of(worker)["vector"] for worker in range(writers)])
                torch.testing.assert_close(found["vector"], every.mean(0))
                (nested,) = found["nested"]
                torch.testing.assert_close(nested["inner"], (every.double() ** 2).mean(0))
                own = rank if rank < writers else 0
                assert nested["count"] == int(found["integers"]) == own
                assert nested["none"] is None
                assert set(found) == {"vector", "nested", "integers"}


def test_vectors_that_are_not_finite_are_left_out(pool: Pool) -> None:
    for found in pool.run(means, 3, 1, world=2):
        torch.testing.assert_close(found["vector"], torch.arange(4.0) + 1)  # of 0 and 2
        torch.testing.assert_close(found["nested"][0]["inner"][0], torch.tensor(5 / 3).double())


def unreadable(rank: int, world: int) -> None:
    worker = joined(nn.Linear(1, 1))

    def read(number: int) -> dict[str, Any]:
        raise ValueError(f"worker_{number:05d}.pt is damaged")

    try:
        mean_of_states(worker, saved_by(3, state_of(rank), read=read), ["vector"])
    finally:
        worker.group.close()


def test_a_file_that_cannot_be_read_is_an_error_on_all(pool: Pool) -> None:
    with pytest.raises(PoolError, match="worker_00002.pt is damaged") as error:
        pool.run(unreadable, world=2)
    assert sorted(error.value.failures) == [0, 1]


def test_what_is_forgotten_is_said() -> None:
    fragments = [{"pending": {"index": 3}}]
    shared = [{"state": {"outer": 1, "momentum": 2}}]
    saved = saved_by(2, state_of(0, fragments=fragments, shared=shared))
    assert saved.forgotten() == [
        "all workers begin at the consensus",
        "what DiLoCo remembered (momentum) is dropped",
        "a pending round is dropped",
        "the last 3 local steps, which no round has shared, are dropped",
    ]
    assert saved_by(2, state_of(0, steps_since_round=0)).forgotten() == [
        "all workers begin at the consensus"
    ]

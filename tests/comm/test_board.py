"""The notice board on one store: those at a meeting learn whether anybody makes a round."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_loco.comm.board import Board
from lightning_loco.comm.store import PromptStore
from lightning_loco.comm.watchdog import Watchdog
from tests.comm.workers import TIMEOUT_S, hurry, on_every_worker, start, watchdogs


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def store() -> Iterator[PromptStore]:
    store = PromptStore(dist.HashStore())
    yield store
    store.close()


def boards(store: PromptStore, num_workers: int) -> list[Board]:
    return [Board(store, worker, num_workers) for worker in range(num_workers)]


def comes_with_a_round(board: Board) -> None:
    """A worker begins the next exchange with a round to make, and its all-reduce is late."""
    board.exchange += 1
    board.post(True, TIMEOUT_S)


def comes_to_a_meeting(board: Board, dog: Watchdog, timeout_s: float = TIMEOUT_S) -> bool:
    """A worker begins the next exchange at a meeting; whether it is to take part in a round."""
    board.exchange += 1
    board.post(False, timeout_s)
    return board.anyone_makes_round(dog, "validation", timeout_s)


def test_if_all_are_at_a_meeting_nobody_makes_a_round(store: PromptStore) -> None:
    with watchdogs(3) as dogs:
        all_boards = boards(store, 3)
        answers = on_every_worker(3, lambda w: comes_to_a_meeting(all_boards[w], dogs[w]))
    assert answers == [False] * 3


@pytest.mark.parametrize("with_round", [{0}, {2}, {0, 1}], ids=str)
def test_one_worker_with_a_round_is_enough(store: PromptStore, with_round: set[int]) -> None:
    with watchdogs(3) as dogs:
        all_boards = boards(store, 3)

        def come(worker: int) -> bool:
            if worker in with_round:
                comes_with_a_round(all_boards[worker])
                return True
            return comes_to_a_meeting(all_boards[worker], dogs[worker])

        assert on_every_worker(3, come) == [True] * 3


def test_those_who_come_early_wait(store: PromptStore) -> None:
    with watchdogs(2) as dogs:
        first, second = boards(store, 2)

        def come(worker: int) -> tuple[bool, float]:
            if worker == 1:
                time.sleep(0.3)
                comes_with_a_round(second)
                return True, 0.3
            began = time.monotonic()
            return comes_to_a_meeting(first, dogs[0]), time.monotonic() - began

        (joins, waited_s), _ = on_every_worker(2, come)
    assert joins
    assert waited_s > 0.25


def test_a_notice_counts_for_its_own_exchange_only(store: PromptStore) -> None:
    with watchdogs(2) as dogs:
        first, second = boards(store, 2)
        comes_with_a_round(second)
        assert comes_to_a_meeting(first, dogs[0])
        with pytest.raises(RuntimeError, match="No message in validation"):
            comes_to_a_meeting(first, dogs[0], timeout_s=0.2)


def test_many_exchanges_at_different_speeds(store: PromptStore) -> None:
    """What workers do is decided by chance; after each exchange all come together, as in a sum."""
    num_workers, num_exchanges = 4, 60
    plans = [
        [random.Random(100 * worker + t).random() < 0.2 for t in range(num_exchanges)]
        for worker in range(num_workers)
    ]
    together = threading.Barrier(num_workers)
    with watchdogs(num_workers) as dogs:
        all_boards = boards(store, num_workers)

        def come(worker: int) -> list[bool]:
            answers = []
            for makes_round in plans[worker]:
                time.sleep(0.002 * random.random())
                if makes_round:
                    comes_with_a_round(all_boards[worker])
                    answers.append(True)
                else:
                    answers.append(comes_to_a_meeting(all_boards[worker], dogs[worker]))
                together.wait(TIMEOUT_S)
            return answers

        answers = on_every_worker(num_workers, come)
    expected = [any(plan[t] for plan in plans) for t in range(num_exchanges)]
    assert {True, False} == set(expected)
    assert answers == [expected] * num_workers


def test_who_does_not_come_is_named(store: PromptStore) -> None:
    with watchdogs(3) as dogs:
        start(*dogs[:2])
        first, second, _ = boards(store, 3)
        comes_with_a_round(second)
        with pytest.raises(RuntimeError, match="No message in validation .* from worker 2"):
            comes_to_a_meeting(first, dogs[0], timeout_s=0.2)


def test_a_failure_ends_the_wait(store: PromptStore) -> None:
    with watchdogs(2) as dogs:
        start(*dogs)
        first, _ = boards(store, 2)
        dogs[1].report("no more power")
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Worker 1 failed:\nno more power"):
            comes_to_a_meeting(first, dogs[0])
        assert time.monotonic() - began < 2


def test_notices_of_old_exchanges_are_taken_down(store: PromptStore) -> None:
    with watchdogs(2) as dogs:
        both = boards(store, 2)
        for _ in range(5):
            answers = on_every_worker(2, lambda w: comes_to_a_meeting(both[w], dogs[w]))
            assert answers == [False, False]
    kept = [n for n in range(1, 6) if store.check([f"{n}/notices"]) or store.check([f"{n}/all"])]
    assert kept == [4, 5]

"""A barrier in one store: workers at a sync point learn whether another worker runs a round."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch.distributed as dist

from lightning_loco.distributed.store import TimeoutStore
from lightning_loco.distributed.store_barrier import StoreBarrier
from lightning_loco.distributed.watchdog import Watchdog
from tests.harness.limits import LONG_S, SOON_S, wait_until
from tests.harness.manual_clock import ManualClock
from tests.harness.watchdogs import TIMEOUT_S, hurry, make_watchdogs, on_every_worker, start


class CountingStore(dist.HashStore):
    """Counts the keys that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []

    def get(self, key: str) -> bytes:
        self.reads.append(1)
        return super().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.reads.append(len(keys))
        return super().multi_get(keys)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def store() -> Iterator[TimeoutStore]:
    store = TimeoutStore(dist.HashStore())
    yield store
    store.close()


def barriers(store: TimeoutStore, num_workers: int) -> list[StoreBarrier]:
    return [StoreBarrier(store, worker, num_workers) for worker in range(num_workers)]


def calls_to_round(store_barrier: StoreBarrier) -> None:
    """Let a worker start the next exchange with a round; its all-reduce is late."""
    store_barrier.exchange += 1
    store_barrier.call_to_round(TIMEOUT_S)


def reaches_a_sync_point(
    store_barrier: StoreBarrier, watchdog: Watchdog, timeout_s: float = TIMEOUT_S
) -> bool:
    """Let a worker start the next exchange at a sync point; return whether it must join a round."""
    store_barrier.exchange += 1
    return (
        store_barrier.wait([float(store_barrier.exchange)], watchdog, "validation", timeout_s)
        is None
    )


def test_if_all_are_at_a_sync_point_no_worker_makes_a_round(store: TimeoutStore) -> None:
    with make_watchdogs(3) as watchdogs:
        all_barriers = barriers(store, 3)
        answers = on_every_worker(3, lambda w: reaches_a_sync_point(all_barriers[w], watchdogs[w]))
    assert answers == [False] * 3


@pytest.mark.parametrize("with_round", [{0}, {2}, {0, 1}], ids=str)
def test_one_worker_with_a_round_is_enough(store: TimeoutStore, with_round: set[int]) -> None:
    with make_watchdogs(3) as watchdogs:
        all_barriers = barriers(store, 3)

        def reach(worker: int) -> bool:
            if worker in with_round:
                calls_to_round(all_barriers[worker])
                return True
            return reaches_a_sync_point(all_barriers[worker], watchdogs[worker])

        assert on_every_worker(3, reach) == [True] * 3


def test_workers_that_come_early_wait(store: TimeoutStore) -> None:
    with make_watchdogs(2) as watchdogs:
        first, second = barriers(store, 2)

        has_reached_it = threading.Event()

        def reach(worker: int) -> tuple[bool, bool]:
            if worker == 1:
                wait_until(lambda: store.check(["1/count"]))  # of the first exchange
                time.sleep(0.1)
                has_reached_it.set()
                calls_to_round(second)
                return True, True
            return reaches_a_sync_point(first, watchdogs[0]), has_reached_it.is_set()

        assert on_every_worker(2, reach) == [(True, True)] * 2


def test_an_arrival_counts_for_its_own_exchange_only(store: TimeoutStore) -> None:
    with make_watchdogs(2) as watchdogs:
        first, second = barriers(store, 2)
        calls_to_round(second)
        assert reaches_a_sync_point(first, watchdogs[0])
        with pytest.raises(RuntimeError, match="No message in validation"):
            reaches_a_sync_point(first, watchdogs[0], timeout_s=0.2)


def test_many_exchanges_at_different_speeds(store: TimeoutStore) -> None:
    """Workers choose at random; after each exchange all workers meet, as after an all-reduce."""
    num_workers, num_exchanges = 4, 60
    plans = [
        [random.Random(100 * worker + t).random() < 0.2 for t in range(num_exchanges)]
        for worker in range(num_workers)
    ]
    together = threading.Barrier(num_workers)
    with make_watchdogs(num_workers) as watchdogs:
        all_barriers = barriers(store, num_workers)

        def reach(worker: int) -> list[bool]:
            answers = []
            for makes_round in plans[worker]:
                time.sleep(0.002 * random.random())
                if makes_round:
                    calls_to_round(all_barriers[worker])
                    answers.append(True)
                else:
                    answers.append(reaches_a_sync_point(all_barriers[worker], watchdogs[worker]))
                together.wait(TIMEOUT_S)
            return answers

        answers = on_every_worker(num_workers, reach)
    expected = [any(plan[t] for plan in plans) for t in range(num_exchanges)]
    assert {True, False} == set(expected)
    assert answers == [expected] * num_workers


def test_a_worker_that_does_not_come_is_named_on_the_others_too(store: TimeoutStore) -> None:
    """Worker 0 hosts the store, so the others receive the name before it exits."""
    clock = ManualClock()
    with make_watchdogs(3, clock=clock) as watchdogs:
        start(*watchdogs[:2])
        first, second, _ = barriers(store, 3)
        calls_to_round(second)

        def reach() -> None:
            reaches_a_sync_point(first, watchdogs[0], timeout_s=0.2)

        with pytest.raises(RuntimeError, match="No message in validation .* from worker 2"):
            clock.pass_during(reach, others=2)
        assert "from worker 2" in str(watchdogs[1].failure)


def test_a_failure_ends_the_wait(store: TimeoutStore) -> None:
    with make_watchdogs(2) as watchdogs:
        start(*watchdogs)
        first, _ = barriers(store, 2)
        watchdogs[1].report("no more power")
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Worker 1 failed:\nno more power"):
            reaches_a_sync_point(first, watchdogs[0], timeout_s=LONG_S)
        assert time.monotonic() - began < SOON_S


def test_counters_of_old_exchanges_are_deleted(store: TimeoutStore) -> None:
    with make_watchdogs(2) as watchdogs:
        both = barriers(store, 2)
        for _ in range(5):
            answers = on_every_worker(2, lambda w: reaches_a_sync_point(both[w], watchdogs[w]))
            assert answers == [False, False]
    kept = [n for n in range(1, 6) if store.check([f"{n}/count"]) or store.check([f"{n}/all"])]
    assert kept == [4, 5]


def test_numbers_arrive_as_they_are(store: TimeoutStore) -> None:
    sent = [[0.1 + 0.2, -0.0, 5e-324], [1.7976931348623157e308, math.nan, -math.inf]]
    with make_watchdogs(2) as watchdogs:
        both = barriers(store, 2)
        for _ in range(2):
            for store_barrier in both:
                store_barrier.exchange += 1
            found = on_every_worker(
                2, lambda w: both[w].wait(sent[w], watchdogs[w], "here", TIMEOUT_S)
            )
            assert [repr(table) for table in found] == [repr(sent)] * 2
            sent.reverse()


@pytest.mark.parametrize("num_workers", [2, 8, 16])
def test_the_numbers_of_all_workers_are_one_question_to_the_store(num_workers: int) -> None:
    counting = CountingStore()
    with closing(TimeoutStore(counting)) as store, make_watchdogs(num_workers) as watchdogs:
        all_barriers = barriers(store, num_workers)
        for _ in range(3):
            counting.reads.clear()
            on_every_worker(
                num_workers, lambda w: reaches_a_sync_point(all_barriers[w], watchdogs[w])
            )
            # The last worker reads all entries; all workers, including it, read its decision.
            assert sorted(counting.reads) == [1] * num_workers + [num_workers]


def test_garbage_in_the_store_is_an_error(subtests: pytest.Subtests) -> None:
    rows = ("no rows", "null", "{}", "[1, 2]", "[[1.0]]", '[["a"], [1.0]]', "[[true], [1.0]]")
    for garbage in rows:
        with (
            subtests.test(garbage),
            closing(TimeoutStore(dist.HashStore())) as store,
            make_watchdogs(2) as watchdogs,
        ):
            store_barrier, _ = barriers(store, 2)
            store.set("1/all", garbage)
            with pytest.raises(
                RuntimeError, match="he barrier in the job.s key-value store (holds|has sent)"
            ):
                reaches_a_sync_point(store_barrier, watchdogs[0])

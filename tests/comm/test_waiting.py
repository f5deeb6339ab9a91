"""Waiting is timed, and an error of the backend names the worker that is missing."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import Explained, Sum, Timed
from lightning_loco.comm.watchdog import WorkerFailure
from tests.comm.workers import group_of, hurry, start, watchdogs
from tests.pool import Pool


def test_seconds_add_up() -> None:
    statistics = Statistics(wait_s=1.0)
    for _ in range(2):
        with Timed(statistics):
            time.sleep(0.05)
    time.sleep(0.05)
    assert 1.1 <= statistics.wait_s < 1.14


def test_seconds_count_when_the_wait_fails() -> None:
    statistics = Statistics()

    def fail() -> None:
        with Timed(statistics):
            time.sleep(0.02)
            raise RuntimeError("closed")

    with pytest.raises(RuntimeError, match="closed"):
        fail()
    assert statistics.wait_s >= 0.02


def test_an_error_names_the_missing_worker_and_keeps_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hurry(monkeypatch)
    cause = RuntimeError("Connection closed by peer")
    with watchdogs(3) as dogs:
        dogs[1].place = "round 3"
        start(*dogs)
        dogs[1].end()
        with pytest.raises(RuntimeError) as raised, Explained(group_of(dogs[0], 0, 3), "round 4"):
            raise cause
    assert "No message in round 4 after 0 s from worker 1" in str(raised.value)
    assert raised.value.__cause__ is cause


def test_an_error_becomes_the_failure_that_another_worker_has_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hurry(monkeypatch)
    with watchdogs(2) as dogs:
        start(*dogs)
        dogs[1].report("IndexError: 7")
        with (
            pytest.raises(RuntimeError, match="^Worker 1 failed:\nIndexError: 7$"),
            Explained(group_of(dogs[0], 0, 2), "round 4"),
        ):
            raise RuntimeError("Connection closed by peer")


def test_what_is_explained_is_not_explained_again() -> None:
    with watchdogs(2) as dogs:
        group = group_of(dogs[0], 0, 2)
        began = time.monotonic()
        with (
            pytest.raises(WorkerFailure, match="^worker 1 is gone$"),
            Explained(group, "round 4"),
            Explained(group, "a part of it"),
        ):
            raise WorkerFailure("worker 1 is gone")
        assert time.monotonic() - began < 0.2


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_errors_that_are_not_the_backends_pass(error: BaseException) -> None:
    with (
        watchdogs(2) as dogs,
        pytest.raises(type(error)) as raised,
        Explained(group_of(dogs[0], 0, 2), "round 4"),
    ):
        raise error
    assert raised.value is error


def test_a_worker_alone_has_nothing_to_explain() -> None:
    with pytest.raises(RuntimeError, match="^as it is$"), Explained(WorkerGroup(0, 1), "round 4"):
        raise RuntimeError("as it is")


def test_without_an_error_nothing_happens() -> None:
    with Explained(WorkerGroup(0, 1), "round 4"):
        pass


def test_the_sum_of_a_worker_alone_is_its_own() -> None:
    statistics, flat = Statistics(), torch.ones(3)
    total = Sum(WorkerGroup(0, 1), statistics, flat, "the test")
    assert total.has_arrived()
    assert total.arrives_within(0.0)
    assert total.wait().tolist() == [1.0, 1.0, 1.0]
    assert statistics == Statistics()


def sum_up(rank: int, world: int) -> tuple[list[float], int]:
    group, statistics = WorkerGroup.create(timeout_s=20), Statistics()
    flat = torch.arange(6.0) * (rank + 1)
    total = Sum(group, statistics, flat, "the test").wait()
    group.close()
    assert total is flat
    return flat.tolist(), statistics.bytes_sent


def test_a_sum_is_counted_as_a_ring_all_reduce(pool: Pool) -> None:
    for flat, num_bytes in pool.run(sum_up, world=3):
        assert flat == [0.0, 6.0, 12.0, 18.0, 24.0, 30.0]
        assert num_bytes == 2 * 2 * 24 // 3

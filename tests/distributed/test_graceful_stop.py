"""Graceful stop with real watchdogs: all workers stop at one step, and none waits for ever."""

from __future__ import annotations

import itertools
import threading
import time
from fractions import Fraction

import pytest

from lightning_loco.distributed import watchdog
from lightning_loco.distributed.graceful_stop import StopAgreement
from lightning_loco.distributed.worker_group import WorkerGroup
from tests.harness.limits import wait_until
from tests.harness.manual_clock import ManualClock
from tests.harness.watchdogs import (
    TIMEOUT_S,
    group_of,
    hurry,
    make_watchdogs,
    on_every_worker,
    start,
)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def after_step(
    stop: StopAgreement, group: WorkerGroup, rounds: int, steps: int, sync_every: int
) -> None:
    """Do what an engine does after each local step."""
    if group.watchdog is not None:
        group.watchdog.position = (rounds, steps, sync_every)
    stop.check(rounds, steps, sync_every)


def stop_together(
    sync_every: list[int], requested_by: set[int]
) -> tuple[list[tuple[Fraction, str]], Fraction]:
    """Return where each worker stopped and why, and the position that all agreed on.

    Each worker counts steps and waits for the others after its ``sync_every``, as an engine does.
    """
    round_barrier = threading.Barrier(3)

    with make_watchdogs(3) as watchdogs:
        start(*watchdogs)

        def train(worker: int) -> tuple[Fraction, str]:
            group = group_of(watchdogs[worker], worker, 3)
            stop = StopAgreement(group)
            rounds = steps = 0
            for step in range(100_000):
                steps += 1
                time.sleep(0.001 * (1 + worker))
                if step == 20 and worker in requested_by:
                    stop.request("SIGTERM")
                after_step(stop, group, rounds, steps, sync_every[worker])
                if steps == sync_every[worker]:
                    round_barrier.wait(TIMEOUT_S)
                    rounds, steps = rounds + 1, 0
                if stop.agreed is not None:
                    return rounds + Fraction(steps, sync_every[worker]), stop.agreed
            raise AssertionError("no worker has stopped")

        ends = on_every_worker(3, train)
        stop_at, _ = watchdogs[0].stop_at
    return ends, stop_at


def test_all_stop_at_the_same_position_and_make_all_rounds_before_it(
    subtests: pytest.Subtests,
) -> None:
    rows = itertools.product(([5, 5, 5], [6, 2, 3], [1, 1, 1], [50, 50, 50]), ({1}, {0, 2}))
    for sync_every, requested_by in rows:
        with subtests.test(sync_every=sync_every, requested_by=requested_by):
            ends, stop_at = stop_together(sync_every, requested_by)
            assert {reason for _, reason in ends} == {"SIGTERM"}
            for (position, _), steps in zip(ends, sync_every, strict=True):
                # The last local step of this worker that is not after the common position.
                assert position <= stop_at < position + Fraction(1, steps)
            if len(set(sync_every)) == 1:
                assert len(set(ends)) == 1


def test_no_worker_stops_without_a_request() -> None:
    with make_watchdogs(2) as watchdogs:
        start(*watchdogs)
        group = group_of(watchdogs[0], 0, 2)
        stop = StopAgreement(group)
        for step in range(5):
            after_step(stop, group, 0, step, 10)
            time.sleep(0.05)
        assert stop.agreed is None
        assert not stop.catch_up()


def test_a_single_worker_stops_after_the_current_step() -> None:
    group = WorkerGroup(0, 1)
    stop = StopAgreement(group)
    after_step(stop, group, 0, 1, 10)
    assert stop.agreed is None
    stop.request("SIGTERM")
    assert stop.agreed is None
    after_step(stop, group, 0, 2, 10)
    assert stop.agreed == "SIGTERM"


@pytest.mark.parametrize(("step_s", "slower_stop"), [(0.01, 501), (0.1, 12)])
def test_workers_that_do_not_wait_stop_at_one_step_unless_one_is_far_behind(
    step_s: float, slower_stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker of the first two ranks is 4.9 or 49 seconds behind the other worker."""
    with make_watchdogs(4, replica_size=2) as watchdogs:
        for one, steps in zip(watchdogs, (10, 11, 500, 499), strict=True):
            one.position, one.step_s = (0, steps, 1), step_s
        start(*watchdogs)
        StopAgreement(group_of(watchdogs[0], 0, 4)).request("SIGTERM")
        wait_until(lambda: all(one.stop_at for one in watchdogs))
        stops = [slower_stop, slower_stop, 501, 501]
        assert [one.stop_at for one in watchdogs] == [(step, "SIGTERM") for step in stops]
    assert ("Each worker stops at its own local step" in caplog.text) == (slower_stop != 501)


def test_a_worker_without_more_data_stops_where_it_is() -> None:
    with make_watchdogs(2) as watchdogs:
        watchdogs[1].position = (3, 1, 4)
        start(*watchdogs)
        group = group_of(watchdogs[0], 0, 2)
        ended = StopAgreement(group)
        after_step(ended, group, 2, 0, 4)
        StopAgreement(group_of(watchdogs[1], 1, 2)).request("SIGTERM")
        wait_until(lambda: watchdogs[0].stop_at)
        after_step(ended, group, 2, 1, 4)
        assert ended.agreed is None  # the others stop later
        assert ended.catch_up()
        assert ended.agreed == "SIGTERM"


def test_a_worker_that_waits_elsewhere_stops_although_not_all_have_answered_yet() -> None:
    """Other workers may read the position and stop before this worker's watchdog has read it."""
    with make_watchdogs(2) as watchdogs:
        start(watchdogs[0])
        waiting = StopAgreement(group_of(watchdogs[0], 0, 2))
        waiting.request("SIGTERM")
        wait_until(lambda: watchdogs[0].stop_seen)
        assert watchdogs[0].stop_at is None
        watchdogs[1].start()
        assert waiting.catch_up()
        assert waiting.agreed == "SIGTERM"


def test_a_worker_that_does_not_answer_is_reported_to_all() -> None:
    """Worker 0 hosts the store, so it reports the error before it exits."""
    clock = ManualClock()
    with make_watchdogs(3, clock=clock) as watchdogs:
        start(*watchdogs[:2])
        group = group_of(watchdogs[0], 0, 3)
        group.timeout_s = 0.2
        stop = StopAgreement(group)
        stop.request("SIGTERM")
        clock.wait_until_waiting(2)
        clock.advance(watchdog._HEARTBEAT_INTERVAL_S)
        wait_until(lambda: watchdogs[0].stop_seen)
        with pytest.raises(RuntimeError, match="the agreement to stop after 0 s from worker 2"):
            clock.pass_during(lambda: after_step(stop, group, 0, 1, 4), others=2)
        assert "from worker 2" in str(watchdogs[1].failure)

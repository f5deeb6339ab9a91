"""Watchdogs on one store: heartbeats, reports of failures, the agreement to stop."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import pytest
import torch.distributed as dist

from lightning_loco.distributed import watchdog as module
from lightning_loco.distributed.watchdog import Watchdog, WorkerFailure
from tests.harness.guards import threads_named
from tests.harness.limits import wait_until
from tests.harness.manual_clock import ManualClock, SkippingClock
from tests.harness.watchdogs import INTERVAL_S, hurry, make_watchdogs, server_in_a_process, start


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


# ------------------------------------------------------------------------------- failures


def test_a_report_reaches_all_others() -> None:
    with make_watchdogs(3) as watchdogs:
        start(*watchdogs)
        watchdogs[1].report("ZeroDivisionError: division by zero")
        for watchdog in (watchdogs[0], watchdogs[2]):
            wait_until(lambda watchdog=watchdog: watchdog.failure)
            with pytest.raises(RuntimeError, match="^Worker 1 failed:\nZeroDivisionError"):
                watchdog.raise_if_failed()
        watchdogs[1].raise_if_failed()  # its own report


def test_only_the_first_report_counts() -> None:
    with make_watchdogs(3) as watchdogs:
        start(*watchdogs)
        watchdogs[2].report("the first")
        watchdogs[1].report("the second")
        wait_until(lambda: watchdogs[0].failure and watchdogs[1].failure)
        assert watchdogs[0].failure == watchdogs[1].failure == "Worker 2 failed:\nthe first"


def test_messages_use_the_names_of_the_workers() -> None:
    with make_watchdogs(2, ["the server", "the client"]) as watchdogs:
        start(*watchdogs)
        watchdogs[1].report("no space left")
        wait_until(lambda: watchdogs[0].failure)
        assert watchdogs[0].failure == "The client failed:\nno space left"


def test_a_report_may_contain_the_separator() -> None:
    with make_watchdogs(2) as watchdogs:
        start(*watchdogs)
        watchdogs[1].label = "a | b"
        watchdogs[1].report("x | y")
        wait_until(lambda: watchdogs[0].failure)
        assert watchdogs[0].failure == "Worker 1 failed:\nx | y"


def test_the_host_of_the_store_waits_until_the_others_have_read_its_report() -> None:
    clock = ManualClock()
    with make_watchdogs(3, clock=clock) as watchdogs:
        start(*watchdogs)
        clock.pass_during(lambda: watchdogs[0].report("out of memory"), others=3)
        assert [watchdog.failure for watchdog in watchdogs[1:]] == [
            "Worker 0 failed:\nout of memory"
        ] * 2


def test_the_host_of_the_store_waits_three_heartbeats_for_missing_workers() -> None:
    clock = SkippingClock()
    with make_watchdogs(2, clock=clock) as watchdogs:
        start(watchdogs[0])
        watchdogs[0].report("out of memory")
        assert clock.now() == pytest.approx(3 * INTERVAL_S, abs=INTERVAL_S / 19)


@pytest.mark.parametrize(
    ("by_torchrun", "host"),
    [("False", "worker 0"), ("True", "torchrun on the machine of worker 0")],
)
def test_a_lost_store_is_a_failure_of_its_host(
    monkeypatch: pytest.MonkeyPatch, by_torchrun: str, host: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", by_torchrun)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    watchdog = Watchdog(client, 1, 2)
    start(watchdog)
    del server
    wait_until(lambda: watchdog.failure)
    watchdog.end()
    with pytest.raises(RuntimeError, match=f"so {host}, which hosts it, has ended"):
        watchdog.raise_if_failed()


def test_a_store_that_ends_while_it_is_read_is_a_failure_of_its_host() -> None:
    with server_in_a_process() as (store, server):
        watchdog = Watchdog(store, 2, 3)  # not started, so explain detects it
        watchdog.num_exchanges = 1
        os.kill(server, signal.SIGKILL)
        assert re.fullmatch(
            r".* worker 0, which hosts it, has ended .*", watchdog.explain("r", 1.0)
        )


ways_to_detect = pytest.mark.parametrize(
    "detect",
    [
        lambda watchdog: "from worker 2 (no sign of life" in watchdog.explain("round 1", 1.0),
        lambda watchdog: watchdog.silent() == ["worker 2"],
        lambda watchdog: watchdog.wait_for_failure() is None,
    ],
    ids=["explain", "silent", "wait_for_failure"],
)


@ways_to_detect
def test_a_report_does_not_wait_for_missing_workers(
    monkeypatch: pytest.MonkeyPatch, detect: Callable[[Watchdog], bool]
) -> None:
    clock = ManualClock()
    with make_watchdogs(3, clock=clock) as watchdogs:
        start(*watchdogs[:2])
        assert clock.pass_during(lambda: detect(watchdogs[0]), others=2)
        checked = checked_keys(monkeypatch, watchdogs[0])
        clock.pass_during(lambda: watchdogs[0].report("no other worker reads it"), others=2)
        assert {key for key in checked if key.startswith("read/")} == {"read/1"}
        assert watchdogs[1].failure == "Worker 0 failed:\nno other worker reads it"


def checked_keys(monkeypatch: pytest.MonkeyPatch, watchdog: Watchdog) -> list[str]:
    """Return a list that records the keys that a watchdog checks from now on."""
    checked: list[str] = []
    check = watchdog._store.check

    def record_and_check(keys: list[str], *args: float) -> bool:
        checked.extend(keys)
        return check(keys, *args)

    monkeypatch.setattr(watchdog._store, "check", record_and_check)
    return checked


def test_a_worker_that_never_reads_delays_only_the_first_report() -> None:
    clock = SkippingClock()
    with make_watchdogs(3, clock=clock) as watchdogs:
        start(*watchdogs[:2])
        watchdogs[1].report("No message in round 1 from worker 2")
        clock.wait_until_waiting(2)
        clock.advance(INTERVAL_S)
        wait_until(lambda: watchdogs[0].failure)
        before_s = clock.now()
        for _ in range(3):
            watchdogs[0].report("Worker 1 failed")
        waited_s = clock.now() - before_s
        assert waited_s == pytest.approx(3 * INTERVAL_S, abs=INTERVAL_S / 19)


def test_a_report_does_not_wait_for_a_worker_that_knows_and_has_ended() -> None:
    clock = ManualClock()
    with make_watchdogs(2, clock=clock) as watchdogs:
        start(*watchdogs)
        blamed = clock.pass_during(lambda: watchdogs[1].blame("round 1", 1.0), others=2)
        assert "No message in round 1" in str(blamed)
        watchdogs[1].end()
        watchdogs[0].report("No message in round 1")  # the clock stands still


def test_wait_for_failure() -> None:
    clock = ManualClock()
    with make_watchdogs(2, clock=clock) as watchdogs:
        start(*watchdogs)
        assert clock.pass_during(watchdogs[0].wait_for_failure, others=2) is None
        assert clock.now() == pytest.approx(module._MISSING_AFTER_S, abs=0.11)
        before_s = clock.now()
        watchdogs[1].report("gone")
        found = clock.pass_during(watchdogs[0].wait_for_failure, others=2)
        assert found == "Worker 1 failed:\ngone"
        assert clock.now() - before_s < 0.11


# ---------------------------------------------------------------------- missing workers


def test_a_missing_worker_is_named_with_its_last_label() -> None:
    clock = ManualClock()
    with make_watchdogs(4, clock=clock) as watchdogs:
        watchdogs[1].label = "round 7"
        start(*watchdogs[:3])
        watchdogs[1].end()
        text = clock.pass_during(lambda: watchdogs[0].explain("round 8", 12.4), others=2)
    assert text.startswith("No message in round 8 after 12 s from ")
    assert "worker 1 (no sign of life; last seen in round 7)" in text
    assert "worker 3 (no sign of life so far)" in text
    assert "worker 2" not in text


def test_a_worker_that_is_behind_is_named_with_its_last_exchange() -> None:
    clock = ManualClock()
    with make_watchdogs(3, clock=clock) as watchdogs:
        for watchdog, num_exchanges, label in zip(
            watchdogs, (5, 4, 5), ("r5", "validation", "r5"), strict=True
        ):
            watchdog.num_exchanges, watchdog.label = num_exchanges, label
        start(*watchdogs)
        text = clock.pass_during(lambda: watchdogs[0].explain("round 5", 3.0), others=3)
    assert "from worker 1 (alive, last exchange: validation). Check" in text


def test_a_worker_that_waits_elsewhere_is_named_with_its_label() -> None:
    clock = ManualClock()
    with make_watchdogs(3, clock=clock) as watchdogs:
        for watchdog, label in zip(watchdogs, ("r5", "validation", "r5"), strict=True):
            watchdog.num_exchanges, watchdog.label = 5, label
        start(*watchdogs)
        text = clock.pass_during(lambda: watchdogs[0].explain("round 5", 3.0), others=3)
    assert "from worker 1 (alive, but waiting in validation). Check" in text


def test_a_worker_that_is_ahead_is_named_if_none_is_behind() -> None:
    clock = ManualClock()
    with make_watchdogs(3, clock=clock) as watchdogs:
        for watchdog, num_exchanges, label in zip(
            watchdogs, (5, 6, 5), ("r5", "validation", "r5"), strict=True
        ):
            watchdog.num_exchanges, watchdog.label = num_exchanges, label
        start(*watchdogs)
        text = clock.pass_during(lambda: watchdogs[0].explain("round 5", 3.0), others=3)
    assert "any worker (all are alive; ahead are worker 1 in validation). Check" in text


def test_a_worker_that_has_left_is_named_with_its_label() -> None:
    clock = ManualClock()
    with make_watchdogs(2, clock=clock) as watchdogs:
        start(*watchdogs)
        watchdogs[1].leave("a fit that trained nothing")
        watchdogs[1].end()
        text = clock.pass_during(lambda: watchdogs[0].explain("round 1", 3.0), others=1)
    assert "worker 1 (no sign of life; last seen in a fit that trained nothing)" in text


def test_a_process_that_was_suspended_does_not_blame_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hurry(monkeypatch, settle_s=2.5)
    monkeypatch.setattr(module, "_HEARTBEAT_INTERVAL_S", 1.0)  # 90 s have fewer heartbeats
    clock = ManualClock()
    with make_watchdogs(2, clock=clock) as watchdogs:
        start(*watchdogs)
        clock.wait_until_waiting(2)
        clock.advance(30.0)
        clock.wait_until_waiting(2)
        text = clock.pass_during(lambda: watchdogs[0].explain("round 1", 30.0), others=2)
        assert "from any worker (all are alive). This process was suspended for 30 s" in text
        clock.pass_during(lambda: clock.sleep(60.0), others=2)
        text = clock.pass_during(lambda: watchdogs[0].explain("round 1", 30.0), others=2)
        assert "any worker (all are alive: a network fault). Check" in text


def test_a_network_fault_if_all_are_alive_and_waiting() -> None:
    clock = ManualClock()
    with make_watchdogs(2, clock=clock) as watchdogs:
        start(*watchdogs)
        text = clock.pass_during(lambda: watchdogs[0].explain("round 1", 1.0), others=2)
    assert "any worker (all are alive: a network fault)" in text


def test_a_reported_failure_is_the_explanation() -> None:
    clock = ManualClock()
    with make_watchdogs(3, clock=clock) as watchdogs:
        start(*watchdogs[:2])
        watchdogs[1].report("the cause")
        text = clock.pass_during(lambda: watchdogs[0].explain("round 1", 1.0), others=2)
        assert text == "Worker 1 failed:\nthe cause"
        assert watchdogs[0].silent() == []


def test_silent_workers_are_listed() -> None:
    clock = ManualClock()
    with make_watchdogs(4, ["a", "b", "c", "d"], clock=clock) as watchdogs:
        start(*watchdogs[:3])
        watchdogs[1].end()
        assert clock.pass_during(watchdogs[0].silent, others=2) == ["b", "d"]


@contextmanager
def one_silent_worker(clock: ManualClock) -> Iterator[Watchdog]:
    """Yield the first of three started watchdogs, long after the last heartbeat of worker 2."""
    with make_watchdogs(3, clock=clock, monitor=True) as watchdogs:
        start(*watchdogs)
        clock.wait_until_waiting(3)
        watchdogs[2].end()
        while clock.now() < 2 * module._MISSING_AFTER_S:
            clock.advance(INTERVAL_S)
            clock.wait_until_waiting(2)
        yield watchdogs[0]


@ways_to_detect
def test_a_monitoring_watchdog_knows_missing_workers_at_once(
    detect: Callable[[Watchdog], bool],
) -> None:
    with one_silent_worker(ManualClock()) as watchdog:
        assert detect(watchdog)  # the clock stands still


def test_a_monitoring_watchdog_knows_the_age_of_heartbeats() -> None:
    clock = ManualClock()
    with one_silent_worker(clock) as watchdog:
        assert watchdog.lost(module._MISSING_AFTER_S) == ["worker 2"]
        assert watchdog.lost(clock.now()) == []


# ------------------------------------------------------------------------ the agreement


def test_all_stop_at_the_latest_position() -> None:
    with make_watchdogs(3) as watchdogs:
        for watchdog, position in zip(watchdogs, [(4, 2, 10), (4, 7, 10), (4, 0, 4)], strict=True):
            watchdog.position = position
        start(*watchdogs)
        watchdogs[2].stop_reason = "SIGTERM"
        wait_until(lambda: all(watchdog.stop_at for watchdog in watchdogs))
        assert {watchdog.stop_at for watchdog in watchdogs} == {(4 + Fraction(8, 10), "SIGTERM")}
        assert all(
            watchdog.wait_for_stop_point(1.0) == watchdogs[0].stop_at for watchdog in watchdogs
        )


def test_two_requests_lead_to_one_stop() -> None:
    with make_watchdogs(2) as watchdogs:
        watchdogs[0].stop_reason = "SIGTERM"
        watchdogs[1].stop_reason = "SIGUSR1"
        start(*watchdogs)
        wait_until(lambda: all(watchdog.stop_at for watchdog in watchdogs))
        assert watchdogs[0].stop_at == watchdogs[1].stop_at
        assert watchdogs[0].stop_at[1] in ("SIGTERM", "SIGUSR1")


def test_a_position_after_the_answer_changes_nothing() -> None:
    with make_watchdogs(2) as watchdogs:
        start(watchdogs[0])
        watchdogs[0].stop_reason = "SIGTERM"
        wait_until(lambda: watchdogs[0].stop_seen)
        watchdogs[0].position = (100, 0, 1)
        start(watchdogs[1])
        assert watchdogs[0].wait_for_stop_point(10.0)[0] == 1


def test_no_worker_stops_before_all_have_answered() -> None:
    with make_watchdogs(2) as watchdogs:
        start(watchdogs[0])
        watchdogs[0].stop_reason = "SIGTERM"
        with pytest.raises(RuntimeError, match="the agreement to stop after 0 s from worker 1"):
            watchdogs[0].wait_for_stop_point(0.2)
        assert watchdogs[0].stop_at is None


def test_a_failure_ends_the_wait_for_an_agreement() -> None:
    with make_watchdogs(3) as watchdogs:
        start(*watchdogs[:2])
        watchdogs[0].stop_reason = "SIGTERM"
        watchdogs[1].report("too late")
        with pytest.raises(RuntimeError, match="Worker 1 failed:\ntoo late"):
            watchdogs[0].wait_for_stop_point(10.0)


# ---------------------------------------------------- invalid values and a broken store


def test_garbage_in_the_store_is_ignored(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    rows = [
        ("failure", "no worker"),
        ("failure", "7|of a worker that does not exist"),
        ("failure", "9" * 10_000 + "|x"),
        ("heartbeat/1", "many|2|round 3"),
        ("heartbeat/1", ""),
        ("stop/1", "1e400000000"),
        ("stop/1", "1/0|0"),
        ("stop/1", "1/1"),
        ("stop/1", "9" * 5000 + "/1|0"),
    ]
    for key, value in rows:
        with subtests.test(key, value=value[:20]):
            caplog.clear()
            store = dist.HashStore()
            watchdog = Watchdog(store, 0, 2)
            try:
                store.set(key, value)
                if key.startswith("stop"):
                    watchdog.stop_reason = "SIGTERM"
                start(watchdog)
                before = watchdog._num_heartbeats
                text = watchdog.explain("round 1", 1.0)
                wait_until(lambda dog=watchdog, n=before: dog._num_heartbeats > n + 5)
                assert watchdog.failure is None
                assert watchdog.stop_at is None
            finally:
                watchdog.end()
            assert "worker 1 (" in text
            if not value.startswith("7|"):
                assert len(caplog.records) == 1
                assert repr(key) in caplog.text


def test_the_agreement_continues_once_the_garbage_is_gone() -> None:
    with make_watchdogs(2) as watchdogs:
        watchdogs[0]._store.set("stop/1", "no point")
        watchdogs[0].stop_reason = "SIGTERM"
        start(watchdogs[0])
        wait_until(lambda: watchdogs[0].stop_seen)
        start(watchdogs[1])
        assert watchdogs[0].wait_for_stop_point(10.0)[0] == 1


class FaultyStore(dist.Store):
    """Raises a different error in each of the first calls."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = [KeyError("a"), ValueError("b"), dist.DistStoreError("c")]

    def set(self, key: str, value: str) -> None:
        if self.errors:
            raise self.errors.pop()

    def check(self, keys: list[str]) -> bool:
        return False


def test_the_thread_survives_errors_of_the_store() -> None:
    store = FaultyStore()
    watchdog = Watchdog(store, 0, 2)
    try:
        start(watchdog)
        wait_until(lambda: watchdog._num_heartbeats > 6)
        assert not store.errors
        assert watchdog.is_alive()
        assert watchdog.failure is None
    finally:
        watchdog.end()


class FrozenStore(dist.Store):
    """Does not answer until ``thawed`` is set, like the client of a frozen server."""

    def __init__(self) -> None:
        super().__init__()
        self.thawed = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.thawed.wait()

    def check(self, keys: list[str]) -> bool:
        self.thawed.wait()
        return False


def test_a_silent_store_is_blamed_on_worker_0() -> None:
    store, clock = FrozenStore(), ManualClock()
    watchdog = Watchdog(store, 1, 3, timeout_s=20.0, clock=clock)
    try:
        start(watchdog)
        wait_until(lambda: watchdog._store._thread.started_at is not None)
        text = clock.pass_during(lambda: watchdog.explain("round 8", 12.4), others=1)
        assert text.startswith("No message in round 8 after 12 s, and worker 0 is unreachable")
        assert clock.now() == module._STORE_TIMEOUT_S
        clock.advance(0.5)
        assert watchdog.silent() == ["worker 0"]
        watchdog.report("no worker reads it")  # no more calls: the clock stands still
        clock.advance(18.5)
        watchdog.raise_if_failed()
        clock.advance(0.1)
        with pytest.raises(WorkerFailure, match="worker 0 is unreachable"):
            clock.pass_during(watchdog.raise_if_failed, others=1)
    finally:
        watchdog.end()
        wait_until(lambda: not watchdog.is_alive())
        store.thawed.set()


# ------------------------------------------------------------------------------ the end


def test_it_ends_at_once_and_may_be_ended_twice() -> None:
    clock = ManualClock()
    with make_watchdogs(2, clock=clock) as watchdogs:
        start(watchdogs[0])
        clock.wait_until_waiting()
        watchdogs[0].end()
        watchdogs[0].end()
        watchdogs[1].end()  # was never started
        wait_until(lambda: not watchdogs[0].is_alive())
    assert not threads_named("loco-watchdog")

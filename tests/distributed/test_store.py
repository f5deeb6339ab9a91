"""A store whose calls return in time, whatever its server does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_loco._util.background import run_in_thread
from lightning_loco.distributed import store as module
from lightning_loco.distributed.store import StoreTimeout, TimeoutStore, with_timeout
from tests.harness.failing import freeze_process
from tests.harness.guards import threads_named
from tests.harness.limits import HARNESS_S, LONG_S, wait_until
from tests.harness.manual_clock import ManualClock
from tests.harness.programs import Program
from tests.harness.watchdogs import server_in_a_process


@pytest.fixture
def store() -> Iterator[TimeoutStore]:
    store = TimeoutStore(dist.HashStore())
    yield store
    store.close()


def test_methods_of_a_store(store: TimeoutStore) -> None:
    assert not store.check(["a"])
    store.set("a", "1")
    store.compare_set("a", "", "2")
    assert store.check(["a"])
    assert store.get("a") == b"1"
    assert [store.add("count", 2), store.add("count", 3)] == [2, 5]
    store.set("b", "3")
    assert store.get_all(["a", "b"]) == [b"1", b"3"]
    assert store.delete_key("a")
    assert not store.check(["a"])
    assert store.silent_s == 0


def test_prefixes_separate_keys(store: TimeoutStore) -> None:
    one, two = store.with_prefix("one"), store.with_prefix("two")
    one.set("key", "1")
    assert not two.check(["key"])
    assert store.check(["one/key"])


def test_many_threads_may_use_it(store: TimeoutStore) -> None:
    threads = [
        threading.Thread(target=lambda: [store.add("n", 1) for _ in range(50)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.add("n", 0) == 400


def test_errors_of_the_store_are_raised(store: TimeoutStore) -> None:
    store.set("text", "no number")
    with pytest.raises(Exception, match="."):
        store.add("text", 1)
    assert store.get("text") == b"no number"


def test_a_call_to_a_frozen_server_times_out_and_a_later_one_succeeds() -> None:
    clock = ManualClock()
    with server_in_a_process(clock) as (store, pid):
        store.set("a", "1")
        assert store.get("a") == b"1"
        freeze_process(pid)
        futures = [run_in_thread(lambda: store.check(["a"], timeout_s=0.25)) for _ in range(2)]
        clock.wait_until_waiting(2)
        wait_until(
            lambda: store._thread._calls.qsize() == 1 and store._thread.started_at is not None
        )
        assert clock.asked[-2:] == [0.25, 0.25]
        clock.advance(0.25)
        for future in futures:
            with pytest.raises(StoreTimeout, match="has not answered"):
                future.result(HARNESS_S)
        assert store.silent_s == 0.25
        os.kill(pid, signal.SIGCONT)
        assert store.get("a", timeout_s=LONG_S) == b"1"
        assert store.silent_s == 0


def test_closing_does_not_wait_for_a_frozen_server() -> None:
    clock = ManualClock()
    with server_in_a_process(clock) as (store, pid):
        freeze_process(pid)
        futures = [
            run_in_thread(lambda: store.check(["a"])) for _ in range(3)
        ]  # two wait in the queue
        clock.wait_until_waiting(3)
        wait_until(lambda: store._thread._calls.qsize() == 2)
        store.close()
        for future in futures:
            with pytest.raises(StoreTimeout):
                future.result(HARNESS_S)


def test_a_server_that_has_ended_is_another_error() -> None:
    with server_in_a_process() as (store, pid):
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(dist.DistNetworkError):
            call_repeatedly(store)


def call_repeatedly(store: TimeoutStore) -> None:
    for _ in range(100):
        store.check(["a"], timeout_s=60.0)  # PyTorch creates a traceback
        time.sleep(0.02)


def test_other_functions_with_a_timeout() -> None:
    assert with_timeout(lambda: 7, 5.0) == 7
    with pytest.raises(LookupError, match="no such thing"):
        with_timeout(lambda: fail(LookupError("no such thing")), 5.0)
    thawed = threading.Event()
    with pytest.raises(StoreTimeout):
        with_timeout(thawed.wait, 0.1)
    thawed.set()


def fail(error: Exception) -> None:
    raise error


def test_calls_of_a_closed_store_are_errors() -> None:
    store = TimeoutStore(dist.HashStore())
    store.close()
    store.close()
    with pytest.raises(StoreTimeout):
        store.check(["a"])
    assert not threads_named("loco-store")


class LateStore(dist.HashStore):
    """Answers while its connection is being closed, after the timeout of a call that hangs."""

    thread: Any

    def check(self, keys: list[str]) -> bool:
        wait_until(lambda: self.thread._is_ending)
        time.sleep(1.5 * module._CLOSE_TIMEOUT_S)
        return super().check(keys)


def test_closing_waits_for_a_call_that_has_just_started() -> None:
    late, clock = LateStore(), ManualClock()
    store = TimeoutStore(late, clock=clock)
    late.thread = store._thread
    future = run_in_thread(lambda: store.check(["key"]))
    wait_until(lambda: store._thread.started_at is not None)
    store.close()
    assert not threads_named("loco-store")
    assert future.result(HARNESS_S) is False


# Exits during a call to a server that resumes a second later; the exit takes two seconds.
ENDING = """
import os, signal, subprocess, sys, time

import torch.distributed as dist

from lightning_loco._util.background import run_in_thread
from lightning_loco.distributed import store as module
from lightning_loco.distributed.store import TimeoutStore, StoreTimeout

host = "import sys, torch.distributed as dist; "
host += "server = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
host += "print(server.port, flush=True); sys.stdin.read()"
pipe = subprocess.PIPE
server = subprocess.Popen([sys.executable, "-c", host], stdin=pipe, stdout=pipe, text=True)
port = int(server.stdout.readline())
client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
store = TimeoutStore.from_clone(client, 10.0)
store.set("key", "value")
os.kill(server.pid, signal.SIGSTOP)
try:
    store.check(["key"], timeout_s=0.1)
except StoreTimeout:
    print("silent")
store.close()
subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {server.pid}"])


class Late:
    def __del__(self):
        time.sleep(2)
        server.kill()


late = Late()
"""


@pytest.mark.process
@pytest.mark.soak
def test_an_answer_during_interpreter_shutdown_does_no_harm(tmp_path: Path) -> None:
    assert "silent" in Program([sys.executable, "-c", ENDING], tmp_path).succeed()

"""A process exits normally while background threads are running."""

from __future__ import annotations

import ast
import gc
import sys
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest

from lightning_loco._util.background import TaskThread
from tests.harness.limits import HARNESS_S
from tests.harness.programs import Program
from tests.harness.sources import PACKAGE

RUNNING = """
import threading
import torch
from lightning_loco._util.background import run_in_thread

values = torch.ones(1_000_000)

def work():
    while threading.main_thread().is_alive():
        values.mul_(1.0)  # returns from PyTorch repeatedly
    for _ in range(50):
        values.mul_(1.0)
    print("ready", flush=True)

run_in_thread(work)
"""
HUNG = """
import threading, time
from lightning_loco._util.background import BackgroundThread

class RunsForever(BackgroundThread):
    def run(self):
        threading.Event().wait()

    def end_with_process(self):
        print("asked to end", flush=True)
        return super().end_with_process()

for number in range(20):
    RunsForever(f"hung-{number}").start()
"""


@pytest.mark.soak
@pytest.mark.process
def test_a_process_waits_for_running_work(tmp_path: Path) -> None:
    assert "ready" in Program([sys.executable, "-c", RUNNING], tmp_path).succeed()


@pytest.mark.process
@pytest.mark.soak
def test_a_process_exits_despite_threads_that_never_end(tmp_path: Path) -> None:
    said = Program([sys.executable, "-c", HUNG], tmp_path).succeed(limit_s=30)
    assert said.count("asked to end") == 20


def test_all_daemon_threads_are_background_threads() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "daemon":
                assert path.name == "background.py", path


RETURNS_LATE = """
import time

import torch

from lightning_loco._util.background import run_in_thread


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1)  # while Python ends the interpreter


def work():
    while True:
        values.mul_(1.0)


slow = Slow()
values = torch.ones(1_000_000)
run_in_thread(work, exit_timeout_s=0.1)
time.sleep(0.5)
print("ready", flush=True)
"""


@pytest.mark.process
@pytest.mark.soak
def test_a_thread_that_returns_during_shutdown_does_no_harm(tmp_path: Path) -> None:
    assert "ready" in Program([sys.executable, "-c", RETURNS_LATE], tmp_path).succeed()


class Held:
    """Replaces an object of a C++ library."""


def test_tasks_run_one_after_another_and_are_released() -> None:
    thread, begin = TaskThread("loco-test-tasks"), threading.Event()
    order: list[int] = []
    held = Held()
    kept = weakref.ref(held)

    def fail(held: Held = held) -> None:
        order.append(1)
        raise ArithmeticError("no dice")

    first = thread.submit(begin.wait)
    futures = [thread.submit(work) for work in (fail, partial(order.append, 2))]
    cancelled, last = thread.submit(partial(order.append, 3)), thread.submit(lambda: "result")
    assert cancelled.cancel()
    begin.set()
    assert first.result(HARNESS_S)
    assert last.result(HARNESS_S) == "result"
    with pytest.raises(ArithmeticError, match="no dice"):
        futures[0].result()
    assert order == [1, 2]
    del held, fail, futures, first
    gc.collect()  # the traceback of the error has its frame
    assert kept() is None
    thread.end()
    thread.join(HARNESS_S)
    assert not thread.is_alive()

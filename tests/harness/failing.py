"""Ways in which a process fails, and the fault points of the package at which it does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_loco._util.fault_points import POINTS, on_reach
from tests.harness.limits import LONG_S, SOON_S

DELAYED = {
    "within the exchange": ("exchange", 0.002),
    "within the confirmation": ("confirming", 0.0005),
}
"""Failures while gloo transfers data: a fault point, and a delay after it in seconds."""


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    """Raise an error as user code would."""
    raise LookupError("trouble")


def lose_connection() -> None:
    """Fail as gloo does, after the others' confirmations may have arrived."""
    raise RuntimeError("the connection is lost")


def freeze() -> None:
    """Stop like a suspended machine; a signal to this thread stops it without delay."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


KINDS: dict[str, Callable[[], object]] = {
    "killed": die,
    "frozen": freeze,
    "raises": raise_error,
    "leaves": sys.exit,
    "hangs": lambda: time.sleep(LONG_S),
}


@contextmanager
def failing_at(
    point: str, is_time: Callable[[], bool], fail: Callable[[], object]
) -> Iterator[None]:
    """Fail once in this context: the first time that a point is reached and ``is_time()`` holds."""
    name, delay_s = DELAYED.get(point, (point, 0.0))
    assert name in POINTS
    once = iter([True])

    def act(reached: str) -> None:
        if reached == name and is_time() and next(once, False):
            if delay_s:
                threading.Timer(delay_s, fail).start()
            else:
                fail()

    with on_reach(act):
        yield


def freeze_process(process_id: int) -> None:
    """Stop all threads of a process; return once none of them runs.

    Sending the signal is not enough: on a busy machine a thread may continue until the thread
    that handles the signal is scheduled.
    """
    os.kill(process_id, signal.SIGSTOP)
    deadline = time.monotonic() + SOON_S
    while not is_frozen(process_id):
        assert time.monotonic() < deadline, f"process {process_id} still runs"
        time.sleep(0.001)


def is_frozen(process_id: int) -> bool:
    """Whether all threads of a process are stopped by a signal."""
    try:
        threads = Path(f"/proc/{process_id}/task").iterdir()
        stats = [(thread / "stat").read_text() for thread in threads]
    except (FileNotFoundError, ProcessLookupError):  # a thread, or the process, has ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


MOMENT = 3
"""The number of the call of a fault point, or of the batch, at which a process fails."""


class FailIn(pl.Callback):
    """Fails within a phase of a fit."""

    def __init__(self, phase: str, fail: Callable[[], object]) -> None:
        self.phase = phase
        self.fail = fail

    def _fail_in(self, phase: str) -> None:
        if self.phase == phase:
            self.fail()

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self._fail_in("set-up")

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._fail_in("start")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == MOMENT:
            self._fail_in("stop")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._fail_in("epoch end")

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._fail_in("validation")

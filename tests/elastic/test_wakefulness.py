"""Sleep of a process is noticed by itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from lightning_loco.elastic.wakefulness import Wakefulness

LONGEST_S = 2.0


def sleeper(line: multiprocessing.connection.Connection) -> None:
    """Say whether this process has slept, each time that it is asked."""
    wakefulness = Wakefulness(LONGEST_S)
    wakefulness.start()
    line.send("ready")
    while line.recv():
        found = ""
        try:
            wakefulness.check()
        except RuntimeError as error:
            found = str(error)
        wakefulness.begin()
        line.send(found)


@pytest.mark.slow
def test_who_was_stopped_knows_it_once() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=sleeper, args=(there,))
    process.start()
    try:
        assert here.recv() == "ready"
        time.sleep(1.5 * LONGEST_S)
        assert ask(here) == ""
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5 * LONGEST_S)
        os.kill(process.pid, signal.SIGCONT)
        assert "this worker has slept for" in ask(here)
        assert ask(here) == ""
        here.send(False)
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def ask(line: multiprocessing.connection.Connection) -> str:
    """What it says."""
    line.send(True)
    return str(line.recv())

"""Freeze another process, as a suspended machine does, and see that it is frozen."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_LIMIT_S = 10.0


def freeze_process(process_id: int) -> None:
    """Stop all threads of a process; returns once none of them runs.

    The signal alone is not enough: on a busy machine a thread may go on for a while, until the one
    that takes the signal has its turn.
    """
    os.kill(process_id, signal.SIGSTOP)
    deadline = time.monotonic() + _LIMIT_S
    while not is_frozen(process_id):
        assert time.monotonic() < deadline, f"process {process_id} still runs"
        time.sleep(0.001)


def is_frozen(process_id: int) -> bool:
    """Whether a process has been stopped by a signal, with all its threads, and not been woken."""
    try:
        threads = Path(f"/proc/{process_id}/task").iterdir()
        stats = [(thread / "stat").read_text() for thread in threads]
    except (FileNotFoundError, ProcessLookupError):  # a thread, or all of them, has ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

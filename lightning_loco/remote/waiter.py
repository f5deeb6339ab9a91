"""Waiting for one client without risk for the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

_FOREVER = timedelta(days=3650)
_LOOK_AROUND_S = 0.5


class Waiter:
    """Waits for a client's messages in a thread, so that the server can give up on that client.

    A wait of gloo that is too late closes the connections to all ranks; here it goes on.

    Args:
        name: The client's.
    """

    def __init__(self, name: str) -> None:
        self._works: queue.SimpleQueue[tuple[dist.Work, _Outcome] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"loco-waiter-{name}", daemon=True)
        self._thread.start()

    def wait(self, work: dist.Work, timeout_s: float, look_around: Callable[[], object]) -> None:
        """Wait for what was begun; what is given up may still come to its end.

        Args:
            work: What to wait for.
            timeout_s: Longest wait, in seconds.
            look_around: Called while nothing happens; may raise.

        Raises:
            RuntimeError: If the client is gone or too late.
        """
        outcome: _Outcome = queue.SimpleQueue()
        self._works.put((work, outcome))
        deadline = time.monotonic() + timeout_s
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                error = outcome.get(timeout=min(_LOOK_AROUND_S, remaining))
            except queue.Empty:
                look_around()
            else:
                if error is not None:
                    raise error
                return
        raise RuntimeError(f"Nothing came for {timeout_s:g} s.")

    def end(self) -> None:
        """End the thread once it waits for nothing."""
        self._works.put(None)

    def _run(self) -> None:
        while (task := self._works.get()) is not None:
            work, outcome = task
            try:
                work.wait(_FOREVER)
            except Exception as error:
                outcome.put(error)
            else:
                outcome.put(None)


_Outcome = queue.SimpleQueue[Exception | None]

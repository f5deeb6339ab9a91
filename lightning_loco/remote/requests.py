"""Hearing of all clients at once: a thread for each waits for its requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from lightning_loco.remote.wire import Kind, Note, Wire

_LOOK_AROUND_S = 0.5


class Requests:
    """The clients' requests in the order of their arrival.

    Threads wait, so that the server's main thread can be interrupted and learns at once of a client
    that is gone.

    Args:
        clients: Who may ask.
        look_around: Called while nothing comes; may raise.
    """

    def __init__(self, clients: Sequence[Wire], look_around: Callable[[], object]) -> None:
        self._arrived: queue.Queue[tuple[Wire, Note | Exception]] = queue.Queue()
        self._look_around = look_around
        for client in clients:
            name = f"loco-requests-{client.name}"
            threading.Thread(target=self._listen, args=(client,), name=name, daemon=True).start()

    def _listen(self, client: Wire) -> None:
        kind = None
        while kind not in (Kind.LEAVE, Kind.FAIL):
            try:
                note = client.next_request()
            except Exception as error:
                self._arrived.put((client, error))
                return
            kind = note.kind
            self._arrived.put((client, note))

    def next(self, timeout_s: float | None) -> tuple[Wire, Note | Exception] | None:
        """Wait for the next request, or for the news that a client is gone.

        Args:
            timeout_s: Longest wait, in seconds; None to wait on.

        Returns:
            Who, and what or why it is gone; None when the time is over.
        """
        remaining = float("inf") if timeout_s is None else timeout_s
        while remaining > 0:
            try:
                return self._arrived.get(timeout=min(_LOOK_AROUND_S, remaining))
            except queue.Empty:
                remaining -= _LOOK_AROUND_S
                self._look_around()
        return None

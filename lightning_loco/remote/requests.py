"""Hearing of all clients at once: a thread for each waits for its requests."""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable, Sequence

from lightning_loco.background import BackgroundThread
from lightning_loco.remote.meanwhile import Meanwhile
from lightning_loco.remote.waiter import PARTING_S
from lightning_loco.remote.wire import LAST_WORDS, Kind, Note, Wire


class Requests:
    """The clients' requests in the order of their arrival.

    Threads wait, so that the server's main thread can be interrupted and learns at once of a client
    that is gone, or that is alive and waits itself.

    Args:
        clients: Who may ask.
        meanwhile: What to do while nothing comes.
    """

    def __init__(self, clients: Sequence[Wire], meanwhile: Meanwhile) -> None:
        self._arrived: queue.Queue[tuple[Wire, Note | Exception]] = queue.Queue()
        self._meanwhile = meanwhile
        self._threads: list[BackgroundThread] = []
        for client in clients:
            listen = functools.partial(self._listen, client)
            thread = BackgroundThread(f"loco-requests-{client.name}", listen)
            thread.start()
            self._threads.append(thread)

    def _listen(self, client: Wire) -> None:
        kind = None
        while kind not in LAST_WORDS:
            try:
                note = client.next_request()
            except Exception as error:
                self._arrived.put((client, error))
                return
            kind = note.kind
            if kind == Kind.WAITING:
                client.last_sign_s = time.monotonic()
            else:
                self._arrived.put((client, note))

    def end(self) -> None:
        """Wait for the threads, but not long for those that listen to a rank that is lost."""
        deadline = time.monotonic() + PARTING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def waiting(self) -> list[Wire]:
        """Clients with a request that has arrived and that nobody has looked at yet."""
        with self._arrived.mutex:
            arrived = list(self._arrived.queue)
        return [c for c, note in arrived if isinstance(note, Note) and note.kind not in LAST_WORDS]

    def next(
        self, timeout_s: float | None, last_sign: Callable[[], float]
    ) -> tuple[Wire, Note | Exception] | None:
        """Wait for the next request, or for the news that a client is gone.

        Args:
            timeout_s: Longest wait, in seconds; None to wait on.
            last_sign: When a client has last asked for patience.

        Returns:
            Who, and what or why it is gone; None when the time is over.
        """
        for pause_s in self._meanwhile.pauses(timeout_s, last_sign):
            try:
                return self._arrived.get(timeout=pause_s)
            except queue.Empty:
                continue
        return None

"""The thread that reads parameters from peers while training goes on."""

from __future__ import annotations

import logging
import threading
import time

from lightning_loco.background import BackgroundThread
from lightning_loco.peers.counts import FetchCounts
from lightning_loco.peers.reader import Reader, ReaderStopped, Received
from lightning_loco.peers.slow_reader import SlowReader

log = logging.getLogger(__name__)


class FetchingThread(BackgroundThread):
    """Make the fetches that the training thread asks for, and hand over what they bring.

    A fetch ends at the latest the reader's ``fetch_timeout_s`` after its start, with or without
    parameters.

    Args:
        reader: Makes a fetch; from now on it belongs to this thread, which closes it in the end.
    """

    def __init__(self, reader: Reader | SlowReader) -> None:
        super().__init__("loco-peer-fetching")
        self._reader = reader
        self._fetch_timeout_s = reader.fetch_timeout_s
        # Fetches are numbered; all below is shared with the training thread.
        self._changed = threading.Condition()
        self._closing = False
        self._wanted = 0
        self._wanted_at = 0.0
        self._ended = 0
        self._handed_over = 0
        self._received: Received | None = None

    @property
    def counts(self) -> FetchCounts:
        """What has become of the fetches so far."""
        return self._reader.counts

    def start_fetch(self) -> None:
        """Begin to read from a peer; what was received before is no longer valid."""
        with self._changed:
            self._wanted += 1
            self._wanted_at = time.monotonic()
            self._received = None
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> Received | None:
        """Wait until the fetch has ended, at most ``fetch_timeout_s`` after its start.

        Args:
            timeout_s: Wait for less; the fetch goes on and can be waited for again.

        Returns:
            The parameters, once; None if there are none, or no fetch was started.
        """
        with self._changed:
            if self._handed_over == self._wanted:
                return None
            left_s = self._wanted_at + self._fetch_timeout_s - time.monotonic()
            patience_s = left_s if timeout_s is None else min(left_s, timeout_s)
            ended = self._changed.wait_for(
                lambda: self._ended == self._wanted or self._closing, max(patience_s, 0)
            )
            if not ended and patience_s < left_s:
                return None
            self._handed_over = self._wanted
            received, self._received = self._received, None
            return received

    @property
    def has_ended(self) -> bool:
        """Whether no fetch is under way, so that :meth:`wait` would not block."""
        return self._ended == self._wanted

    def run(self) -> None:
        """Make one fetch after the other until closed."""
        try:
            while True:
                with self._changed:
                    called = self._changed.wait_for(
                        lambda: self._closing or self._ended < self._wanted,
                        self._reader.look_after_s,
                    )
                    if self._closing:
                        return
                    number, deadline = self._wanted, self._wanted_at + self._fetch_timeout_s
                if not called:
                    self._reader.look()
                    continue
                received = self._reader.fetch(deadline)
                with self._changed:
                    self._ended = number
                    if number == self._wanted:
                        self._received = received
                    self._changed.notify_all()
        except ReaderStopped:
            pass
        except Exception:
            log.exception("Parameters are no longer read from peers.")
        finally:
            self._reader.close()

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        self._tell_to_end()
        if self.ident is None:
            self._reader.close()
        elif self.is_alive():
            self.join(self._fetch_timeout_s + 5)

    def end_with_process(self) -> float:
        """Give up the fetch under way."""
        self._tell_to_end()
        return super().end_with_process()

    def _tell_to_end(self) -> None:
        with self._changed:
            self._closing = True
            self._reader.stop()
            self._changed.notify_all()

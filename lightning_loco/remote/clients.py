"""The clients of a server: who is left, what each wants, and what happens when one fails."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_loco.remote.calls import Call
from lightning_loco.remote.requests import Requests
from lightning_loco.remote.waiter import Waiter
from lightning_loco.remote.wire import Kind, Note, Sending, Wire

log = logging.getLogger(__name__)

_FAILURE_CHARACTERS = 300
_FAILURE_S = 2.0
_REASSURANCES = 1000


class Clients:
    """Hears what the clients want, answers them, and goes on without those that are gone.

    Those who wait for an answer hear now and then that the server waits, too: their patience with
    a server that is alive has no end, and the server's with a client ends after ``timeout_s``.

    Args:
        wires: The ranks that ask, in the order of the sum.
        answer_alone: Answers a request that concerns its client alone; says whether it did.
        timeout_s: How much later than the first one a client may make a step, in seconds.
        min_left: With how many to go on when some fail. Default: all.
        look_around: Called while nothing happens; may raise.

    Attributes:
        left: Those that have neither left nor failed, in the order of the sum.
        wanted: What each of them asks for that concerns all.
        stepping: Those that wait for the end of the step that is made now.
        farewell: What those said that have left.
    """

    def __init__(
        self,
        wires: Sequence[Wire],
        answer_alone: Callable[[Wire, Note], bool],
        *,
        timeout_s: float | None = None,
        min_left: int | None = None,
        look_around: Callable[[], object] = lambda: None,
    ) -> None:
        self.left = list(wires)
        self.wanted: dict[Wire, Note] = {}
        self.stepping: list[Wire] = []
        self.farewell: dict[str, Any] = {}
        self._answer_alone = answer_alone
        self._timeout_s = timeout_s
        self._min_left = len(wires) if min_left is None else min_left
        self._look_around = look_around
        self._requests = Requests(wires, self._look_and_reassure)
        self._calls: dict[Wire, Call] = {}
        self._waiters: dict[Wire, Waiter] = {}
        self._reassured_s = time.monotonic()
        self._told: deque[Sending] = deque(maxlen=_REASSURANCES)

    # ---------------------------------------------------------------- requests

    def hear_all(self) -> None:
        """Wait until each client wants something that concerns all.

        Raises:
            RuntimeError: If a client is gone or too late, and too few are left.
        """
        while missing := [client for client in self.left if client not in self.wanted]:
            meets = all(note.kind == Kind.MEET for note in self.wanted.values())
            what = "meeting" if meets else "step"
            self._hear(missing, what, self._timeout_s if self.wanted else None)

    def hear_calls(self, streaming: Sequence[Wire]) -> dict[Wire, Call]:
        """Wait for the wishes of clients that have sent gradients while they were computed.

        Returns:
            Those of the clients that are left, in the order of the sum.
        """
        while missing := [c for c in streaming if c in self.left and c not in self._calls]:
            self._hear(missing, "step", self._timeout_s)
        return {client: self._calls.pop(client) for client in streaming if client in self._calls}

    def _hear(self, missing: Sequence[Wire], what: str, timeout_s: float | None) -> None:
        """Take in the next request, or lose those who are too late."""
        self._look_and_reassure()
        arrived = self._requests.next(timeout_s)
        if arrived is not None:
            self._take_in(*arrived)
            return
        for client in missing:
            late = f"{client.name}: no {what} {self._timeout_s:g} s after another worker's."
            self.lose(client, RuntimeError(f"{late} Look at where it is, or raise timeout_s."))

    def _take_in(self, client: Wire, note: Note | Exception) -> None:
        if client not in self.left:
            return
        if isinstance(note, Exception):
            self.lose(client, note)
        elif note.kind == Kind.LEAVE:
            self.left.remove(client)
            self.farewell = note.content or self.farewell
        elif note.kind == Kind.FAIL:
            self.lose(client, RuntimeError(f"{client.name} failed: {note.content['text']}"))
        elif note.kind == Kind.CALL:
            self._calls[client] = Call.read(note.content)
        elif not self._answer_alone(client, note):
            self.wanted[client] = note

    # ----------------------------------------------------------------- answers

    def answer(self, client: Wire, content: dict[str, Any]) -> None:
        """Answer a client, if it is left."""
        if client in self.left:
            try:
                for work, _ in client.answer_later(content):
                    self.wait(client, work, "a note")
            except RuntimeError as error:
                self.lose(client, error)

    def finish_sending(self, sending: Iterable[tuple[Wire, dist.Work]]) -> None:
        """Wait until clients have what was sent to them."""
        for client, work in sending:
            if client in self.left:
                try:
                    self.wait(client, work, "the parameters")
                except RuntimeError as error:
                    self.lose(client, error)

    def wait(self, client: Wire, work: dist.Work, what: str) -> None:
        """Wait for a message to or from a client; one that is late can be lost alone.

        Raises:
            RuntimeError: If it is gone or too late.
        """
        timeout_s = self._timeout_s
        if timeout_s is None or len(self.left) <= self._min_left:
            client.wait(work, what)
            return
        if client not in self._waiters:
            self._waiters[client] = Waiter(client.name)
        try:
            self._waiters[client].wait(work, timeout_s, self._look_and_reassure)
        except RuntimeError as error:
            raise RuntimeError(f"{client.name}: {what} could not be exchanged.") from error

    def _look_and_reassure(self) -> None:
        self._look_around()
        if self._timeout_s is None or time.monotonic() < self._reassured_s + self._timeout_s / 4:
            return
        self._reassured_s = time.monotonic()
        for client in [*self.wanted, *self.stepping]:
            with suppress(RuntimeError):
                self._told += client.answer_later({"waiting": True})

    def end(self) -> None:
        """End the threads that wait for clients, as soon as they can."""
        for waiter in self._waiters.values():
            waiter.end()

    # ------------------------------------------------------------------ faults

    def lose(self, client: Wire, error: Exception) -> None:
        """Go on without a client, if enough are left.

        Raises:
            Exception: ``error``, if not.
        """
        if client not in self.left:
            return
        self.left.remove(client)
        self.wanted.pop(client, None)
        self.stepping = [other for other in self.stepping if other is not client]
        if len(self.left) < self._min_left:
            raise error
        log.warning("%s is gone; going on with the mean over %d.", client.name, len(self.left))
        with suppress(RuntimeError):  # it may only have slept
            self._told += client.answer_later({"failure": "The others went on without this rank."})

    def tell_failure(self, error: Exception) -> None:
        """Tell those who wait for an answer, or soon will, why none comes."""
        lines = str(error).strip().split("\n")
        text = " ".join([lines[0], *lines[1:][-1:]])[:_FAILURE_CHARACTERS]
        sending: list[Sending] = []
        for client in self.left:
            with suppress(RuntimeError):
                sending += client.answer_later({"failure": text})
        for work, _ in sending:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=_FAILURE_S))

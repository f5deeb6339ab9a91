"""The clients of a server: who is left, what each wants, and what happens when one fails."""

from __future__ import annotations

import functools
import logging
import math
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_loco.background import BackgroundThread
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.parameter_server.keep_alive import PARTING_S, Meanwhile
from lightning_loco.parameter_server.protocol import (
    LAST_WORDS,
    Kind,
    Lane,
    Note,
    Sending,
    Unreachable,
    Wire,
)
from lightning_loco.parameter_server.step_request import Call

log = logging.getLogger(__name__)

_FAILURE_CHARACTERS = 300
_LEAST_S = 0.01  # gloo takes 0 for the timeout of the group
_FAILURE_S = 2.0
_REPORTED_FAILURE_S = 0.5
"""Less for what a watchdog has told: it tells the others, too, and a frozen one takes nothing."""
_NO_STEP = "step {:g} s after another worker's"
_NO_MEETING = "sync point {:g} s after another worker's"
_NO_SIGN = "sign of life for {:g} s"


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


class Clients:
    """Hears what the clients want, answers them, and goes on without those that are gone.

    Those who wait for an answer hear now and then that the server waits, too: their patience with
    a server that is alive has no end, and the server's with a client ends after ``timeout_s``.

    Args:
        wires: The ranks that ask, in the order of the sum.
        answer_alone: Answers a request that concerns its client alone; says whether it did.
        meanwhile: What to do while nothing happens. Its ``timeout_s`` is how much later than the
            first one a client may make a step, in seconds.
        min_left: With how many to go on when some fail. Default: all.
        are_heard: Whether the clients ask for patience whenever they wait, as servers do: one that
            has done so and then is silent is too late, whatever it was to do.

    Attributes:
        left: Those that have neither left nor failed, in the order of the sum.
        wanted: What each of them asks for that concerns all.
        served: Those whose wishes are being met now.
        farewell: What those said that have left.
    """

    def __init__(
        self,
        wires: Sequence[Wire],
        answer_alone: Callable[[Wire, Note], bool],
        meanwhile: Meanwhile,
        *,
        min_left: int | None = None,
        are_heard: bool = False,
    ) -> None:
        self.left = list(wires)
        self.wanted: dict[Wire, Note] = {}
        self.served: list[Wire] = []
        self.farewell: dict[str, Any] = {}
        self._answer_alone = answer_alone
        self._timeout_s = meanwhile.timeout_s
        self._min_left = len(wires) if min_left is None else min_left
        self._are_heard = are_heard
        self._requests = Requests(wires, meanwhile)
        self._calls: dict[Wire, Call] = {}
        meanwhile.reassure(self._reassure)

    # ---------------------------------------------------------------- requests

    def hear_all(self) -> None:
        """Wait until each client wants something that concerns all.

        Raises:
            RuntimeError: If a client is gone or too late, and too few are left.
        """
        while missing := [client for client in self.left if client not in self.wanted]:
            if self.wanted:
                meets = all(note.kind == Kind.MEET for note in self.wanted.values())
                self._hear(missing, _NO_MEETING if meets else _NO_STEP, self._timeout_s)
            else:
                is_heard = self._are_heard and all(c.last_sign_s > -math.inf for c in missing)
                self._hear(missing, _NO_SIGN, self._timeout_s if is_heard else None)

    def hear_calls(self, streaming: Sequence[Wire]) -> dict[Wire, Call]:
        """Wait for the wishes of clients that have sent gradients while they were computed.

        Returns:
            Those of the clients that are left, in the order of the sum.
        """
        while missing := [c for c in streaming if c in self.left and c not in self._calls]:
            self._hear(missing, _NO_STEP, self._timeout_s)
        return {client: self._calls.pop(client) for client in streaming if client in self._calls}

    def _hear(self, missing: Sequence[Wire], what: str, timeout_s: float | None) -> None:
        """Take in the next request, or lose those who are too late."""
        arrived = self._requests.next(
            timeout_s, lambda: max(client.last_sign_s for client in missing)
        )
        if arrived is not None:
            self._take_in(*arrived)
            return
        assert timeout_s is not None
        for client in missing:
            if time.monotonic() > client.last_sign_s + timeout_s:
                late = f"{client.name}: no {what.format(timeout_s)}."
                text = f"{late} Look at where it is, or raise timeout_s."
                self.lose(client, Unreachable(text, client.rank))

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
        else:
            self.served.append(client)
            with self.losing(client):
                if not self._answer_alone(client, note):
                    self.wanted[client] = note
            self.served = [other for other in self.served if other is not client]

    def _reassure(self) -> None:
        for client in {*self.wanted, *self.served, *self._requests.waiting()}:
            client.reassure_client()

    # ----------------------------------------------------------------- answers

    def answer(self, client: Wire, content: dict[str, Any]) -> None:
        """Answer a client, if it is left; nobody waits until it has the answer."""
        if client in self.left:
            with self.losing(client):
                client.answer(content)

    def send(
        self, clients: Iterable[Wire], tensor: Tensor, lane: Lane
    ) -> list[tuple[Wire, dist.Work]]:
        """Begin to send the same to clients that are left."""
        sending = []
        for client in clients:
            if client in self.left:
                with self.losing(client):
                    sending.append((client, client.send(tensor, lane)))
        return sending

    def finish_sending(self, sending: Iterable[tuple[Wire, dist.Work]]) -> None:
        """Wait until clients have what was sent to them."""
        waits = [(c, c.begin_wait(work, "the parameters")) for c, work in sending if c in self.left]
        for client, wait in waits:
            if client in self.left:
                with self.losing(client):
                    wait()

    # ------------------------------------------------------------------ faults

    @contextmanager
    def losing(self, client: Wire) -> Iterator[None]:
        """Go on without a client that turns out to be unreachable inside, if enough are left."""
        try:
            yield
        except Unreachable as error:
            if error.rank != client.rank:
                raise
            self.lose(client, error)

    def lose(self, client: Wire, error: Exception) -> None:
        """Go on without a client, if enough are left.

        Raises:
            Exception: ``error``, if not.
        """
        if client not in self.left:
            return
        self.left.remove(client)
        self.wanted.pop(client, None)
        self.served = [other for other in self.served if other is not client]
        if len(self.left) < self._min_left:
            raise error
        log.warning("%s is gone; going on with the mean over %d.", client.name, len(self.left))
        client.last_answer({"failure": "The others went on without this rank."})  # it may wake up

    def end(self) -> None:
        """Listen to nobody any more."""
        self._requests.end()

    def tell_failure(self, error: Exception, tell: Callable[[str], list[Sending]]) -> None:
        """Tell those who wait for an answer, or soon will, why none comes, and somebody else."""
        lines = str(error).strip().split("\n")
        text = " ".join([lines[0], *lines[1:][-1:]])[:_FAILURE_CHARACTERS]
        sending = [last for c in self.left for last in c.last_answer({"failure": text})]
        sending += tell(text)
        patience_s = _REPORTED_FAILURE_S if isinstance(error, WorkerFailure) else _FAILURE_S
        deadline = time.monotonic() + patience_s
        for work, _ in sending:
            left_s = max(deadline - time.monotonic(), _LEAST_S)
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=left_s))

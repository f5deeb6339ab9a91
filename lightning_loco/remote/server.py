"""A rank that does not train: sums the clients' gradients and hands out parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_loco.remote.accumulator import Accumulator
from lightning_loco.remote.backend import Backend
from lightning_loco.remote.calls import Call
from lightning_loco.remote.inbox import Inbox
from lightning_loco.remote.plan import Message
from lightning_loco.remote.requests import Requests
from lightning_loco.remote.state import State
from lightning_loco.remote.wire import Kind, Lane, Note, Wire

log = logging.getLogger(__name__)

_FAILURE_CHARACTERS = 300
_FAILURE_S = 2.0


class Server:
    """Serves clients, in lockstep, until all have left.

    Clients that meet (before a validation, say) wait until none makes steps any more. A step takes
    the mean over the clients that make it.

    Args:
        clients: The ranks that send gradients, in the order of the sum.
        messages: How gradients are cut, and their dtype on the wire.
        accumulator: Where they are summed.
        backend: Where the mean goes.
        checksum: Tells the model.
        timeout_s: How much later than the first one a client may make a step, in seconds.
        min_workers: With how many clients to go on when some fail. Default: all.
        stop_reason: Says why all should stop, if this rank was asked to.
        look_around: Called while nothing happens; may raise.
    """

    def __init__(
        self,
        clients: Sequence[Wire],
        messages: Sequence[Message],
        accumulator: Accumulator,
        backend: Backend,
        checksum: int,
        *,
        timeout_s: float | None = None,
        min_workers: int | None = None,
        stop_reason: Callable[[], str | None] = lambda: None,
        look_around: Callable[[], object] = lambda: None,
    ) -> None:
        self._clients = list(clients)
        self._messages = messages
        self._accumulator = accumulator
        self._backend = backend
        self._checksum = checksum
        self._timeout_s = timeout_s
        self._min_workers = len(clients) if min_workers is None else min_workers
        self._stop_reason = stop_reason
        self._requests = Requests(clients, look_around)
        self._pending: dict[Wire, Note] = {}
        self._calls: dict[Wire, Call] = {}
        self._inboxes = {
            client: Inbox(client, messages, accumulator, is_first=number == 0)
            for number, client in enumerate(clients)
        }
        self.farewell: dict[str, Any] = {}

    @torch.no_grad()
    def serve(self) -> None:
        """Answer until all clients have left.

        Raises:
            ValueError: If a client has another model.
            RuntimeError: If a client is gone, too late, or not where the others are.
        """
        try:
            while self._clients:
                self._hear_all()
                self._answer_all()
        except Exception as error:
            self._tell_failure(error)
            raise
        self._backend.end(self.farewell)

    # ---------------------------------------------------------------- requests

    def _hear_all(self) -> None:
        """Wait until each client wants something that concerns all."""
        while missing := [c for c in self._clients if c not in self._pending]:
            steps = [c for c, note in self._pending.items() if note.kind != Kind.MEET]
            arrived = self._requests.next(self._timeout_s if steps else None)
            if arrived is None:
                for client in missing:
                    self._lose(client, self._too_late(client))
                continue
            self._take_in(*arrived)

    def _take_in(self, client: Wire, note: Note | Exception) -> None:
        if client not in self._clients:
            return
        if isinstance(note, Exception):
            self._lose(client, note)
        elif note.kind == Kind.LEAVE:
            self._clients.remove(client)
            self.farewell = note.content or self.farewell
        elif note.kind == Kind.FAIL:
            self._lose(client, RuntimeError(f"{client.name} failed: {note.content['text']}"))
        elif note.kind == Kind.CALL:
            self._calls[client] = Call.read(note.content)
        elif not self._answer_one(client, note):
            self._pending[client] = note

    def _answer_one(self, client: Wire, note: Note) -> bool:
        """Answer what concerns this client alone; says whether it did."""
        if note.kind == Kind.STATE:
            self._tell_state(client)
        elif note.kind == Kind.LOAD_STATE:
            self._backend.load_state(State.receive(client, note.content))
            client.answer({})
        elif note.kind == Kind.PARAMETERS:
            client.answer({})
            for tensor in self._backend.parameters():
                client.wait(client.send(tensor.view(-1), Lane.STATE), "the parameters")
        else:
            return False
        return True

    def _tell_state(self, client: Wire) -> None:
        try:
            state = self._backend.state()
        except TypeError as error:  # of use to the client only
            client.answer({"refused": str(error)})
        else:
            state.send(client, client.answer)

    def _answer_all(self) -> None:
        if not self._clients:
            return
        pending = {c: self._pending[c] for c in self._clients}  # the order of the sum
        wanted = {c: note for c, note in pending.items() if note.kind != Kind.MEET}
        kinds = {Kind.STEP if n.kind == Kind.STREAM else n.kind for n in wanted.values()}
        if len(kinds) > 1:
            raise RuntimeError(
                "Workers ask for different things: "
                + ", ".join(f"{c.name} {note.kind.name}" for c, note in wanted.items())
                + ". Call receive_weights on all of them before the first step."
            )
        if not wanted:
            self._end_meeting()
            return
        for client in wanted:
            del self._pending[client]
        if kinds == {Kind.WEIGHTS}:
            self._hand_out(wanted)
        elif kinds == {Kind.FINITE}:
            finite = all(note.content["finite"] for note in wanted.values())
            for client in wanted:
                self._answer(client, {"finite": finite})
        else:
            self._make_step(wanted)

    def _end_meeting(self) -> None:
        purposes = {note.content["purpose"] for note in self._pending.values()}
        if len(purposes) > 1:
            raise RuntimeError(
                "Workers wait for each other at different places: "
                + ", ".join(f"{c.name} at {n.content['purpose']}" for c, n in self._pending.items())
                + ". All must reach the same validations and checkpoints."
            )
        stops = [note.content.get("stop") for note in self._pending.values()]
        self._release(next(filter(None, [*stops, self._stop_reason()]), None))

    def _release(self, stop: str | None) -> None:
        """Let those go on who meet."""
        present = [client.rank for client in self._clients]
        meeting, self._pending = list(self._pending), {}
        for client in meeting:
            self._answer(client, {"stop": stop, "present": present})

    def _hand_out(self, wanted: dict[Wire, Note]) -> None:
        others = [c for c, note in wanted.items() if note.content["checksum"] != self._checksum]
        for client in others:
            client.answer({})
        if others:
            names = ", ".join(client.name for client in others)
            raise ValueError(f"Another model on: {names}. Build the same on all ranks.")
        answer = self._backend.join(self._checksum)
        for client in wanted:
            self._answer(client, answer)
        self._finish_sending(self._send(wanted, range(len(self._messages))))
        for client in wanted:
            self._inboxes[client].open()

    # -------------------------------------------------------------------- step

    def _make_step(self, wanted: dict[Wire, Note]) -> None:
        """Sum, step and send back message by message; what can begin early does."""
        clients = list(wanted)
        streams = [client for client, note in wanted.items() if note.kind == Kind.STREAM]
        calls = [Call.read(n.content) for n in wanted.values() if n.kind == Kind.STEP]
        self._backend.begin(None if streams else Call.merge(calls))
        sending: list[tuple[Wire, dist.Work]] = []
        for index in range(len(self._messages)):
            self._receive_mean(index, clients)
            sending += self._send(clients, self._backend.push(index))
        calls += self._hear_calls(streams)
        call = Call.merge(calls)
        answer = self._backend.finish(call)
        answer["stop"] = call.stop or answer.get("stop") or self._stop_reason()
        for client in clients:
            self._answer(client, answer)
        if answer["stop"]:
            self._release(answer["stop"])
        sending += self._send(clients, self._backend.remaining())
        self._finish_sending(sending)
        for client in clients:
            self._inboxes[client].open()

    def _receive_mean(self, index: int, clients: Sequence[Wire]) -> None:
        """Sum a message in the order of the clients, then divide."""
        target = self._accumulator.slices[index]
        arrived = 0
        for client in clients:
            if client not in self._clients:
                continue
            try:
                memory = self._inboxes[client].next()
            except RuntimeError as error:
                self._lose(client, error)
                continue
            arrived += 1
            if arrived > 1:
                target.add_(memory)
            elif memory is not target:
                target.copy_(memory)
        if arrived == 0:
            raise RuntimeError("All workers that were making a step are gone.")
        if arrived > 1:
            target.div_(arrived)

    def _hear_calls(self, clients: Sequence[Wire]) -> list[Call]:
        """Wait for what the clients want that have sent gradients while they were computed."""
        while missing := [c for c in clients if c in self._clients and c not in self._calls]:
            arrived = self._requests.next(self._timeout_s)
            if arrived is not None:
                self._take_in(*arrived)
                continue
            for client in missing:
                self._lose(client, self._too_late(client))
        return [self._calls.pop(client) for client in clients if client in self._calls]

    def _send(self, clients: Any, indices: Any) -> list[tuple[Wire, dist.Work]]:
        """Begin to send the parameters of messages as they become known."""
        sending = []
        for index in indices:
            weights = self._backend.weights(index)
            for client in clients:
                if client in self._clients:
                    sending.append((client, client.send(weights, Lane.WEIGHTS)))
        return sending

    def _finish_sending(self, sending: Sequence[tuple[Wire, dist.Work]]) -> None:
        for client, work in sending:
            if client in self._clients:
                try:
                    client.wait(work, "the parameters")
                except RuntimeError as error:
                    self._lose(client, error)

    # ------------------------------------------------------------------ faults

    def _answer(self, client: Wire, content: dict[str, Any]) -> None:
        if client in self._clients:
            try:
                client.answer(content)
            except RuntimeError as error:
                self._lose(client, error)

    def _too_late(self, client: Wire) -> RuntimeError:
        return RuntimeError(
            f"{client.name}: no step {self._timeout_s:g} s after another worker's. Look at where "
            "it is, or raise timeout_s."
        )

    def _lose(self, client: Wire, error: Exception) -> None:
        """Go on without a client, if enough are left.

        Raises:
            RuntimeError: If not.
        """
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._pending.pop(client, None)
        if len(self._clients) < self._min_workers:
            raise error
        log.warning("%s is gone; going on with the mean over %d.", client.name, len(self._clients))

    def _tell_failure(self, error: Exception) -> None:
        """Tell those who wait for an answer, or soon will, why none comes."""
        lines = str(error).strip().split("\n")
        text = " ".join([lines[0], *lines[1:][-1:]])[:_FAILURE_CHARACTERS]
        sending = []
        for client in self._clients:
            with suppress(RuntimeError):
                sending.append(client.answer_later({"failure": text}))
        for work, _ in sending:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=_FAILURE_S))

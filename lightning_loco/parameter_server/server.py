"""A rank that does not train: takes in the clients' gradients and hands out parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_loco.fault_points import reach
from lightning_loco.parameter_server.asking import receive_parameters, send_parameters
from lightning_loco.parameter_server.backends import Backend
from lightning_loco.parameter_server.buckets import Accumulator, Message
from lightning_loco.parameter_server.clients import Clients
from lightning_loco.parameter_server.keep_alive import Meanwhile
from lightning_loco.parameter_server.mean_gradient import MeanGradient
from lightning_loco.parameter_server.optimizer_state import OptimizerState
from lightning_loco.parameter_server.protocol import Kind, Lane, Note, Wire
from lightning_loco.parameter_server.step_request import Call


class GradientServer:
    """Serves clients, in lockstep, until all have left.

    Clients that meet (before a validation, say) wait until none makes steps any more. A step takes
    the mean over the clients that make it.

    Args:
        clients: The ranks that send gradients, in the order of the sum.
        messages: How gradients are cut and written.
        accumulator: Where they are summed.
        backend: Where the mean goes.
        checksum: Tells the model.
        meanwhile: What to do while nothing happens. Its ``timeout_s`` is how much later than the
            first one a client may make a step, in seconds.
        min_workers: With how many clients to go on when some fail. Default: all.
        are_heard: Whether clients ask for patience whenever they wait, as other servers do.
        stop_reason: Says why all should stop, if this rank was asked to.
    """

    def __init__(
        self,
        clients: Sequence[Wire],
        messages: Sequence[Message],
        accumulator: Accumulator,
        backend: Backend,
        checksum: int,
        meanwhile: Meanwhile,
        *,
        min_workers: int | None = None,
        are_heard: bool = False,
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        answers = functools.partial(_answer_alone, backend)  # no circle, which would keep the group
        self._clients = Clients(
            clients, answers, meanwhile, min_left=min_workers, are_heard=are_heard
        )
        self._num_messages = len(messages)
        self._mean = MeanGradient(self._clients, messages, accumulator)
        self._backend = backend
        self._checksum = checksum
        self._stop_reason = stop_reason
        self._behind: set[Wire] = set()

    @torch.no_grad()
    def serve(self) -> dict[str, Any]:
        """Answer until all clients have left.

        Returns:
            What they said when they left.

        Raises:
            ValueError: If a client has another model.
            RuntimeError: If a client is gone, too late, or not where the others are.
        """
        try:
            while self._clients.left:
                self._clients.hear_all()
                self._answer_all()
        except Exception as error:
            self._clients.tell_failure(error, self._backend.fail)
            raise
        finally:
            self._clients.end()
        self._backend.leave(self._clients.farewell)
        return self._clients.farewell

    def _answer_all(self) -> None:
        if not self._clients.left:
            return
        everything = {client: self._clients.wanted[client] for client in self._clients.left}
        wanted = {client: note for client, note in everything.items() if note.kind != Kind.MEET}
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
            del self._clients.wanted[client]
        self._clients.served = list(wanted)
        if kinds == {Kind.WEIGHTS}:
            self._hand_out(wanted)
        elif kinds == {Kind.FINITE}:
            finite = all(note.content["finite"] for note in wanted.values())
            for client in wanted:
                self._clients.answer(client, {"finite": finite})
        else:
            self._make_step(wanted)
        self._clients.served = []

    # ---------------------------------------------------------------- sync points

    def _end_meeting(self) -> None:
        wanted = self._clients.wanted
        purposes = {note.content["purpose"] for note in wanted.values()}
        if len(purposes) > 1:
            raise RuntimeError(
                "Workers wait for each other at different places: "
                + ", ".join(f"{c.name} at {n.content['purpose']}" for c, n in wanted.items())
                + ". All must reach the same validations and checkpoints."
            )
        stops = [note.content.get("stop") for note in wanted.values()]
        if self._behind:
            changed = {c: n.content["changed"] for c, n in wanted.items() if c not in self._behind}
            self._adopt_changes(changed)
        self._release(next(filter(None, [*stops, self._stop_reason()]), None))

    def _release(self, stop: str | None) -> None:
        """Let those go on who meet."""
        present = [client.rank for client in self._clients.left]
        meeting, self._clients.wanted = list(self._clients.wanted), {}
        for client in meeting:
            answer = {"stop": stop, "present": present, "behind": client in self._behind}
            self._clients.answer(client, answer)
            self._behind.discard(client)

    # -------------------------------------------------------------------- step

    def _hand_out(self, wanted: dict[Wire, Note]) -> None:
        """Give the parameters to clients that begin."""
        others = [c for c, note in wanted.items() if note.content["checksum"] != self._checksum]
        for client in others:
            client.answer({})
        if others:
            names = ", ".join(client.name for client in others)
            raise ValueError(f"Another model on: {names}. Build the same on all ranks.")
        answer = self._backend.join(self._checksum)
        sending = self._send(wanted, range(self._num_messages))
        for client in wanted:
            self._clients.answer(client, answer)
        self._clients.finish_sending(sending)
        self._mean.expect(wanted)

    def _make_step(self, wanted: dict[Wire, Note]) -> None:
        """Sum, step and send back message by message; what can begin early does."""
        streaming = [client for client, note in wanted.items() if note.kind == Kind.STREAM]
        calls = {c: Call.read(n.content) for c, n in wanted.items() if n.kind == Kind.STEP}
        is_late = streaming or any(call.changed for call in calls.values())
        self._backend.begin(None if is_late else Call.merge(list(calls.values())))
        sending: list[tuple[Wire, dist.Work]] = []
        for index in range(self._num_messages):
            reach("summing")
            self._mean.receive(index, wanted)
            sending += self._send(wanted, self._backend.push(index))
        calls |= self._clients.hear_calls(streaming)
        calls = {client: calls[client] for client in wanted if client in calls}
        changes = {client: call.changed for client, call in calls.items()}
        self._adopt_changes(changes)
        call = Call.merge(list(calls.values()))
        reach("server step")
        answer = self._backend.finish(call)
        answer["stop"] = call.stop or answer.get("stop") or self._stop_reason()
        for index in self._backend.remaining():
            if index == self._num_messages - 1:
                self._answer_step(wanted, answer)
            sending += self._send(wanted, [index])
        self._behind.update(client for client in self._clients.left if client not in wanted)
        if answer["stop"]:
            self._release(answer["stop"])
        self._clients.served = []
        self._clients.finish_sending(sending)
        self._mean.expect(wanted)

    def _answer_step(self, wanted: Iterable[Wire], answer: dict[str, Any]) -> None:
        """Answer once all parameters are known: who has an answer waits for no other rank."""
        for client in wanted:
            self._clients.answer(client, answer)

    def _send(
        self, clients: Iterable[Wire], indices: Iterable[int]
    ) -> list[tuple[Wire, dist.Work]]:
        """Begin to send the parameters of messages as they become known."""
        return [
            begun
            for index in indices
            for begun in self._clients.send(clients, self._backend.weights(index), Lane.WEIGHTS)
        ]

    def _adopt_changes(self, digests: Mapping[Wire, str | None]) -> None:
        """Take over the parameters that all workers have changed alike.

        Each that has changed something waits to hear whether to send it.

        Args:
            digests: By client, the checksum of its changed parameters, or None.

        Raises:
            RuntimeError: If not all have made the same change.
        """
        if not any(digests.values()):
            return
        if len(set(digests.values())) > 1:
            changed = [client.name for client, digest in digests.items() if digest is not None]
            if len(changed) < len(digests):
                others = [client.name for client in digests if client.name not in changed]
                how = f"on {_names(changed)} but not on {_names(others)}"
            else:
                how = f"on {_names(changed)}, but not to the same values"
            raise RuntimeError(
                f"Parameters were changed outside of the optimizer {how}. Change them alike on all "
                "workers, with the same random numbers, or not at all."
            )
        given = False
        for client in digests:
            self._clients.answer(client, {"give": not given})
            if not given and client in self._clients.left:
                with self._clients.losing(client):
                    values = receive_parameters(client, self._backend.shapes)
                    self._backend.load_parameters(values)
                    given = True


def _names(names: Sequence[str]) -> str:
    return ", ".join(name[0].lower() + name[1:] for name in names)


def _answer_alone(backend: Backend, client: Wire, note: Note) -> bool:
    """Answer a request that concerns its client alone; whether it was one.

    These are about the optimizer's state and all parameters in full precision.
    """
    if note.kind == Kind.STATE:
        try:
            state = backend.state()
        except TypeError as error:  # of use to the client only
            client.answer({"refused": str(error)})
        else:
            state.send(client, client.answer)
    elif note.kind == Kind.LOAD_STATE:
        backend.load_state(OptimizerState.receive(client, note.content))
        client.answer({})
    elif note.kind == Kind.PARAMETERS:
        client.answer({})
        send_parameters(client, backend.parameters())
    elif note.kind == Kind.LOAD_PARAMETERS:
        backend.load_parameters(receive_parameters(client, backend.shapes))
        client.answer({})
    else:
        return False
    return True

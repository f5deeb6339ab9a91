"""What a client asks a server for, and how it learns of a failure there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_loco.parameter_server.optimizer_state import OptimizerState
from lightning_loco.parameter_server.protocol import Kind, Lane, Note, Wire


class ServerClient:
    """Asks one server for its parameters and the state of its optimizer, or gives it others.

    Args:
        wire: To the server.
        shapes: Tensors of the shapes and dtypes of the parameters that the server has.

    Attributes:
        wire: As given.
        shapes: As given.
    """

    def __init__(self, wire: Wire, shapes: Sequence[Tensor]) -> None:
        self.wire = wire
        self.shapes = shapes

    def ask_for_weights(self, checksum: int) -> dict[str, Any]:
        """Ask for the parameters of the same model, which follow the answer.

        Raises:
            ValueError: If the other rank has another model.
            RuntimeError: If it is gone or too late.
        """
        self.wire.ask(Note(Kind.WEIGHTS, {"checksum": checksum}))
        answer = self.answer()
        if "hyperparameters" not in answer:
            raise ValueError(
                f"{self.wire.name} has a model with other parameters. Build the same model on all "
                "ranks, pass its parameters in the same order, and give all ranks the same "
                "Transport."
            )
        return answer

    def parameters(self) -> Iterable[Tensor]:
        """Ask for all parameters in full precision; yields them one after another."""
        self.wire.ask(Note(Kind.PARAMETERS, {}))
        self.answer()
        yield from receive_parameters(self.wire, self.shapes)

    def load_parameters(self, values: Iterable[Tensor]) -> None:
        """Give the optimizer other parameters."""
        self.wire.ask(Note(Kind.LOAD_PARAMETERS, {}))
        send_parameters(self.wire, values)
        self.answer()

    def state(self) -> OptimizerState:
        """Ask for what the optimizer remembers; TypeError if that cannot be sent."""
        self.wire.ask(Note(Kind.STATE, {}))
        answer = self.answer()
        if "refused" in answer:
            raise TypeError(answer["refused"])
        return OptimizerState.receive(self.wire, answer)

    def load_state(self, state: OptimizerState) -> None:
        """Give the optimizer a state to go on from."""
        state.send(self.wire, lambda text: self.wire.ask(Note(Kind.LOAD_STATE, text)))
        self.answer()

    def leave(self, farewell: dict[str, Any]) -> None:
        """Say that no more requests will come, with a last word."""
        self.wire.ask(Note(Kind.LEAVE, farewell))

    def answer(self) -> dict[str, Any]:
        """Wait for the server's answer to the last request.

        Raises:
            RuntimeError: If the server tells of a failure; it need not listen to this rank any
                more.
        """
        answer = self.wire.answered()
        while "waiting" in answer:  # it is alive, and waits for another rank
            for server in self.wire.waiting_too:
                server.reassure_server()
            answer = self.wire.answered()
        if "failure" in answer:
            with suppress(RuntimeError):
                self.leave({})
            raise RuntimeError(f"{self.wire.name}: {answer['failure']}")
        return answer


def receive_parameters(wire: Wire, params: Iterable[Tensor]) -> Iterable[Tensor]:
    """Receive parameters of these shapes and dtypes in full precision, one after another."""
    for param in params:
        memory = torch.empty(param.shape, dtype=param.dtype)
        if memory.numel():
            wire.wait(wire.receive(memory.view(-1), Lane.STATE), "the parameters")
        yield memory


def send_parameters(wire: Wire, params: Iterable[Tensor]) -> None:
    """Send what :func:`receive_parameters` receives."""
    for param in params:
        if param.numel():
            values = param.detach().cpu().contiguous()
            wire.wait(wire.send(values.view(-1), Lane.STATE), "the parameters")

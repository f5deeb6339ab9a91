"""What a client asks a server for, and how it learns of a failure there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_loco.remote.optimizer_state import OptimizerState
from lightning_loco.remote.wire import Kind, Lane, Note, Wire


def ask_for_weights(wire: Wire, checksum: int) -> dict[str, Any]:
    """Ask for the parameters of the same model, which follow the answer.

    Raises:
        ValueError: If the other rank has another model.
        RuntimeError: If it is gone or too late.
    """
    wire.ask(Note(Kind.WEIGHTS, {"checksum": checksum}))
    answer = check_answer(wire)
    if "hyperparameters" not in answer:
        raise ValueError(
            f"{wire.name} has a model with other parameters. Build the same model on all ranks, "
            "pass its parameters in the same order, and give all ranks the same Transport."
        )
    return answer


def ask_for_parameters(wire: Wire, params: Sequence[Tensor]) -> Iterable[Tensor]:
    """Ask for all parameters in full precision; yields them one after another."""
    wire.ask(Note(Kind.PARAMETERS, {}))
    check_answer(wire)
    yield from receive_parameters(wire, params)


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


def ask_for_state(wire: Wire) -> OptimizerState:
    """Ask for what the optimizer remembers.

    Raises:
        TypeError: If it cannot be sent.
    """
    wire.ask(Note(Kind.STATE, {}))
    answer = check_answer(wire)
    if "refused" in answer:
        raise TypeError(answer["refused"])
    return OptimizerState.receive(wire, answer)


def check_answer(wire: Wire) -> dict[str, Any]:
    """Wait for the server's answer to the last request.

    Raises:
        RuntimeError: If the server tells of a failure; it need not listen to this rank any more.
    """
    answer = wire.answered()
    while "waiting" in answer:  # it is alive, and waits for another rank
        for server in wire.waiting_too:
            server.reassure_server()
        answer = wire.answered()
    if "failure" in answer:
        with suppress(RuntimeError):
            wire.ask(Note(Kind.LEAVE, {}))
        raise RuntimeError(f"{wire.name}: {answer['failure']}")
    return answer

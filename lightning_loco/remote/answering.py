"""What a server answers to one client, whatever the others are doing."""

from __future__ import annotations

from lightning_loco.remote.asking import receive_parameters, send_parameters
from lightning_loco.remote.backends import Backend
from lightning_loco.remote.optimizer_state import OptimizerState
from lightning_loco.remote.wire import Kind, Note, Wire


def answer_alone(client: Wire, note: Note, backend: Backend) -> bool:
    """Answer a request about the optimizer's state or all parameters in full precision.

    Args:
        client: Who asks.
        note: For what.
        backend: What has it.

    Returns:
        Whether it was such a request.
    """
    if note.kind == Kind.STATE:
        _tell_state(client, backend)
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


def _tell_state(client: Wire, backend: Backend) -> None:
    try:
        state = backend.state()
    except TypeError as error:  # of use to the client only
        client.answer({"refused": str(error)})
    else:
        state.send(client, client.answer)

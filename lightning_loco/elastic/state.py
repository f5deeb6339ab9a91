"""What a newcomer gets of an engine, and how it goes on from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_loco.codecs import shared_part
from lightning_loco.elastic.handover import Handover
from lightning_loco.rounds.engine import Engine

if TYPE_CHECKING:
    from lightning_loco.elastic.flights import Flight

STATES = 8
"""The most vectors of the length of a message that a state is made of."""

_STATE, _PARAMS, _BUFFERS, _KNOWN = "state/", "params", "buffers", "known"


def longest_state(engine: Engine) -> int:
    """The most bytes that the state of a run may take."""
    layout = engine.worker.replica.layout
    return STATES * layout.numel * layout.dtype.itemsize + 2**30


def outer_state(engine: Engine) -> dict[str, Any]:
    """What the algorithm remembers, as it is until the flight under way lands."""
    lane = engine.lanes[0].lane
    state = {**lane.state, **(lane.parts[0].state if lane.has_uncut_state else {})}
    return state | {key: lane.state[key] for key in state if lane.is_cut(lane.state[key])}


@torch.no_grad()
def copy_state(engine: Engine, flight: Flight) -> Handover:
    """Copy the state of the run into the host's memory, as it is until the flight lands.

    It may be called beside the local steps: outer parameters stand still meanwhile. Where the
    algorithm has none, the model's parameters are taken, and the round replaces them.
    """
    lane, worker, state = engine.lanes[0].lane, engine.worker, outer_state(engine)
    tensors = {f"{_STATE}{k}": _copied(v) for k, v in state.items() if isinstance(v, Tensor)}
    if engine.settings.algorithm.restart(lane.state) is None:
        tensors[_PARAMS] = worker.replica.layout.set_aside()
    if (known := shared_part(lane.residual)) is not None:
        tensors[_KNOWN] = _copied(known)
    tensors[_BUFFERS] = worker.replica.buffers.set_aside()
    values: dict[str, Any] = {
        "numbers": {k: v for k, v in state.items() if not isinstance(v, Tensor)},
        **flight.values,
    }
    return Handover(tensors, values)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@torch.no_grad()
def adopt_state(engine: Engine, flight: Flight) -> None:
    """Go on from the state that a flight has brought, as at its begin; so does the model.

    Raises:
        RuntimeError: If it does not fit.
    """
    worker, lane, state = engine.worker, engine.lanes[0].lane, flight.state
    assert state is not None
    flight.is_adopted = True
    tensors = {k.removeprefix(_STATE): t for k, t in state.tensors.items() if k.startswith(_STATE)}
    own = {key: value for key, value in lane.state.items() if isinstance(value, Tensor)}
    for key, value in own.items():
        if key not in tensors or tensors[key].shape != value.shape:
            raise RuntimeError(f"The state of the run does not fit this worker's: {key!r} differs.")
    numbers = dict(state.values["numbers"])
    start = engine.settings.algorithm.restart({**tensors, **numbers})
    params = state.tensors.get(_PARAMS) if start is None else start
    if params is None or params.shape != (worker.replica.layout.numel,):
        raise RuntimeError("The state of the run has parameters of another size than this model.")
    residual = engine.settings.init_residual(state.tensors.get(_KNOWN, params))
    lane.load_state_dict({**tensors, **numbers}, {"residual": residual, "departure": params})
    worker.replica.layout.write(params)
    worker.replica.buffers.write(state.tensors[_BUFFERS])
    if flight.has_drifted:
        return  # it knows where it is
    worker.steps = int(state.values["steps"])
    worker.round_index = int(state.values["round_index"])
    worker.steps_since_round = int(state.values.get("steps_since_round", 0))

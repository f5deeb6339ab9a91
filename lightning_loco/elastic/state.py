"""What a newcomer gets of an engine, and how it goes on from there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_loco.elastic.flights import Flight
from lightning_loco.elastic.handover import Handover
from lightning_loco.rounds.engine import Engine

_STATE, _PARAMS, _BUFFERS = "state/", "params", "buffers"


@torch.no_grad()
def copy_state(engine: Engine, flight: Flight) -> Handover:
    """Copy the state of the run into the host's memory, as it is until the flight lands.

    It may be called beside the local steps: outer parameters stand still meanwhile. Where the
    algorithm has none, the model's parameters are taken, and the round replaces them.
    """
    lane, worker = engine.lanes[0].lane, engine.worker
    state = {**lane.state, **(lane.parts[0].state if lane.has_uncut_state else {})}
    state |= {key: lane.state[key] for key in state if _is_vector(lane.state[key], engine)}
    tensors = {f"{_STATE}{k}": _copied(v) for k, v in state.items() if isinstance(v, Tensor)}
    start = engine.settings.algorithm.restart(lane.state)
    tensors[_PARAMS] = worker.replica.layout.set_aside() if start is None else _copied(start)
    tensors[_BUFFERS] = worker.replica.buffers.set_aside()
    values: dict[str, Any] = {
        "numbers": {k: v for k, v in state.items() if not isinstance(v, Tensor)},
        **flight.values,
    }
    return Handover(tensors, values)


def _is_vector(value: object, engine: Engine) -> bool:
    return isinstance(value, Tensor) and value.shape == (engine.worker.replica.layout.numel,)


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
    params = state.tensors.get(_PARAMS)
    if params is None or params.shape != (worker.replica.layout.numel,):
        raise RuntimeError("The state of the run has parameters of another size than this model.")
    for key, value in own.items():
        if key not in tensors or tensors[key].shape != value.shape:
            raise RuntimeError(f"The state of the run does not fit this worker's: {key!r} differs.")
    numbers = dict(state.values["numbers"])
    residual = engine.settings.codec.init(params)
    lane.load_state_dict({**tensors, **numbers}, {"residual": residual, "departure": params})
    worker.replica.layout.write(params)
    worker.replica.buffers.write(state.tensors[_BUFFERS])
    worker.steps = int(state.values["steps"])
    worker.round_index = int(state.values["round_index"])
    worker.steps_since_round = int(state.values.get("steps_since_round", 0))

"""Rounds that go on from what another run has saved: other settings, or other numbers of workers.

With another algorithm the rounds begin anew at the consensus. With another number of workers all
that differed between the old ones becomes its mean, which is what rounds work on: nothing that was
learned is lost, and the mean moves on as it would have.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.earlier_run import Saved, mean_of_saved
from lightning_loco.engine.engine import Engine


@torch.no_grad()
def carry_over(engine: Engine, saved: Saved) -> list[str]:
    """Go on from what another run has saved, as far as that fits; all workers must call it.

    Args:
        engine: A new one, whose model holds the consensus of that run.
        saved: What it is to go on from.

    Returns:
        What is dropped, begun anew or brought to an end, in words; equal on all workers.

    Raises:
        ValueError: Or OSError, on all workers, if a file cannot be read.
        KeyError: If something is missing in it.
    """
    if not saved.is_of(engine.settings.algorithm) or "lanes" not in saved.state:
        return _begin_at_consensus(engine, saved)
    notes: list[str] = []
    state = saved.state
    if not saved.fits(engine.worker.group.num_workers):
        state = _with_means(engine, saved, notes)
    lanes = [_lane(engine, index, state, saved, notes) for index in range(len(engine.lanes))]
    began_at = state["began_at"]
    if engine.settings.stays and all(lane.own["flight"] is None for lane in lanes):
        state = {**state, "round_index": 0}  # for a warm start
    engine.load_state_dict(
        {
            **state,
            "began_at": began_at if len(began_at) == len(lanes) else [began_at[0]] * len(lanes),
            "shared": [lane.shared for lane in lanes],
            "lanes": [lane.own for lane in lanes],
        }
    )
    for rounds, lane in zip(engine.lanes, lanes, strict=True):
        if lane.late is not None:
            rounds.land_saved(lane.late)
    return list(dict.fromkeys(notes))


def _begin_at_consensus(engine: Engine, saved: Saved) -> list[str]:
    worker, algorithm = engine.worker, engine.settings.algorithm
    worker.go_on_counting(saved.state)
    worker.round_index = worker.steps_since_round = 0
    engine.reset()
    notes = saved.forgotten()
    state = engine.lanes[0].lane.state
    start = algorithm.restart(state)
    if new := [name for name, value in state.items() if value is not start]:
        notes.append(_anew(algorithm, new))
    return notes


def _with_means(engine: Engine, saved: Saved, notes: list[str]) -> dict[str, Any]:
    """The state, with means in place of all that differed between the workers."""
    replica = engine.worker.replica
    names = ["params", "lanes"] if saved.is_shared else ["params", "lanes", "shared"]
    state = {**saved.state, **mean_of_saved(engine.worker, saved, names)}
    state.pop("others", None)
    state["buffers"] = replica.buffers.set_aside()
    state["buffers_at_start"] = replica.buffers.new_flat()
    state["running"] = {}
    if saved.consensus_key is None:
        state["params"] = replica.layout.set_aside()
        notes.append("all workers begin at the consensus")
    else:
        notes.append(
            f"all workers begin at the mean of the {saved.num_workers} workers' parameters"
        )
        for lane, former in zip(state["shared"], saved.state["shared"], strict=True):
            lane["state"][saved.consensus_key] = former["state"][saved.consensus_key]
    for lane in state["lanes"]:
        if lane["flight"] is not None:
            lane["flight"].update(valid=True, finite=True)
    return state


class _Lane(NamedTuple):
    """What a lane is to load, and the flight that must land at once, if there is one."""

    shared: dict[str, Any]
    own: dict[str, Any]
    late: dict[str, Any] | None


def _lane(
    engine: Engine, index: int, saved_state: dict[str, Any], saved: Saved, notes: list[str]
) -> _Lane:
    settings, lane = engine.settings, engine.lanes[index].lane
    algorithm, params = settings.algorithm, saved_state["params"]
    has_same_lanes = len(saved_state["lanes"]) == len(engine.lanes)
    former = index if has_same_lanes else 0
    shared, own = saved_state["shared"][former], dict(saved_state["lanes"][former])
    described = settings.describe()
    changed = {name for name, value in described.items() if saved.settings.get(name) != value}
    state = shared["state"]
    if changed & {field.name for field in dataclasses.fields(algorithm)}:
        state = _fitted(algorithm, state, params, notes)
    if "compression" in changed:
        if own["residual"]:
            notes.append("what compression had left over is dropped")
        own["residual"] = settings.init_residual(engine.worker.replica.layout.new_flat())
    flight = own.pop("flight")
    if flight is not None:
        flight = {**flight, "received": shared["received"], "departure": own["departure"]}
    if own["departure"] is None:
        own["departure"] = params
    length = sum(map(len, lane.parts))
    if len(engine.lanes) > 1 and changed & {"schedule", "pattern"}:
        has_same_lanes = False
    if flight is not None and not (has_same_lanes and flight["received"].numel() == length):
        notes.append("a round that was under way is dropped, because other parts are exchanged")
        flight = None
    if flight is None or _stays(engine, index, flight):
        received = None if flight is None else flight["received"]
        return _Lane({"state": state, "received": received}, {**own, "flight": flight}, None)
    notes.append("a round that was under way is landed at once")
    return _Lane({"state": state, "received": None}, {**own, "flight": None}, flight)


def _stays(engine: Engine, index: int, flight: dict[str, Any]) -> bool:
    """Whether a flight of another run can stay under way in this one."""
    needs_departure = engine.lanes[index].lane.departure is not None
    return engine.settings.stays and (flight["departure"] is not None or not needs_departure)


def _fitted(algorithm: Algorithm, old: State, params: Tensor, notes: list[str]) -> State:
    """What this algorithm remembers, out of what one of its class with other settings did."""
    start = algorithm.restart(old)
    fresh = algorithm.init((params if start is None else start).clone())
    names = _names_of(algorithm)
    kept = {name: value for name, value in old.items() if name in names}
    if dropped := sorted(old.keys() - kept.keys()):
        name = type(algorithm).__name__
        notes.append(f"what {name} remembered ({', '.join(dropped)}) is dropped")
    if new := sorted(fresh.keys() - kept.keys()):
        notes.append(_anew(algorithm, new))
    return {**fresh, **kept}


def _names_of(algorithm: Algorithm) -> set[str]:
    """The names of all that an algorithm remembers once it has made a round."""
    state = algorithm.init(torch.zeros(2))
    names = set(state)
    if algorithm.num_scalars:
        algorithm.hear([algorithm.scalars(state)], state)
    algorithm.update(torch.zeros(2), torch.ones(2), state)
    return names | set(state)


def _anew(algorithm: Algorithm, names: list[str]) -> str:
    return f"what {type(algorithm).__name__} remembers ({', '.join(names)}) begins anew"

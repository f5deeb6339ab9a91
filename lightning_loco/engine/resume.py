"""Rounds that resume from an earlier run with other settings, or another number of workers.

With another algorithm, training starts from the consensus with a new state. With another number of
workers too, but state that was equal on all workers, such as outer parameters, is kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, RoundInfo, State
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.gathered_state import own_state, whole_length
from lightning_loco.model.worker import EarlierRun


@torch.no_grad()
def resume_from(engine: Engine, saved: EarlierRun) -> list[str]:
    """Load as much of an earlier run's state as fits; all workers must call it.

    The engine is new, and its model holds the consensus of that run. The states are for whole
    workers, and each rank takes the elements that it owns. Returns notes on state that is dropped
    or reset, equal on all workers. KeyError if an entry is missing.
    """
    algorithm, state = engine.settings.algorithm, saved.state
    if not saved.is_of(algorithm) or not (saved.has_same_workers or algorithm.replicated):
        return _start_at_consensus(engine, saved)
    drops_pending = saved.has_pending and not _can_stay_pending(engine, saved)
    if drops_pending and type(algorithm).on_send is not Algorithm.on_send:
        return _start_at_consensus(engine, saved)  # its state is in the middle of the round
    notes: list[str] = []
    if not saved.has_same_workers:
        notes.append("all workers start from the consensus")
        state = _with_consensus(engine, state)
    if drops_pending:
        notes.append("a pending round is dropped")
    if engine.settings.is_overlapped and (drops_pending or not saved.has_pending):
        state = {**state, "round_index": 0}  # for a warm start
    count, began_at = len(engine.fragments), state["began_at"]
    fragments = [_fragment(engine, i, state, saved, notes) for i in range(count)]
    if drops_pending:
        for shared, own in fragments:
            shared["received"] = own["pending"] = None
    whole = {
        **state,
        "began_at": began_at if len(began_at) == count else [began_at[0]] * count,
        "shared": [shared for shared, _ in fragments],
        "fragments": [own for _, own in fragments],
    }
    engine.load_state_dict(own_state(whole, engine.worker.replica))
    return list(dict.fromkeys(notes))


def _start_at_consensus(engine: Engine, saved: EarlierRun) -> list[str]:
    worker, algorithm = engine.worker, engine.settings.algorithm
    worker.load_counters(saved.state)
    worker.steps_since_round = 0
    if engine.settings.is_overlapped or not saved.is_of(algorithm):
        worker.round_index = 0
    engine.reset()
    state = engine.fragments[0].state
    start = algorithm.round_start(state)
    new = [name for name, value in state.items() if value is not start]
    return saved.dropped_by(algorithm) + ([_reset_note(algorithm, new)] if new else [])


def _with_consensus(engine: Engine, state: dict[str, Any]) -> dict[str, Any]:
    """The state, with the consensus in place of the parameters and buffers of a worker."""
    replica = engine.worker.replica
    return {
        **{name: value for name, value in state.items() if name != "others"},
        "params": replica.layout.new_flat_on_cpu(),
        "buffers": replica.buffers.new_flat_on_cpu(),
        "buffers_at_start": replica.buffers.new_flat(),
        "running": {},
        "fragments": [{**fragment, "sent_params": None} for fragment in state["fragments"]],
    }


def _fragment(
    engine: Engine, index: int, state: dict[str, Any], saved: EarlierRun, notes: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of one fragment to load: the algorithm's, and the worker's own."""
    settings, params = engine.settings, state["params"]
    former = index if len(state["fragments"]) == len(engine.fragments) else 0
    shared, own = dict(state["shared"][former]), dict(state["fragments"][former])
    changed = _changed(engine, saved)
    if changed & {field.name for field in dataclasses.fields(settings.algorithm)}:
        shared["state"] = _fitted(settings.algorithm, shared["state"], params, notes)
    if "compression" in changed or not saved.has_same_workers:
        if own["residual"]:
            notes.append("the residual of the compression is dropped")
        own["residual"] = settings.init_residual(engine.worker.replica.layout.new_flat_on_cpu())
    if own["sent_params"] is None:
        own["sent_params"] = params
    return shared, own


def _changed(engine: Engine, saved: EarlierRun) -> set[str]:
    """The names of the settings that differ from the earlier run."""
    described = engine.settings.describe()
    return {name for name, value in described.items() if saved.settings.get(name) != value}


def _can_stay_pending(engine: Engine, saved: EarlierRun) -> bool:
    """Whether the pending rounds of the earlier run can stay pending in this one."""
    count, replica = len(engine.fragments), engine.worker.replica
    own, shared = saved.state["fragments"], saved.state["shared"]
    has_other_parts = count > 1 and _changed(engine, saved) & {"schedule", "pattern"}
    if len(own) != count or has_other_parts or not engine.settings.is_overlapped:
        return False
    return saved.has_same_workers and all(
        shared[index]["received"].numel() == whole_length(index, replica)
        and (own[index]["sent_params"] is not None or fragment.memory.sent_params is None)
        for index, fragment in enumerate(engine.fragments)
        if own[index]["pending"] is not None
    )


def _fitted(algorithm: Algorithm, old: State, params: Tensor, notes: list[str]) -> State:
    """The state for this algorithm from the state of an algorithm of its class, set differently."""
    start = algorithm.round_start(old)
    fresh = algorithm.init((params if start is None else start).clone())
    names = _state_names(algorithm)
    kept = {name: value for name, value in old.items() if name in names}
    if dropped := sorted(old.keys() - kept.keys()):
        name = type(algorithm).__name__
        notes.append(f"the state of {name} ({', '.join(dropped)}) is dropped")
    if new := sorted(fresh.keys() - kept.keys()):
        notes.append(_reset_note(algorithm, new))
    return {**fresh, **kept}


def _state_names(algorithm: Algorithm) -> set[str]:
    """The names of all entries that the algorithm's state has after a round."""
    params = torch.zeros(2, dtype=torch.float32, device="cpu")
    state = algorithm.init(params.clone())
    names = set(state)
    scalars = tuple(map(float, algorithm.scalars(state)))
    info = RoundInfo(weights=(1.0,), scalars=(scalars,), steps=(1.0,), ages=(0.0,))
    message = params.new_ones(algorithm.message_length(2))
    algorithm.update(params, message.clone(), message, state, info)
    return names | set(state)


def _reset_note(algorithm: Algorithm, names: list[str]) -> str:
    return f"the state of {type(algorithm).__name__} ({', '.join(names)}) is reset"

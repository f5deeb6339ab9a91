"""Rounds that resume from another run: with other settings, or another number of workers.

With another algorithm, training starts at the consensus with a new state. With another number of
workers, everything that differed between the workers is replaced by its mean. Rounds work on the
mean, so it continues as if the number of workers had not changed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, RoundInfo, State
from lightning_loco.earlier_run import EarlierRun, mean_of_states
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.whole_state import own_pending, own_state, whole_length


@torch.no_grad()
def resume_from(engine: Engine, saved: EarlierRun) -> list[str]:
    """Load as much of another run's state as fits; all workers must call it.

    The engine is a new one, whose model holds the consensus of that run. Its states are those of
    whole workers, of which each rank takes what it owns. Returns what is dropped, reset or applied
    at once, in words, equal on all workers. ValueError or OSError on all workers if a file cannot
    be read; KeyError if an entry is missing.
    """
    if not saved.is_of(engine.settings.algorithm) or "fragments" not in saved.state:
        return _start_at_consensus(engine, saved)
    notes: list[str] = []
    state = saved.state
    if not saved.fits(engine.worker.group.num_workers):
        state = _with_means(engine, saved, notes)
    fragments = [_fragment(engine, i, state, saved, notes) for i in range(len(engine.fragments))]
    began_at = state["began_at"]
    if engine.settings.is_overlapped and all(f.own["pending"] is None for f in fragments):
        state = {**state, "round_index": 0}  # for a warm start
    has_same_fragments = len(began_at) == len(fragments)
    replica = engine.worker.replica
    whole = {
        **state,
        "began_at": began_at if has_same_fragments else [began_at[0]] * len(fragments),
        "shared": [fragment.shared for fragment in fragments],
        "fragments": [fragment.own for fragment in fragments],
    }
    engine.load_state_dict(own_state(whole, replica))
    for index, (fragment, loaded) in enumerate(zip(engine.fragments, fragments, strict=True)):
        if loaded.ended is not None:
            fragment.apply_saved(own_pending(loaded.ended, index, replica), engine.worker.steps)
            replica.share(index)
    return list(dict.fromkeys(notes))


def _start_at_consensus(engine: Engine, saved: EarlierRun) -> list[str]:
    worker, algorithm = engine.worker, engine.settings.algorithm
    worker.load_counters(saved.state)
    worker.round_index = worker.steps_since_round = 0
    engine.reset()
    notes = saved.forgotten()
    state = engine.fragments[0].state
    start = algorithm.round_start(state)
    if new := [name for name, value in state.items() if value is not start]:
        notes.append(_reset_note(algorithm, new))
    return notes


def _with_means(engine: Engine, saved: EarlierRun, notes: list[str]) -> dict[str, Any]:
    """The state, with means in place of everything that differed between the workers."""
    replica = engine.worker.replica
    names = ["params", "fragments"] if saved.is_shared else ["params", "fragments", "shared"]
    state = {**saved.state, **mean_of_states(engine.worker, saved, names)}
    state.pop("others", None)
    state["buffers"] = replica.buffers.new_flat_on_cpu()
    state["buffers_at_start"] = replica.buffers.new_flat()
    state["running"] = {}
    if saved.consensus_key is None:
        state["params"] = replica.layout.new_flat_on_cpu()
        notes.append("all workers begin at the consensus")
    else:
        first, *others = range(saved.num_workers) if saved.readers is None else saved.readers
        of_whom = f"the mean of the {1 + len(others)} workers' parameters"
        notes.append(
            f"all workers begin at {of_whom if others else f'the parameters of worker {first}'}"
        )
        for fragment, former in zip(state["shared"], saved.state["shared"], strict=True):
            fragment["state"][saved.consensus_key] = former["state"][saved.consensus_key]
    for fragment in state["fragments"]:
        if fragment["pending"] is not None:
            fragment["pending"].update(valid=True, finite=True)
    return state


class _LoadedFragment(NamedTuple):
    """The state of one fragment to load: shared if the algorithm is replicated, and own.

    ``ended`` is a pending round that must be applied at once, if there is one.
    """

    shared: dict[str, Any]
    own: dict[str, Any]
    ended: dict[str, Any] | None


def _fragment(
    engine: Engine, index: int, state: dict[str, Any], saved: EarlierRun, notes: list[str]
) -> _LoadedFragment:
    settings, replica = engine.settings, engine.worker.replica
    algorithm, params = settings.algorithm, state["params"]
    has_same_fragments = len(state["fragments"]) == len(engine.fragments)
    former = index if has_same_fragments else 0
    shared, own = state["shared"][former], dict(state["fragments"][former])
    described = settings.describe()
    changed = {name for name, value in described.items() if saved.settings.get(name) != value}
    algorithm_state = shared["state"]
    if changed & {field.name for field in dataclasses.fields(algorithm)}:
        algorithm_state = _fitted(algorithm, algorithm_state, params, notes)
    if "compression" in changed:
        if own["residual"]:
            notes.append("what compression had left over is dropped")
        own["residual"] = settings.init_residual(replica.layout.new_flat_on_cpu())
    pending = own.pop("pending")
    if pending is not None:
        received, sent_params = shared["received"], own["sent_params"]
        pending = {**pending, "received": received, "sent_params": sent_params}
    if own["sent_params"] is None:
        own["sent_params"] = params
    length = whole_length(index, replica)
    if len(engine.fragments) > 1 and changed & {"schedule", "pattern"}:
        has_same_fragments = False
    if pending is not None and not (has_same_fragments and pending["received"].numel() == length):
        notes.append("a pending round is dropped, because other parts are exchanged")
        pending = None
    if pending is None or _can_stay_pending(engine, index, pending):
        received = None if pending is None else pending["received"]
        loaded = {"state": algorithm_state, "received": received}
        return _LoadedFragment(loaded, {**own, "pending": pending}, None)
    notes.append("a pending round is applied at once")
    loaded = {"state": algorithm_state, "received": None}
    return _LoadedFragment(loaded, {**own, "pending": None}, pending)


def _can_stay_pending(engine: Engine, index: int, pending: dict[str, Any]) -> bool:
    """Whether a pending round of another run can stay pending in this one."""
    needs_sent_params = engine.fragments[index].memory.sent_params is not None
    has_sent_params = pending["sent_params"] is not None
    return engine.settings.is_overlapped and (has_sent_params or not needs_sent_params)


def _fitted(algorithm: Algorithm, old: State, params: Tensor, notes: list[str]) -> State:
    """The state for this algorithm from that of one of its class with other settings."""
    start = algorithm.round_start(old)
    fresh = algorithm.init((params if start is None else start).clone())
    names = _state_names(algorithm)
    kept = {name: value for name, value in old.items() if name in names}
    if dropped := sorted(old.keys() - kept.keys()):
        name = type(algorithm).__name__
        notes.append(f"what {name} remembered ({', '.join(dropped)}) is dropped")
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
    algorithm.update(params, params.new_ones(algorithm.message_length(2)), state, info)
    return names | set(state)


def _reset_note(algorithm: Algorithm, names: list[str]) -> str:
    return f"what {type(algorithm).__name__} remembers ({', '.join(names)}) is reset"

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
from lightning_loco.earlier_run import EarlierRun, mean_of_states
from lightning_loco.engine.engine import Engine


@torch.no_grad()
def resume_from(engine: Engine, saved: EarlierRun) -> list[str]:
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
    if not saved.is_of(engine.settings.algorithm) or "fragments" not in saved.state:
        return _begin_at_consensus(engine, saved)
    notes: list[str] = []
    state = saved.state
    if not saved.fits(engine.worker.group.num_workers):
        state = _with_means(engine, saved, notes)
    fragments = [
        _fragment(engine, index, state, saved, notes) for index in range(len(engine.fragments))
    ]
    began_at = state["began_at"]
    if engine.settings.is_overlapped and all(
        fragment.own["pending"] is None for fragment in fragments
    ):
        state = {**state, "round_index": 0}  # for a warm start
    engine.load_state_dict(
        {
            **state,
            "began_at": began_at
            if len(began_at) == len(fragments)
            else [began_at[0]] * len(fragments),
            "shared": [fragment.shared for fragment in fragments],
            "fragments": [fragment.own for fragment in fragments],
        }
    )
    for rounds, fragment in zip(engine.fragments, fragments, strict=True):
        if fragment.late is not None:
            rounds.apply_saved(fragment.late)
    return list(dict.fromkeys(notes))


def _begin_at_consensus(engine: Engine, saved: EarlierRun) -> list[str]:
    worker, algorithm = engine.worker, engine.settings.algorithm
    worker.go_on_counting(saved.state)
    worker.round_index = worker.steps_since_round = 0
    engine.reset()
    notes = saved.forgotten()
    state = engine.fragments[0].fragment.state
    start = algorithm.restart(state)
    if new := [name for name, value in state.items() if value is not start]:
        notes.append(_anew(algorithm, new))
    return notes


def _with_means(engine: Engine, saved: EarlierRun, notes: list[str]) -> dict[str, Any]:
    """The state, with means in place of all that differed between the workers."""
    replica = engine.worker.replica
    names = ["params", "fragments"] if saved.is_shared else ["params", "fragments", "shared"]
    state = {**saved.state, **mean_of_states(engine.worker, saved, names)}
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
        for fragment, former in zip(state["shared"], saved.state["shared"], strict=True):
            fragment["state"][saved.consensus_key] = former["state"][saved.consensus_key]
    for fragment in state["fragments"]:
        if fragment["pending"] is not None:
            fragment["pending"].update(valid=True, finite=True)
    return state


class _SavedFragment(NamedTuple):
    """What a fragment is to load, and the pending round that must land at once, if there is one."""

    shared: dict[str, Any]
    own: dict[str, Any]
    late: dict[str, Any] | None


def _fragment(
    engine: Engine, index: int, saved_state: dict[str, Any], saved: EarlierRun, notes: list[str]
) -> _SavedFragment:
    settings, fragment = engine.settings, engine.fragments[index].fragment
    algorithm, params = settings.algorithm, saved_state["params"]
    has_same_fragments = len(saved_state["fragments"]) == len(engine.fragments)
    former = index if has_same_fragments else 0
    shared, own = saved_state["shared"][former], dict(saved_state["fragments"][former])
    described = settings.describe()
    changed = {name for name, value in described.items() if saved.settings.get(name) != value}
    state = shared["state"]
    if changed & {field.name for field in dataclasses.fields(algorithm)}:
        state = _fitted(algorithm, state, params, notes)
    if "compression" in changed:
        if own["residual"]:
            notes.append("what compression had left over is dropped")
        own["residual"] = settings.init_residual(engine.worker.replica.layout.new_flat())
    pending = own.pop("pending")
    if pending is not None:
        pending = {**pending, "received": shared["received"], "sent_params": own["sent_params"]}
    if own["sent_params"] is None:
        own["sent_params"] = params
    length = sum(map(len, fragment.parts))
    if len(engine.fragments) > 1 and changed & {"schedule", "pattern"}:
        has_same_fragments = False
    if pending is not None and not (has_same_fragments and pending["received"].numel() == length):
        notes.append("a round that was under way is dropped, because other parts are exchanged")
        pending = None
    if pending is None or _is_overlapped(engine, index, pending):
        received = None if pending is None else pending["received"]
        return _SavedFragment(
            {"state": state, "received": received}, {**own, "pending": pending}, None
        )
    notes.append("a round that was under way is landed at once")
    return _SavedFragment({"state": state, "received": None}, {**own, "pending": None}, pending)


def _is_overlapped(engine: Engine, index: int, pending: dict[str, Any]) -> bool:
    """Whether a pending round of another run can stay under way in this one."""
    needs_sent_params = engine.fragments[index].fragment.sent_params is not None
    return engine.settings.is_overlapped and (
        pending["sent_params"] is not None or not needs_sent_params
    )


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
        algorithm.receive_scalars([algorithm.scalars(state)], state)
    algorithm.update(torch.zeros(2), torch.ones(2), state)
    return names | set(state)


def _anew(algorithm: Algorithm, names: list[str]) -> str:
    return f"what {type(algorithm).__name__} remembers ({', '.join(names)}) begins anew"

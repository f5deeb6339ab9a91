"""Rounds that resume from an earlier run with other settings, or another number of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco._util.text import names_of_entries
from lightning_loco.algorithms import Algorithm, RoundInfo, State
from lightning_loco.engine.fragment_sync import FragmentSync
from lightning_loco.engine.gathered_state import own_state, whole_length
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.model.worker import EarlierRun, Worker


class FittingState:
    """As much of an earlier run's state as fits the fragments of an engine, which are new.

    The states are for whole workers, and each rank takes the elements that it owns.

    Attributes:
        notes: What is dropped or reset, equal on all workers.
    """

    def __init__(
        self,
        saved: EarlierRun,
        worker: Worker,
        settings: RoundSettings,
        fragments: Sequence[FragmentSync],
    ) -> None:
        self._saved = saved
        self._worker = worker
        self._settings = settings
        self._fragments = fragments
        described = settings.describe()
        self._changed = {name for name, v in described.items() if saved.settings.get(name) != v}
        self.notes: list[str] = []

    def find(self) -> dict[str, Any] | None:
        """Return the state to load; None if training starts from the consensus with a new one.

        KeyError if an entry is missing.
        """
        saved, algorithm = self._saved, self._settings.algorithm
        if not saved.is_of(algorithm) or not (saved.has_same_workers or algorithm.replicated):
            return None
        drops_pending = saved.has_pending and not self._can_stay_pending()
        if drops_pending and type(algorithm).on_send is not Algorithm.on_send:
            return None  # its state is in the middle of the round
        state = saved.state
        if not saved.has_same_workers:
            self.notes.append("all workers start from the consensus")
            state = self._with_consensus(state)
        if drops_pending:
            self.notes.append("a pending round is dropped")
        if self._settings.is_overlapped and (drops_pending or not saved.has_pending):
            state = {**state, "round_index": 0}  # for a warm start
        count, began_at = len(self._fragments), state["began_at"]
        fragments = [self._fragment(index, state) for index in range(count)]
        if drops_pending:
            for shared, own in fragments:
                shared["received"] = own["pending"] = None
        whole = {
            **state,
            "began_at": began_at if len(began_at) == count else [began_at[0]] * count,
            "shared": [shared for shared, _ in fragments],
            "fragments": [own for _, own in fragments],
        }
        self.notes = list(dict.fromkeys(self.notes))
        return own_state(whole, self._worker.replica)

    def load_counters(self) -> None:
        """Load the counters alone, of a run that starts from the consensus."""
        worker = self._worker
        worker.load_counters(self._saved.state)
        worker.steps_since_round = 0
        if self._settings.is_overlapped or not self._saved.is_of(self._settings.algorithm):
            worker.round_index = 0

    def note_reset(self) -> None:
        """Note what was dropped and reset when the rounds have started from the consensus."""
        algorithm, state = self._settings.algorithm, self._fragments[0].state
        self.notes = self._saved.dropped_by(algorithm)
        start = algorithm.round_start(state)
        if new := [name for name, value in state.items() if value is not start]:
            self.notes.append(_reset_note(algorithm, new))

    def _with_consensus(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state, with the consensus in place of the parameters and buffers of a worker."""
        replica = self._worker.replica
        return {
            **{name: value for name, value in state.items() if name != "others"},
            "params": replica.layout.new_flat_on_cpu(),
            "buffers": replica.buffers.new_flat_on_cpu(),
            "buffers_at_start": replica.buffers.new_flat(),
            "running": {},
            "fragments": [{**fragment, "sent_params": None} for fragment in state["fragments"]],
        }

    def _fragment(self, index: int, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state of one fragment to load: the algorithm's, and the worker's own."""
        settings, params = self._settings, state["params"]
        former = index if len(state["fragments"]) == len(self._fragments) else 0
        shared, own = dict(state["shared"][former]), dict(state["fragments"][former])
        if self._changed & {field.name for field in dataclasses.fields(settings.algorithm)}:
            shared["state"] = _fitted(settings.algorithm, shared["state"], params, self.notes)
        if "compression" in self._changed or not self._saved.has_same_workers:
            if own["residual"]:
                self.notes.append("the residual of the compression is dropped")
            start = self._worker.replica.layout.new_flat_on_cpu()
            own["residual"] = settings.init_residual(start)
        if own["sent_params"] is None:
            own["sent_params"] = params
        return shared, own

    def _can_stay_pending(self) -> bool:
        """Whether the pending rounds of the earlier run can stay pending in this one."""
        saved, count, replica = self._saved, len(self._fragments), self._worker.replica
        own, shared = saved.state["fragments"], saved.state["shared"]
        has_other_parts = count > 1 and self._changed & {"schedule", "pattern"}
        if len(own) != count or has_other_parts or not self._settings.is_overlapped:
            return False
        return saved.has_same_workers and all(
            shared[index]["received"].numel() == whole_length(index, replica)
            and (own[index]["sent_params"] is not None or fragment.memory.sent_params is None)
            for index, fragment in enumerate(self._fragments)
            if own[index]["pending"] is not None
        )


def _fitted(algorithm: Algorithm, old: State, params: Tensor, notes: list[str]) -> State:
    """The state for this algorithm from the state of an algorithm of its class, set differently."""
    start = algorithm.round_start(old)
    fresh = algorithm.init((params if start is None else start).clone())
    names = _state_names(algorithm)
    kept = {name: value for name, value in old.items() if name in names}
    if dropped := names_of_entries(old.keys() - kept.keys()):
        name = type(algorithm).__name__
        notes.append(f"the state of {name} ({dropped}) is dropped")
    if new := fresh.keys() - kept.keys():
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


def _reset_note(algorithm: Algorithm, names: Iterable[str]) -> str:
    return f"the state of {type(algorithm).__name__} ({names_of_entries(names)}) is reset"

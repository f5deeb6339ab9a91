"""The syncer: the fragments of a run, merged from what learners push, saved, and handed out."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco._util.disk import DISK, Disk
from lightning_loco.algorithms.algorithm import State
from lightning_loco.algorithms.decoupled_diloco import Push as Progress
from lightning_loco.algorithms.persistence import Persistence
from lightning_loco.algorithms.robust import is_finite
from lightning_loco.syncer.contract import Contract, first_difference
from lightning_loco.syncer.merge_rounds import (
    Merge,
    MergeRounds,
    Push,
    Refused,
    Reply,
    Version,
)
from lightning_loco.syncer.snapshot import Snapshot
from lightning_loco.syncer.tape import Tape

log = logging.getLogger(__name__)

_RETRY_SAVE_S = 10.0


class Fragment(NamedTuple):
    """A fragment as it is handed out.

    Attributes:
        epoch: Of the syncer.
        version: Of the fragment.
        params: Its parameters ``(P,)``, which do not change.
    """

    epoch: int
    version: Version
    params: Tensor


class Syncer:
    """Merges the fragments of a run. Its methods can be called by several threads.

    A merge is saved before learners see it, so that a syncer that is killed and started again has
    every version that a learner has received (with ``save_every=1``; otherwise up to ``save_every``
    merges are lost, and learners follow it back).

    Args:
        contract: The method, the settings and the model; equal in all learners and in the folder.
        folder: For the state of this run alone. If a run is there, it is continued. None to save
            nothing: the caller saves :meth:`state_dict`.
        state: Of :meth:`state_dict`, to continue that run; only without a folder.
        save_every: Merges between two saves.
        first_epoch: Epoch of a new run. If folders may be lost, it is to be larger than that of any
            earlier syncer, so that learners that are still there follow this one.
        on_merge: Called with each merge when it is published.
        tape: Where the run is recorded. Default: nowhere.
        clock: The clock.
        disk: Of this machine.

    Attributes:
        rounds: The decisions.
        counts: Numbers since the start: ``joins``, ``merges``, ``pushes``, ``late`` ones among
            them, and requests that were ``refused``.
        persistence: Cosine of the mean pseudo-gradients of the last two merges of the fragment that
            was merged last; None if there is none.
        failure: Why a merge could not be computed, such as MemoryError. Nothing is merged or saved
            any more: start it again.

    Raises:
        ValueError: If the folder is of another run; the message names the first difference.
    """

    def __init__(
        self,
        contract: Contract,
        folder: Path | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        save_every: int = 1,
        first_epoch: int = 1,
        on_merge: Callable[[Merge], object] | None = None,
        tape: Tape | None = None,
        clock: Clock = REAL_CLOCK,
        disk: Disk = DISK,
    ) -> None:
        if type(save_every) is not int or save_every < 1:
            raise ValueError(
                f"save_every counts merges and must be at least 1, got {save_every!r}."
            )
        self.contract, self._method = contract, contract.method
        self._plain_contract = contract.as_plain()
        self._clock, self._save_every, self._on_merge = clock, save_every, on_merge
        self._tape = tape
        self._lock = threading.RLock()
        self._snapshot = None if folder is None else Snapshot(folder, disk)
        self._deltas: dict[Push, Tensor] = {}
        self._unsaved: dict[int, str] = {}
        self._merging: Merge | None = None
        self._saves_again_at = 0.0
        self._is_closed = False
        self.failure: Exception | None = None
        self.persistence: float | None = None
        lengths = contract.lengths
        self._persistence = [Persistence(sum(lengths)) for _ in lengths]
        self.counts = dict.fromkeys(("joins", "merges", "pushes", "late", "refused"), 0)
        self._states: list[State] = []
        self._published: list[Tensor] = []
        saved = None if self._snapshot is None else self._snapshot.load()
        if saved is not None:
            if (difference := first_difference(self._plain_contract, saved.contract)) is not None:
                raise ValueError(f"The folder {folder} is of another run: {difference}.")
            state = {"rounds": saved.rounds, "fragments": saved.fragments}
        self.rounds = MergeRounds(
            contract.settings, None if state is None else state["rounds"], first_epoch
        )
        if state is not None:
            self._states = state["fragments"]
            self._save(self.rounds.committed)  # the epoch
            self._published = [state["outer"].clone() for state in self._states]
            self._record_start()

    @property
    def has_started(self) -> bool:
        """Whether it has parameters: of the folder, or of the first learner."""
        return bool(self._published)

    def start(self, params: Sequence[Tensor]) -> None:
        """Begin a run with these parameters, one vector ``(P,)`` for each fragment.

        Only the first call counts. ValueError if lengths do not fit.
        """
        with self._lock:
            if self.has_started:
                return
            for fragment, (one, length) in enumerate(
                zip(params, self.contract.lengths, strict=True)
            ):
                if len(one) != length:
                    raise ValueError(f"Fragment {fragment} has {len(one)} elements, not {length}.")
            self._states = [self._method.init(one.clone()) for one in params]
            self._unsaved = dict.fromkeys(range(len(params)), "start")
            try:
                self._save(0)
            except OSError as error:
                log.error("The start of the run cannot be saved: %s. Learners try again.", error)
                raise
            self._published = [one.clone() for one in params]
            self._record_start()

    def _record_start(self) -> None:
        if self._tape is not None:
            rounds = self.rounds
            self._tape.write_start(
                self._method, self.contract.tensors, rounds.epoch, rounds.committed, self._states
            )

    def _say(self, text: str, *values: object) -> None:
        """Log who comes and goes, but not the workers of a job: these are always there."""
        log.log(logging.DEBUG if self._snapshot is None else logging.INFO, text, *values)

    def _record(self, event: str, **values: Any) -> None:
        if self._tape is not None:
            self._tape.write(event, **values)

    # -------------------------------------------------------------------- requests

    def join(self, name: str, generation: int, steps: int, contract: Mapping[str, Any]) -> Reply:
        """Take a learner in; see :meth:`MergeRounds.join`.

        Raises:
            Refused: ``"contract"`` if it has another model or other settings, and as above.
        """
        with self._lock, self._counting_refusals():
            if (difference := first_difference(self._plain_contract, contract)) is not None:
                raise Refused("contract", f"Learner {name} does not fit the syncer: {difference}.")
            reply = self.rounds.join(name, generation, steps, self._clock.now())
            self.counts["joins"] += 1
            self._say("Learner %s has joined; there are %d.", name, len(self.rounds.learners))
            self._record("join", learner=name, generation=generation, steps=steps)
            return reply

    def poll(self, name: str, generation: int, epoch: int, steps: int) -> Reply:
        """Tell a learner what is due; see :meth:`MergeRounds.note_steps`.

        Raises:
            Refused: ``"start"`` if there are no parameters yet, and as above.
        """
        with self._lock, self._counting_refusals():
            if not self.has_started:
                raise Refused("start", "The run has not started: send parameters.")
            self.rounds.note_steps(name, generation, epoch, steps, self._clock.now())
            self._advance()
            return self.rounds.reply_to(name)

    def leave(self, name: str, generation: int) -> None:
        """Do not expect a learner any more."""
        with self._lock:
            before = len(self.rounds.learners)
            self.rounds.leave(name, generation)
            if (left := len(self.rounds.learners)) < before:
                self._say("Learner %s has left; there are %d.", name, left)
            self._record("leave", learner=name, generation=generation)
            self._advance()

    def fetch(self, fragment: int) -> Fragment:
        """Return a fragment as it is committed."""
        with self._lock:
            return Fragment(
                self.rounds.epoch, self.rounds.version(fragment), self._published[fragment]
            )

    @contextmanager
    def hearing(self, name: str) -> Iterator[None]:
        """Take a learner for one that is there while its push arrives, however long that takes."""
        with self._lock:
            self.rounds.speaking[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self.rounds.stop_speaking(name, self._clock.now())

    def push(self, push: Push, delta: Tensor) -> None:
        """Take the pseudo-gradient of a learner, which it must not change any more.

        Raises:
            Refused: ``"finite"`` if it holds NaN or infinity, and as :meth:`MergeRounds.push`.
        """
        has_nan = not is_finite(delta)  # before the lock: it reads the whole vector
        with self._lock, self._counting_refusals():
            if has_nan:
                raise Refused(
                    "finite", f"The push of {push.learner} for round {push.due.round} holds NaN."
                )
            is_late = push.due.round <= self.rounds.committed
            self.rounds.push(push, self._clock.now())
            self._deltas[push] = delta
            self.counts["pushes"] += 1
            self.counts["late"] += is_late
            self._advance()

    def advance(self) -> float | None:
        """Do what is due; return after how many seconds to call again, None if after an event."""
        with self._lock:
            self._advance()
            is_saved = self._merging is None
            following = self.rounds.next_time() if is_saved else self._saves_again_at
            return None if following is None else max(following - self._clock.now(), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what a later :class:`Syncer` continues with; pushes are not in it.

        For one without a folder. RuntimeError if it has not started.
        """
        with self._lock:
            if not self.has_started:
                raise RuntimeError("The syncer has no parameters yet.")
            return {"rounds": self.rounds.state_dict(), "fragments": copy.deepcopy(self._states)}

    def status(self) -> dict[str, Any]:
        """Return numbers for a line or a page; what is not known is None."""
        with self._lock:
            rounds, now = self.rounds, self._clock.now()
            return {
                "epoch": rounds.epoch,
                "committed": rounds.committed,
                "learners": {
                    name: {
                        "steps": one.steps,
                        "step_s": one.step_s,
                        "seen_s": now - one.seen_at,
                        "merged_share": one.merged_share(rounds.settings.fragments),
                    }
                    for name, one in sorted(rounds.learners.items())
                },
                "open": {number: sorted(one.pushes) for number, one in sorted(rounds.open.items())},
                "min_quorum": rounds.settings.min_quorum,
                "measured_sync_every": rounds.measured_sync_every,
                "persistence": self.persistence,
                "failure": None if self.failure is None else repr(self.failure),
                **self.counts,
            }

    def close(self) -> None:
        """Save merges that are not saved, and merge nothing any more; OSError if that fails."""
        with self._lock:
            self._is_closed = True
            if self._unsaved and self.has_started and self.failure is None:
                merging = self._merging
                self._save(self.rounds.committed if merging is None else merging.due.round)

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except Refused as error:
            self.counts["refused"] += 1
            self._record("refused", reason=error.reason, text=str(error))
            raise

    # ---------------------------------------------------------------------- merges

    def _advance(self) -> None:
        """Open rounds; compute, save and publish the merges that are due."""
        if self._is_closed or self.failure is not None:
            return
        while (merge := self._merging or self._next_merge()) is not None:
            if self._merging is None:
                try:
                    self._compute(merge)
                except Exception as error:
                    self.failure = error  # a part of the merge may be in the fragment
                    raise
            elif self._clock.now() < self._saves_again_at:
                break
            if not self._commit(merge):
                break
        waiting = self.rounds.waiting_pushes()
        self._deltas = {push: delta for push, delta in self._deltas.items() if push in waiting}

    def _next_merge(self) -> Merge | None:
        before = [*self.rounds.learners]
        merge = self.rounds.advance(self._clock.now())
        for name in before:
            if name not in self.rounds.learners:
                self._say(
                    "Learner %s was silent for %g s and is not expected any more; there are %d.",
                    name,
                    self.rounds.settings.lease_s,
                    len(self.rounds.learners),
                )
                self._record("forgotten", learner=name)
        return merge

    def _compute(self, merge: Merge) -> None:
        self._merging, fragment = merge, merge.due.fragment
        progress = [
            Progress(push.steps, push.tokens, age)
            for push, age in zip(merge.pushes, merge.ages, strict=True)
        ]
        deltas = torch.stack([self._deltas[push] for push in merge.pushes])
        weights, epoch, tape = self._method.weights(progress), self.rounds.epoch, self._tape
        # Before the merge, which may overwrite them.
        kept = None if tape is None else tape.keep_deltas(merge, epoch, deltas)
        state, tensors = self._states[fragment], self.contract.tensors[fragment]
        merged = self._method.combine(deltas, progress, state, tensors, weights)
        self._persistence[fragment].add(merged)
        self.persistence = self._persistence[fragment].end_round().cosine
        outer = self._method.step(merged, state)
        if tape is not None and kept is not None:
            tape.write_merge(merge, epoch, weights, kept, outer)
        self._unsaved[fragment] = f"{self.rounds.epoch}_{merge.due.round}"

    def _commit(self, merge: Merge) -> bool:
        """Save a merge if it is time, and publish it; return False if it could not be saved."""
        number, fragment = merge.due.round, merge.due.fragment
        if number % self._save_every == 0:
            try:
                self._save(number)
            except OSError as error:
                log.error(
                    "The merge of round %d cannot be saved, so learners do not get it: %s. The "
                    "syncer tries again every %.0f s.",
                    number,
                    error,
                    _RETRY_SAVE_S,
                )
                self._saves_again_at = self._clock.now() + _RETRY_SAVE_S
                return False
        self._merging = None
        self.rounds.commit(self._clock.now())
        self._published[fragment] = self._states[fragment]["outer"].clone()
        self.counts["merges"] += 1
        if self._on_merge is not None:
            self._on_merge(merge)
        return True

    def _save(self, merged: int) -> None:
        if self._snapshot is not None:
            state = self.rounds.state_dict(merged)
            self._snapshot.save(self._plain_contract, state, self._states, self._unsaved)
        self._unsaved = {}

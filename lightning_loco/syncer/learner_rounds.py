"""What a learner pushes and receives, without tensors, sockets or threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_loco.syncer.merge_rounds import Due, Push, Reply, Version


class LearnerRounds:
    """The counters of a learner and its answers to the syncer.

    At the boundary between two local steps a learner first applies the fragments that have arrived
    (:meth:`receive`), and then answers what is due (:meth:`answers`). Progress on a fragment that
    it would lose then, since others were merged before it was asked, is pushed first
    (:meth:`leftover`). A push changes no counter: if it is lost, the next one has the same
    progress, and more.

    Args:
        name: Of the learner.
        generation: Of its process.
        fragments: Number of fragments.

    Attributes:
        epoch: Of the syncer that it has joined last; 0 before.
        received: The version of each fragment that it trains on; None before the first.
        steps: Local steps since then, for each fragment.
        tokens: Tokens, or samples, of these steps.
        total_steps: All its local steps.
        lost_steps: Those whose progress was overwritten and not pushed, or whose push was refused,
            since it was last set to 0; a mean over the fragments.
    """

    def __init__(self, name: str, generation: int, fragments: int) -> None:
        self.name = name
        self.generation = generation
        self.epoch = 0
        self.received: list[Version | None] = [None] * fragments
        self.steps = [0] * fragments
        self.tokens = [0.0] * fragments
        self.total_steps = 0
        self.lost_steps = 0.0
        self._asked: tuple[Due, ...] = ()
        self._announced: tuple[Version, ...] = ()
        self._answered: set[Due] = set()
        # The version to which the last push of each fragment was relative.
        self._pushed: list[Version | None] = [None] * fragments
        self._pushed_steps = [0] * fragments
        # The epoch of the syncer that has said last that ``received`` is what it has.
        self._said_by = [0] * fragments

    def state_dict(self) -> dict[str, Any]:
        """Return what the next process of this learner needs; pushes are not in it."""
        return {
            "received": [None if one is None else list(one) for one in self.received],
            "steps": list(self.steps),
            "tokens": list(self.tokens),
            "total_steps": self.total_steps,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`, before joining."""
        self.received = [None if one is None else Version(*one) for one in saved["received"]]
        self.steps, self.tokens = list(saved["steps"]), list(saved["tokens"])
        self.total_steps = saved["total_steps"]

    def count(self, tokens: float) -> None:
        """Count a local step."""
        self.total_steps += 1
        for fragment in range(len(self.steps)):
            self.steps[fragment] += 1
            self.tokens[fragment] += tokens

    def listen(self, reply: Reply) -> list[int]:
        """Note what the syncer has said; return the fragments to fetch."""
        if reply.epoch != self.epoch:
            self.epoch = reply.epoch
            self._answered.clear()
            # Pushes that waited for their merge were lost with the syncer before.
            self._pushed = [None] * len(self._pushed)
        self._asked, self._announced = reply.asked, reply.versions
        fetched = []
        for fragment, version in enumerate(reply.versions):
            if self.received[fragment] == version:
                self._said_by[fragment] = self.epoch
            elif self.is_news(self.epoch, fragment, version):
                fetched.append(fragment)
        return fetched

    def is_news(self, epoch: int, fragment: int, version: Version) -> bool:
        """Return whether a version that has arrived is to be applied.

        After a restart of the syncer, ``epoch``, it may be older than the one that was received: if
        that one was not saved, nothing relative to it can be merged. The epoch is smaller than
        before if the folder of the syncer was lost and the clock was set back.
        """
        own = self.received[fragment]
        is_later = own is None or version.round > own.round
        return epoch == self.epoch and (is_later or self._said_by[fragment] != epoch)

    def leftover(self, fragment: int, version: Version) -> Push | None:
        """Return the push, late, of progress of which a version that has arrived has nothing.

        None without progress, or if it was pushed. At the end of training, ``version`` is the one
        that was received.
        """
        if fragment not in self.unsent:
            return None
        return self._push(Due(version.round, fragment, 0))

    @property
    def unsent(self) -> list[int]:
        """The fragments with progress of which nothing was pushed."""
        return [
            fragment
            for fragment, base in enumerate(self.received)
            if base is not None and self.steps[fragment] > 0 and self._pushed[fragment] != base
        ]

    def receive(self, fragment: int, version: Version) -> None:
        """Note that a fragment is applied, which replaces the progress on it."""
        self._drop(fragment)
        self.received[fragment], self._said_by[fragment] = version, self.epoch

    def drop_progress(self) -> None:
        """Note that all fragments are again as they were received."""
        for fragment in range(len(self.steps)):
            self._drop(fragment)

    def _drop(self, fragment: int) -> None:
        base = self.received[fragment]
        was_pushed = base is not None and self._pushed[fragment] == base
        kept = self._pushed_steps[fragment] if was_pushed else 0
        self.lost_steps += (self.steps[fragment] - kept) / len(self.steps)
        self.steps[fragment], self.tokens[fragment] = 0, 0.0

    @property
    def is_asked(self) -> bool:
        """Whether :meth:`answers` returns pushes."""
        return bool(self._unanswered())

    def _unanswered(self) -> list[Due]:
        return [
            due
            for due in self._asked
            if due not in self._answered
            and self.steps[due.fragment] > 0
            # Else it is on its way, and a push relative to the one before would be refused.
            and self.received[due.fragment] == self._announced[due.fragment]
        ]

    def answers(self) -> list[Push]:
        """Return the pushes for what is due: once each, and only with progress."""
        self._answered &= set(self._asked)
        unanswered = self._unanswered()
        self._answered.update(unanswered)
        return [self._push(due) for due in unanswered]

    def _push(self, due: Due) -> Push:
        fragment = due.fragment
        base, steps, tokens = self.received[fragment], self.steps[fragment], self.tokens[fragment]
        assert base is not None
        self._pushed[fragment], self._pushed_steps[fragment] = base, steps
        return Push(self.name, self.generation, self.epoch, due, base, steps, tokens)

    def refused(self, push: Push) -> None:
        """Note that a push will not be merged; a later one on the same version may be."""
        if self.received[push.due.fragment] == push.base:
            self._pushed_steps[push.due.fragment] = 0
        else:
            self.lost_steps += push.steps / len(self.steps)

    def lost(self, due: Due) -> None:
        """Note that a push has not arrived: it is repeated with what there is then."""
        self._answered.discard(due)
        self._pushed[due.fragment] = None

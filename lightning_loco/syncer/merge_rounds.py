"""Which fragment is merged when, and whose pushes are in it.

A syncer has no sockets, threads or clock here: events come in with their time, and
:meth:`MergeRounds.advance` returns the merge that is to be computed. Round t (from 1) merges
fragment (t - 1) mod P, and rounds are committed in their order, so the number of the last committed
round says which version of each fragment there is.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Reason = Literal[
    "epoch",
    "learner",
    "generation",
    "late",
    "not open",
    "attempt",
    "duplicate",
    "base",
    "steps",
    "finite",
    "contract",
    "start",
]
"""Why a request was refused: see :meth:`MergeRounds.note_steps` and :meth:`MergeRounds.push`."""

_NEW = 0.5
"""Share of the newest value in a moving average."""

_MOST = 3.0
"""How many times longer than before a local step is taken to be: the rest is a validation, say."""


class Refused(Exception):
    """A request that the syncer does not accept.

    Attributes:
        reason: In one word, for the program of the learner.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Version(NamedTuple):
    """A version of a fragment.

    Attributes:
        epoch: Of the syncer that merged it. A syncer that was restarted has the next epoch, so that
            a version that was lost is not taken for the one that took its place.
        round: In which it was merged; 0 for the start.
    """

    epoch: int
    round: int


class Due(NamedTuple):
    """A push that a learner is asked for.

    Attributes:
        round: Number of the round; 0 for a push, at the end of training, of a fragment that was
            never merged.
        fragment: To push.
        attempt: From 0; pushes of an earlier attempt are not used.
    """

    round: int
    fragment: int
    attempt: int


class Push(NamedTuple):
    """What a learner says of the pseudo-gradient that it pushes.

    Attributes:
        learner: Name of the learner.
        generation: Of the learner: another one in each process that has its name.
        epoch: Of the syncer, as the learner knows it.
        due: What the learner was asked for.
        base: The version of the fragment to which the pseudo-gradient is relative.
        steps: Local steps in it.
        tokens: Tokens, or samples, of these steps.
    """

    learner: str
    generation: int
    epoch: int
    due: Due
    base: Version
    steps: int
    tokens: float


class Reply(NamedTuple):
    """The answer to a learner that joins or polls.

    Attributes:
        epoch: Of the syncer.
        asked: What the learner is to push.
        versions: The committed version of each fragment.
    """

    epoch: int
    asked: tuple[Due, ...]
    versions: tuple[Version, ...]


class Merge(NamedTuple):
    """A merge that is to be computed, saved, and confirmed by :meth:`MergeRounds.commit`.

    Attributes:
        due: Which round it is of.
        pushes: Sorted by the names of the learners. One that was late for the round before may be
            there beside a later one of its learner.
        ages: For each push, how often the fragment was merged since its base.
    """

    due: Due
    pushes: tuple[Push, ...]
    ages: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MergeSettings:
    """When fragments are merged.

    Args:
        fragments: Number of fragments P.
        sync_every: Local steps between two merges of a fragment that the syncer aims at.
        min_quorum: Number of learners whose pushes every merge has at least.
        in_flight: Most rounds that are open at once. Default: as many as begin within ``delay``
            local steps, but at least 2.
        delay: Local steps that a learner may take until it gets what it has pushed for; the syncer
            waits for more pushes than the quorum in what is left of them.
        grace: Share of what is left that is waited, in [0, 1]; with 0 nothing.
        retry_s: Seconds after which the pushes of a round without a quorum are dropped and asked
            for again.
        lease_s: Seconds after which a silent learner is not expected any more.
        keep_late: Whether a push that comes too late for its round is in the next merge of its
            fragment. Otherwise it is refused, and a learner whose local steps take much longer than
            those of the others is never in a merge.
        max_age: Pushes on older versions are refused; counts merges of the fragment.

    Raises:
        ValueError: If a number is out of range.
    """

    fragments: int = 24
    sync_every: int = 24
    min_quorum: int = 1
    in_flight: int | None = None
    delay: int = 2
    grace: float = 0.8
    retry_s: float = 900.0
    lease_s: float = 90.0
    keep_late: bool = True
    max_age: int = 32

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("fragments", "sync_every", "min_quorum", "in_flight"):
            value = getattr(self, name)
            if value is None and name == "in_flight":
                continue
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer and at least 1, got {value!r}.")
        if not 0 <= self.grace <= 1:
            raise ValueError(f"grace is a share and must be in [0, 1], got {self.grace}.")
        for name in ("retry_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} is in seconds and must be positive, got {getattr(self, name)}."
                )
        for name in ("delay", "max_age"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")

    @property
    def most_open(self) -> int:
        """Most rounds that are open at once: one of a fragment.

        Example:
            >>> MergeSettings().most_open, MergeSettings(sync_every=8, delay=3).most_open
            (2, 9)
        """
        if self.in_flight is not None:
            return min(self.in_flight, self.fragments)
        by_pace = math.ceil(self.delay * self.fragments / self.sync_every)
        return min(max(2, by_pace), self.fragments)


@dataclasses.dataclass
class Learner:
    """What the syncer knows of a learner.

    Attributes:
        generation: Of its process.
        seen_at: When it was last heard of.
        steps: Its local steps, as it has said last.
        stepped_at: When it said so; not later if it has made no step since.
        step_s: Moving average of the seconds of a local step; None before the second report.
        counted_from: Its local steps before the first one that :meth:`merged_share` counts.
        merged_steps: Local steps in merges since then, summed over the fragments.
    """

    generation: int
    seen_at: float
    steps: int
    stepped_at: float
    step_s: float | None = None
    counted_from: int = 0
    merged_steps: int = 0

    def note_merged(self, steps: int) -> None:
        """Note that a push is merged; its steps may be from before the learner has joined."""
        self.counted_from = min(self.counted_from, self.steps - steps)
        self.merged_steps += steps

    def merged_share(self, fragments: int) -> float | None:
        """Return the share of its local steps that are in merges; None before the first step.

        The last ones are not yet in the merges of all fragments.
        """
        steps = self.steps - self.counted_from
        return min(self.merged_steps / fragments / steps, 1.0) if steps > 0 else None


@dataclasses.dataclass
class OpenRound:
    """A round whose merge is not committed.

    Attributes:
        due: What learners are asked for.
        opened_at: When it was opened.
        tried_at: When its present attempt began.
        expected: Names of the learners that were there then.
        pushes: Those that were in time, by the names of their learners.
        merges_at: When it is merged, at the latest; None without a quorum.
        is_closed: Whether it takes no more pushes.
    """

    due: Due
    opened_at: float
    tried_at: float
    expected: frozenset[str]
    pushes: dict[str, Push] = dataclasses.field(default_factory=dict)
    merges_at: float | None = None
    is_closed: bool = False


class MergeRounds:
    """The decisions of a syncer.

    Args:
        settings: When fragments are merged.
        state: Of :meth:`state_dict`, if the syncer was restarted. The new :meth:`state_dict` must
            be saved before a learner is answered, so that the next restart has another epoch.
        first_epoch: The epoch without a state.

    Attributes:
        epoch: Of this syncer.
        committed: The last committed round; 0 if there is none.
        learners: Those that are there, by name.
        open: The open rounds, by number.
        speaking: How many messages of a learner are arriving: then it is not silent.
        measured_sync_every: Local steps between the last two merges of a fragment; None before.
    """

    def __init__(
        self,
        settings: MergeSettings,
        state: Mapping[str, Any] | None = None,
        first_epoch: int = 1,
    ) -> None:
        self.settings = settings
        self.epoch = first_epoch
        self.committed = 0
        self.learners: dict[str, Learner] = {}
        self.open: dict[int, OpenRound] = {}
        self.speaking: Counter[str] = Counter()
        self.measured_sync_every: float | None = None
        # The epoch of the rounds from a number on, in increasing order.
        self._epochs = [(0, first_epoch)]
        self._merging: Merge | None = None
        # Pushes that were late, for the next merge of their fragment.
        self._late: dict[int, dict[tuple[str, Version], Push]] = {}
        # For a learner and a fragment, the base of the last push in a merge: also for the next
        # process of the learner, which may continue from before that push, and of the syncer.
        self._used: dict[tuple[str, int], Version] = {}
        # Mean local steps of the learners: all of them, and those since the last round was opened.
        self._progress = self._since_opening = 0.0
        self._merged_at_progress: dict[int, float] = {}
        self._quorum_s = self._merge_s = self._merge_began = 0.0
        if state is not None:
            self.committed = state["committed"]
            self.epoch = max(state["epoch"] + 1, first_epoch)
            self._epochs = [tuple(entry) for entry in state["epochs"]]
            self._epochs.append((self.committed + 1, self.epoch))
            self._used = {
                (name, fragment): Version(*base) for name, fragment, base in state["used"]
            }

    def state_dict(self, merged: int | None = None) -> dict[str, Any]:
        """Return what a restarted syncer needs, to be saved with the fragments.

        Open rounds are not in it: learners push again.

        Args:
            merged: The round whose merge is in the fragments, before it is committed.
        """
        committed = self.committed if merged is None else merged
        used = [[name, fragment, [*base]] for (name, fragment), base in self._used.items()]
        return {
            "epoch": self.epoch,
            "committed": committed,
            "epochs": list(self._epochs),
            "used": used,
        }

    # ---------------------------------------------------------------------- versions

    def version(self, fragment: int) -> Version:
        """Return the committed version of a fragment."""
        count = self.settings.fragments
        latest = self.committed - (self.committed - 1 - fragment) % count
        return self._version_of(max(latest, 0))

    def versions(self) -> tuple[Version, ...]:
        """Return the committed versions of all fragments."""
        return tuple(self.version(fragment) for fragment in range(self.settings.fragments))

    def _version_of(self, number: int) -> Version:
        epoch = next(epoch for first, epoch in reversed(self._epochs) if first <= number)
        return Version(epoch, number)

    def _merges_until(self, number: int) -> int:
        """Return how often a fragment has been merged up to a round of it, or to the start."""
        return (number - 1) // self.settings.fragments + 1

    # ---------------------------------------------------------------------- learners

    def join(self, name: str, generation: int, steps: int, now: float) -> Reply:
        """Take a learner in, or its next process; it is asked for nothing yet.

        Pushes of its earlier processes stay, since their local steps were made.

        Args:
            name: Unique name.
            generation: Larger than that of an earlier process of this name.
            steps: Local steps that it has made.
            now: The time.

        Raises:
            Refused: If a newer process has this name.
        """
        known = self.learners.get(name)
        if known is not None and known.generation > generation:
            raise Refused("generation", f"A newer process than this one is learner {name}.")
        self.learners[name] = Learner(generation, now, steps, now, counted_from=steps)
        return Reply(self.epoch, (), self.versions())

    def stop_speaking(self, name: str, now: float) -> None:
        """Note that a message of a learner has arrived, or has broken off."""
        self.speaking[name] -= 1
        self.speaking += Counter()  # without zeros
        if name in self.learners:
            self.learners[name].seen_at = now

    def leave(self, name: str, generation: int) -> None:
        """Do not expect a learner any more; what it has pushed stays."""
        known = self.learners.get(name)
        if known is not None and known.generation == generation:
            del self.learners[name]

    def note_steps(self, name: str, generation: int, epoch: int, steps: int, now: float) -> None:
        """Note a learner's progress, which may be reason for a round.

        Args:
            name: Of the learner.
            generation: Of the learner.
            epoch: Of the syncer, as the learner knows it.
            steps: Local steps that the learner has made.
            now: The time.

        Raises:
            Refused: ``"epoch"`` or ``"learner"`` if it must join again, since the syncer was
                restarted or has not heard of it for long; ``"generation"`` if a newer process has
                its name.
        """
        learner = self._known(name, generation, epoch)
        learner.seen_at = now
        made = steps - learner.steps
        if made > 0:
            step_s = (now - learner.stepped_at) / made
            before = learner.step_s
            if before is None:
                learner.step_s = step_s
            else:
                learner.step_s = before + _NEW * (min(step_s, _MOST * before) - before)
            learner.steps, learner.stepped_at = steps, now
            share = made / len(self.learners)
            self._progress += share
            most = self.settings.most_open * self._gap
            self._since_opening = min(self._since_opening + share, most)

    def reply_to(self, name: str) -> Reply:
        """Return what a learner is asked for, and the committed versions."""
        asked = (
            one.due for one in self.open.values() if not one.is_closed and name not in one.pushes
        )
        return Reply(self.epoch, tuple(asked), self.versions())

    def _known(self, name: str, generation: int, epoch: int) -> Learner:
        if epoch != self.epoch:
            raise Refused("epoch", f"The syncer has epoch {self.epoch}, and not {epoch}: join.")
        learner = self.learners.get(name)
        if learner is None:
            raise Refused("learner", f"No learner {name} is known: join.")
        if learner.generation != generation:
            raise Refused("generation", f"A newer process than this one is learner {name}.")
        return learner

    # ---------------------------------------------------------------------- pushes

    def push(self, push: Push, now: float) -> None:
        """Take a push, whose pseudo-gradient is complete and finite.

        A learner that has not received what its last push was merged into would send the same
        progress again, so a base is merged once.

        Raises:
            Refused: As :meth:`note_steps`; ``"late"`` if the round takes no more pushes, unless
                late ones are kept, ``"not open"`` if it is in the future, ``"attempt"`` if pushes
                are asked for again, ``"duplicate"`` if there is one of this learner, ``"base"`` if
                it is relative to a version that is not, or no longer, one of this fragment, or of
                which a push was merged, and ``"steps"`` without progress.
        """
        learner = self._known(push.learner, push.generation, push.epoch)
        learner.seen_at = now
        number = push.due.round
        said = f"The push of {push.learner} for round {number}"
        if push.steps < 1 or not 0 < push.tokens < math.inf:
            raise Refused("steps", f"{said} has {push.steps} steps and {push.tokens} tokens.")
        one = self.open.get(number)
        if one is not None and push.learner in one.pushes:
            raise Refused("duplicate", f"{said} is there.")
        if number <= self.committed or (one is not None and one.is_closed):
            self._keep_late(push, said)
            return
        if one is None:
            raise Refused("not open", f"{said} is early: no such round is open.")
        if push.due != one.due:
            raise Refused("attempt", f"{said} is of {push.due}, and {one.due} is asked for.")
        self._check_base(push, said)
        one.pushes[push.learner] = push
        if one.merges_at is None and len(one.pushes) >= self.settings.min_quorum:
            taken = now - one.opened_at
            self._quorum_s += _NEW * (taken - self._quorum_s)
            one.merges_at = now + self._grace_s(one.expected)

    def _keep_late(self, push: Push, said: str) -> None:
        if not self.settings.keep_late:
            raise Refused("late", f"{said} is late.")
        self._check_base(push, said)
        late = self._late.setdefault(push.due.fragment, {})
        before = late.get(_progress_of(push))
        if before is not None and push.steps <= before.steps:
            raise Refused("duplicate", f"{said} is there.")
        late[_progress_of(push)] = push

    def _check_base(self, push: Push, said: str) -> None:
        base, fragment = push.base, push.due.fragment
        current = self.version(fragment)
        is_of_fragment = base.round == 0 or (base.round - 1) % self.settings.fragments == fragment
        is_past = 0 <= base.round <= current.round
        if not (is_of_fragment and is_past and base == self._version_of(base.round)):
            raise Refused(
                "base", f"{said} is relative to {base}, and fragment {fragment} is at {current}."
            )
        used = self._used.get((push.learner, fragment))
        if used is not None and base.round <= used.round:
            raise Refused("base", f"{said} is relative to {base}, of which a push was merged.")
        age = self._merges_until(current.round) - self._merges_until(base.round)
        if age > self.settings.max_age:
            raise Refused("base", f"{said} is {age} merges old.")

    def _grace_s(self, expected: frozenset[str]) -> float:
        """Return how long more pushes than the quorum are waited for, at most a local step."""
        known = [self.learners[name].step_s for name in expected if name in self.learners]
        steps_s = [step_s for step_s in known if step_s is not None]
        if not steps_s:
            return 0.0
        step_s = sum(steps_s) / len(steps_s)
        slack = self.settings.delay * step_s - (self._quorum_s + self._merge_s)
        return min(max(self.settings.grace * slack, 0.0), step_s)

    # ---------------------------------------------------------------------- merges

    @property
    def _gap(self) -> float:
        """Local steps between two rounds."""
        return self.settings.sync_every / self.settings.fragments

    def advance(self, now: float) -> Merge | None:
        """Do what is due by now; return a merge that is to be computed.

        It is called after every event, and at :meth:`next_time`.
        """
        for name, learner in list(self.learners.items()):
            if now - learner.seen_at >= self.settings.lease_s and name not in self.speaking:
                del self.learners[name]
        for one in self.open.values():
            self._try_again_or_close(one, now)
        self._open_due(now)
        following = self.open.get(self.committed + 1)
        if self._merging is not None or following is None or not following.is_closed:
            return None
        self._merge_began = now
        pushes = self._pushes_of(following)
        merges = self._merges_until(self.version(following.due.fragment).round)
        ages = tuple(merges - self._merges_until(push.base.round) for push in pushes)
        self._merging = Merge(following.due, tuple(pushes), ages)
        return self._merging

    def _pushes_of(self, one: OpenRound) -> list[Push]:
        """Return the pushes of a merge, and note that they are used."""
        fragment, found = one.due.fragment, self._late.pop(one.due.fragment, {})
        found.update((_progress_of(push), push) for push in one.pushes.values())
        pushes = [found[progress] for progress in sorted(found)]
        for push in pushes:
            self._used[push.learner, fragment] = push.base
        oldest = self._merges_until(one.due.round) - self.settings.max_age
        self._used = {
            key: base
            for key, base in self._used.items()
            if key[1] != fragment or self._merges_until(base.round) >= oldest
        }
        return pushes

    def waiting_pushes(self) -> set[Push]:
        """Return the pushes that may come to be merged; pseudo-gradients of others can go."""
        merging = set() if self._merging is None else {*self._merging.pushes}
        in_time = {push for one in self.open.values() for push in one.pushes.values()}
        return merging | in_time.union(*(late.values() for late in self._late.values()))

    def _try_again_or_close(self, one: OpenRound, now: float) -> None:
        if one.is_closed:
            return
        if one.merges_at is None:
            if now - one.tried_at >= self.settings.retry_s:
                one.pushes.clear()
                one.due = one.due._replace(attempt=one.due.attempt + 1)
                one.tried_at = now
            return
        missing = (one.expected & self.learners.keys()) - one.pushes.keys()
        one.is_closed = now >= one.merges_at or not missing

    def _open_due(self, now: float) -> None:
        settings = self.settings
        while (
            len(self.open) < settings.most_open
            and self._since_opening > self._gap * (1 - 1e-9)  # shares of steps are rounded
            and len(self.learners) >= settings.min_quorum
        ):
            number = self.committed + len(self.open) + 1
            due = Due(number, (number - 1) % settings.fragments, 0)
            self.open[number] = OpenRound(due, now, now, frozenset(self.learners))
            self._since_opening -= self._gap

    def commit(self, now: float) -> None:
        """Publish the merge that :meth:`advance` has returned: it was computed and saved."""
        assert self._merging is not None
        for push in self._merging.pushes:
            learner = self.learners.get(push.learner)
            if learner is not None and learner.generation == push.generation:
                learner.note_merged(push.steps)
        self.committed, fragment, _ = self._merging.due
        self._merging = None
        del self.open[self.committed]
        self._merge_s += _NEW * (now - self._merge_began - self._merge_s)
        before = self._merged_at_progress.get(fragment)
        if before is not None:
            self.measured_sync_every = self._progress - before
        self._merged_at_progress[fragment] = self._progress

    def next_time(self) -> float | None:
        """Return when :meth:`advance` has something to do if there is no event before."""
        times = [
            one.seen_at + self.settings.lease_s
            for name, one in self.learners.items()
            if name not in self.speaking
        ]
        for one in self.open.values():
            if not one.is_closed:
                retry_at = one.tried_at + self.settings.retry_s
                times.append(retry_at if one.merges_at is None else one.merges_at)
        return min(times, default=None)


def _progress_of(push: Push) -> tuple[str, Version]:
    """Return what is equal for two pushes of which one has all that the other has."""
    return push.learner, push.base

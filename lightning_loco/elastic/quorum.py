"""What a quorum means: who exchanges with whom, and who brings the state to whom.

Every member makes its plan of the same words of all members, and so all make the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_loco.elastic.lighthouse import Member, Quorum
from lightning_loco.elastic.store import is_address

NO_STATE = -1
"""The round of a worker that knows nothing of the run, or whose knowledge is out of date."""


def resumed(round_index: int) -> int:
    """What a worker tells in place of its round, that knows the run from a checkpoint and joins it.

    Those that make rounds are ahead of it, whatever they have made: it has no message for them.
    """
    return NO_STATE - 1 - round_index


class Told(NamedTuple):
    """What a worker says of itself when it asks to take part.

    Attributes:
        round_index: The round that it begins; :data:`NO_STATE` if it knows nothing, and
            :func:`resumed` if it only joins, with a state from a checkpoint.
        group: The group that it has open; empty if it has none.
        store: ``"host:port"`` of a key-value store that it serves.
        data: The first position in the stream of samples that it cannot have taken.
        run: Fingerprint of settings and schema.
        enough: The least number of members with which it makes this round.
        made: The group in which it made the round before; empty if it knows it from a checkpoint.
        received: Group and members of an exchange of this round that has failed after this worker
            had received it; empty if there is none.
        awaited: Members of the exchange before that are alive, as far as it can see, and that a
            lighthouse which was started again may not have heard of yet.
    """

    round_index: int
    group: str
    store: str
    data: int
    run: str
    enough: int
    made: str
    received: list[str]
    awaited: list[str]


class Plan(NamedTuple):
    """What this worker does in one quorum.

    Attributes:
        group: Name of the group that carries the exchange.
        names: Of all members, in order.
        own: This worker's place among them.
        stores: ``"host:port"`` of the key-value store of each member; those of a new group find
            each other at the donor's.
        is_new: Whether the group has to be made.
        donor: Place of the member that brings the state to those in ``newcomers``.
        newcomers: Places of those who need it.
        round_index: The round that is made; :data:`NO_STATE` if none is: a run begins or goes on.
        data: Where the members of a new group go on in the stream of samples.
        enough: With fewer members the round waits: what the least demanding of them has told.
        drifted: Places of those newcomers whose state was found to be another one than the others'.
        counted: Places of those for whom the exchange counts that has failed; if there are any, no
            other is made in this quorum.
        strangers: Members whose request is malformed; they take no part.
        missing: Whom all those who know the run await, and who has not come: the round waits.
    """

    group: str
    names: tuple[str, ...]
    own: int
    stores: tuple[str, ...]
    is_new: bool
    donor: int
    newcomers: tuple[int, ...]
    round_index: int
    data: int
    enough: int = 1
    drifted: tuple[int, ...] = ()
    counted: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()


class Commit(NamedTuple):
    """What this worker has received, before it knows that all have.

    Attributes:
        plan: Of the exchange.
        received: What the messages have come to; None if this worker needs the state as well.
        statuses: Of all members.
    """

    plan: Plan
    received: Tensor | None
    statuses: Tensor

    @property
    def words(self) -> list[str]:
        """The group and its members, as this worker tells them."""
        return [self.plan.group, *self.plan.names]


class OtherRun(Exception):
    """The run is another one than this worker's.

    Attributes:
        who: A member of the run.
        store: That member's key-value store.
    """

    def __init__(self, who: str, store: str) -> None:
        super().__init__(who)
        self.who = who
        self.store = store


def read(member: Member) -> Told | None:
    """What a member has said; None if it is not in the form and the range of :class:`Told`."""
    try:
        told = Told(**member.told)
    except TypeError:
        return None
    kinds = (int, str, str, int, str, int, str, list, list)
    is_told = all(type(value) is kind for value, kind in zip(told, kinds, strict=True))
    if not is_told or not all(type(word) is str for word in (*told.received, *told.awaited)):
        return None
    numbers = told.round_index, told.data, told.enough
    is_sound = is_address(told.store) and all(abs(number) < 2**53 for number in numbers)
    return told if is_sound else None


def make_plan(quorum: Quorum, own_name: str) -> Plan:
    """What to do in a quorum.

    Who is ahead knows the run, and the first of them brings the state to all others: they take part
    without weight. Of those who are ahead, but made the round before in other groups, and so have
    another state, most know the run. If nobody makes a round, the run begins with the state of the
    first of those who have made most, or of the first member if nobody knows anything.
    Strangers, whose words are none, take no part.

    Args:
        quorum: Who has come, in the same order for all.
        own_name: This worker's.

    Raises:
        RuntimeError: If this worker's own words are not among those of the members.
        OtherRun: If this worker has another model or other settings than the one that brings the
            state; the others go on without it.
    """
    said = {member.name: read(member) for member in quorum.members}
    told = {name: one for name, one in said.items() if one is not None}
    if own_name not in told:
        raise RuntimeError(f"The lighthouse's answer lacks what this worker, {own_name}, has sent.")
    rounds = [one.round_index for one in told.values()]
    ahead = max(rounds) if max(rounds) > NO_STATE else min(rounds)
    in_front = [name for name, one in told.items() if one.round_index == ahead]
    made = Counter(told[name].made for name in in_front).most_common(1)[0][0]
    donor = next(name for name in in_front if told[name].made == made)
    reference = told[donor].run
    names = tuple(name for name, one in told.items() if one.run == reference)
    if own_name not in names:
        raise OtherRun(donor, told[donor].store)
    open_groups = {told[name].group for name in names}
    open_group = min(open_groups)
    is_new = len(open_groups) > 1 or not is_group_of(open_group, len(names))
    knowing = [donor] if ahead == NO_STATE else [n for n in in_front if told[n].made == made]
    counted = counting({name: told[name] for name in names})
    missing = set.intersection(*(set(told[name].awaited) for name in knowing)) - told.keys()
    return Plan(
        group=f"{quorum.number}/{len(names)}" if is_new else open_group,
        names=names,
        own=names.index(own_name),
        stores=tuple(told[name].store for name in names),
        is_new=is_new,
        donor=names.index(donor),
        newcomers=tuple(i for i, name in enumerate(names) if name not in knowing),
        round_index=max(ahead, NO_STATE),
        data=max(told[name].data for name in names),
        enough=min(told[name].enough for name in names),
        counted=tuple(i for i, name in enumerate(names) if name in counted),
        missing=tuple(sorted(missing)),
        strangers=tuple(name for name, one in said.items() if one is None),
    )


def counting(told: Mapping[str, Told]) -> set[str]:
    """Names of those for whom an exchange counts that has failed for them.

    An exchange ends as a three-phase commit does. Each member receives what the messages have come
    to, and all statuses; it says so to the others; and once all have said so, it lands. If one is
    lost meanwhile, some may have landed without the others' knowing. These ask again who takes
    part, and tell what they have received. If all who were members and are there now have received
    it, it counts for them, whatever the lost one has done. If one of them has not, nobody can have
    landed: it is repeated.

    Args:
        told: What all who are there now have told.
    """
    return {name for name, one in told.items() if one.received and _counts(one, told)}


def _counts(one: Told, told: Mapping[str, Told]) -> bool:
    group, *members = one.received
    return all(
        _agrees(other, one.round_index, group, name in members) for name, other in told.items()
    )


def _agrees(other: Told, round_index: int, group: str, is_member: bool) -> bool:
    """Whether a worker has made or received a round in a group, or has no say in it."""
    if other.round_index > round_index:
        return other.round_index == round_index + 1 and other.made == group
    if other.round_index == round_index and is_member:
        return other.received[:1] == [group]
    return True


def is_group_of(group: str, count: int) -> bool:
    """Whether an open group holds so many members, and so exactly those who all have it open."""
    return group.endswith(f"/{count}")


def difference(own: dict[str, Any], other: dict[str, Any], who: str) -> str:
    """The first thing in which this worker's settings differ from those of the run."""
    for key in [*other, *own]:
        if own.get(key) != other.get(key):
            return (
                f"This worker cannot join: {key} is {own.get(key)!r:.300} here and "
                f"{other.get(key)!r:.300} in the run (as {who} has it). Start it with the same "
                "model and settings."
            )
    return "This worker cannot join: its settings differ from those of the run."

"""The plan of a round: its members, the sender of the run's state, and the receivers.

Every member makes its plan from the same information about all members, so all plans agree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from typing_extensions import Self

NO_STATE = -1
"""The round index of a worker that has no state of the run, or an outdated one."""

_LABEL = r"[A-Za-z0-9_:%\[\]-]{1,63}"
_ADDRESS = re.compile(rf"(?=.{{1,260}}$){_LABEL}(\.{_LABEL})*\.?:\d{{1,5}}")


def resumed_round(round_index: int) -> int:
    """Return the round index that a worker sends when it joins with the state of a checkpoint.

    It is less than the index of every round under way, for which this worker has no message.
    """
    return NO_STATE - 1 - round_index


def is_address(text: str) -> bool:
    """Whether a text is ``"host:port"`` with a host name that can be looked up."""
    return _ADDRESS.fullmatch(text) is not None and int(text.rpartition(":")[2]) < 2**16


class Member(NamedTuple):
    """A worker in a quorum.

    Attributes:
        name: Its replica id, never used by another worker.
        data: Its request as plain values, not checked yet.
    """

    name: str
    data: dict[str, Any]


class Quorum(NamedTuple):
    """The workers that asked for the same round.

    Attributes:
        id: Unique, also after a restart of the lighthouse.
        members: In the same order on all workers.
    """

    id: str
    members: list[Member]


class MemberInfo(NamedTuple):
    """The request of a worker to take part in a round.

    Attributes:
        round_index: The round that it starts; :data:`NO_STATE` if it has no state, and
            :func:`resumed_round` if it joins with the state of a checkpoint.
        open_group: Name of its process group; empty if it has none.
        stores: ``"host:port"`` of the key-value stores that its ranks serve, by place.
        data_position: First position in the stream of samples that it cannot have used.
        run_hash: Fingerprint of its settings and the schema of its parameters.
        min_members: Least number of members for this round.
        last_group: Group of its previous round; empty if its state is from a checkpoint.
        received: Group and members of an exchange of this round that failed after this worker had
            received all messages; empty if there is none.
        awaited: Members of the previous exchange that are alive, as far as this worker can see, and
            that a restarted lighthouse may not know yet.
    """

    round_index: int
    open_group: str
    stores: list[str]
    data_position: int
    run_hash: str
    min_members: int
    last_group: str
    received: list[str]
    awaited: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values as they are sent."""
        return self._asdict()

    @classmethod
    def parse(cls, member: Member) -> Self | None:
        """Return the request of a member; None if its form, types or ranges are wrong."""
        # Any program that reaches the lighthouse can ask, so nothing about a request is certain.
        if not isinstance(member.data, dict) or member.data.keys() != set(cls._fields):
            return None
        info = cls(**member.data)
        kinds = (int, str, list, int, str, int, str, list, list)
        if not all(type(value) is kind for value, kind in zip(info, kinds, strict=True)):
            return None
        if not all(type(text) is str for text in (*info.stores, *info.received, *info.awaited)):
            return None
        numbers = info.round_index, info.data_position, info.min_members
        in_range = all(abs(number) < 2**53 for number in numbers)
        return info if in_range and info.stores and all(map(is_address, info.stores)) else None

    @property
    def run(self) -> tuple[str, int]:
        """Identifies the run: the fingerprint, and the number of ranks of a worker."""
        return self.run_hash, len(self.stores)


class QuorumPlan(NamedTuple):
    """The plan of this worker for one quorum. Ranks are positions in ``names``.

    Attributes:
        group: Name of the process group.
        names: Names of all members, in the same order on all of them.
        rank: Rank of this worker.
        stores: ``"host:port"`` of the key-value store that the rank of each member with this
            rank's place serves; a new group rendezvouses at the store of the donor.
        is_new: Whether the group has to be created.
        donor: Rank of the member that sends the state to those in ``joining``.
        joining: Ranks of the members that need the state; they have no weight in the round.
        round_index: The round; :data:`NO_STATE` if there is none, since the run begins or resumes.
        data_position: Where the members of a new group continue in the stream of samples.
        min_members: Number of members that the round waits for: the least of all requests.
        drifted: Ranks of joining members whose state was found to differ from the others'.
        committed: Ranks of the members for which the failed exchange counts; if there are any, this
            quorum has no other exchange.
        missing: Names of members that all members with the state of the run wait for; the round
            waits, too.
        malformed: Names of workers whose request could not be read; they do not take part.
    """

    group: str
    names: tuple[str, ...]
    rank: int
    stores: tuple[str, ...]
    is_new: bool
    donor: int
    joining: tuple[int, ...]
    round_index: int
    data_position: int
    min_members: int = 1
    drifted: tuple[int, ...] = ()
    committed: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    malformed: tuple[str, ...] = ()

    @property
    def is_joining(self) -> bool:
        """Whether this worker needs the state."""
        return self.rank in self.joining

    @property
    def is_donor(self) -> bool:
        """Whether this worker sends the state."""
        return self.rank == self.donor

    @property
    def has_drifted(self) -> bool:
        """Whether this worker needs the state because its own differs from the others'."""
        return self.rank in self.drifted

    @property
    def group_and_members(self) -> list[str]:
        """The value of :attr:`MemberInfo.received`, when all messages have been received."""
        return [self.group, *self.names]


class OtherRun(Exception):
    """The quorum belongs to another run than this worker: settings or parameters differ.

    ``member`` belongs to that run, and ``store`` is the address of its key-value store.
    """

    def __init__(self, member: str, store: str) -> None:
        super().__init__(member)
        self.member = member
        self.store = store


def make_plan(quorum: Quorum, own_name: str, place: int = 0) -> QuorumPlan:
    """Return the plan of a worker for a quorum, whose members are in the same order on all of them.

    The plans of its ranks differ in the stores only.

    The members with the highest round have the state of the run, and the first of them sends it to
    all others, which take part without weight. If members with the highest round were in different
    groups in the previous one, their states differ, and the members of the largest group have the
    state of the run. If no member is in a round, the run begins with the state of the first member
    with the newest checkpoint, or of the first member if there is no checkpoint. Workers with a
    malformed request do not take part.

    RuntimeError if the quorum lacks this worker's request; OtherRun if its model or settings differ
    from the donor's, so that the others continue without it.
    """
    parsed = {member.name: MemberInfo.parse(member) for member in quorum.members}
    infos = {name: info for name, info in parsed.items() if info is not None}
    if own_name not in infos:
        raise RuntimeError(f"The lighthouse's answer lacks the request of this worker, {own_name}.")
    rounds = [info.round_index for info in infos.values()]
    newest = max(rounds) if max(rounds) > NO_STATE else min(rounds)
    ahead = [name for name, info in infos.items() if info.round_index == newest]
    # Two groups that were cut off from each other may have counted the same rounds.
    last_group = Counter(infos[name].last_group for name in ahead).most_common(1)[0][0]
    with_state = [name for name in ahead if infos[name].last_group == last_group]
    donor = with_state[0]
    if newest == NO_STATE:
        with_state = [donor]
    names = tuple(name for name in infos if infos[name].run == infos[donor].run)
    if own_name not in names:
        raise OtherRun(donor, infos[donor].stores[0])
    members = {name: infos[name] for name in names}
    open_groups = {info.open_group for info in members.values()}
    # Members of the same group need no new one; else any choice that is equal on all of them.
    open_group = min(open_groups)
    # A group's name ends with the number of its members: then these members have opened it.
    is_new = len(open_groups) > 1 or not open_group.endswith(f"/{len(names)}")
    # A member that only some can still reach is lost to the others.
    awaited = set.intersection(*(set(infos[name].awaited) for name in with_state))
    committed = committed_members(members)
    return QuorumPlan(
        group=f"{quorum.id}/{len(names)}" if is_new else open_group,
        names=names,
        rank=names.index(own_name),
        stores=tuple(info.stores[place] for info in members.values()),
        is_new=is_new,
        donor=names.index(donor),
        joining=tuple(rank for rank, name in enumerate(names) if name not in with_state),
        round_index=max(newest, NO_STATE),
        data_position=max(info.data_position for info in members.values()),
        min_members=min(info.min_members for info in members.values()),
        committed=tuple(rank for rank, name in enumerate(names) if name in committed),
        missing=tuple(sorted(awaited - infos.keys())),
        malformed=tuple(name for name, info in parsed.items() if info is None),
    )


def committed_members(infos: Mapping[str, MemberInfo]) -> set[str]:
    """Return the names of the members for which an exchange counts although it failed for them.

    An exchange ends like a three-phase commit. Each member receives all messages and statuses,
    confirms this to the others, and applies the result once all have confirmed. If a member is lost
    during this, some may have applied the result without the others' knowledge. The remaining ones
    then send what they received with their next request. If all members that are still there
    received it, it counts for them, whatever the lost one did. If one of them did not, no member
    can have applied it, and it is repeated.
    """
    return {name for name, info in infos.items() if info.received and _counts(info, infos)}


def _counts(info: MemberInfo, infos: Mapping[str, MemberInfo]) -> bool:
    group, *members = info.received
    return all(
        _agrees(other, info.round_index, group, name in members) for name, other in infos.items()
    )


def _agrees(other: MemberInfo, round_index: int, group: str, is_member: bool) -> bool:
    """Whether a worker received or applied the round in this group, or was not part of it."""
    # It has applied this round, in the same group or in another one.
    if other.round_index > round_index:
        return other.round_index == round_index + 1 and other.last_group == group
    if other.round_index == round_index and is_member:
        return other.received[:1] == [group]
    return True


def describe_difference(own: dict[str, Any], other: dict[str, Any], member: str) -> str:
    """Return a message with the first setting that differs between this worker and the run."""
    for key in [*other, *own]:
        if own.get(key) != other.get(key):
            return (
                f"This worker cannot join: {key} is {own.get(key)!r:.300} here and "
                f"{other.get(key)!r:.300} in the run (as {member} has it). Start it with the same "
                "model and settings."
            )
    return "This worker cannot join: its settings differ from the run's."

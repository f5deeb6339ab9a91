"""The plan of a round: who takes part, who sends the state of the run, and who receives it.

Every member makes its plan from the same information about all members, so all plans agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import Self

from lightning_loco.elastic.elastic import is_address
from lightning_loco.elastic.lighthouse import Member, Quorum

NO_STATE = -1
"""The round index of a worker that has no state of the run, or an outdated one."""


def resumed_round(round_index: int) -> int:
    """Return what a worker sends as its round when it joins with the state of a checkpoint.

    Workers that are making rounds are ahead of it, whatever their round: it has no message for
    theirs.
    """
    return NO_STATE - 1 - round_index


class MemberInfo(NamedTuple):
    """What a worker sends about itself when it asks to take part.

    Attributes:
        round_index: The round that it starts; :data:`NO_STATE` if it has no state, and
            :func:`resumed_round` if it joins with the state of a checkpoint.
        open_group: Name of its process group; empty if it has none.
        stores: ``"host:port"`` of the key-value stores that its ranks serve, by place.
        data_position: First position in the stream of samples that it cannot have used.
        run_hash: Fingerprint of its settings and the schema of its parameters.
        min_members: Least number of members with which it makes this round.
        last_group: Group that made its previous round; empty if its state is from a checkpoint.
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
        """Return what a member sent; None if its form, types or ranges are wrong."""
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
        """What is equal for all workers of a run: the fingerprint and the number of ranks."""
        return self.run_hash, len(self.stores)


class QuorumPlan(NamedTuple):
    """What this worker does in one quorum. Ranks are positions in ``names``.

    Attributes:
        group: Name of the process group.
        names: Names of all members, in the same order on all of them.
        rank: Rank of this worker.
        stores: ``"host:port"`` of the key-value store that the rank of each member with this
            rank's place serves; those of a new group rendezvous at that of the donor.
        is_new: Whether the group has to be created.
        donor: Rank of the member that sends the state to those in ``joining``.
        joining: Ranks of the members that need the state; they have no weight in the round.
        round_index: The round; :data:`NO_STATE` if there is none, since the run begins or resumes.
        data_position: Where the members of a new group continue in the stream of samples.
        min_members: Number of members that the round waits for: the least that one of them needs.
        drifted: Ranks of those joining members whose state was found to differ from the others'.
        committed: Ranks of the members for which the failed exchange counts; if there are any, this
            quorum makes no other one.
        missing: Names of members that all with the state of the run wait for; the round waits, too.
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

    def format_names(self, ranks: tuple[int, ...] | list[int]) -> str:
        """Return the names of some members, for messages."""
        return ", ".join(self.names[rank] for rank in ranks)


class OtherRun(Exception):
    """The quorum belongs to another run than this worker: settings or parameters differ.

    ``member`` belongs to that run, and ``store`` is the address of its key-value store.
    """

    def __init__(self, member: str, store: str) -> None:
        super().__init__(member)
        self.member = member
        self.store = store


def make_plan(quorum: Quorum, own_name: str, place: int = 0) -> QuorumPlan:
    """Return what a worker does in a quorum, whose members are in the same order for all.

    The plans of its ranks differ in the stores only.

    The members with the highest round have the state of the run, and the first of them sends it to
    all others, which take part without weight. If members with the highest round made the previous
    one in different groups, their states differ, and those of the largest group have the state of
    the run. If no member makes a round, the run begins with the state of the first of those with
    the newest checkpoint, or of the first member if there is no checkpoint. Workers with a
    malformed request do not take part.

    RuntimeError if the quorum lacks what this worker sent; OtherRun if its model or settings differ
    from those of the donor, so that the others continue without it.
    """
    parsed = {member.name: MemberInfo.parse(member) for member in quorum.members}
    infos = {name: info for name, info in parsed.items() if info is not None}
    if own_name not in infos:
        raise RuntimeError(f"The lighthouse's answer lacks what this worker, {own_name}, has sent.")
    rounds = [info.round_index for info in infos.values()]
    newest = max(rounds) if max(rounds) > NO_STATE else min(rounds)
    ahead = [name for name, info in infos.items() if info.round_index == newest]
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
    open_group = min(open_groups)
    is_new = len(open_groups) > 1 or not _has_size(open_group, len(names))
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


def _has_size(group: str, size: int) -> bool:
    """Whether a group has so many members: then all of them have it open, and no others."""
    return group.endswith(f"/{size}")


class Commit(NamedTuple):
    """What this worker received in an exchange that not all members have confirmed yet.

    Attributes:
        plan: QuorumPlan of the exchange.
        received: The sum of the messages.
        statuses: Statuses of all members.
    """

    plan: QuorumPlan
    received: Tensor
    statuses: Tensor

    @property
    def group_and_members(self) -> list[str]:
        """What :attr:`MemberInfo.received` is."""
        return [self.plan.group, *self.plan.names]


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
    return "This worker cannot join: its settings differ from those of the run."

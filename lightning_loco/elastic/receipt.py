"""What a member has received of an exchange that has failed, and whether the exchange counts.

An exchange ends as a three-phase commit does. Each member receives what the messages have come to,
and all rows; it says so to the others; and once all have said so, it lands. If one is lost
meanwhile, some may have landed without the others' knowing. These ask again who takes part, and
tell what they have received. If all who were members and are there now have received it, it counts
for them, whatever the lost one has done. If one of them has not, nobody can have landed: it is
repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from lightning_loco.elastic.plan import Plan, Told


class Receipt(NamedTuple):
    """What this worker has received, before it knows that all have.

    Attributes:
        plan: Of the exchange.
        received: What the messages have come to; None if this worker needs the state as well.
        rows: Of all members.
    """

    plan: Plan
    received: Tensor | None
    rows: Tensor

    @property
    def words(self) -> list[str]:
        """The group and its members, as this worker tells them."""
        return [self.plan.group, *self.plan.names]


def counting(told: Mapping[str, Told]) -> set[str]:
    """Names of those for whom an exchange counts that has failed for them.

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

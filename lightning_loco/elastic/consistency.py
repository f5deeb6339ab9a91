"""Whether all members still hold the same outer parameters; one that has drifted gets them again.

Nothing in a round would show it: what the members send are differences, and each adds their mean to
what it has. A flipped bit, or a hook that writes weights on one member only, would stay for ever.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_loco.elastic.quorum import NO_STATE, Plan
from lightning_loco.parameters.fingerprint import pieces

log = logging.getLogger(__name__)


def fingerprint(state: Mapping[str, Any]) -> int:
    """64 bits, with a sign, of all names, tensors and numbers of a state."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode())
        if not isinstance(value, Tensor):
            digest.update(repr(value).encode())
            continue
        for piece in pieces(value):
            digest.update(piece)
    return int.from_bytes(digest.digest()[:8], "little", signed=True)


class Consistency:
    """Compares the members' states in some rounds, before their messages are added up.

    Args:
        every: In every so many rounds; 0 for never. Equal on all members.
        look: The :func:`fingerprint` of what rounds keep equal on all members.
    """

    def __init__(self, every: int, look: Callable[[], int]) -> None:
        self._every = every
        self._look = look

    def is_due(self, plan: Plan) -> bool:
        """Whether the members of a plan compare their states; the same on all of them."""
        if not self._every or plan.round_index in (0, NO_STATE):
            return False
        knowing = len(plan.names) - len(plan.newcomers)
        return plan.round_index % self._every == 0 and knowing > 1

    def compare(self, plan: Plan, gather: Callable[[Tensor], Tensor]) -> Plan:
        """The plan in which members that have drifted are newcomers.

        Args:
            plan: Of a round that :meth:`is_due`.
            gather: Collects the statuses of all members.

        Returns:
            The plan, with a donor that has the state of most members, or with as many that of the
            first of them. A warning names those that have drifted.
        """
        own = 0 if plan.own in plan.newcomers else self._look()
        found = gather(torch.tensor([own])).reshape(-1).tolist()
        known = {place: one for place, one in enumerate(found) if place not in plan.newcomers}
        right = Counter(known.values()).most_common(1)[0][0]
        drifted = tuple(place for place, one in known.items() if one != right)
        for place in drifted:
            log.warning(
                "Round %d: the outer parameters or the outer state of %s are not those of the "
                "other members. It goes on from theirs, and what it brings does not count.",
                plan.round_index,
                plan.names[place],
            )
        return plan._replace(
            donor=next(place for place, one in known.items() if one == right),
            newcomers=tuple(sorted((*plan.newcomers, *drifted))),
            drifted=drifted,
        )

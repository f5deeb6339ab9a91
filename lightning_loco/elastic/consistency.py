"""Check that all members still hold the same outer parameters.

A difference would show in no round: the members send differences, and each adds their mean to its
own parameters. A flipped bit, or a hook that writes weights on one member only, would last forever.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_loco.elastic.quorum import NO_STATE, QuorumPlan
from lightning_loco.model.fingerprint import pieces


class ConsistencyCheck:
    """Compares the members' states every ``every`` rounds (0 for never), before their messages.

    ``own_fingerprint`` returns the :func:`fingerprint` of the state that rounds keep equal.
    """

    def __init__(self, every: int, own_fingerprint: Callable[[], int]) -> None:
        self._every = every
        self._own_fingerprint = own_fingerprint

    def is_due(self, plan: QuorumPlan) -> bool:
        """Whether the members of a plan compare their states; the same on all of them."""
        # At the beginning of a run all have just received the state of one member.
        if not self._every or plan.round_index in (0, NO_STATE):
            return False
        num_with_state = len(plan.names) - len(plan.joining)
        return plan.round_index % self._every == 0 and num_with_state > 1

    def compare(self, plan: QuorumPlan, all_gather: Callable[[Tensor], Tensor]) -> QuorumPlan:
        """Return a plan in which members whose state has drifted are joining members.

        The donor has the state of most members; in a tie, the state of the first member.
        ``all_gather`` gathers a row of numbers.
        """
        # A joining member takes part in the collective, but has no state of the run.
        own = 0 if plan.is_joining else self._own_fingerprint()
        gathered = (
            all_gather(torch.tensor([own], dtype=torch.int64, device="cpu")).reshape(-1).tolist()
        )
        known = {rank: value for rank, value in enumerate(gathered) if rank not in plan.joining}
        expected = Counter(known.values()).most_common(1)[0][0]
        drifted = tuple(rank for rank, value in known.items() if value != expected)
        return plan._replace(
            # The donor of the plan may be one that has drifted.
            donor=next(rank for rank, value in known.items() if value == expected),
            joining=tuple(sorted((*plan.joining, *drifted))),
            drifted=drifted,
        )


def fingerprint(state: Mapping[str, Any]) -> int:
    """Return a signed hash of 64 bits of all names, tensors and numbers of a state."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode())
        if not isinstance(value, Tensor):
            digest.update(repr(value).encode())
            continue
        for piece in pieces(value):
            digest.update(piece)
    return int.from_bytes(digest.digest()[:8], "little", signed=True)

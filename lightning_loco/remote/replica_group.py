"""The ranks that are one worker together: the first one talks to the servers for all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.remote.tiers import Tiers

_LETTERS = 32


class ReplicaGroup:
    """Tells all ranks of a worker what its first rank has heard.

    Args:
        group: These ranks, with gloo; None for a worker of a single rank.

    Attributes:
        leads: Whether this rank is the one that talks to the servers.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.leads = group is None or dist.get_rank(group) == 0

    def let_go(self) -> None:
        """Keep the group no longer: nothing can be shared any more."""
        self._group = None

    def share(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first rank."""
        if self._group is not None:
            source = dist.get_global_rank(self._group, 0)
            dist.broadcast(tensor, source, group=self._group)

    def share_text(self, text: str | None) -> str | None:
        """The first rank's text, of which the first 32 bytes travel; None if it has none."""
        if self._group is None:
            return text
        letters = torch.zeros(_LETTERS, dtype=torch.uint8)
        for place, letter in enumerate((text or "").encode()[:_LETTERS]):
            letters[place] = letter
        self.share(letters)
        return bytes(letters.tolist()).rstrip(b"\0").decode() or None


def new_replica_group(
    tiers: Tiers, rank: int, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Make the groups of all workers' ranks; call it on every rank of the default group.

    Args:
        tiers: The roles of all ranks.
        rank: This one.
        backend: Default: that of the default group.

    Returns:
        The group of this rank's worker; None for ranks that serve.
    """
    mine = None
    for first in tiers.leaders:
        ranks = list(range(first, first + tiers.replica_size))
        group = dist.new_group(ranks, backend=backend)
        if rank in ranks:
            mine = group
    return mine

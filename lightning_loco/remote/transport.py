"""How the ranks of a remote optimizer are connected."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from lightning_loco.comm.watchdog import Watchdog
from lightning_loco.remote.meanwhile import Meanwhile
from lightning_loco.remote.plan import BUCKET_BYTES
from lightning_loco.remote.wire import Wire


@dataclasses.dataclass(frozen=True)
class Transport:
    """How this rank reaches the others; all but ``watchdog`` must be alike on all ranks.

    Args:
        group: All ranks, with gloo. Default: the default process group.
        bucket_bytes: Longest message; smaller parameters travel together.
        wire_dtype: Of gradients and parameters on the wire, for instance ``torch.bfloat16``; sums
            and steps keep their precision. Default: as they are.
        timeout_s: Longest wait for another rank, in seconds. Default: the group's.
        watchdog: Knows which rank has failed, and why.
    """

    group: dist.ProcessGroup | None = None
    bucket_bytes: int = BUCKET_BYTES
    wire_dtype: torch.dtype | None = None
    timeout_s: float | None = None
    watchdog: Watchdog | None = None

    def wire(self, rank: int, name: str, meanwhile: Meanwhile | None = None) -> Wire:
        """A connection to another rank; a server says what to do while it waits for that."""
        return Wire(
            rank,
            name[0].upper() + name[1:],
            self.group,
            self.timeout_s,
            self.watchdog,
            meanwhile,
        )

    def look_around(self) -> None:
        """Raise what another rank has reported before it ended.

        Raises:
            RuntimeError: If one has failed.
        """
        if self.watchdog is not None:
            self.watchdog.raise_if_failed()

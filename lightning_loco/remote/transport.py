"""How the ranks of a remote optimizer are connected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from lightning_loco.codecs import Codec
from lightning_loco.comm.watchdog import Watchdog
from lightning_loco.remote.compression import as_codec
from lightning_loco.remote.meanwhile import Meanwhile
from lightning_loco.remote.message import Message
from lightning_loco.remote.plan import BUCKET_BYTES, plan_messages
from lightning_loco.remote.wire import Wire

_runs: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Transport:
    """How this rank reaches the others; all but ``watchdog`` must be alike on all ranks.

    Args:
        group: All ranks, with gloo. Default: the default process group.
        bucket_bytes: Longest message; smaller parameters travel together.
        compression: How gradients and parameters are written on the wire: ``"bf16"``, ``"fp16"``,
            ``"int8"``, or a codec such as ``Int8(block=128)``; sums and steps keep their precision.
            Default: as they are.
        timeout_s: Longest wait for another rank, in seconds. Default: the group's.
        watchdog: Knows which rank has failed, and why.

    Raises:
        TypeError: If ``compression`` is nothing of the kind.
        ValueError: If it cannot be used here; see :func:`as_codec`.
    """

    group: dist.ProcessGroup | None = None
    bucket_bytes: int = BUCKET_BYTES
    compression: str | Codec | None = None
    timeout_s: float | None = None
    watchdog: Watchdog | None = None

    def __post_init__(self) -> None:
        """Check the compression."""
        as_codec(self.compression)

    def plan(self, params: Sequence[Tensor]) -> list[Message]:
        """How parameters, and their gradients, are cut into messages."""
        return plan_messages(params, self.bucket_bytes, as_codec(self.compression))

    def next_run(self) -> int:
        """The number of a run, from 0 on; every rank of the group must ask for it once in each."""
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        _runs[group] = _runs.get(group, -1) + 1
        return _runs[group]

    def wire(self, rank: int, name: str, run: int = 0, meanwhile: Meanwhile | None = None) -> Wire:
        """A connection to another rank; a server says what to do while it waits for that."""
        return Wire(
            rank,
            name[0].upper() + name[1:],
            self.group,
            self.timeout_s,
            self.watchdog,
            meanwhile,
            run,
        )

    def look_around(self) -> None:
        """Raise what another rank has reported before it ended.

        Raises:
            RuntimeError: If one has failed.
        """
        if self.watchdog is not None:
            self.watchdog.raise_if_failed()

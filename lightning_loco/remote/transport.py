"""How the ranks of a remote optimizer are connected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from lightning_loco.codecs import CODECS, Codec, check_compression
from lightning_loco.comm.watchdog import Watchdog
from lightning_loco.remote.keep_alive import Meanwhile
from lightning_loco.remote.plan import BUCKET_BYTES, Message, plan_messages
from lightning_loco.remote.wire import Wire

_runs: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def as_codec(given: Any) -> Codec | None:
    """The codec of gradients and parameters.

    Parameters travel too, and a worker may have no part in a step: nothing is remembered from one
    message to the next, and what a codec loses must be small.

    Args:
        given: None or ``"none"``, the name of a codec, or a codec.

    Returns:
        The codec; None if all travels as it is.

    Raises:
        TypeError: If it is none of these.
        ValueError: If the name is unknown, the codec is rough, or an error feedback is asked for.

    Example:
        >>> as_codec("int8")
        Int8(block=256)
    """
    check_compression(given)
    if given is None or given == "none":
        return None
    named = CODECS[given]() if isinstance(given, str) else given
    codec: Codec = named if isinstance(named, Codec) else named.codec
    if codec.is_rough:
        raise ValueError(
            f"{codec} writes too roughly for a remote optimizer, where parameters travel in every "
            'step. Use compression="int8", "bf16" or "fp16", or an algorithm with rounds.'
        )
    if named is not codec:
        raise ValueError(
            f"{named} has nothing to feed back to: under a remote optimizer a worker may miss "
            "messages, so nothing is remembered from one to the next. Give the codec alone: "
            f"compression={codec}."
        )
    return codec


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

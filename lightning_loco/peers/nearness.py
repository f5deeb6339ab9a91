"""How far a peer's parameters are from one's own, and whether that is further than usual."""

from __future__ import annotations

import math
import statistics
from collections import deque

import torch
from torch import Tensor

from lightning_loco.peers.publications import Publications

MAX_PEER_DISTANCE = 10.0
"""The default of ``max_peer_distance``."""

# Below 32768, the size from which PyTorch starts threads of its own, which would compete with those
# that train; and a multiple of the cache line.
SERIAL_ELEMENTS = 32_640

_RECENT = 21
_FEWEST = 5
_MOST_TRIES = 3
_ABSURD = 1e9


class Nearness:
    """The distance between what a peer sends and one's own parameters, measured as chunks come.

    One's own are those that were published last, so that neither the model nor its device is
    touched. The measurement is the check for NaN and infinity, too, and it reads what has come
    while the cache still has it.

    A peer is too far away if its distance is more than ``max_peer_distance`` times

    - the norm of one's own parameters, or the square root of their number if that is more; or
    - the median of the last 21 distances, once there are 5. There a longer one counts as the
      longest allowed: a worker that is far from all others takes part again after a while, and the
      median is an honest one as long as most of what is read is honest.

    Args:
        numel: Number of parameters P.
        dtype: In which they are handed over.
        own: This worker's publications; without any only what is absurd is too far away.
        max_peer_distance: See above, more than 1; None for no limit.

    Attributes:
        is_finite: Whether all that has come since :meth:`clear` is.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        own: Publications | None = None,
        max_peer_distance: float | None = None,
    ) -> None:
        self._root = math.sqrt(numel)
        self._own = own
        self._most = max_peer_distance
        self._differences = torch.empty(SERIAL_ELEMENTS, dtype=dtype)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.clear()

    def clear(self) -> None:
        """Forget what has come, but not how far away peers were."""
        self.is_finite = True
        self._squares = 0.0
        self._is_relative = self._own is not None and self._own.newest is not None

    @property
    def distance(self) -> float:
        """The distance of what has come, or its norm if there is nothing to compare it with."""
        return math.sqrt(self._squares)

    def add(self, start: int, values: Tensor) -> None:
        """Look at values whose place in the flat vector begins at ``start``."""
        for block in torch.split(values, SERIAL_ELEMENTS):
            part = self._differences_to(start, block) if self._is_relative else block
            norm = float(torch.linalg.vector_norm(part))
            if not math.isfinite(norm):  # squares of finite values may be too large, too
                self.is_finite = self.is_finite and bool(torch.isfinite(block).all())
            self._squares += norm * norm
            start += len(block)

    def _differences_to(self, start: int, theirs: Tensor) -> Tensor:
        """Subtract one's own latest parameters, which are published anew at any moment."""
        assert self._own is not None
        differences = self._differences[: len(theirs)]
        for _ in range(_MOST_TRIES):
            own = self._own.newest
            assert own is not None
            number = own.number
            torch.sub(theirs, own.values[start : start + len(theirs)], out=differences)
            if own.number == number != 0:
                return differences
        return differences.zero_()

    def is_near(self) -> bool:
        """Whether the peer is near enough; to be asked once, when all has come."""
        if self._most is None:
            return True
        distance = self.distance
        own = self._own.newest if self._own is not None and self._is_relative else None
        if own is None:
            return distance <= _ABSURD * self._root
        limit = self._most * max(own.norm, self._root)
        if not distance <= limit:
            return False
        if len(self._recent) >= _FEWEST:
            limit = min(limit, self._most * statistics.median(self._recent))
        if distance > 0:
            self._recent.append(min(distance, limit))
        return distance <= limit

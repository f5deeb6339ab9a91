"""How far a peer's parameters are from one's own, and whether that is further than usual."""

from __future__ import annotations

import math
import secrets
import statistics
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_loco.gossip.model import Model
from lightning_loco.gossip.snapshots import Snapshots

MAX_PEER_DISTANCE = 10.0
"""The default of ``max_peer_distance``."""

# Below the size from which NumPy, whose dot product is the fastest, starts threads of its own.
_SERIAL_DOT = 9_984
_MEASURED = 2**22
_RECENT = 21
_FEWEST = 5
_MOST_TRIES = 3
_ABSURD = 1e9
_NORM_ERROR = 0.01
_SHORT = 0.01

Values = np.ndarray[Any, np.dtype[np.floating[Any]]]


class Nearness:
    """The distance between what a peer sends and one's own parameters, measured as chunks come.

    One's own are those that were published last, as peers read them, so that neither the model nor
    its device is touched. Of more than 4 million parameters the distance is that of so many, in
    pieces that are drawn anew for each fetch, and at least the difference of the norms; so it costs
    no more for a larger model. The norm, taken of all values, is the check for NaN and infinity,
    too.

    A peer is too far away if its distance is more than ``max_peer_distance`` times

    - the norm of one's own parameters, or the square root of their number if that is more; or
    - the median of the last 21 distances, once there are 5, or a hundredth of the norm of one's own
      parameters if that is more: early in training distances are short, and grow quickly with the
      learning rate. There a longer one counts as the longest allowed: a worker that is far from all
      others takes part again after a while, and the median is sound as long as most of what is read
      is. A peer that moves a little with every request is near each time: this finds faults, not
      adversaries.

    Args:
        model: Of which they are, and how it is written on the wire.
        own: This worker's snapshots; without any only what is absurd is too far away.
        max_peer_distance: See above, more than 1; None for no limit.

    Attributes:
        is_finite: Whether all that has come since :meth:`clear` is.
    """

    def __init__(
        self,
        model: Model,
        own: Snapshots | None = None,
        max_peer_distance: float | None = None,
    ) -> None:
        self._model = model
        self._root = math.sqrt(model.numel)
        self._own = own if max_peer_distance is not None else None
        self._most = max_peer_distance
        self._stride = math.ceil(model.numel / _MEASURED)
        self._piece = model.piece
        self._room = torch.empty(model.piece, dtype=model.dtype)
        self._differences: Values = np.empty(_SERIAL_DOT, self._room.numpy().dtype)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.clear()

    def clear(self) -> None:
        """Forget what has come, but not how far away peers were."""
        self.is_finite = True
        self._squares = 0.0
        self._measured_squares = 0.0
        self._num_seen = self._num_measured = 0
        self._skip = secrets.randbelow(self._stride)
        self._is_relative = self._own is not None and self._own.latest is not None

    def add(self, start: int, values: Tensor) -> None:
        """Look at values from ``start`` on in the flat vector, where a block of the wire begins."""
        with np.errstate(all="ignore"):
            self._add(start, values)

    def _add(self, start: int, values: Tensor) -> None:
        array = values.numpy()
        squares = sum(_squared(array[at : at + _SERIAL_DOT]) for at in _blocks(array))
        if not math.isfinite(squares):  # squares of finite values may be too large, too
            self.is_finite = self.is_finite and bool(torch.isfinite(values).all())
        self._squares += squares
        self._num_seen += len(array)
        if not self._is_relative:
            return
        for place in range(0, len(array), self._piece):
            if self._skip == 0:
                self._measure(start + place, array[place : place + self._piece])
            self._skip = (self._skip or self._stride) - 1

    def _measure(self, start: int, theirs: Values) -> None:
        """Compare with one's own latest parameters, which are published anew at any moment."""
        assert self._own is not None
        room = self._room[: len(theirs)]
        for _ in range(_MOST_TRIES):
            own = self._own.latest
            assert own is not None
            number = own.number
            values = self._model.read(own.wire, start, room).numpy()
            squares = 0.0
            for at in _blocks(theirs):
                block = theirs[at : at + _SERIAL_DOT]
                differences = self._differences[: len(block)]
                squares += _squared(np.subtract(block, values[at : at + len(block)], differences))
            if own.number == number != 0:
                self._measured_squares += squares
                self._num_measured += len(theirs)
                return

    @property
    def distance(self) -> float:
        """The distance of what has come, or its norm if there is nothing to compare it with."""
        norm = math.sqrt(self._squares)
        own = self._own.latest if self._own is not None and self._is_relative else None
        if own is None or not self._num_measured:
            return norm
        distance = math.sqrt(self._measured_squares * (self._num_seen / self._num_measured))
        if self._stride == 1:
            return distance
        return max(distance, abs(norm - own.norm) - _NORM_ERROR * own.norm)

    def is_near(self) -> bool:
        """Whether the peer is near enough; to be asked once, when all has come."""
        if self._most is None:
            return True
        distance = self.distance
        own = self._own.latest if self._own is not None and self._is_relative else None
        if own is None:
            return distance <= _ABSURD * self._root
        limit = self._most * max(own.norm, self._root)
        if not distance <= limit:
            return False
        if len(self._recent) >= _FEWEST:
            usual = max(statistics.median(self._recent), _SHORT * own.norm)
            limit = min(limit, self._most * usual)
        if distance > 0:
            self._recent.append(min(distance, limit))
        return distance <= limit


def _blocks(values: Values) -> range:
    """Where each begins."""
    return range(0, len(values), _SERIAL_DOT)


def _squared(block: Values) -> float:
    """Its squared norm; infinity or NaN if there is one, or a square is too large."""
    return float(np.dot(block, block))

"""Decides whether the parameters of a peer are finite and close enough to this worker's own."""

from __future__ import annotations

import math
import secrets
import statistics
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_loco.gossip.protocol import WireFormat
from lightning_loco.gossip.snapshots import Snapshots

MAX_PEER_DISTANCE = 10.0
"""The default of ``max_peer_distance``."""

# NumPy has the fastest dot product. From 10,000 values on it uses a thread pool of its own.
_SINGLE_THREAD_DOT = 9_984
_SAMPLED_ELEMENTS = 2**22
_NUM_RECENT = 21
_MIN_RECENT = 5
_MAX_TRIES = 3
_MAX_ROOT_MEAN_SQUARE = 1e9
_NORM_TOLERANCE = 0.01
_MIN_USUAL_DISTANCE = 0.01  # relative to the norm of the own parameters

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]


class OutlierFilter:
    """Measures the distance of a peer's parameters while they arrive, and rejects outliers.

    The distance is that to this worker's latest snapshot, in the encoded form that peers read. So
    neither the model nor its device is used. For models of more than 4 million parameters the
    distance is estimated from a random sample of that size, drawn again for every fetch, so that
    the cost does not grow with the model. It is never estimated lower than the difference of the
    two norms. The norm of the peer's parameters is computed from all values, which also detects NaN
    and infinity.

    A peer is rejected if its distance is more than ``max_peer_distance`` times

    - the norm of this worker's own parameters, or the square root of their number if that is more;
    - or the median of the last 21 distances, once there are 5, or a hundredth of the norm of this
      worker's own parameters if that is more. The second value is for the start of training, when
      distances are short and grow quickly with the learning rate.

    In the median a rejected distance counts as the longest one that was allowed. So a worker that
    is far from all others takes part again after a while, and the median is reliable as long as
    most peers are sound. The filter detects faults, not attacks: a peer that moves its parameters a
    little with every request is always accepted.

    Call :meth:`reset`, :meth:`update` for every chunk, and then :meth:`accepts` once.

    Args:
        wire_format: How the parameters are encoded.
        own: This worker's snapshots. Without any, only absurdly large parameters are rejected.
        max_peer_distance: See above; more than 1. None for no limit.

    Attributes:
        is_finite: Whether all values since :meth:`reset` are finite.
    """

    def __init__(
        self,
        wire_format: WireFormat,
        own: Snapshots | None = None,
        max_peer_distance: float | None = None,
    ) -> None:
        self._wire_format = wire_format
        self._root_numel = math.sqrt(wire_format.numel)
        self._own = own if max_peer_distance is not None else None
        self._max_peer_distance = max_peer_distance
        self._stride = math.ceil(wire_format.numel / _SAMPLED_ELEMENTS)
        self._sample_elements = wire_format.single_thread_elements
        self._own_values = torch.empty(self._sample_elements, dtype=wire_format.dtype, device="cpu")
        self._differences: Array = np.empty(_SINGLE_THREAD_DOT, self._own_values.numpy().dtype)
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self.reset()

    def reset(self) -> None:
        """Start with the parameters of another fetch; the recent distances are kept."""
        self.is_finite = True
        self._squared_norm = 0.0
        self._sampled_squares = 0.0
        self._num_elements = self._num_sampled = 0
        self._until_sample = secrets.randbelow(self._stride)
        self._has_own = self._own is not None and self._own.latest is not None

    def update(self, start: int, values: Tensor) -> None:
        """Measure the next chunk of decoded values, on the CPU.

        ``start`` is the index of the first one in the flat vector, the first of a codec's block.
        """
        with np.errstate(all="ignore"):
            self._update(start, values)

    def _update(self, start: int, values: Tensor) -> None:
        array = values.numpy()
        squares = sum(_squared_norm(array[i : i + _SINGLE_THREAD_DOT]) for i in _blocks(array))
        if not math.isfinite(squares):  # the square of a finite value may overflow, too
            self.is_finite = self.is_finite and bool(torch.isfinite(values).all())
        self._squared_norm += squares
        self._num_elements += len(array)
        if not self._has_own:
            return
        for first in range(0, len(array), self._sample_elements):
            if self._until_sample == 0:
                self._measure(start + first, array[first : first + self._sample_elements])
            self._until_sample = (self._until_sample or self._stride) - 1

    def _measure(self, start: int, theirs: Array) -> None:
        """Compare with the latest snapshot, unless it is overwritten meanwhile in every try."""
        assert self._own is not None
        buffer = self._own_values[: len(theirs)]
        for _ in range(_MAX_TRIES):
            own = self._own.latest
            assert own is not None
            number = own.number
            values = self._wire_format.decode(own.wire, start, buffer).numpy()
            squares = 0.0
            for i in _blocks(theirs):
                block = theirs[i : i + _SINGLE_THREAD_DOT]
                out = self._differences[: len(block)]
                squares += _squared_norm(np.subtract(block, values[i : i + len(block)], out))
            if own.number == number != 0:
                self._sampled_squares += squares
                self._num_sampled += len(theirs)
                return

    @property
    def distance(self) -> float:
        """Distance of the values since :meth:`reset`; their norm if there is no own snapshot."""
        norm = math.sqrt(self._squared_norm)
        own = self._own.latest if self._own is not None and self._has_own else None
        if own is None or not self._num_sampled:
            return norm
        distance = math.sqrt(self._sampled_squares * (self._num_elements / self._num_sampled))
        if self._stride == 1:
            return distance
        return max(distance, abs(norm - own.norm) - _NORM_TOLERANCE * own.norm)

    def accepts(self) -> bool:
        """Whether the distance is within the limit. Call it once, after all chunks."""
        if self._max_peer_distance is None:
            return True
        distance = self.distance
        own = self._own.latest if self._own is not None and self._has_own else None
        if own is None:
            return distance <= _MAX_ROOT_MEAN_SQUARE * self._root_numel
        limit = self._max_peer_distance * max(own.norm, self._root_numel)
        if not distance <= limit:
            return False
        if len(self._recent) >= _MIN_RECENT:
            usual = max(statistics.median(self._recent), _MIN_USUAL_DISTANCE * own.norm)
            limit = min(limit, self._max_peer_distance * usual)
        if distance > 0:
            self._recent.append(min(distance, limit))
        return distance <= limit


def _blocks(values: Array) -> range:
    """Return where each block of one dot product starts."""
    return range(0, len(values), _SINGLE_THREAD_DOT)


def _squared_norm(block: Array) -> float:
    """Return the squared norm; not finite if a value is not, or a square overflows."""
    return float(np.dot(block, block))

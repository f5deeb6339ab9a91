"""What a round works on: parts, small enough for the cache, and parcels of them, which travel.

Parts are small, so that they stay in the processor's cache from one operation to the next. Parcels
are long, because every exchange has fixed costs. Both are tied to their memory once, because making
views of many small tensors takes longer than copying them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.comm.flat import Chunk


def slice_state(algorithm: Algorithm, state: State, chunk: Chunk) -> State:
    """The part of an elementwise algorithm's state that belongs to a chunk."""
    if not algorithm.elementwise:
        return state
    return {key: value[chunk.start : chunk.stop] for key, value in state.items()}


class Part:
    """A chunk of the parameters with its memory in the bucket and its slice of the state.

    Args:
        chunk: The pieces of parameters.
        params: Where they are worked on, of shape ``(len(chunk),)``.
        algorithm: What a round computes.
        state: The algorithm's state for all parameters.
    """

    def __init__(self, chunk: Chunk, params: Tensor, algorithm: Algorithm, state: State) -> None:
        self.chunk = chunk
        self.params = params
        self.state = slice_state(algorithm, state, chunk)
        self._algorithm = algorithm
        self._is_rounded = chunk.is_rounded(params.dtype)
        values = [params, *(v for v in self.state.values() if isinstance(v, Tensor))]
        self._kept = [v for v in values if v.shape == params.shape]
        self._windows = {id(v): chunk.window(v) for v in self._kept}

    def __len__(self) -> int:
        return len(self.chunk)

    def read_local(self) -> None:
        """Pack the local parameters, exact to the drift.

        Parameters in a narrow dtype (bfloat16) were rounded when the round began. What was lost
        then is added again, or the algorithm would take it for a drift and undo small steps of its
        masters.
        """
        window = self._windows[id(self.params)]
        if self._is_rounded:
            self._algorithm.restart(self.params, self.state)
            lost = self.chunk.rounding_error(self.params)
            window.pack()
            self.params.add_(lost)
        else:
            window.pack()

    def restart(self) -> None:
        """Take the parameters at the beginning of the round instead of the local ones."""
        self._algorithm.restart(self.params, self.state)

    def propose(self) -> None:
        """Replace the parameters by the message."""
        message = self._algorithm.propose(self.params, self.state)
        if message is not self.params:
            self.params.copy_(message)

    def unpack(self, values: Tensor) -> None:
        """Copy ``values``, of shape ``(len(self),)``, into the model."""
        (self._windows.get(id(values)) or self.chunk.window(values)).unpack()


class Parcel:
    """Consecutive parts that travel together.

    Args:
        message: Where the message is when it leaves, of shape ``(len(self),)``.
        parts: What it is made of.
    """

    def __init__(self, message: Tensor, parts: list[Part]) -> None:
        self.message = message
        self.parts = parts

    def __len__(self) -> int:
        return self.message.numel()

    def split(self, received: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Each part with its share of what was received, of shape ``(len(self),)`` or longer."""
        lengths = [len(part) for part in self.parts]
        return zip(self.parts, torch.split_with_sizes(received[: len(self)], lengths), strict=True)


def group_chunks(chunks: list[Chunk], longest: int) -> list[list[Chunk]]:
    """Put consecutive chunks together, up to ``longest`` elements if a chunk is not longer."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        if groups and chunk.stop - groups[-1][0].start <= longest:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups

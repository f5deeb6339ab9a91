"""Snapshots of a worker's parameters that others read while the next one is written.

The training thread writes and the threads of the server read. Neither waits for the other: the lock
is held for bookkeeping only, and parameters are copied outside of it, into memory that nobody reads
and from memory that nobody writes. There is memory for three: the latest snapshot, one that is kept
for those who read it, and one to write the next into.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.gossip.model import Model

_NUM_SNAPSHOTS = 3
_NORM_BLOCK = 2**17  # values whose copy is still in the cache


@dataclasses.dataclass(eq=False)
class Snapshot:
    """Memory for the parameters, and what it holds.

    Attributes:
        wire: The parameters as the bytes that travel.
        data: The same memory, for sockets.
        number: Number of the snapshot; 0 while it is written.
        tag: Clock and loss of the parameters.
        norm: Their norm.
        readers: How many read it at this moment.
    """

    wire: Tensor
    data: memoryview
    number: int = 0
    tag: Tag = Tag(0.0, 0.0)
    norm: float = 0.0
    readers: int = 0


class Snapshots:
    """The latest snapshot, and earlier ones as long as they are being read.

    When two earlier ones are being read there is no memory for the next: :meth:`draft` says so, and
    the latest stays until all have read one of them. Readers have a deadline, which bounds this.

    Args:
        model: What is served, and how it is written.
        pinned: Whether a GPU copies into the memory.

    Raises:
        ValueError: If there are no parameters.
    """

    def __init__(self, model: Model, *, pinned: bool = False) -> None:
        if model.numel < 1:
            raise ValueError("There are no parameters to serve. Give the model some.")
        self._lock = threading.Lock()
        self._model = model
        self._flat: Tensor | None = None
        self._count = 0
        self._latest: Snapshot | None = None
        self._draft: Snapshot | None = None
        self._all = []
        for _ in range(_NUM_SNAPSHOTS):
            memory = torch.zeros(model.total_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._all.append(Snapshot(memory, memory.numpy().data))

    @property
    def latest(self) -> Snapshot | None:
        """The latest snapshot, to be read by the worker's own threads without a lock.

        It changes while it is read if its ``number`` does.
        """
        return self._latest

    def publish(self, flat: Tensor, tag: Tag) -> bool:
        """Copy parameters and make them the latest snapshot; for one thread only.

        Args:
            flat: Parameters ``(P,)``, on any device and in any floating-point dtype.
            tag: Their clock and loss.

        Returns:
            Whether there was memory for it.

        Raises:
            ValueError: If the number of parameters is another one.
        """
        numel = self._model.numel
        if flat.shape != (numel,):
            raise ValueError(
                f"The parameters have shape {tuple(flat.shape)}, but {numel} were announced. "
                "Publish one flat vector of the model's size."
            )
        draft = self.draft()
        if draft is None:
            return False
        with torch.no_grad():
            norm = copy_with_norm(flat, draft)
        self.post(tag, norm)
        return True

    def draft(self) -> Tensor | None:
        """Where the next snapshot is written ``(P,)``, in the model's dtype.

        With a codec it is a vector that is kept for this, and :meth:`post` encodes it. Nobody reads
        it until then; without a :meth:`post` the next call returns the same.

        Returns:
            The memory; None while all of it is being read.
        """
        memory = self.draft_bytes()
        if memory is None or self._model.codec is None:
            return None if memory is None else memory.view(self._model.dtype)
        if self._flat is None:
            self._flat = torch.empty(self._model.numel, dtype=self._model.dtype)
        return self._flat

    def post(self, tag: Tag, norm: float) -> None:
        """Make what was written into the :meth:`draft` the latest snapshot; for the same thread.

        Args:
            tag: Clock and loss of the parameters.
            norm: Their norm.
        """
        if self._model.codec is not None:
            assert self._flat is not None
            self._model.codec.encode(self._flat, self.draft_bytes())
        self.post_bytes(tag, norm)

    def draft_bytes(self) -> Tensor | None:
        """The memory of the next snapshot, for who encodes it; otherwise as :meth:`draft`."""
        if self._draft is None:
            with self._lock:
                free = [s for s in self._all if s is not self._latest and not s.readers]
                if not free:
                    return None
                self._draft = min(free, key=lambda snapshot: snapshot.number)
                self._draft.number = 0
        return self._draft.wire

    def post_bytes(self, tag: Tag, norm: float) -> None:
        """As :meth:`post`, of what was written into :meth:`draft_bytes`."""
        assert self._draft is not None
        with self._lock:
            self._count += 1
            self._latest, self._draft = self._draft, None
            self._latest.number = self._count
            self._latest.tag = tag
            self._latest.norm = norm

    def withdraw(self) -> None:
        """Serve nothing until the next snapshot, for which there is memory now."""
        with self._lock:
            self._latest = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[Snapshot | None]:
        """The latest snapshot, which stays as it is for the block; None if there is none."""
        with self._lock:
            snapshot = self._latest
            if snapshot is not None:
                snapshot.readers += 1
        try:
            yield snapshot
        finally:
            if snapshot is not None:
                with self._lock:
                    snapshot.readers -= 1


def norm_of(values: Tensor) -> float:
    """The norm of ``values`` ``(P,)``; not finite if one is not, or if a square is too large."""
    return math.sqrt(sum(map(_squared, torch.split(values, _NORM_BLOCK))))


def copy_with_norm(values: Tensor, into: Tensor) -> float:
    """Copy ``values`` ``(P,)`` and return the norm of the copy, in one pass over the memory."""
    blocks = zip(torch.split(values, _NORM_BLOCK), torch.split(into, _NORM_BLOCK), strict=True)
    return math.sqrt(sum(_squared(target.copy_(source)) for source, target in blocks))


def _squared(block: Tensor) -> float:
    return float(torch.dot(block, block))

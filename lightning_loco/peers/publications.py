"""Snapshots of a worker's parameters that others read while the next one is written.

The training thread publishes and the server thread reads. Neither waits for the other: the lock is
held for bookkeeping only, and parameters are copied outside of it, into a buffer that nobody reads
and from a buffer that nobody writes. There are three buffers: the latest publication, one that is
kept for readers who have begun with it, and one to write the next into.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers.model import Model
from lightning_loco.peers.norms import copy_with_norm
from lightning_loco.peers.protocol import LATEST

_MOST_READERS = 64


@dataclasses.dataclass(eq=False)
class Publication:
    """One buffer and what it holds.

    Attributes:
        wire: The parameters as the bytes that travel.
        data: The same memory, for sockets.
        number: Number of the publication; 0 while there is none.
        tag: Clock and loss of the parameters.
        norm: Their norm.
        pinned: Whether it is being copied from at this moment.
        leased_at: When the first of its present readers began.
        leases: Until when it is kept, by reader.
    """

    wire: Tensor
    data: memoryview
    number: int = 0
    tag: Tag = Tag(0.0, 0.0)
    norm: float = 0.0
    pinned: bool = False
    leased_at: float = 0.0
    leases: dict[bytes, float] = dataclasses.field(default_factory=dict)

    def is_leased(self, now: float) -> bool:
        """Whether someone is in the middle of reading it."""
        for reader in [reader for reader, end in self.leases.items() if end <= now]:
            del self.leases[reader]
        return bool(self.leases)


class Publications:
    """The latest publication, and earlier ones as long as they are being read.

    A reader that has begun with a publication keeps it for ``lease_s`` from its last chunk on. If
    the publisher has no other buffer left, the oldest lease ends early and its reader must start
    anew. So that this is rare, readers share: one that comes while all buffers but the latest and a
    free one are being read is given what the others are reading, if they have begun within
    ``lease_s``.

    Args:
        model: What is published, and how it is written.
        lease_s: How long a reader may be silent, in seconds.
        num_buffers: Publications that are held at once, at least 3.
        pinned: Whether a GPU copies into them.

    Raises:
        ValueError: If there are no parameters or too few buffers.
    """

    def __init__(
        self, model: Model, *, lease_s: float = 2.5, num_buffers: int = 3, pinned: bool = False
    ) -> None:
        if model.numel < 1:
            raise ValueError("There are no parameters to publish. Give the model some.")
        if num_buffers < 3:
            raise ValueError(f"num_buffers must be at least 3, got {num_buffers}. Use 3.")
        self._lock = threading.Lock()
        self._model = model
        self._flat: Tensor | None = None
        self._lease_s = lease_s
        self._count = 0
        self._latest: Publication | None = None
        self._draft: Publication | None = None
        self._buffers = []
        for _ in range(num_buffers):
            memory = torch.zeros(model.total_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._buffers.append(Publication(memory, memory.numpy().data))

    @property
    def latest(self) -> int:
        """Number of the latest publication, from 1 on; 0 if there is none."""
        return self._count

    @property
    def newest(self) -> Publication | None:
        """The latest publication, to be read by the worker's own threads without a lock.

        It changes while it is read if its ``number`` does.
        """
        return self._latest

    def publish(self, flat: Tensor, tag: Tag) -> int:
        """Copy parameters and make them the latest; for one thread only.

        Args:
            flat: Parameters ``(P,)``, on any device and in any floating-point dtype.
            tag: Their clock and loss.

        Returns:
            The number of the publication.

        Raises:
            ValueError: If the number of parameters is another one.
        """
        numel = self._model.numel
        if flat.shape != (numel,):
            raise ValueError(
                f"The parameters have shape {tuple(flat.shape)}, but {numel} were announced. "
                "Publish one flat vector of the model's size."
            )
        with torch.no_grad():
            norm = copy_with_norm(flat, self.draft())
        return self.post(tag, norm)

    def draft(self) -> Tensor:
        """Where the next publication is written ``(P,)``, in the model's dtype.

        With a codec it is a vector that is kept for this, and :meth:`post` encodes it. Nobody reads
        it until then; without a :meth:`post` the next call returns the same.
        """
        if self._model.codec is None:
            return self.draft_bytes().view(self._model.dtype)
        if self._flat is None:
            self._flat = torch.empty(self._model.numel, dtype=self._model.dtype)
        return self._flat

    def post(self, tag: Tag, norm: float) -> int:
        """Make what was written into the :meth:`draft` the latest publication.

        For one thread only, the one of :meth:`draft`.

        Args:
            tag: Clock and loss of the parameters.
            norm: Their norm.

        Returns:
            The number of the publication.
        """
        if self._model.codec is not None:
            assert self._flat is not None
            self._model.codec.encode(self._flat, self.draft_bytes())
        return self.post_bytes(tag, norm)

    def draft_bytes(self) -> Tensor:
        """The memory of the next publication, for who encodes it; as :meth:`draft` otherwise."""
        if self._draft is None:
            with self._lock:
                self._draft = self._take_buffer()
        return self._draft.wire

    def post_bytes(self, tag: Tag, norm: float) -> int:
        """As :meth:`post`, of what was written into :meth:`draft_bytes`."""
        assert self._draft is not None
        with self._lock:
            self._count += 1
            self._latest, self._draft = self._draft, None
            self._latest.number = self._count
            self._latest.tag = tag
            self._latest.norm = norm
            return self._count

    def _take_buffer(self) -> Publication:
        """A buffer that nobody can reach from now on, until it is the latest."""
        now = time.monotonic()
        free = [b for b in self._buffers if b is not self._latest and not b.pinned]
        buffer = min(free, key=lambda b: (b.is_leased(now), b.leased_at if b.leases else b.number))
        buffer.number = 0
        buffer.leases.clear()
        return buffer

    @contextlib.contextmanager
    def reading(self, number: int, reader: bytes) -> Iterator[Publication | None]:
        """Keep a publication still for as long as the block lasts; for one thread only.

        Args:
            number: Number of the publication, 0 for the latest.
            reader: Who reads, for the lease.

        Yields:
            The publication, or None if it is gone or there is none yet.
        """
        with self._lock:
            publication = self._find(number)
            if publication is not None:
                self._lease(publication, reader)
                publication.pinned = True
        try:
            yield publication
        finally:
            if publication is not None:
                publication.pinned = False

    def _find(self, number: int) -> Publication | None:
        if number != LATEST:
            return next((b for b in self._buffers if b.number == number), None)
        now = time.monotonic()
        if self._latest is None or self._latest.is_leased(now):
            return self._latest
        kept = [b for b in self._buffers if b.number and b is not self._latest and b.is_leased(now)]
        young = [b for b in kept if now - b.leased_at < self._lease_s]
        if young and len(kept) >= len(self._buffers) - 2:
            return max(young, key=lambda b: b.number)
        return self._latest

    def _lease(self, publication: Publication, reader: bytes) -> None:
        now = time.monotonic()
        for buffer in self._buffers:
            if buffer is not publication:
                buffer.leases.pop(reader, None)
        if not publication.is_leased(now):
            publication.leased_at = now
        if reader in publication.leases or len(publication.leases) < _MOST_READERS:
            publication.leases[reader] = now + self._lease_s

    def release(self, publication: Publication, reader: bytes) -> None:
        """End the lease of a reader that has read all."""
        with self._lock:
            publication.leases.pop(reader, None)

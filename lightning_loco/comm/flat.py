"""Flat buffers: where each parameter lives in one vector, and copying to and from it.

Parameters are copied, never re-pointed, so tied weights, memory formats and captured graphs stay
intact. The vector is cut into chunks that stay in the processor's cache while they are packed,
exchanged and unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_loco.comm.chunk import Chunk
from lightning_loco.comm.devices import CPU, has_streams

Schema = list[tuple[str, tuple[int, ...], str, tuple[int, ...]]]
"""(name, shape, dtype, strides) of every tensor: what must be equal on all workers."""

CHUNK_ELEMENTS = 2**20
"""Elements that are worked on at once: 4 MiB of float32, which a processor's cache can hold."""
_CHUNK_ELEMENTS_ON_A_GPU = 2**24


def longest_chunk(device: torch.device) -> int:
    """Elements that are worked on at once; more on a GPU, where each operation is a launch."""
    return CHUNK_ELEMENTS if device.type == "cpu" else _CHUNK_ELEMENTS_ON_A_GPU


class Cuts(NamedTuple):
    """Where a flat vector is cut into chunks.

    Attributes:
        chunk_elements: Longest chunk; None for no limit.
        granularity: Chunks begin at multiples of it.
        boundaries: Where chunks must end besides, in ascending order.
    """

    chunk_elements: int | None = None
    granularity: int = 1
    boundaries: tuple[int, ...] = ()


_UNCUT = Cuts()


class FlatLayout:
    """The layout of named tensors in one flat vector of length ``numel``.

    Args:
        named_tensors: Names and floating-point tensors; duplicates (tied weights) must be gone.
        cuts: How to cut it into chunks. Default: a single one. Dense tensors are cut to fit; a
            tensor with gaps in memory stays whole, and its chunk may then be longer.
        device: Where new vectors are. Default: where the tensors are.

    Attributes:
        names: Of the tensors.
        tensors: In the order of the vector.
        device: Where vectors are.
        numel: Length of the vector.
        cut: The chunks that :meth:`chunks` has returned last.
        before_write: To be called before a round reads or writes the tensors, if it is not None.

    Raises:
        TypeError: If a tensor is not real floating point.
        ValueError: From :meth:`chunks`, if a boundary falls into a tensor with gaps in memory.

    Note:
        The vector is float32, or float64 if any tensor is float64. Dense tensors are laid out in
        the order of their memory, so that channels_last costs nothing; hence strides are part of
        the schema.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        cuts: Cuts = _UNCUT,
        device: torch.device | None = None,
    ) -> None:
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        for name, tensor in named_tensors:
            if not tensor.is_floating_point():
                raise TypeError(
                    f"{name!r} has dtype {tensor.dtype}; only real floating-point values can "
                    "be averaged."
                )
            self.names.append(name)
            self.tensors.append(tensor)
        self.numel = sum(tensor.numel() for tensor in self.tensors)
        wide = any(tensor.dtype == torch.float64 for tensor in self.tensors)
        self.dtype = torch.float64 if wide else torch.float32
        near = self.tensors[0].device if self.tensors else CPU
        self.device = near if device is None else device
        self._is_pinned = self.device.type == "cpu" and has_streams(near)
        self._granularity = cuts.granularity
        wanted = cuts.chunk_elements or max(self.numel, 1)
        self._chunk_elements = max(wanted - wanted % cuts.granularity, cuts.granularity)
        self._boundaries = cuts.boundaries
        self._addresses: list[int] = []
        self.cut: list[Chunk] = []
        self.before_write: Callable[[], None] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each tensor by its name, in the order of the vector."""
        return {n: t.numel() for n, t in zip(self.names, self.tensors, strict=True)}

    @property
    def is_rounded(self) -> bool:
        """Whether a tensor is stored in a narrower dtype than the vector's."""
        return any(tensor.dtype != self.dtype for tensor in self.tensors)

    def schema(self) -> Schema:
        """Describe the tensors for a comparison between workers."""
        return [
            (name, tuple(t.shape), str(t.dtype), tuple(t.stride()))
            for name, t in zip(self.names, self.tensors, strict=True)
        ]

    def chunks(self) -> list[Chunk]:
        """The chunks, in order; made anew when a parameter's memory has moved."""
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        if addresses != self._addresses:
            self.cut = self._cut()
            self._addresses = addresses
        return self.cut

    def _cut(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        views: list[Tensor] = []
        start = position = 0

        def close() -> None:
            nonlocal views, start
            if views:
                chunks.append(Chunk(start, views))
                start, views = position, []

        for name, tensor in zip(self.names, self.tensors, strict=True):
            data = tensor.detach()
            if not data.numel():
                continue
            if not _is_dense(data):
                end = position + data.numel()
                if any(position < boundary < end for boundary in self._boundaries):
                    raise ValueError(f"{name!r} has gaps in memory and cannot be cut.")
                if end > start + self._chunk_elements and position % self._granularity == 0:
                    close()
                views.append(data)
                position = end
                if position >= self._stop(start, position):
                    close()
                continue
            line = data.as_strided((data.numel(),), (1,))
            while line.numel():
                length = min(line.numel(), self._stop(start, position + 1) - position)
                views.append(line[:length])
                line = line[length:]
                position += length
                if position == self._stop(start, position):
                    close()
        close()
        return chunks

    def _stop(self, start: int, position: int) -> int:
        """Where a chunk that began at ``start`` ends, at ``position`` or later."""
        full = start + self._chunk_elements
        stop = full if position <= full else position + -position % self._granularity
        return min([stop, *(b for b in self._boundaries if b >= position)])

    def empty(self, length: int) -> Tensor:
        """New memory ``(length,)``, pinned if the tensors' device then copies it faster."""
        return torch.empty(length, dtype=self.dtype, device=self.device, pin_memory=self._is_pinned)

    def new_flat(self) -> Tensor:
        """Copy all tensors into a new flat vector ``(numel,)``, on :attr:`device`."""
        return self._copied_to(self.device)

    def _copied_to(self, device: torch.device) -> Tensor:
        flat = torch.empty(self.numel, dtype=self.dtype, device=device)
        for chunk in self.chunks():
            chunk.pack(flat[chunk.start : chunk.stop])
        return flat

    def set_aside(self) -> Tensor:
        """Copy all tensors into a new flat vector ``(numel,)`` in the host's memory."""
        return self._copied_to(CPU)

    def write(self, flat: Tensor) -> None:
        """Copy a flat vector ``(numel,)``, on any device, into all tensors."""
        for chunk in self.chunks():
            chunk.unpack(flat[chunk.start : chunk.stop])

    def every(self, stride: int, offset: int) -> Tensor:
        """Copy the elements ``offset, offset + stride, ...`` of the flat vector."""
        parts = []
        position = 0
        for chunk in self.chunks():
            for view in chunk.views:
                parts.append(view.reshape(-1)[(offset - position) % stride :: stride])
                position += view.numel()
        return torch.cat(parts).to(self.dtype)


def are_finite(chunks: Sequence[Chunk]) -> bool:
    """Whether no chunk holds NaN or infinity (one read of the memory, one device sync)."""
    views = [view for chunk in chunks for view in chunk.views]
    if not views:
        return True
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(views)])
    if bool(torch.isfinite(norms).all()):
        return True
    return all(bool(torch.isfinite(view).all()) for view in views)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True

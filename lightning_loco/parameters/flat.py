"""Flat buffers: where each parameter lives in one vector, and copying to and from it.

Parameters are copied, never re-pointed, so tied weights, memory formats and captured graphs stay
intact. The vector is cut into chunks that stay in the processor's cache while they are packed,
exchanged and unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_loco.distributed.devices import CPU, has_streams

Schema = list[tuple[str, tuple[int, ...], str, tuple[int, ...]]]
"""(name, shape, dtype, strides) of every tensor: what must be equal on all workers."""


class Window(NamedTuple):
    """The views of a chunk, side by side with their places in a flat vector, dtype by dtype.

    On a GPU, torch 2.5 to 2.10 copy wrong values if the tensors of one list have several dtypes.
    """

    by_dtype: list[tuple[list[Tensor], list[Tensor]]]

    @classmethod
    def of(cls, views: list[Tensor], parts: list[Tensor]) -> Window:
        """Tie views to their places, which all have one dtype."""
        if len({view.dtype for view in views}) == 1:
            return cls([(views, parts)])
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for view, part in zip(views, parts, strict=True):
            of_dtype = by_dtype.setdefault(view.dtype, ([], []))
            of_dtype[0].append(view)
            of_dtype[1].append(part)
        return cls(list(by_dtype.values()))

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each view with its place."""
        for views, parts in self.by_dtype:
            yield from zip(views, parts, strict=True)

    def pack(self) -> None:
        """Copy the parameters into the flat vector."""
        for views, parts in self.by_dtype:
            torch._foreach_copy_(parts, views)

    def unpack(self) -> None:
        """Copy the flat vector into the parameters."""
        for views, parts in self.by_dtype:
            torch._foreach_copy_(views, parts)


class DistantWindow(NamedTuple):
    """A chunk beside its place in a flat vector in the memory of another device.

    The views are gathered where they are, so that one stretch of memory crosses over.
    """

    chunk: Chunk
    flat: Tensor

    def pack(self) -> None:
        """Copy the parameters into the flat vector, and wait until they are there."""
        near = self._near()
        self.chunk.window(near).pack()
        self.flat.copy_(near)

    def unpack(self) -> None:
        """Copy the flat vector into the parameters; it may be changed at once."""
        near = self._near()
        near.copy_(self.flat)
        self.chunk.window(near).unpack()

    def _near(self) -> Tensor:
        return torch.empty_like(self.flat, device=self.chunk.device, pin_memory=False)


class Chunk:
    """The slice ``start:stop`` of the flat vector, and the views of parameters it is made of."""

    def __init__(self, start: int, views: list[Tensor]) -> None:
        self.start = start
        self.views = views
        self._sizes = [view.numel() for view in views]
        self._shapes = [view.shape if view.ndim > 1 else None for view in views]
        self.stop = start + sum(self._sizes)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.views[0].device

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split_with_sizes(flat, self._sizes)
        return [p if s is None else p.view(s) for p, s in zip(parts, self._shapes, strict=True)]

    def is_rounded(self, dtype: torch.dtype) -> bool:
        """Whether a parameter is stored in a narrower dtype than ``dtype``."""
        return any(view.dtype != dtype for view in self.views)

    def rounding_error(self, flat: Tensor) -> Tensor:
        """What unpacking ``flat`` would lose because parameters are stored in narrower dtypes."""
        pairs = zip(self._parts(flat), self.views, strict=True)
        return torch.cat([(part - part.to(view.dtype)).reshape(-1) for part, view in pairs])

    def window(self, flat: Tensor) -> Window:
        """Tie the chunk to ``flat``, ``(len(self),)`` on the same device, for many copies."""
        return Window.of(self.views, self._parts(flat))

    def tied(self, flat: Tensor) -> Window | DistantWindow:
        """Tie the chunk to ``flat``, ``(len(self),)`` on any device, for many copies."""
        is_near = flat.device.type == self.device.type
        return self.window(flat) if is_near else DistantWindow(self, flat)

    def pack(self, flat: Tensor) -> None:
        """Copy the parameters into ``flat``, of shape ``(len(self),)``, on any device."""
        self.tied(flat).pack()

    def unpack(self, flat: Tensor) -> None:
        """Copy ``flat``, of shape ``(len(self),)``, on any device, into the parameters."""
        self.tied(flat).unpack()


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
        self._cuts = cuts
        self._addresses: list[int] = []
        self.cut: list[Chunk] = []
        self.before_write: Callable[[], None] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each tensor by its name, in the order of the vector."""
        return {n: t.numel() for n, t in zip(self.names, self.tensors, strict=True)}

    @property
    def num_bytes(self) -> int:
        """Bytes of the flat vector."""
        return self.numel * self.dtype.itemsize

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
            longest = self._cuts.chunk_elements or max(self.numel, 1)
            named = zip(self.names, self.tensors, strict=True)
            found = stretches(named, longest, self._cuts.granularity, self._cuts.boundaries)
            self.cut = [Chunk(start, views) for start, views in found]
            self._addresses = addresses
        return self.cut

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


def stretches(
    named_tensors: Iterable[tuple[str, Tensor]],
    longest: int,
    granularity: int = 1,
    boundaries: Sequence[int] = (),
) -> Iterator[tuple[int, list[Tensor]]]:
    """Cut tensors at the ends of stretches of one long vector.

    Args:
        named_tensors: In the order of the vector; dense ones are cut to fit. One with gaps in
            memory stays whole, and its stretch may then be longer.
        longest: Elements of a stretch.
        granularity: Stretches begin at multiples of it.
        boundaries: Where stretches must end besides, in ascending order.

    Yields:
        Where a stretch begins, and the views that it is made of.

    Raises:
        ValueError: If a boundary falls into a tensor with gaps in memory.

    Example:
        >>> import torch
        >>> tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(3)}
        >>> [(at, [len(v) for v in views]) for at, views in stretches(tensors.items(), longest=4)]
        [(0, [4]), (4, [2, 2]), (8, [1])]
    """
    length_of_all = max(longest - longest % granularity, granularity)
    views: list[Tensor] = []
    start = position = 0

    def stop(position: int) -> int:
        """Where the stretch that began at ``start`` ends, at ``position`` or later."""
        full = start + length_of_all
        end = full if position <= full else position + -position % granularity
        return min([end, *(b for b in boundaries if b >= position)])

    for name, tensor in named_tensors:
        data = tensor.detach()
        if not data.numel():
            continue
        if not _is_dense(data):
            end = position + data.numel()
            if any(position < boundary < end for boundary in boundaries):
                raise ValueError(f"{name!r} has gaps in memory and cannot be cut.")
            if views and end > start + length_of_all and position % granularity == 0:
                yield start, views
                start, views = position, []
            views.append(data)
            position = end
            if position >= stop(position):
                yield start, views
                start, views = position, []
            continue
        line = data.as_strided((data.numel(),), (1,))
        while line.numel():
            length = min(line.numel(), stop(position + 1) - position)
            views.append(line[:length])
            line = line[length:]
            position += length
            if position == stop(position):
                yield start, views
                start, views = position, []
    if views:
        yield start, views


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

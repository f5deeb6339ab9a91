"""Flat vectors: the position of each parameter in one vector, and copies to and from it.

Parameters are copied into flat vectors, never re-pointed, so tied weights, memory formats and
captured graphs stay intact. The vector is cut into chunks that fit the processor's cache while they
are packed, exchanged and unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_loco.distributed.devices import CPU, has_streams

CHUNK_ELEMENTS = 2**20
"""Elements of a chunk on the CPU: 4 MiB of float32, which fit the processor's cache."""
_CHUNK_ELEMENTS_ON_A_GPU = 2**24

Schema = list[tuple[str, tuple[int, ...], str, tuple[int, ...]]]
"""(name, shape, dtype, strides) of every tensor; equal on all workers."""


def longest_chunk(device: torch.device) -> int:
    """Return the elements of a chunk; more on a GPU, where every operation is a kernel launch."""
    return CHUNK_ELEMENTS if device.type == "cpu" else _CHUNK_ELEMENTS_ON_A_GPU


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor on this rank: of a ``DTensor`` its shard."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


class Cuts(NamedTuple):
    """Where a flat vector is cut into chunks.

    Attributes:
        chunk_elements: Length of the longest chunk; None for no limit.
        granularity: Chunks start at multiples of it.
        boundaries: Positions at which a chunk must end, in ascending order.
        whole_tensors: Whether chunks must not end within a tensor; they may then be longer.
    """

    chunk_elements: int | None = None
    granularity: int = 1
    boundaries: tuple[int, ...] = ()
    whole_tensors: bool = False


_UNCUT = Cuts()


class FlatLayout:
    """The layout of named tensors in one flat vector of length ``numel``.

    Args:
        named_tensors: Names and floating-point tensors, without duplicates (tied weights).
        cuts: How to cut the vector into chunks. Default: a single chunk. Dense tensors are cut to
            fit; a tensor with gaps in memory stays whole, and its chunk may then be longer.
        device: Device of new vectors. Default: the tensors' device.
        owned: Slices, cut by ``cuts``, that the vector consists of. Default: all of the tensors.
        whole_position: From a position in the vector of all tensors to that in the vector of the
            whole tensors, of which these may be shards. Default: they are whole.

    Attributes:
        names: Names of the tensors.
        tensors: The tensors, in the order of the vector.
        device: Device of new vectors.
        numel: Length of the vector.
        num_held: Number of elements of all tensors, also those that are not owned.
        dtype: float32, or float64 if any tensor is float64.
        before_write: Unless None, rounds call it before they read or write the tensors.

    Raises:
        TypeError: If a tensor is not real floating point.
        ValueError: From :meth:`chunks`, if a boundary falls into a tensor with gaps in memory.

    Note:
        The elements of dense tensors are in the order of their memory, so that channels_last costs
        nothing. Therefore strides are part of the schema.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        cuts: Cuts = _UNCUT,
        device: torch.device | None = None,
        owned: Sequence[range] | None = None,
        whole_position: Callable[[int], int] = int,
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
        self.num_held = sum(tensor.numel() for tensor in self.tensors)
        self.numel = self.num_held if owned is None else sum(map(len, owned))
        has_float64 = any(tensor.dtype == torch.float64 for tensor in self.tensors)
        self.dtype = torch.float64 if has_float64 else torch.float32
        device_of_tensors = self.tensors[0].device if self.tensors else CPU
        self.device = device_of_tensors if device is None else device
        self._is_pinned = self.device.type == "cpu" and has_streams(device_of_tensors)
        self._cuts = cuts
        self._owned = owned
        self._whole_position = whole_position
        self._chunks: list[Chunk] = []
        self._held_chunks: list[Chunk] = []
        self._addresses: list[int] = []
        self.before_write: Callable[[], None] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Number of elements of each tensor by its name, in the order of the vector."""
        return {n: t.numel() for n, t in zip(self.names, self.tensors, strict=True)}

    @property
    def num_bytes(self) -> int:
        """Size of the flat vector in bytes."""
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
        """Return the chunks in order; a new list whenever the memory of a tensor has moved."""
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        if addresses != self._addresses:
            longest = self._cuts.chunk_elements or max(self.num_held, 1)
            named = zip(self.names, self.tensors, strict=True)
            slices = cut_tensors(named, longest, *self._cuts[1:])
            self._held_chunks = [
                Chunk(start, views, self._whole_position(start)) for start, views in slices
            ]
            self._chunks = self._held_chunks if self._owned is None else self._find_owned()
            self._addresses = addresses
        return self._chunks

    def _find_owned(self) -> list[Chunk]:
        assert self._owned is not None
        found, start = [], 0
        for chunk in self._held_chunks:
            if any(chunk.start in part for part in self._owned):
                found.append(Chunk(start, chunk.views, chunk.whole_position))
                start = found[-1].stop
        return found

    def held_chunks(self) -> list[Chunk]:
        """Return the chunks of all tensors, also those that are not owned."""
        self.chunks()
        return self._held_chunks

    def empty(self, length: int) -> Tensor:
        """Allocate a vector ``(length,)``, pinned if the tensors' device then copies it faster."""
        return torch.empty(length, dtype=self.dtype, device=self.device, pin_memory=self._is_pinned)

    def new_flat(self) -> Tensor:
        """Copy the tensors into a new flat vector ``(numel,)``, on :attr:`device`."""
        flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        for chunk in self.chunks():
            chunk.pack(flat[chunk.start : chunk.stop])
        return flat

    def new_flat_on_cpu(self) -> Tensor:
        """Copy all tensors into a new flat vector ``(num_held,)`` in the host's memory."""
        flat = torch.empty(self.num_held, dtype=self.dtype, device="cpu")
        for chunk in self.held_chunks():
            chunk.pack(flat[chunk.start : chunk.stop])
        return flat

    def write(self, flat: Tensor) -> None:
        """Copy a flat vector ``(numel,)``, on any device, into the tensors."""
        for chunk in self.chunks():
            chunk.unpack(flat[chunk.start : chunk.stop])

    def write_held(self, flat: Tensor) -> None:
        """Copy a flat vector ``(num_held,)``, on any device, into all tensors."""
        for chunk in self.held_chunks():
            chunk.unpack(flat[chunk.start : chunk.stop])

    def named_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a vector ``(num_held,)`` with the shapes of the tensors, by name."""
        views, start = {}, 0
        for name, tensor in zip(self.names, self.tensors, strict=True):
            part = flat[start : start + tensor.numel()]
            start += tensor.numel()
            if _is_dense(tensor):
                views[name] = part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())
            else:
                views[name] = part.view(tensor.shape)
        return views

    def subsample(self, stride: int, offset: int) -> Tensor:
        """Copy the elements ``offset, offset + stride, ...`` of the flat vector."""
        parts = []
        position = 0
        for chunk in self.chunks():
            for view in chunk.views:
                parts.append(view.reshape(-1)[(offset - position) % stride :: stride])
                position += view.numel()
        return torch.cat(parts).to(self.dtype) if parts else self.empty(0)


class Chunk:
    """The slice ``start:stop`` of the flat vector, made of these views of parameters.

    In the vector of a whole worker, of which this rank may have a part, it begins at
    ``whole_position``; by default at ``start``.
    """

    def __init__(self, start: int, views: list[Tensor], whole_position: int | None = None) -> None:
        self.start = start
        self.whole_position = start if whole_position is None else whole_position
        self.views = views
        self._sizes = [view.numel() for view in views]
        self._shapes = [view.shape if view.ndim > 1 else None for view in views]
        self.stop = start + sum(self._sizes)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.views[0].device

    def is_rounded(self, dtype: torch.dtype) -> bool:
        """Return whether a parameter is stored in another dtype than ``dtype``."""
        return any(view.dtype != dtype for view in self.views)

    def rounding_error(self, flat: Tensor) -> Tensor:
        """Return what unpacking ``flat`` would lose to the narrower dtypes of parameters."""
        pairs = zip(self._split(flat), self.views, strict=True)
        return torch.cat([(part - part.to(view.dtype)).reshape(-1) for part, view in pairs])

    def pack(self, flat: Tensor) -> None:
        """Copy the parameters into ``flat``, of shape ``(len(self),)``, on any device."""
        self.packing(flat).pack()

    def unpack(self, flat: Tensor) -> None:
        """Copy ``flat``, of shape ``(len(self),)``, on any device, into the parameters."""
        self.packing(flat).unpack()

    def packing(self, flat: Tensor) -> Packing | CrossDevicePacking:
        """Prepare repeated copies to and from ``flat``, ``(len(self),)``, on any device."""
        is_same_device = flat.device.type == self.device.type
        return self.same_device_packing(flat) if is_same_device else CrossDevicePacking(self, flat)

    def same_device_packing(self, flat: Tensor) -> Packing:
        """Prepare repeated copies to and from ``flat``, ``(len(self),)``, on the same device."""
        return Packing.of(self.views, self._split(flat))

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split_with_sizes(flat, self._sizes)
        return [p if s is None else p.view(s) for p, s in zip(parts, self._shapes, strict=True)]


class Packing(NamedTuple):
    """Repeated copies between parameters and parts of a flat vector on the same device.

    Attributes:
        by_dtype: Views of parameters and parts of the vector, one pair of lists for each dtype of
            the parameters. On a GPU, ``torch._foreach_copy_`` of torch 2.5 to 2.10 copies wrong
            values if a list has tensors of several dtypes.
    """

    by_dtype: list[tuple[list[Tensor], list[Tensor]]]

    @classmethod
    def of(cls, views: list[Tensor], parts: list[Tensor]) -> Packing:
        """Pair views of parameters with parts of a vector, in the same order."""
        if len({view.dtype for view in views}) == 1:
            return cls([(views, parts)])
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for view, part in zip(views, parts, strict=True):
            same_dtype = by_dtype.setdefault(view.dtype, ([], []))
            same_dtype[0].append(view)
            same_dtype[1].append(part)
        return cls(list(by_dtype.values()))

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the views and their parts of the vector."""
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


class CrossDevicePacking(NamedTuple):
    """Repeated copies between a chunk of parameters and a vector of its length on another device.

    The parameters are packed on their own device first, so that one copy crosses over.
    """

    chunk: Chunk
    flat: Tensor

    def pack(self) -> None:
        """Copy the parameters into the flat vector, and wait until they have arrived."""
        packed = self._empty_on_device()
        self.chunk.same_device_packing(packed).pack()
        self.flat.copy_(packed)

    def unpack(self) -> None:
        """Copy the flat vector into the parameters; the vector may be changed at once."""
        packed = self._empty_on_device()
        packed.copy_(self.flat)
        self.chunk.same_device_packing(packed).unpack()

    def _empty_on_device(self) -> Tensor:
        return torch.empty_like(self.flat, device=self.chunk.device, pin_memory=False)


def are_finite(chunks: Sequence[Chunk]) -> bool:
    """Return whether no chunk holds NaN or infinity (one read of the memory, one device sync)."""
    views = [view for chunk in chunks for view in chunk.views]
    if not views:
        return True
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(views)])
    if bool(torch.isfinite(norms).all()):
        return True
    return all(bool(torch.isfinite(view).all()) for view in views)


def cut_tensors(
    named_tensors: Iterable[tuple[str, Tensor]],
    longest: int,
    granularity: int = 1,
    boundaries: Sequence[int] = (),
    whole_tensors: bool = False,
) -> Iterator[tuple[int, list[Tensor]]]:
    """Cut tensors, laid end to end in one vector, into slices of a given length.

    Args:
        named_tensors: Tensors in the order of the vector. Dense ones are cut to fit; one with gaps
            in memory stays whole, and its slice may then be longer.
        longest: Number of elements of a slice.
        granularity: Slices start at multiples of it.
        boundaries: Positions at which a slice must end, in ascending order.
        whole_tensors: Whether all tensors stay whole; no boundary may fall into one.

    Yields:
        Position at which a slice starts, and the views that it consists of.

    Raises:
        ValueError: If a boundary falls into a tensor with gaps in memory.

    Example:
        >>> import torch
        >>> tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(3)}
        >>> [(at, [len(v) for v in views]) for at, views in cut_tensors(tensors.items(), longest=4)]
        [(0, [4]), (4, [2, 2]), (8, [1])]
    """
    full_length = max(longest - longest % granularity, granularity)
    views: list[Tensor] = []
    start = position = 0

    def end_from(position: int) -> int:
        """Return where the slice that starts at ``start`` ends, at ``position`` or later."""
        full = start + full_length
        end = full if position <= full else position + -position % granularity
        return min([end, *(b for b in boundaries if b >= position)])

    for name, tensor in named_tensors:
        data = tensor.detach()
        if not data.numel():
            continue
        if whole_tensors or not _is_dense(data):
            end = position + data.numel()
            if any(position < boundary < end for boundary in boundaries):
                raise ValueError(f"{name!r} has gaps in memory and cannot be cut.")
            if views and end > start + full_length and position % granularity == 0:
                yield start, views
                start, views = position, []
            views.append(data)
            position = end
            if position >= end_from(position):
                yield start, views
                start, views = position, []
            continue
        flat = data.as_strided((data.numel(),), (1,))
        while flat.numel():
            length = min(flat.numel(), end_from(position + 1) - position)
            views.append(flat[:length])
            flat = flat[length:]
            position += length
            if position == end_from(position):
                yield start, views
                start, views = position, []
    if views:
        yield start, views


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill contiguous memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True

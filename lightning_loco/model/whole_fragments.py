"""Fragments of a worker's whole parameters, of which its ranks may hold shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_loco._util.fault_points import reach
from lightning_loco.distributed.devices import device_of_group
from lightning_loco.distributed.work import PendingWork
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.model.flat import CHUNK_ELEMENTS, Chunk, Cuts, FlatLayout, local_tensor
from lightning_loco.model.ownership import Block, gather_blocks
from lightning_loco.model.same_model import broadcast_inside

_READING = "gathering a fragment from the ranks of a worker"
_WRITING = "sharing a fragment between the ranks of a worker"


class Part(NamedTuple):
    """The part of a tensor that is in a fragment.

    Attributes:
        number: Of the tensor.
        elements: Its elements in the whole tensor, row by row.
        begin: Where they begin in the fragment.
    """

    number: int
    elements: range
    begin: int

    @property
    def place(self) -> slice:
        """Where the elements are in the fragment."""
        return slice(self.begin, self.begin + len(self.elements))


class WholeFragments:
    """Reads and writes fragments of a worker's parameters, whatever its ranks hold of them.

    A fragment is a slice of one vector of all parameters. In a worker of several ranks only the
    first one has fragments. If all ranks hold the whole parameters, it reads them by itself; if
    they hold shards, all ranks must call :meth:`read`.

    Args:
        parameters: By name.
        slices: By fragment, its slice of the vector; they follow each other.
        group: The worker; all ranks must create it.

    Attributes:
        dtype: Of the fragments: float32, or float64 if a parameter is float64.
        are_sharded: Whether a rank holds only a part of a parameter.

    Raises:
        ValueError: If a parameter has gaps in memory, or shards are not stored row by row.
        RuntimeError: If a rank is missing or has failed.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], slices: Sequence[range], group: WorkerGroup
    ) -> None:
        self._tensors, self._slices, self._group = [*parameters.values()], slices, group
        is_divided = any(isinstance(tensor, DTensor) for tensor in self._tensors)
        self.are_sharded = is_divided and group.inner is not None
        blocks = [Block.of(tensor) for tensor in self._tensors]
        self._blocks = gather_blocks(blocks, group) if self.are_sharded else [blocks]
        place = group.place if self.are_sharded else 0
        lengths = [self._num_held(place, fragment) for fragment in range(len(slices))]
        self._borders = [*itertools.accumulate(lengths, initial=0)]
        named = {name: local_tensor(tensor) for name, tensor in parameters.items()}
        for name, tensor in named.items():
            if self.are_sharded and not tensor.is_contiguous():
                raise ValueError(
                    f"{name!r} is not stored row by row, and parameters are that are divided among "
                    "the ranks of a worker. Make it contiguous, or do not divide the model."
                )
        ends = tuple(sorted({*self._borders[1:]} - {0}))
        self._layout = FlatLayout(named.items(), Cuts(CHUNK_ELEMENTS, 1, ends))
        self._layout.chunks()  # ValueError for a tensor that cannot be cut
        self.dtype = self._layout.dtype

    @property
    def is_rounded(self) -> bool:
        """Whether a parameter is stored in a narrower dtype than :attr:`dtype`."""
        return self._layout.is_rounded

    def parts(self, fragment: int) -> Iterator[Part]:
        """Yield the parts of tensors that are in a fragment, in order."""
        whole, start = self._slices[fragment], 0
        for number, tensor in enumerate(self._tensors):
            first, last = max(whole.start - start, 0), min(whole.stop - start, tensor.numel())
            if first < last:
                yield Part(number, range(first, last), start + first - whole.start)
            start += tensor.numel()

    def as_stored(self, fragment: int, params: Tensor) -> Tensor:
        """Return a fragment rounded to the dtypes of the parameters."""
        stored = params.clone()
        for part in self.parts(fragment):
            stored[part.place] = params[part.place].to(self._tensors[part.number].dtype)
        return stored

    # ------------------------------------------------------------------------ read

    def read(self, fragment: int) -> Tensor:
        """Copy a fragment into the host's memory, ``(P,)``; another rank gets what it holds."""
        reach("packing")
        chunks, begin = self._held(fragment)
        held = torch.empty(sum(map(len, chunks)), dtype=self.dtype, device="cpu")
        for chunk in chunks:
            chunk.pack(held[chunk.start - begin : chunk.stop - begin])
        return self._gather(held, fragment) if self.are_sharded else held

    def _held(self, fragment: int) -> tuple[list[Chunk], int]:
        """Return what this rank holds of a fragment, and where that begins in its vector."""
        part = range(self._borders[fragment], self._borders[fragment + 1])
        return [chunk for chunk in self._layout.chunks() if chunk.start in part], part.start

    def _num_held(self, place: int, fragment: int) -> int:
        return sum(
            math.prod(held.local_shape)
            for part in self.parts(fragment)
            for _, held in self._blocks[place][part.number].boxes(part.elements)
        )

    def _longest(self, fragment: int) -> int:
        return max(self._num_held(place, fragment) for place in range(self._group.replica_size))

    def _gather(self, held: Tensor, fragment: int) -> Tensor:
        group = self._group
        members = group.whole_inside
        assert members is not None
        device, longest = device_of_group(members), self._longest(fragment)
        sent = torch.zeros(longest, dtype=self.dtype, device=device)
        sent[: len(held)] = held
        received = [torch.empty_like(sent) for _ in self._blocks] if group.place == 0 else None
        first = dist.get_global_rank(members, 0)
        work = dist.gather(sent, received, first, members, async_op=True)
        PendingWork(group, _READING, [work]).wait()
        if received is None:
            return held
        whole = torch.empty(len(self._slices[fragment]), dtype=self.dtype, device="cpu")
        for place, values in enumerate(received):
            position, values = 0, values.to("cpu")
            for view in self._views(whole, place, fragment):
                view.copy_(values[position : position + view.numel()].view(view.shape))
                position += view.numel()
        return whole

    def _views(self, whole: Tensor, place: int, fragment: int) -> Iterator[Tensor]:
        """Yield views of what a rank holds of a fragment, in the order of its vector."""
        for part in self.parts(fragment):
            of_tensor, start = whole[part.place], part.elements.start
            for elements, held in self._blocks[place][part.number].boxes(part.elements):
                view = of_tensor[elements.start - start : elements.stop - start].view(held.shape)
                for dim, (offset, length) in enumerate(
                    zip(held.offset, held.local_shape, strict=True)
                ):
                    view = view.narrow(dim, offset, length)
                yield view

    # ----------------------------------------------------------------------- write

    def write(self, fragment: int, params: Tensor) -> None:
        """Write the first rank's fragment ``(P,)`` into the model; all ranks must call it.

        Only the length of the vectors of other ranks counts.
        """
        held = self.share(fragment, params)
        chunks, begin = self._held(fragment)
        for chunk in chunks:
            chunk.unpack(held[chunk.start - begin : chunk.stop - begin])

    def share(self, fragment: int, params: Tensor) -> Tensor:
        """Return what this rank holds of the first rank's fragment; all ranks must call it."""
        group = self._group
        if group.inner is None:
            return params
        if not self.are_sharded:
            sent = params.to(self._layout.device, self.dtype)
            broadcast_inside([sent], group, _WRITING)
            return sent
        members = group.whole_inside
        assert members is not None
        device, longest = device_of_group(members), self._longest(fragment)
        received = torch.empty(longest, dtype=self.dtype, device=device)
        sent_to = None
        if group.place == 0:
            sent_to = [torch.zeros_like(received) for _ in self._blocks]
            for place, into in enumerate(sent_to):
                views = [view.reshape(-1) for view in self._views(params, place, fragment)]
                if views:
                    values = torch.cat(views)
                    into[: len(values)] = values
        first = dist.get_global_rank(members, 0)
        work = dist.scatter(received, sent_to, first, members, async_op=True)
        PendingWork(group, _WRITING, [work]).wait()
        return received[: self._num_held(group.place, fragment)]

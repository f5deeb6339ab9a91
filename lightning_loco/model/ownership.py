"""Ownership of elements in a worker of several ranks: owners exchange, and share the results.

Every element of a worker is owned by one of its ranks. The ranks that own the same elements of all
workers exchange them with each other. Where other ranks of the worker hold the same element, they
get the result from its owner.

A ``DTensor`` is a shard, which its rank owns; of a plain tensor all ranks of the worker hold the
same values, and each owns a part of about the same size. The same holds for a shard that several
ranks hold, for example of a parameter that tensor parallelism leaves whole.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from lightning_loco.distributed.work import PendingWork
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.model.flat import Chunk, FlatLayout

_LABEL = "sharing a result between the ranks of a worker"


class Block(NamedTuple):
    """The part of a tensor that a rank holds: a box in its index space.

    Attributes:
        shape: Of the whole tensor.
        offset: Of the part's first element, by dimension.
        local_shape: Of the part.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Block:
        """Find the part of a parameter that this rank holds."""
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(shape, (0,) * len(shape), shape)
        chunks: Any = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        (held,) = chunks  # as torch.distributed.checkpoint saves them
        return cls(shape, tuple(held.offsets), tuple(held.sizes))

    def elements_before(self, position: int) -> int:
        """Number of elements of the part before a position of the whole tensor, row by row.

        Example:
            >>> right_half = Block((2, 4), (0, 2), (2, 2))
            >>> [right_half.elements_before(position) for position in (0, 2, 3, 6, 8)]
            [0, 0, 1, 2, 4]
        """
        before, size = 0, math.prod(self.local_shape)
        if position >= math.prod(self.shape):
            return size
        rest = math.prod(self.shape)
        for length, offset, local in zip(self.shape, self.offset, self.local_shape, strict=True):
            rest, size = rest // max(length, 1), size // max(local, 1)
            index, position = divmod(position, max(rest, 1))
            before += min(max(index - offset, 0), local) * size
            if not offset <= index < offset + local:
                break
        return before

    def boxes(self, part: range) -> Iterator[tuple[range, Block]]:
        """Divide a part of the whole tensor into boxes, in order, of which some elements are held.

        Yields the elements of a box, row by row, and which of them are held.

        Example:
            >>> right_half = Block((2, 4), (0, 2), (2, 2))
            >>> for elements, held in right_half.boxes(range(1, 8)):
            ...     print(elements, held)
            range(1, 4) Block(shape=(3,), offset=(1,), local_shape=(2,))
            range(4, 8) Block(shape=(1, 4), offset=(0, 2), local_shape=(1, 2))
        """
        if not self.shape:
            yield part, self
            return
        size = math.prod(self.shape[1:])
        first, last = -(-part.start // size), part.stop // size  # rows that are in it as a whole
        if first > last:
            yield from self._boxes_in_row(last, part)
            return
        if part.start < first * size:
            yield from self._boxes_in_row(first - 1, range(part.start, first * size))
        begin = max(self.offset[0], first)
        end = min(self.offset[0] + self.local_shape[0], last)
        if begin < end:
            offset, local_shape = self.offset[1:], self.local_shape[1:]
            held = Block(
                (last - first, *self.shape[1:]),
                (begin - first, *offset),
                (end - begin, *local_shape),
            )
            yield range(first * size, last * size), held
        if last * size < part.stop:
            yield from self._boxes_in_row(last, range(last * size, part.stop))

    def _boxes_in_row(self, row: int, part: range) -> Iterator[tuple[range, Block]]:
        if row in range(self.offset[0], self.offset[0] + self.local_shape[0]):
            start = row * math.prod(self.shape[1:])
            inside = Block(self.shape[1:], self.offset[1:], self.local_shape[1:])
            for elements, held in inside.boxes(range(part.start - start, part.stop - start)):
                yield range(elements.start + start, elements.stop + start), held

    def whole_position(self, element: int) -> int:
        """Position in the whole tensor, row by row, of an element of the part.

        Example:
            >>> right_half = Block((2, 4), (0, 2), (2, 2))
            >>> [right_half.whole_position(element) for element in range(4)]
            [2, 3, 6, 7]
        """
        position, size = 0, math.prod(self.local_shape)
        for length, offset, local in zip(self.shape, self.offset, self.local_shape, strict=True):
            size //= local
            index, element = divmod(element, size)
            position = position * length + offset + index
        return position


def whole_positions(tensors: Iterable[Tensor]) -> Callable[[int], int]:
    """Return a function from positions in the vector of shards to the vector of whole tensors."""
    blocks = [Block.of(tensor) for tensor in tensors]
    held, whole = (
        list(itertools.accumulate(map(math.prod, shapes), initial=0))
        for shapes in ([b.local_shape for b in blocks], [b.shape for b in blocks])
    )

    def find(position: int) -> int:
        number = bisect.bisect_right(held, position) - 1
        return whole[number] + blocks[number].whole_position(position - held[number])

    return find


class SharedSlices(NamedTuple):
    """Slices of a vector that several ranks of a worker hold, and who of them owns which.

    Attributes:
        places: The ranks of the worker that hold them.
        owned_by: By fragment, for each of the places the slices that it owns.
    """

    places: tuple[int, ...]
    owned_by: list[list[list[range]]]


class Ownership(NamedTuple):
    """The parts of this rank's vector: by fragment the slices it owns, and those it shares.

    Attributes:
        fragments: By fragment the slices that this rank owns.
        shared: Slices that several ranks hold.
        most: The most elements that a rank of the worker owns.
    """

    fragments: list[list[range]]
    shared: list[SharedSlices]
    most: int

    @property
    def owned(self) -> list[range]:
        """All slices that this rank owns, in order."""
        slices = [part for fragment in self.fragments for part in fragment]
        return sorted(slices, key=lambda part: part.start)

    def fragment_slices(self) -> list[list[range]]:
        """By fragment, the slices of the vector of only those elements that this rank owns."""
        starts, position = {}, 0
        for part in self.owned:
            starts[part.start] = position
            position += len(part)
        return [
            [range(starts[part.start], starts[part.start] + len(part)) for part in fragment]
            for fragment in self.fragments
        ]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Positions at which chunks must end."""
        slices = self.owned
        for shared in self.shared:
            slices += [part for parts in shared.owned_by for own in parts for part in own]
        ends = {border for part in slices for border in (part.start, part.stop)}
        return tuple(sorted(ends - {0}))


def check_shards(named: Iterable[tuple[str, Tensor]], group: WorkerGroup) -> None:
    """Raise ValueError if a parameter is a partial sum, or sharded over ranks of other workers."""
    first = group.worker * group.replica_size
    own = range(first, first + group.replica_size)
    for name, tensor in named:
        if not isinstance(tensor, DTensor):
            continue
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            raise ValueError(
                f"Parameter {name!r} must not be a partial sum, got {tensor.placements}. Use "
                "Shard or Replicate."
            )
        ranks = tensor.device_mesh.mesh.flatten().tolist()
        if others := [rank for rank in ranks if rank not in own]:
            raise ValueError(
                f"Parameter {name!r} is distributed over a mesh with {rank_list(others)}, and "
                f"worker {group.worker} is {rank_list(own)}. Use self.device_mesh in "
                "configure_model, which holds the ranks of one worker."
            )


def check_sliceable(named: Mapping[str, Tensor], granularity: int | None) -> None:
    """Raise ValueError if a parameter is sharded, and ``granularity`` None keeps it together."""
    placements = [t.placements for t in named.values() if isinstance(t, DTensor)]
    if granularity is None and not all(p.is_replicate() for of_one in placements for p in of_one):
        raise ValueError(
            "An algorithm with granularity=None needs the whole vector of parameters, and one with "
            "whole_tensors needs whole ones, but each rank of a worker holds a shard of it. Use an "
            "algorithm that works on slices."
        )


def rank_list(ranks: Sequence[int]) -> str:
    """Format ranks for a message.

    Example:
        >>> rank_list([3]), rank_list([4, 5])
        ('rank 3', 'ranks 4, 5')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def find_ownership(
    named: Mapping[str, Tensor],
    fragments: Sequence[Sequence[range]],
    granularity: int | None,
    group: WorkerGroup,
) -> Ownership:
    """Decide which slices of the vector of its local tensors each rank of a worker owns.

    All ranks of the worker must call it.

    Args:
        named: Parameters by name, in the order of the vector.
        fragments: By fragment, slices of the vector of all whole parameters.
        granularity: Slices that several ranks divide are cut at multiples of it; None if they must
            not be cut, so that the first of these ranks owns all.
        group: The worker.

    Raises:
        RuntimeError: If a rank is missing or has failed.
    """
    blocks = [Block.of(tensor) for tensor in named.values()]
    local_fragments = [list(_local_slices(blocks, fragment)) for fragment in fragments]
    if group.replica_size == 1:
        whole = [_joined(part for _, part in found) for found in local_fragments]
        return Ownership(whole, [], sum(len(part) for found in whole for part in found))
    holders = find_holders(blocks, group)
    owned: list[list[range]] = []
    shared = {each: SharedSlices(each, []) for each in sorted(set(holders)) if len(each) > 1}
    for found in local_fragments:
        own = [part for tensor, part in found if len(holders[tensor]) == 1]
        for each, slices in shared.items():
            held_together = _joined_tensors(
                [(tensor, part) for tensor, part in found if holders[tensor] == each]
            )
            parts = list(divide(held_together, len(each), granularity))
            slices.owned_by.append(parts)
            own += parts[each.index(group.place)]
        owned.append(_joined(sorted(own, key=lambda part: part.start)))
    numel = sum(len(part) for found in owned for part in found)
    most = max(group.gather_inside(numel, "the comparison of the ranks of a worker"))
    return Ownership(owned, list(shared.values()), most)


def find_holders(blocks: Sequence[Block], group: WorkerGroup) -> list[tuple[int, ...]]:
    """For each part, the places of the ranks of this worker that hold the same elements.

    All ranks of the worker must call it.
    """
    everyone = gather_blocks(blocks, group)
    return [
        tuple(place for place, theirs in enumerate(everyone) if theirs[index] == own)
        for index, own in enumerate(blocks)
    ]


def gather_blocks(blocks: Sequence[Block], group: WorkerGroup) -> list[list[Block]]:
    """Return for each rank of this worker the parts that it holds of the same tensors.

    All ranks of the worker must call it.
    """
    held = [[list(block.offset), list(block.local_shape)] for block in blocks]
    everyone = group.gather_inside(held, "the comparison of the ranks of a worker")
    return [
        [
            Block(own.shape, tuple(offset), tuple(local_shape))
            for own, (offset, local_shape) in zip(blocks, theirs, strict=True)
        ]
        for theirs in everyone
    ]


def _local_slices(
    blocks: Sequence[Block], fragment: Sequence[range]
) -> Iterator[tuple[int, range]]:
    """Yield this rank's part of a fragment: the number of a tensor, and a slice of the vector."""
    start = local_start = 0
    for number, block in enumerate(blocks):
        size, local_size = math.prod(block.shape), math.prod(block.local_shape)
        for part in fragment:
            first, last = max(part.start - start, 0), min(part.stop - start, size)
            if first < last:
                ends = block.elements_before(first), block.elements_before(last)
                if ends[0] < ends[1]:
                    yield number, range(local_start + ends[0], local_start + ends[1])
        start, local_start = start + size, local_start + local_size


def _joined(slices: Iterable[range]) -> list[range]:
    """Join neighbours of slices in ascending order."""
    joined: list[range] = []
    for part in slices:
        if joined and joined[-1].stop == part.start:
            part = range(joined.pop().start, part.stop)
        joined.append(part)
    return joined


def _joined_tensors(slices: Sequence[tuple[int, range]]) -> list[range]:
    """Join slices of neighbouring tensors, given by number: where is the same on all ranks.

    A tensor in between may have no elements on one rank only.
    """
    joined: list[range] = []
    last = -1
    for tensor, part in slices:
        if joined and joined[-1].stop == part.start and tensor <= last + 1:
            part = range(joined.pop().start, part.stop)
        joined.append(part)
        last = tensor
    return joined


def divide(
    slices: Sequence[range], num_parts: int, granularity: int | None
) -> Iterator[list[range]]:
    """Divide slices into parts of about the same size, of which the first one is not empty.

    Args:
        slices: To divide; not empty.
        num_parts: Number of parts.
        granularity: Slices are cut at multiples of it, counted from their start; None if they must
            not be cut or separated, so that all are in the first part.

    Example:
        >>> list(divide([range(0, 10), range(20, 26)], 2, granularity=4))
        [[range(0, 8)], [range(8, 10), range(20, 26)]]
    """
    total = sum(map(len, slices))
    for index in range(num_parts):
        if granularity is None:
            yield list(slices) if index == 0 else []
            continue
        first, last = -(-total * index // num_parts), -(-total * (index + 1) // num_parts)
        before, part = 0, []
        for piece in slices:
            begin, end = (
                min(len(piece), max(0, border - before + -(border - before) % granularity))
                for border in (first, last)
            )
            if begin < end:
                part.append(piece[begin:end])
            before += len(piece)
        yield part


class ResultSharing:
    """Sends the elements that each rank of a worker owns to other ranks that hold them.

    Args:
        ownership: Of this rank.
        layout: Its vector.
        group: The worker; process groups of ranks that hold the same elements are made on all
            ranks.
    """

    def __init__(self, ownership: Ownership, layout: FlatLayout, group: WorkerGroup) -> None:
        self._shared = ownership.shared
        self._layout = layout
        self._group = group
        group.connect_inside([shared.places for shared in self._shared], _LABEL)

    @torch.no_grad()
    def share(self, fragment: int | None = None) -> None:
        """Overwrite the elements that other ranks own; all ranks of the worker must call it.

        Args:
            fragment: Of these elements; None for all.

        Raises:
            RuntimeError: If a rank is missing or has failed.
        """
        for shared in self._shared:
            for number, parts in enumerate(shared.owned_by):
                if fragment is None or number == fragment:
                    self._share(parts, shared.places)

    def _share(self, parts: list[list[range]], places: tuple[int, ...]) -> None:
        by_owner = [self._chunks_in(slices) for slices in parts]
        pending: PendingChunks | None = None
        for chunks in itertools.zip_longest(*by_owner):
            following = self._all_gather(chunks, places)
            if pending is not None:
                pending.unpack()
            pending = following
        if pending is not None:
            pending.unpack()

    def _chunks_in(self, slices: list[range]) -> list[Chunk]:
        chunks = self._layout.held_chunks()
        return [chunk for chunk in chunks if any(chunk.start in part for part in slices)]

    def _all_gather(self, chunks: Sequence[Chunk | None], places: tuple[int, ...]) -> PendingChunks:
        """Send a chunk of each owner, of which some may have none."""
        own, members = places.index(self._group.place), self._group.inside[places]
        present = [chunk for chunk in chunks if chunk is not None]
        dtypes = {view.dtype for chunk in present for view in chunk.views}
        dtype = dtypes.pop() if len(dtypes) == 1 else self._layout.dtype
        longest, device = max(map(len, present)), present[0].device
        sent = torch.empty(longest, dtype=dtype, device=device)
        if (mine := chunks[own]) is not None:
            mine.pack(sent[: len(mine)])
        received = [torch.empty_like(sent) for _ in chunks]
        work = dist.all_gather(received, sent, members, async_op=True)
        pending = PendingWork(self._group, _LABEL, [work])
        others = [(c, r) for c, r in zip(chunks, received, strict=True) if c not in (None, mine)]
        return PendingChunks(pending, [(c, r[: len(c)]) for c, r in others if c is not None])


class PendingChunks(NamedTuple):
    """Chunks that are being received from their owners.

    Attributes:
        work: Of the collective.
        received: Each chunk with its new values.
    """

    work: PendingWork
    received: list[tuple[Chunk, Tensor]]

    def unpack(self) -> None:
        """Wait, and write the received values into the parameters."""
        self.work.wait()
        for chunk, values in self.received:
            chunk.unpack(values)

"""Vectors of a worker of several ranks: gathered from the parts of its ranks, and cut into them.

A checkpoint has vectors of all elements that a rank holds, so that they do not depend on ownership:
from the first rank for whole parameters, from each rank for shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.distributed.devices import device_of_group
from lightning_loco.distributed.worker_group import ExplainErrors, WorkerGroup
from lightning_loco.model.flat import CHUNK_ELEMENTS
from lightning_loco.model.ownership import Ownership

_LABEL = "gathering the state of a worker"


class WorkerVectors:
    """Makes vectors of all elements that a rank holds from those that each owns, and the reverse.

    A vector has one value per parameter, or one per parameter of a fragment. The methods raise
    ValueError if a rank holds a shard although ``holds_shards`` is False.

    Args:
        ownership: Of this rank.
        group: The worker, connected as its :class:`~.ownership.ResultSharing` has done it.
        holds_shards: Whether each rank gets vectors of its elements. Otherwise all ranks must
            hold all parameters, and only the first one gets vectors.

    Attributes:
        fragments: By fragment, the slices of the vector of all that this rank holds.
        is_receiver: Whether this rank gets vectors.
    """

    def __init__(self, ownership: Ownership, group: WorkerGroup, *, holds_shards: bool) -> None:
        self._ownership = ownership
        self._group = group
        self._holds_shards = holds_shards
        self.is_receiver = holds_shards or group.place == 0
        self.fragments = [self._held_of(number) for number in range(len(ownership.fragments))]
        self._all_held = _merged(itertools.chain(*self.fragments))
        everyone = tuple(range(group.replica_size))
        of_all = [shared.owned_by for shared in ownership.shared if shared.places == everyone]
        num_of_all = sum(len(part) for parts in itertools.chain(*of_all) for part in sum(parts, []))
        self._lacks_elements = not holds_shards and num_of_all < sum(map(len, self._all_held))

    def length(self, fragment: int | None = None) -> int:
        """Return the length of a vector of all elements that this rank holds."""
        return sum(map(len, self._slices(fragment)))

    def cut(self, held: Tensor, fragment: int | None = None) -> Tensor:
        """Return the part of a vector that this rank owns, on the same device."""
        return _read(held, _positions(self._slices(fragment), self._owned(fragment)))

    def spread(self, values: Tensor, fragment: int) -> Tensor:
        """Return a vector of all parameters with the values of a fragment, and zero elsewhere."""
        held = values.new_zeros(self.length())
        _write(held, _positions(self._slices(None), self.fragments[fragment]), values)
        return held

    def part_of(self, held: Tensor, fragment: int) -> Tensor:
        """Return the values of a fragment in a vector of all parameters."""
        return _read(held, _positions(self._slices(None), self.fragments[fragment]))

    def gather(self, part: Tensor, fragment: int | None = None) -> Tensor | None:
        """Return the vector of all elements that this rank holds, in the host's memory.

        All ranks of the worker must call it, except those that own nothing if the first one owns
        all. Ranks that do not get vectors get None.

        Args:
            part: The values of the elements that this rank owns.
            fragment: The one to which the vector belongs; None for all parameters.

        Raises:
            RuntimeError: If a rank is missing or has failed; the message names it.
        """
        held, slices = None, self._slices(fragment)
        if self.is_receiver:
            held = torch.zeros(sum(map(len, slices)), dtype=part.dtype, device="cpu")
            _write(held, _positions(slices, self._owned(fragment)), part)
        for shared in self._ownership.shared:
            for number, parts in enumerate(shared.owned_by):
                if fragment is None or number == fragment:
                    for chunks in itertools.zip_longest(*map(_chunks, parts), fillvalue=()):
                        if self._holds_shards or any(chunks[1:]):
                            self._gather_chunks(chunks, shared.places, part, held, fragment)
        return held

    def _gather_chunks(
        self,
        chunks: Sequence[Sequence[range]],
        places: tuple[int, ...],
        part: Tensor,
        held: Tensor | None,
        fragment: int | None,
    ) -> None:
        """Send a chunk of each rank's elements to the ranks that get vectors."""
        members, own = self._group.inside[places], chunks[places.index(self._group.place)]
        # The vector may be in the host's memory, and the group may send from a GPU's only.
        longest, device = max(sum(map(len, chunk)) for chunk in chunks), device_of_group(members)
        sent = torch.zeros(longest, dtype=part.dtype, device=device)
        values = _read(part, _positions(self._owned(fragment), own))
        sent[: len(values)] = values
        received = [torch.empty_like(sent) for _ in chunks] if held is not None else None
        with ExplainErrors(self._group, _LABEL):
            if self._holds_shards:
                dist.all_gather(received, sent, members)
            else:
                dist.gather(sent, received, dist.get_global_rank(members, 0), members)
        if held is not None and received is not None:
            for found, chunk in zip(received, chunks, strict=True):
                _write(held, _positions(self._slices(fragment), chunk), found)

    def _held_of(self, fragment: int) -> list[range]:
        """Slices of a fragment that this rank owns, or another one that holds them as well."""
        found = list(self._ownership.fragments[fragment])
        for shared in self._ownership.shared:
            found += itertools.chain(*shared.owned_by[fragment])
        return _merged(found)

    def _slices(self, fragment: int | None) -> list[range]:
        if self._lacks_elements:
            raise ValueError(
                "A rank of a worker holds a shard of the parameters. Checkpoints are only for "
                "workers whose ranks hold all parameters."
            )
        return self._all_held if fragment is None else self.fragments[fragment]

    def _owned(self, fragment: int | None) -> list[range]:
        owned = self._ownership
        return owned.owned if fragment is None else _merged(owned.fragments[fragment])


def _merged(slices: Iterable[range]) -> list[range]:
    """Sort slices, and join those that touch or overlap."""
    merged: list[range] = []
    for part in sorted(slices, key=lambda part: part.start):
        if merged and part.start <= merged[-1].stop:
            last = merged.pop()
            part = range(last.start, max(last.stop, part.stop))
        merged.append(part)
    return merged


def _chunks(slices: Iterable[range]) -> Iterator[list[range]]:
    """Divide slices into groups of at most ``CHUNK_ELEMENTS`` elements."""
    chunk: list[range] = []
    room = CHUNK_ELEMENTS
    for part in slices:
        while part:
            chunk.append(part[:room])
            part, room = part[room:], room - len(chunk[-1])
            if not room:
                yield chunk
                chunk, room = [], CHUNK_ELEMENTS
    if chunk:
        yield chunk


def _positions(held: Sequence[range], wanted: Iterable[range]) -> Iterator[slice]:
    """Yield where slices are in a vector that consists of the slices ``held``."""
    for part in wanted:
        before = 0
        for around in held:
            if part.start in around:
                start = before + part.start - around.start
                yield slice(start, start + len(part))
            before += len(around)


def _read(held: Tensor, positions: Iterable[slice]) -> Tensor:
    """Copy slices of a vector into one that has nothing else."""
    return torch.cat([held[:0], *(held[elements] for elements in positions)])


def _write(held: Tensor, positions: Iterable[slice], values: Tensor) -> None:
    """Write the values of a vector, from its start, into slices of another one."""
    start = 0
    for elements in positions:
        stop = start + elements.stop - elements.start
        held[elements].copy_(values[start:stop])
        start = stop

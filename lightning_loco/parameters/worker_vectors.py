"""Vectors of a worker whose ranks hold shards: of what a rank owns, and of all that it holds.

A checkpoint has those of all elements that a rank holds, by the names of the parameters, so that
they do not depend on who owns what.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.distributed.work import ExplainErrors
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.parameters.ownership import Ownership

_LABEL = "gathering the state of a worker"


class HeldVectors:
    """Makes vectors of all elements that this rank holds from those that it owns, and the reverse.

    A vector has one value per parameter, or one per parameter of a fragment.

    Args:
        ownership: Of this rank.
        group: The worker, connected as its :class:`~.ownership.ResultSharing` has done it.

    Attributes:
        fragments: By fragment, the slices of the vector of all that this rank holds.
    """

    def __init__(self, ownership: Ownership, group: WorkerGroup) -> None:
        self._ownership = ownership
        self._group = group
        self.fragments = [self._held_of(number) for number in range(len(ownership.fragments))]

    @property
    def is_first(self) -> bool:
        """Whether this rank gets the vectors; each gets those that it holds."""
        return True

    def _held_of(self, fragment: int) -> list[range]:
        """Slices of a fragment that this rank owns, or another one that holds them as well."""
        found = list(self._ownership.fragments[fragment])
        for shared in self._ownership.shared:
            found += itertools.chain(*shared.owned_by[fragment])
        return _merged(found)

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

    def gather(self, part: Tensor, fragment: int | None = None) -> Tensor:
        """Return the vector of all elements that this rank holds, in the host's memory.

        All ranks of the worker must call it.

        Raises:
            RuntimeError: If a rank is missing or has failed; the message names it.
        """
        held, slices = torch.zeros(self.length(fragment), dtype=part.dtype), self._slices(fragment)
        _write(held, _positions(slices, self._owned(fragment)), part)
        for shared in self._ownership.shared:
            members = self._group.inside[shared.places]
            for number, parts in enumerate(shared.owned_by):
                if fragment is None or number == fragment:
                    found = [list(_positions(slices, owned)) for owned in parts]
                    own = shared.places.index(self._group.place)
                    with ExplainErrors(self._group, _LABEL):
                        _all_gather(held, found, own, members, part.device)
        return held

    def _slices(self, fragment: int | None) -> list[range]:
        if fragment is not None:
            return self.fragments[fragment]
        return _merged(itertools.chain(*self.fragments))

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


def _positions(held: Sequence[range], wanted: Sequence[range]) -> Iterator[slice]:
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


def _all_gather(
    held: Tensor,
    by_owner: Sequence[Sequence[slice]],
    own: int,
    members: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Fill in the elements that other ranks own."""
    lengths = [sum(part.stop - part.start for part in slices) for slices in by_owner]
    sent = torch.zeros(max(lengths), dtype=held.dtype)
    sent[: lengths[own]] = _read(held, by_owner[own])
    received = [torch.empty_like(sent, device=device) for _ in by_owner]
    dist.all_gather(received, sent.to(device), members)
    for values, slices in zip(received, by_owner, strict=True):
        _write(held, slices, values)

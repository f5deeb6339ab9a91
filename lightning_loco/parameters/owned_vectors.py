"""Vectors of a worker of several ranks, of which each has the part that it owns.

A checkpoint has them whole, so that they do not depend on the number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.distributed.work import ExplainErrors
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.parameters.flat import CHUNK_ELEMENTS
from lightning_loco.parameters.ownership import Ownership

_LABEL = "gathering the state of a worker"


class OwnedVectors:
    """Gathers vectors from the parts that the ranks of a worker own, and cuts them into these.

    A vector has one value per parameter, or one per parameter of a fragment.

    Args:
        ownership: Of this rank.
        numel: Number of elements of all parameters.
        group: The worker.
    """

    def __init__(self, ownership: Ownership, numel: int, group: WorkerGroup) -> None:
        self._shared = ownership.shared
        self._numel = numel
        self._group = group

    @property
    def is_first(self) -> bool:
        """Whether this rank gets whole vectors."""
        return self._group.place == 0

    def gather(self, part: Tensor, fragment: int | None = None) -> Tensor | None:
        """Return the whole vector on the worker's first rank, in the host's memory; None on others.

        All ranks of the worker that own a part of it must call it.

        Args:
            part: What this rank owns.
            fragment: The one to which the vector belongs; None for all parameters.

        Raises:
            ValueError: If a rank of the worker holds a shard of the parameters.
            RuntimeError: If a rank is missing or has failed; the message names it.
        """
        owned_by, group = self._owned_by(fragment), self._group
        assert group.inner is not None
        ranks = [dist.get_global_rank(group.inner, place) for place in range(group.replica_size)]
        if group.place > 0:
            with ExplainErrors(group, _LABEL):
                for own, _ in _pieces(owned_by[group.place]):
                    dist.send(part[own].cpu(), ranks[0], group.inner)
            return None
        whole = torch.empty(_length(owned_by), dtype=part.dtype)
        for own, elements in _pieces(owned_by[0]):
            whole[elements].copy_(part[own])
        with ExplainErrors(group, _LABEL):
            for rank, slices in zip(ranks[1:], owned_by[1:], strict=True):
                for _, elements in _pieces(slices):
                    dist.recv(whole[elements], rank, group.inner)
        return whole

    def cut(self, whole: Tensor, fragment: int | None = None) -> Tensor:
        """Return the part of a whole vector that this rank owns, on the same device.

        ValueError if a rank of the worker holds a shard of the parameters.
        """
        own = self._owned_by(fragment)[self._group.place]
        return torch.cat([whole[:0], *(whole[part.start : part.stop] for part in own)])

    def length(self, fragment: int | None = None) -> int:
        """Return the length of a whole vector."""
        return _length(self._owned_by(fragment))

    def _owned_by(self, fragment: int | None) -> list[list[range]]:
        """For each rank of the worker, the slices of a whole vector that it owns."""
        everyone = tuple(range(self._group.replica_size))
        of_all = [shared.owned_by for shared in self._shared if shared.places == everyone]
        if sum(map(_length, itertools.chain(*of_all))) != self._numel:
            raise ValueError(
                "A rank of a worker holds a shard of the parameters. Checkpoints are only for "
                "workers whose ranks hold all parameters."
            )
        if not of_all:
            return [[] for _ in everyone]
        (by_fragment,) = of_all
        if fragment is None:
            return [
                sorted(itertools.chain(*slices), key=lambda part: part.start)
                for slices in zip(*by_fragment, strict=True)
            ]
        lengths = (sum(map(len, slices)) for slices in by_fragment[fragment])
        ends = itertools.accumulate(lengths, initial=0)
        return [[range(start, stop)] for start, stop in itertools.pairwise(ends)]


def _length(owned_by: Sequence[Sequence[range]]) -> int:
    return sum(len(part) for slices in owned_by for part in slices)


def _pieces(slices: Sequence[range]) -> Iterator[tuple[slice, slice]]:
    """Yield the elements of each message: where they are in the rank's part, and in the whole."""
    position = 0
    for held in slices:
        for start in range(held.start, held.stop, CHUNK_ELEMENTS):
            stop = min(start + CHUNK_ELEMENTS, held.stop)
            yield slice(position, position + stop - start), slice(start, stop)
            position += stop - start

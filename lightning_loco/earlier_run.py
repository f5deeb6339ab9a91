"""The saved state of another run: one with other settings, or another number of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco.distributed.work import AllReduceSum
from lightning_loco.worker import Worker

_LABEL = "the mean of what other workers have saved"


@dataclasses.dataclass(frozen=True)
class EarlierRun:
    """The state of an earlier run.

    Attributes:
        state: State that this worker has saved; that of worker 0 if this worker is new.
        algorithm: Name of the class of its algorithm.
        settings: Its settings, as plain values.
        num_workers: Number of its workers.
        consensus_key: The entry of the algorithm's state that was the consensus; None if that was
            the mean of the local parameters.
        is_shared: Whether the entry ``"shared"`` was equal on all workers.
        read: Reads the state of any of its workers.
        readers: For each of its workers, the worker that reads its state for a mean. Default: each
            worker reads its share. A state without a reader is left out.
    """

    state: dict[str, Any]
    algorithm: str
    settings: dict[str, Any]
    num_workers: int
    consensus_key: str | None
    is_shared: bool
    read: Callable[[int], dict[str, Any]]
    readers: dict[int, int] | None = None

    def fits(self, num_workers: int) -> bool:
        """Whether each of ``num_workers`` workers has a state of its own in it."""
        is_whole = self.readers is None or len(self.readers) >= self.num_workers
        return is_whole and self.num_workers == num_workers

    def share_of(self, worker: int, num_workers: int) -> Sequence[int]:
        """The workers of the earlier run whose states a worker reads for a mean."""
        if self.readers is None:
            return range(worker, self.num_workers, num_workers)
        return [writer for writer, reader in self.readers.items() if reader == worker]

    def is_of(self, algorithm: object) -> bool:
        """Whether it was written by an algorithm of the same class."""
        return self.algorithm == type(algorithm).__name__

    def forgotten(self) -> list[str]:
        """What another algorithm, which starts at the consensus, does not take over, in words."""
        notes = ["all workers begin at the consensus"]
        states = [shared["state"] for shared in self.state.get("shared", ())]
        if names := sorted(set().union(*states) - {self.consensus_key}):
            notes.append(f"what {self.algorithm} remembered ({', '.join(names)}) is dropped")
        if any(fragment["pending"] is not None for fragment in self.state.get("fragments", ())):
            notes.append("a pending round is dropped")
        steps = self.state["steps_since_round"]
        if self.consensus_key is not None and steps:
            notes.append(f"the last {steps} local steps, which no round has shared, are dropped")
        return notes


def mean_of_states(worker: Worker, saved: EarlierRun, names: Iterable[str]) -> dict[str, Any]:
    """Return entries of the saved states with the mean over the earlier workers for each vector.

    Each worker reads its share of the files; all must call it. Vectors that are not finite are left
    out. Plain numbers and tensors of integers are those of ``saved.state``. ValueError or OSError
    on all workers if a file cannot be read.
    """
    group = worker.group
    template = {name: saved.state[name] for name in names}
    sums = [torch.zeros_like(vector) for vector in _vectors(template)]
    counts = [0] * len(sums)
    with group.errors_shared(_LABEL):
        for number in saved.share_of(group.worker, group.num_workers):
            state = saved.state if number == group.worker else saved.read(number)
            found = _vectors({name: state[name] for name in template})
            for index, (total, vector) in enumerate(zip(sums, found, strict=True)):
                if bool(torch.isfinite(vector).all()):
                    total.add_(vector)
                    counts[index] += 1
    totals = [sum(column) for column in zip(*group.gather_objects(counts, _LABEL), strict=True)]
    device = worker.replica.layout.device
    for flat, count in zip(sums, totals, strict=True):
        whole = AllReduceSum(group, worker.statistics, flat.to(device), _LABEL).wait()
        flat.copy_(whole.div_(max(count, 1)))
    means: dict[str, Any] = _replaced(template, iter(sums))
    return means


def _vectors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor) and tree.is_floating_point():
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _vectors(value)


def _replaced(tree: Any, vectors: Iterator[Tensor]) -> Any:
    if isinstance(tree, Tensor) and tree.is_floating_point():
        return next(vectors)
    if isinstance(tree, dict):
        return {name: _replaced(value, vectors) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_replaced(value, vectors) for value in tree]
    return tree

"""The ranks of one worker: DDP averages their gradients in every step, and they stay together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_loco.distributed import json_messages
from lightning_loco.distributed.watchdog import WorkerFailure, capitalized
from lightning_loco.distributed.worker_group import (
    ExplainErrors,
    WorkerGroup,
    abort_groups,
    is_of_collective,
)
from lightning_loco.strategies import lightning_compat

_SAME = (
    "All ranks of a worker take the same steps: give them the same number of batches, as the "
    "sampler that Lightning sets does, and let their hooks do the same."
)


def warn_of_straddling(replica_size: int, ranks_per_node: int, arguments: str) -> None:
    """Warn if some workers have ranks on two nodes that they do not fill.

    ``arguments`` of the strategy make workers of ``replica_size`` ranks.
    """
    if ranks_per_node % replica_size and replica_size % ranks_per_node:
        first = ranks_per_node - ranks_per_node % replica_size
        rank_zero_warn(
            f"{arguments} makes workers of {replica_size} ranks, and a node has {ranks_per_node}: "
            f"ranks {first} to {first + replica_size - 1} are one worker on several nodes, which "
            "communicate over the network in every step. Choose a size that divides "
            f"{ranks_per_node}."
        )


class ReplicaGroup:
    """The ranks of this worker, of several; all ranks of all workers make it at the same time.

    They share a copy of the model: DDP averages their gradients. They come to every sync point
    together, since each of them waits there for the ranks of other workers only.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._names = list(group.rank_names)
        size = group.replica_size
        self._ranks = range(group.worker * size, (group.worker + 1) * size)
        with ExplainErrors(group, "the set-up of the groups"):
            # For sync points alone: a group that other collectives use would mix these up with a
            # sync point of other ranks.
            self._control: dist.ProcessGroup | None = group.new_inner_group("gloo")

    def wrap(self, strategy: DDPStrategy, model: nn.Module) -> nn.Module:
        """Return the model in DDP over these ranks, with the arguments of the strategy.

        The group must be connected.
        """
        lightning_compat.average_gradients_in(strategy, self._group.whole_inside)
        with self.errors_named("the set-up of DDP"):
            return lightning_compat.wrap_in_ddp(strategy, model)

    def meet(self, purpose: str, steps: int) -> None:
        """Wait until all ranks of this worker are at the same sync point.

        Raises:
            RuntimeError: If they are at different ones, or one is missing or has failed. The
                message names them.
        """
        own = f"{purpose} after {steps} local steps"
        names = [self._names[rank] for rank in self._ranks]
        self._group.announce_wait(purpose)
        assert self._control is not None
        with self.errors_named(own):
            found = json_messages.all_gather(json_messages.write(own), self._control, names)
        places = [
            str(json_messages.read(one, name)) for one, name in zip(found, names, strict=True)
        ]
        if len(set(places)) > 1:
            where = "; ".join(f"{n} at {place}" for n, place in zip(names, places, strict=True))
            raise RuntimeError(
                f"The ranks of worker {self._group.worker} wait for each other at different sync "
                f"points: {where}. {_SAME}"
            )

    @contextmanager
    def errors_named(self, label: str) -> Iterator[None]:
        """A context in which an error of a collective of these ranks names the rank at fault.

        ``label`` names the collective. Errors of the user's code are not changed.
        """
        started = self._group.clock.now()
        try:
            yield
        except RuntimeError as error:
            if not (type(error) is RuntimeError or isinstance(error, dist.DistError)):
                raise
            found = self._explain(error, label, self._group.clock.now() - started)
            if found is None:
                raise
            self._group.failed = True
            raise found from error

    def _explain(self, error: RuntimeError, label: str, waited_s: float) -> WorkerFailure | None:
        """Find the rank that failed: a connection may be closed by a rank that blames another one.

        The watchdog is asked first, since some errors of gloo do not say that they are. None for an
        error of the user's code while all ranks are well.
        """
        watchdog = self._group.watchdog
        assert watchdog is not None
        silent = watchdog.silent()
        if watchdog.failure is not None:
            return WorkerFailure(watchdog.failure)
        if silent:
            return WorkerFailure(
                f"No message in {label} after {waited_s:.0f} s from {', '.join(silent)} (no sign "
                "of life). Check that every rank runs, or raise timeout_s."
            )
        if not is_of_collective(error):
            return None
        own, last = self._ranks[self._group.place], watchdog.labels()
        others = ", ".join(
            f"{self._names[rank]} (alive, last exchange: {last.get(rank, 'none')})"
            for rank in self._ranks
            if rank != own
        )
        return WorkerFailure(
            f"{capitalized(self._names[own])}, has waited {waited_s:.0f} s in {label} for the "
            f"other ranks of its worker: {others}. {_SAME}"
        )

    def close(self, strategy: object, *, has_failed: bool) -> None:
        """Destroy the groups, once the model is no longer wrapped."""
        if isinstance(strategy, DDPStrategy):
            lightning_compat.average_gradients_in(strategy, None)
        assert self._control is not None
        groups, self._control = [self._control], None
        if has_failed:
            abort_groups(groups)
        else:
            list(map(dist.destroy_process_group, groups))

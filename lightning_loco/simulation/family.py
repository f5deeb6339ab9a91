"""What differs between the families of methods in the simulation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from lightning_loco._util.goodput import Counted
from lightning_loco.costs import LinkTimes
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.fragment_sync import HasArrived
from lightning_loco.model.ownership import find_ownership
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.model.worker import Settings, Worker, exchanged_parameters, make_replica
from lightning_loco.simulation.timeline import Timeline
from lightning_loco.syncer.merge_rounds import Merge
from lightning_loco.syncer.syncer import Syncer


class Family(ABC):
    """The participants of one family, and how their messages travel on the virtual clock.

    Args:
        workers: The workers, with the same parameters.
        settings: Prepared.
        times: Transfer times of messages; None if they take no time.
        timeline: Records the messages.
        seed: Of random choices.
        admit: With failures, called with a time before a round is complete; returns the workers
            that join in it. Else None.

    Attributes:
        participants: The participant of each worker.
        has_rounds: Whether there are rounds.
        syncer: The syncer of decoupled learners, and ``merges``, those that it has published.
        sync_every: Local steps between rounds of worker 0; None if time decides.
        wakeups: Times and receivers of messages that arrive, since the list was last cleared.
        join_s: How long each worker that comes back waits for the state of the run.
    """

    participants: Sequence[LocalParticipant]
    has_rounds = True
    sync_every: int | None = None
    syncer: Syncer | None = None

    def __init__(
        self,
        workers: Sequence[Worker],
        settings: Any,
        times: LinkTimes | None,
        timeline: Timeline,
        seed: int,
        admit: Callable[[float], list[int]] | None,
    ) -> None:
        self.settings, self.times, self.timeline = settings, times, timeline
        self.seed, self.admit = seed, admit
        self.wakeups: list[tuple[float, int]] = []
        self.join_s = [0.0] * len(workers)
        self.merges: list[Merge] = []
        self.participants = self.make_participants(workers)

    def begin(self, worker: int) -> Iterator[HasArrived]:
        """Take part in the run, before the first local step."""
        return iter(())

    @abstractmethod
    def make_participants(self, workers: Sequence[Worker]) -> Sequence[LocalParticipant]:
        """Return a participant for each worker, connected with those of the others."""

    def rounds_of(self, worker: int) -> int:
        """Return the number of rounds that a worker has begun in all its lives."""
        return self.participants[worker].statistics.rounds

    def begin_round(self, worker: int) -> Iterator[HasArrived]:
        """Begin a round of a worker whose parameters may have changed without local steps."""
        return self.participants[worker].round_in_parts()

    def drain(self, worker: int, num_rounds: int) -> Iterator[HasArrived]:
        """Begin the missing rounds up to ``num_rounds``, and apply all pending ones."""
        return iter(())

    def lose(self, worker: int, now_s: float) -> None:  # noqa: B027
        """A worker has died."""

    def notice(self, worker: int, now_s: float) -> None:  # noqa: B027
        """The other workers have noticed that it is dead."""

    def welcome(self, worker: int, now_s: float) -> None:  # noqa: B027
        """A worker that is back waits until it is admitted."""

    def rejoin(self, worker: int) -> Iterator[HasArrived]:
        """Take part in the run again, before the next local step, once it is admitted."""
        return self.begin(worker)

    def counted_steps(self, worker: int) -> Counted | None:
        """Return the local steps whose progress was merged; None if that is not known."""
        return None

    @property
    def background_s(self) -> float:
        """Time of what happens next without a worker; infinite if nothing does."""
        return math.inf

    def run_background(self, until_s: float) -> None:  # noqa: B027
        """Do what happens without a worker until then."""

    def finish_run(self, end_s: float) -> None:  # noqa: B027
        """Send what is due until the end of a run."""


def make_worker(model: nn.Module, group: WorkerGroup, settings: Settings) -> Worker:
    """Set up a worker, with the present parameters of its model."""
    named = exchanged_parameters(model)
    slices = settings.fragment_slices({name: p.numel() for name, p in named.items()})
    ownership = find_ownership(named, slices, settings.granularity, group)
    return Worker(group, make_replica(model, settings, named, ownership), checksum=0)

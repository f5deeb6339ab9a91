"""Rounds in the simulation: an engine per worker, and a hub for their messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.elastic.elastic import check_settings
from lightning_loco.elastic.recovery import copy_state, position_of, resume_from_state
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.engine.fragment_sync import HasArrived
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.model.worker import Worker
from lightning_loco.simulation.failures import Failure, MembersOfSimulation
from lightning_loco.simulation.family import Family, make_worker
from lightning_loco.simulation.messages import Hub


class Rounds(Family):
    """The engines of all workers, whose rounds pass through one hub."""

    participants: list[Engine]
    settings: RoundSettings
    hub: Hub

    def make_participants(self, workers: Sequence[Worker]) -> list[Engine]:
        """Make the hub, and an engine for each worker."""
        settings = self.settings
        self.sync_every = settings.schedule.sync_every_of(0)
        algorithm, layout = settings.algorithm, workers[0].replica.layout
        topology, compression = settings.topology, settings.compression
        self.hub = Hub(
            make_exchange(algorithm, WorkerGroup(0, 1), Statistics(), topology, compression),
            len(workers),
            settings.bucket_elements(layout.numel, layout.dtype.itemsize),
            compression,
            times=self.times,
            topology=topology if algorithm.exchange == "neighbors" else None,
            timeline=self.timeline,
            admit=self._join if self.admit is not None else None,
        )
        self.wakeups = self.hub.wakeups
        return [self._make_engine(worker) for worker in workers]

    @staticmethod
    def prepare(
        settings: RoundSettings, num_workers: int, failures: Sequence[Failure], seed: int
    ) -> RoundSettings:
        """Check the settings and fill in ``"auto"``; with failures, as for elastic members."""
        if not failures:
            return settings.prepare(num_workers, seed)
        members = MembersOfSimulation(tuple(failures))
        members.check(num_workers)
        settings = dataclasses.replace(settings, membership=members).prepare(num_workers, seed)
        check_settings(settings)
        return settings

    def _make_engine(self, worker: Worker) -> Engine:
        group = worker.group
        exchange = self.hub.of_worker(group.worker, group.clock, worker.statistics)
        return Engine.of_worker(worker, self.settings, exchange)

    def rounds_of(self, worker: int) -> int:
        """Return the number of rounds that a worker has begun in all its lives."""
        by_clock = self.sync_every is None  # then statistics count the rounds that have ended
        index = self.participants[worker].worker.round_index
        return index if by_clock else super().rounds_of(worker)

    def lose(self, worker: int, now_s: float) -> None:
        """Take no messages of a worker any more."""
        self.hub.lose(worker, now_s)

    def notice(self, worker: int, now_s: float) -> None:
        """Repeat rounds without a worker; RuntimeError if no other one has the state."""
        self.hub.leave(worker, now_s)
        if not self.hub.present:
            raise RuntimeError(
                f"All workers are dead at {now_s:g} s, and the state of the run is lost."
            )

    def rejoin(self, worker: int) -> Iterator[HasArrived]:
        """Take part in the round that begins, with weight 0, and then wait for the state."""
        return self.participants[worker].round_in_parts()

    def begin_round(self, worker: int) -> Iterator[HasArrived]:
        """Begin a round of a worker whose parameters may have changed without local steps."""
        for fragment in self.participants[worker].fragments:
            fragment.fresh_at = -1
        return super().begin_round(worker)

    def drain(self, worker: int, num_rounds: int) -> Iterator[HasArrived]:
        """Begin the missing rounds up to ``num_rounds``, and apply all pending ones."""
        engine = self.participants[worker]
        while engine.worker.round_index < num_rounds:
            yield from engine.round_in_parts()
        yield from engine.apply_all_in_parts()

    def _join(self, round_index: int, donor: int, now_s: float) -> list[int]:
        """Load the state at the start of a round into the workers that join in it."""
        assert self.admit is not None
        joining = self.admit(now_s)
        if not joining:
            return []
        position = position_of(self.participants[donor], None, round_index)
        state = copy_state(self.participants[donor], position, with_saved_rounds=False)
        for number in joining:
            before = self.participants[number].worker
            worker = make_worker(before.replica.model, before.group, self.settings)
            worker.statistics = before.statistics
            self.participants[number] = self._make_engine(worker)
            resume_from_state(self.participants[number], None, state, f"worker {donor}")
            if self.times is not None:
                size = sum(tensor.nbytes for tensor in state.tensors.values())
                self.join_s[number] = self.times.fetch(number, donor, size, round_index).seconds
        self.hub.wake(joining, now_s)
        return joining

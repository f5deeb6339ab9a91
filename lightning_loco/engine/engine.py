"""Counts the local steps of one worker and makes its rounds when the schedule says so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_loco.distributed.devices import device_of
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import (
    ROUND,
    PendingRows,
    Row,
    RowCarrier,
    TravellingRows,
)
from lightning_loco.engine.exchanges.all_reduce import RidingRows
from lightning_loco.engine.exchanges.base import Exchange, make_exchange
from lightning_loco.engine.fragment import Lane
from lightning_loco.engine.fragment_sync import Flight, Rounds
from lightning_loco.engine.link_emulator import LinkEmulator
from lightning_loco.engine.membership import Link
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import Now
from lightning_loco.worker import Worker


class Engine:
    """One worker's part in the training of all.

    Args:
        model: The module to train; its trainable parameters are exchanged.
        make_settings: Makes the settings; may raise, on all workers then.
        group: The workers. Default: all ranks of the default process group, with groups of its own.
        optimized: Exchange only those trainable parameters. Default: all of them.

    Attributes:
        worker: What is this worker's whatever its schedule: place, replica, meetings, consensus.
        lanes: The rounds of each part of the parameters that the schedule exchanges by itself.
        settings: Checked against the number of workers, without ``"auto"``.
        statistics: What communication cost so far.
        paused: Set it to make no rounds for a while; the same on all workers.
        consensus_every: Measure the consensus distance every that many rounds; 0 for never.
        consensus_elements: How many elements to look at.
        link: Connects with members that come and go; None if all ranks take part all the time.
        measure_outer_gradient: Whether rounds measure its norm (one more pass over memory).

    Raises:
        ValueError: Or TypeError on every worker, if the model or the settings do not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        make_settings: Callable[[], RoundSettings],
        group: WorkerGroup | None = None,
        optimized: Iterable[Tensor] | None = None,
    ) -> None:
        group = group if group is not None else WorkerGroup.create(device=device_of(model))
        try:
            self.worker, self.settings = Worker.join(model, make_settings, group, optimized)
            made = make_lanes(self.worker, self.settings)
        except BaseException as error:
            group.close(error)
            raise
        self.lanes, self._carriers, exchange, self.link = made
        self.statistics = self.worker.statistics
        self.paused = self.measure_outer_gradient = False
        self.consensus_every, self.consensus_elements = 0, 8192
        self._schedule = self.settings.schedule.of_worker(group.worker)
        self._sync_every = self._schedule.sync_every_of(group.worker)
        self._is_weighted = exchange.is_weighted
        self._takes_part = False
        self._unread: PendingRows | None = None
        self.statistics.staleness = self._schedule.staleness_of(group.worker)
        self.buffers_at_start = self.worker.replica.buffers.new_flat()
        self.worker.engine = self
        self.worker.shows_outer = self.link is not None

    @classmethod
    def from_settings(
        cls,
        model: nn.Module,
        settings: RoundSettings,
        group: WorkerGroup | None = None,
        optimized: Iterable[Tensor] | None = None,
    ) -> Self:
        """An engine of settings that are made already."""
        Engine.__init__(engine := cls.__new__(cls), model, lambda: settings, group, optimized)
        return engine

    def join(self) -> None:
        """Where workers come and go: take part, before the first step, in the run's state."""
        if self.link is not None:
            self.link.join(self)

    def step(self) -> bool:
        """Count one local step and make the rounds that are due.

        Returns:
            Whether a round has begun or ended.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        self.count_step()
        if due := self.is_due:
            self.make_round()
        return due

    def count_step(self) -> None:
        """Count one local step without making a round."""
        self.worker.count_step(self._schedule.places_in(self.worker.round_index))

    @property
    def is_due(self) -> bool:
        """Whether a round is to begin or to end after the step that was counted last."""
        return not self.paused and any(begin or end for begin, end in self._due())

    @property
    def _turn(self) -> int:  # the lane that the next round moves
        return self.worker.round_index % len(self.lanes)

    def _due(self) -> list[tuple[bool, bool]]:
        worker, now_s = self.worker, time.monotonic()
        counts = (worker.steps, worker.steps_since_round, worker.round_index)
        lanes = enumerate(self.lanes)
        nows = [Now(*counts, i, now_s - lane.landed_at, lane.flight) for i, lane in lanes]
        return [self._schedule.due(now) for now in nows]

    @torch.no_grad()
    def make_round(self) -> None:
        """End the rounds that have come to their end and begin what is due; at least begin one."""
        if self.link is not None:
            self._settle()
        dues = self._due()
        begins = any(begin for begin, _ in dues) or not any(end for _, end in dues)
        for index, (_, end) in enumerate(dues):
            if end and not (begins and index == self._turn):
                self._land(index)
        if begins:
            self._settle()
            self._begin(ROUND, f"round {self.worker.round_index}")

    def _begin(self, place: float, words: str, unread: PendingRows | None = None) -> None:
        """Begin a round, and end it in the same turn if the schedule says so.

        ``place`` and ``words`` say where this worker is; ``unread`` are the workers' rows, if they
        are under way already.
        """
        worker, turn = self.worker, self._turn
        for index in range(len(self.lanes)) if self.link is not None else ():
            if index != turn:
                self._land(index)  # newcomers get the state as it is between two rounds
        lane = self.lanes[turn]
        worker.check_trainable()
        if unread is None:
            row = self._look(place)
            unread = self._carriers[turn].carry(self.statistics, row, words)
            if self._is_weighted:
                unread.complete = lambda: self.worker.tell(row, words).wait()
        self._unread = unread
        every = self.consensus_every if self._sync_every is not None and self.link is None else 0
        if every and worker.round_index % every == 0:
            unread.wait()
            self.statistics.consensus_distance = worker.measure_consensus(self.consensus_elements)
        before = lane.flight
        flight = Flight(worker.round_index, unread, self._takes_part, worker.steps)
        if self._schedule.stays(worker.round_index):
            lane.begin(flight)
        elif self.link is None:
            lane.make(flight)
        else:
            lane.begin(flight, stays=False)
            self.link.catch_up()
            lane = self.lanes[self._turn]
            lane.land()
        is_blocking = lane.flight is None
        if before is not None or is_blocking:
            self.statistics.outer_grad_norm = lane.gradient_norm
        self.statistics.rounds += self._sync_every is not None
        lane.began_at = lane.fresh_at = worker.steps
        if not worker.was_finite:
            worker.replica.put_back_buffers(self.buffers_at_start)
        if is_blocking:
            worker.replica.running.note(worker.steps_since_round)
        self.buffers_at_start = worker.replica.buffers.new_flat()
        worker.round_index += 1
        worker.steps_since_round = 0
        if unread.has_been_read:
            self._settle()

    def _look(self, place: float) -> Row:
        """Look at the parameters, and say what the others should know of them."""
        worker, lane = self.worker, self.lanes[self._turn]
        lane.measure_gradient = self.measure_outer_gradient
        worker.was_finite = finite = lane.look()
        moved = worker.steps > lane.fresh_at or self._sync_every is None
        self._takes_part = finite and moved
        if not finite:
            for rounds in self.lanes:
                if rounds is not lane:
                    rounds.go_back()
        spread = math.nan if lane.gradient_norm is None else lane.gradient_norm**2
        return self._row(place)._replace(weight=self._takes_part, finite=finite, spread=spread)

    def _row(self, place: float) -> Row:
        """Where this worker is, without a look at its parameters."""
        algorithm, lane = self.settings.algorithm, self.lanes[self._turn]
        numbers = algorithm.scalars(lane.lane.state) if algorithm.num_scalars else ()
        steps = self.worker.steps - lane.began_at
        return self.worker.row(place)._replace(steps=steps, scalars=tuple(map(float, numbers)))

    def _land(self, index: int) -> None:
        """End the flight of a lane, if there is one."""
        lane, statistics = self.lanes[index], self.statistics
        if (flight := lane.flight) is None:
            return
        lane.land()
        lane.landed_at = time.monotonic()
        statistics.outer_grad_norm = lane.gradient_norm
        if not self.worker.was_finite:
            self.worker.replica.put_back_buffers(self.buffers_at_start)
        if self._sync_every is None:
            statistics.rounds += 1
            statistics.staleness = self.worker.steps - flight.began_at
        if self._unread is flight.rows:
            self._settle()

    def _settle(self) -> None:
        """Take note of what the workers said with the last round, at the end of a local step."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        self.worker.note(rows := unread.wait())
        if self.link is not None:
            self.link.catch_up()
        spreads = [row.spread for row in rows if math.isfinite(row.spread)]
        if spreads and self._sync_every is None:
            self.statistics.consensus_distance = math.sqrt(sum(spreads) / len(spreads))

    def rest(self) -> None:
        """Bring to an end what cannot wait until after a meeting."""
        self._settle()
        for index in range(len(self.lanes)) if self._schedule.lands_at_meetings else ():
            self._land(index)

    def rows_at_meeting(self, place: float, words: str) -> list[Row] | None:
        """Tell the others that this worker is at a meeting; None after a round with them."""
        unread = self._carriers[self._turn].meet(self.statistics, self._row(place), words)
        if unread is None:
            self._begin(place, words)
            return None
        if self._is_weighted:
            unread.complete = lambda: self.worker.tell(self._look(place), words).wait()
        rows = unread.wait()
        if any(row.place == ROUND for row in rows):
            if not self._is_weighted:
                self._look(place)
            self._begin(place, words, unread)
            return None
        self.worker.note(rows)
        return rows

    def outer(self) -> Tensor | None:
        """The outer parameters ``(P,)``; None if the algorithm has none that all workers share."""
        key = self.settings.consensus_key
        return None if key is None else self.lanes[0].lane.state[key]

    @torch.no_grad()
    def finish(self, purpose: str = "the end of training") -> None:
        """Leave the mean of the local parameters in the model, on all workers.

        No round is made: a short last one would move the parameters as far as a whole one. What is
        under way is waited for and not applied, unless :meth:`drain` was called. Members that come
        and go make a last round, whose outer parameters are the same on all.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        if self.link is not None:
            self._make_last_rounds(purpose)
        else:
            self.worker.meet(purpose)
            for lane in self.lanes:
                lane.wait()
            self._settle()
            self.worker.shows_outer = False
        self.worker.show_consensus("the final consensus")

    def _make_last_rounds(self, purpose: str) -> None:
        assert self.link is not None
        self.link.finish()
        for _ in self.lanes:
            rows = self.worker.meet(purpose)
            if self._sync_every is not None and any(row.steps > 0 for row in rows):
                self._begin(ROUND, f"round {self.worker.round_index}")
            elif len(self.lanes) > 1:
                self.worker.round_index += 1
        self._land_all()

    def _land_all(self) -> None:
        self._settle()
        for index in range(len(self.lanes)):
            self._land(index)

    @torch.no_grad()
    def drain(self) -> None:
        """Wait for all that is under way and apply it; all workers must call it.

        Raises:
            RuntimeError: If a worker is missing or has failed.
        """
        self.worker.meet("the draining of rounds")
        self._land_all()

    def state_dict(self) -> dict[str, Any]:
        """Everything this worker needs to go on exactly, also in the middle of a round.

        What stands under ``"shared"`` is equal on all workers if the algorithm is replicated.
        """
        self._settle()
        shared, own = zip(*(lane.state_dict() for lane in self.lanes), strict=True)
        return {
            **self.worker.state_dict(),
            "buffers_at_start": self.buffers_at_start,
            "began_at": [lane.began_at for lane in self.lanes],
            "shared": list(shared),
            "lanes": list(own),
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict` of the same worker."""
        self.worker.load_state_dict(saved)
        self.buffers_at_start = saved["buffers_at_start"]
        states = zip(saved["shared"], saved["lanes"], saved["began_at"], strict=True)
        for lane, (shared, own, began_at) in zip(self.lanes, states, strict=True):
            lane.load_state_dict(shared, own)
            lane.began_at = lane.fresh_at = began_at

    @torch.no_grad()
    def reset(self) -> None:
        """Make what the model holds now the start of the rounds, as if there had been none before.

        Outer parameters are the present ones and momentum is zero; what a flight under way brings
        is dropped, and the next round is a whole one. All workers must call it at the same place,
        and hold the same parameters. A member of a run whose workers come and go calls it alone,
        and keeps in step with the others.
        """
        worker, settings = self.worker, self.settings
        start = worker.replica.layout.new_flat()
        own = {"flight": None, "residual": settings.init_residual(start), "departure": start}
        self.load_state_dict(
            {
                **worker.state_dict(),
                "steps_since_round": 0 if self.link is None else worker.steps_since_round,
                "running": {},
                "buffers_at_start": worker.replica.buffers.new_flat(),
                "began_at": [worker.steps for _ in self.lanes],
                "shared": [
                    {"state": settings.algorithm.init(start.clone()), "received": None}
                    for _ in self.lanes
                ],
                "lanes": [own for _ in self.lanes],
            }
        )

    def close(self) -> None:
        """Destroy the process groups and stop all threads; a second call does nothing."""
        self.worker.group.failed |= any(lane.is_under_way for lane in self.lanes)
        handles = [handle for lane in self.lanes for handle in lane.give_up()]
        self._unread = self.worker.engine = None
        if self.link is not None:
            self.link.close()
        self.worker.group.close()
        for handle in handles:
            handle.release()


def make_lanes(
    worker: Worker, settings: RoundSettings
) -> tuple[list[Rounds], list[RowCarrier], Exchange, Link | None]:
    """The lanes of an engine, how rows travel with each, the exchange of all, and the link if any.

    Rows ride with a round's first parcel where the exchange can carry them and somebody attends to
    the round until it ends: those at a meeting must be called when it is late.
    """
    group, layout, algorithm = worker.group, worker.replica.layout, settings.algorithm
    membership = settings.membership
    link = None if membership is None else membership.connect(settings, group)
    exchange = link or make_exchange(
        algorithm,
        group,
        worker.statistics,
        settings.topology,
        settings.compression,
        settings.stays,
    )
    if settings.link is not None and group.num_workers > 1:
        slow = settings.link, group, worker.statistics, settings.topology
        exchange = LinkEmulator(exchange, *slow)
    is_attended = not settings.stays or settings.schedule.lands_at_meetings
    rides = exchange.can_carry_rows and is_attended
    width = Row.width(algorithm.num_scalars)
    rows_elements = group.num_workers * width if rides else 0
    longest = settings.parcel_elements(layout.numel, layout.dtype.itemsize)
    start = layout.new_flat()
    residual = settings.init_residual(start)
    state = algorithm.init(start)
    lanes: list[Rounds] = []
    carriers: list[RowCarrier] = []
    for stretches in settings.schedule.lanes(layout.sizes):
        departure = lanes[0].lane.departure if lanes else None
        lane = Lane(layout, stretches, settings, state, residual, longest, rows_elements, departure)
        rounds = Rounds(lane, settings, exchange)
        lanes.append(rounds)
        table = lane.rows_memory.view(-1, width)
        rider = RidingRows(group, table, rounds.send_first, settings.stays) if rides else None
        carriers.append(link or rider or TravellingRows(group))
    return lanes, carriers, exchange, link

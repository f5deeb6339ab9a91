"""Counts the local steps of one worker and makes its rounds when the schedule says so.

An engine holds lanes, each with rounds of its own: one for all parameters, or one for each part of
them that the schedule exchanges by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.rows import ROUND, PendingRows, Row, RowCarrier, TravellingRows, start_rows
from lightning_loco.comm.worker import Worker
from lightning_loco.rounds.exchange import make_exchange
from lightning_loco.rounds.flight import Flight
from lightning_loco.rounds.lane import Lane
from lightning_loco.rounds.mean_exchange import RidingRows
from lightning_loco.rounds.rounds import Rounds
from lightning_loco.rounds.schedule import Now
from lightning_loco.rounds.settings import RoundSettings

E = TypeVar("E", bound="Engine")


class Engine:
    """One worker's part in the training of all.

    Args:
        model: The module to train; its trainable parameters are exchanged.
        make_settings: Makes the settings; may raise, on all workers then.
        group: The workers. Default: all ranks of the default process group, with groups of its own.

    Attributes:
        worker: What is this worker's whatever its schedule: place, replica, meetings, consensus.
        settings: Checked against the number of workers, without ``"auto"``.
        statistics: What communication cost so far.
        paused: Set it to make no rounds for a while; the same on all workers.
        consensus_every: Measure the consensus distance every that many rounds; 0 for never.
        consensus_elements: How many elements to look at for it.

    Raises:
        ValueError: On every worker, if the model or the settings do not fit.
        TypeError: Likewise.
    """

    def __init__(
        self,
        model: nn.Module,
        make_settings: Callable[[], RoundSettings],
        group: WorkerGroup | None = None,
    ) -> None:
        group = group if group is not None else WorkerGroup.create()
        try:
            self.worker, self.settings = Worker.join(model, make_settings, group)
            self._make_lanes()
        except BaseException:
            group.close()
            raise
        self.statistics = self.worker.statistics
        self.paused = False
        self.consensus_every = 0
        self.consensus_elements = 65536
        self._schedule = self.settings.schedule.of_worker(group.worker)
        self._sync_every = self._schedule.sync_every_of(group.worker)
        self._landed_at = [-math.inf] * len(self.lanes)
        self._began_at = [0] * len(self.lanes)
        self._takes_part = False
        self._unread: PendingRows | None = None
        self.statistics.staleness = int(self.settings.stays and self._sync_every is not None)
        self._buffers_at_start = self.worker.replica.buffers.new_flat()
        self.worker.engine = self

    @classmethod
    def from_settings(
        cls: type[E], model: nn.Module, settings: RoundSettings, group: WorkerGroup | None = None
    ) -> E:
        """An engine of settings that are made already."""
        engine = cls.__new__(cls)
        Engine.__init__(engine, model, lambda: settings, group)
        return engine

    def _make_lanes(self) -> None:
        settings, group = self.settings, self.worker.group
        layout, algorithm = self.worker.replica.layout, settings.algorithm
        exchange = make_exchange(algorithm, group, self.worker.statistics, settings.topology)
        self._is_weighted = exchange.is_weighted
        sizes = [tensor.numel() for tensor in layout.tensors]
        parcel_elements = settings.parcel_elements(layout.numel, layout.itemsize)
        attended = not settings.stays or settings.schedule.lands_at_meetings
        rides = exchange.can_carry_rows and attended
        width = Row.width(algorithm.num_scalars)
        rows_elements = rides * group.num_workers * width
        start = layout.new_flat()
        residual = settings.codec.init(start)
        state = algorithm.init(start)
        self.lanes: list[Rounds] = []
        self._carriers: list[RowCarrier] = []
        for stretches in settings.schedule.lanes(sizes):
            lane = Lane(
                layout, stretches, settings, state, residual, parcel_elements, rows_elements
            )
            rounds = Rounds(lane, settings, exchange)
            table = lane.rows_memory.view(-1, width)
            self.lanes.append(rounds)
            self._carriers.append(
                RidingRows(group, table, rounds.send_first) if rides else TravellingRows(group)
            )

    # ------------------------------------------------------------- local steps

    def step(self) -> bool:
        """Count one local step and make the rounds that are due.

        Returns:
            Whether a round has begun or ended.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        self.count_step()
        if not self.is_due:
            return False
        self.make_round()
        return True

    def count_step(self) -> None:
        """Count one local step without making a round."""
        self.worker.count_step(self._sync_every)

    @property
    def steps(self) -> int:
        """Local steps of this worker so far."""
        return self.worker.steps

    @property
    def is_due(self) -> bool:
        """Whether a round is to begin or to end after the step that was counted last."""
        return any(begin or end for begin, end in self._due())

    def _due(self) -> list[tuple[bool, bool]]:
        worker, now_s = self.worker, time.monotonic()
        if self.paused:
            return [(False, False)] * len(self.lanes)
        turn = worker.round_index % len(self.lanes)
        dues = []
        for index, lane in enumerate(self.lanes):
            idle_s = now_s - self._landed_at[index]
            now = Now(
                worker.steps,
                worker.steps_since_round,
                worker.round_index,
                index,
                idle_s,
                lane.flight,
            )
            begin, end = self._schedule.due(now)
            dues.append((begin and index == turn, end))
        return dues

    @torch.no_grad()
    def make_round(self) -> None:
        """End the rounds that have come to their end and begin what is due; at least begin one."""
        dues = self._due()
        begins = any(begin for begin, _ in dues) or not any(end for _, end in dues)
        turn = self.worker.round_index % len(self.lanes)
        for index, (_, end) in enumerate(dues):
            if end and not (begins and index == turn):
                self._land(index)
        if begins:
            self._settle()
            self._begin(ROUND, f"round {self.worker.round_index}")

    # ------------------------------------------------------------------ rounds

    def _begin(self, place: float, words: str, unread: PendingRows | None = None) -> None:
        """Begin a round, and end it in the same turn if the schedule says so.

        Args:
            place: Where this worker is: at a round, or at a meeting.
            words: The same in words.
            unread: The workers' rows, if they are known already.
        """
        worker = self.worker
        worker.check_trainable()
        turn = worker.round_index % len(self.lanes)
        lane = self.lanes[turn]
        if unread is None:
            row = self._look(place)
            unread = self._carriers[turn].carry(self.statistics, row, words)
            if self._is_weighted:
                unread.complete = lambda: self._tell(row, words).wait()
        self._unread = unread
        if self._samples_consensus:
            unread.wait()
            distance = worker.measure_consensus(self.consensus_elements)
            self.statistics.consensus_distance = distance
        flight = Flight(worker.round_index, unread, self._takes_part, worker.steps)
        if self._schedule.stays(worker.round_index):
            lane.begin(flight)
        else:
            lane.make(flight)
        self.statistics.outer_grad_norm = lane.gradient_norm
        self.statistics.rounds += self._sync_every is not None
        self._began_at[turn] = worker.steps
        if not worker.was_finite:
            worker.replica.buffers.write(self._buffers_at_start)
        self._buffers_at_start = worker.replica.buffers.new_flat()
        worker.round_index += 1
        worker.steps_since_round = 0
        if unread.has_been_read:
            self._settle()

    def _look(self, place: float) -> Row:
        """Look at the parameters, and say what the others should know of them."""
        worker = self.worker
        turn = worker.round_index % len(self.lanes)
        lane = self.lanes[turn]
        worker.was_finite = finite = lane.look()
        moved = worker.steps > self._began_at[turn] or self._sync_every is None
        self._takes_part = finite and moved
        norm = lane.gradient_norm
        return self._row(place)._replace(
            weight=float(self._takes_part),
            finite=float(finite),
            spread=math.nan if norm is None else norm**2,
        )

    def _row(self, place: float) -> Row:
        """Where this worker is, without a look at its parameters."""
        worker = self.worker
        algorithm, turn = self.settings.algorithm, worker.round_index % len(self.lanes)
        row = worker.row(place)._replace(steps=worker.steps - self._began_at[turn])
        if algorithm.num_scalars:
            numbers = algorithm.scalars(self.lanes[turn].lane.state)
            row = row._replace(scalars=tuple(map(float, numbers)))
        return row

    def _tell(self, row: Row, words: str) -> PendingRows:
        return start_rows(self.worker.group, self.statistics, row, words)

    @property
    def _samples_consensus(self) -> bool:
        """Whether the coming round measures the consensus distance, by an exchange of its own."""
        every = self.consensus_every if self._sync_every is not None else 0
        return bool(every) and self.worker.round_index % every == 0

    def _land(self, index: int) -> None:
        """End the flight of a lane, if there is one."""
        lane, statistics = self.lanes[index], self.statistics
        if lane.flight is None:
            return
        flight = lane.flight
        lane.land()
        if not self.worker.was_finite:
            self.worker.replica.buffers.write(self._buffers_at_start)
        self._landed_at[index] = time.monotonic()
        statistics.outer_grad_norm = lane.gradient_norm
        if self._sync_every is None:
            statistics.rounds += 1
            statistics.staleness = self.worker.steps - flight.began_at
        self._settle()

    def _settle(self) -> None:
        """Take note of what the workers said with the last round."""
        if self._unread is None:
            return
        rows = self._unread.wait()
        self._unread = None
        self.worker.note(rows)
        spreads = [row.spread for row in rows if math.isfinite(row.spread)]
        if spreads and self._sync_every is None:
            self.statistics.consensus_distance = math.sqrt(sum(spreads) / len(spreads))

    # ---------------------------------------------------------------- meetings

    def rest(self) -> None:
        """Bring to an end what cannot wait until after a meeting."""
        self._settle()
        if self._schedule.lands_at_meetings:
            self._land_all()

    def _land_all(self) -> None:
        for index in range(len(self.lanes)):
            self._land(index)

    def rows_at_meeting(self, place: float, words: str) -> list[Row] | None:
        """Tell the others that this worker is at a meeting, or take part in their round.

        Returns:
            What every worker said; None if somebody had a round to make, which is done.
        """
        turn = self.worker.round_index % len(self.lanes)
        if self._carriers[turn].anyone_makes_round(self.statistics, words):
            self._begin(place, words)
            return None
        unread = self._tell(self._row(place), words)
        if self._is_weighted:
            unread.complete = lambda: self._tell(self._look(place), words).wait()
        rows = unread.wait()
        if any(row.place == ROUND for row in rows):
            if not self._is_weighted:
                self._look(place)
            self._begin(place, words, unread)
            return None
        self.worker.note(rows)
        return rows

    def outer(self) -> Tensor | None:
        """The consensus parameters ``(P,)``; None if they are the mean over the workers."""
        key = self.settings.algorithm.consensus_key
        return None if key is None else self.lanes[0].lane.state[key]

    @torch.no_grad()
    def finish(self, purpose: str = "the end of training") -> None:
        """Share what is not shared yet and leave the consensus in the model, on all workers.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        for _ in self.lanes:
            rows = self.worker.meet(purpose)
            if self._sync_every is None:
                break
            if any(row.steps > 0 for row in rows):
                self._begin(ROUND, f"round {self.worker.round_index}")
            elif len(self.lanes) > 1:
                self.worker.round_index += 1
        self._settle()
        self._land_all()
        self.worker.show_consensus("the final consensus")

    def show_consensus(self) -> None:
        """Put the consensus into the model; all workers must call it."""
        self.worker.show_consensus()

    def show_local(self) -> None:
        """Put the local parameters back into the model."""
        self.worker.show_local()

    @property
    def measure_outer_gradient(self) -> bool:
        """Whether rounds measure the norm of the outer gradient (one more pass over memory)."""
        return self.lanes[0].measure_gradient

    @measure_outer_gradient.setter
    def measure_outer_gradient(self, value: bool) -> None:
        for lane in self.lanes:
            lane.measure_gradient = value

    # -------------------------------------------------------------- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Everything this worker needs to go on exactly, also in the middle of a round.

        What stands under ``"shared"`` is equal on all workers if the algorithm is replicated.
        """
        self._settle()
        shared, own = zip(*(lane.state_dict() for lane in self.lanes), strict=True)
        return {
            **self.worker.state_dict(),
            "buffers_at_start": self._buffers_at_start,
            "began_at": list(self._began_at),
            "shared": list(shared),
            "lanes": list(own),
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict` of the same worker."""
        self.worker.load_state_dict(saved)
        self._buffers_at_start = saved["buffers_at_start"]
        self._began_at = list(saved["began_at"])
        for lane, shared, own in zip(self.lanes, saved["shared"], saved["lanes"], strict=True):
            lane.load_state_dict(shared, own)

    def close(self) -> None:
        """Destroy the process groups and stop all threads; a second call does nothing."""
        flights = [lane.flight for lane in self.lanes if lane.flight is not None]
        for lane in self.lanes:
            lane.flight = None
        self._unread = self.worker.engine = None
        self.worker.group.close()
        for flight in flights:
            for handle in flight.handles:
                handle.release()

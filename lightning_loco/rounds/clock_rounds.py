"""Rounds that travel while training goes on, and then move the parameters as they are by then."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.comm.flat import FlatLayout
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.rows import ROUND, PendingRows, Row
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import Timed
from lightning_loco.rounds.exchange import Handle, MeanExchange, NeighborExchange
from lightning_loco.rounds.mean_rounds import PATIENCE_S, MeanRounds
from lightning_loco.rounds.parcels import Parcel, Part
from lightning_loco.rounds.rounds import BlockingRounds
from lightning_loco.topology import Topology

_LONGEST_JOIN_S = 5.0


class TravellingRounds(BlockingRounds):
    """Rounds whose update takes account of the progress made while they travelled."""

    _progress: Progress

    def _propose(self, parcel: Parcel, progress: bool) -> None:
        super()._propose(parcel, progress)
        self._progress.begin(parcel)

    def _update(self, part: Part, params: Tensor, received: Tensor, weight: float) -> None:
        self._exchange.normalize(received, weight)
        if self.measure_gradient:
            self._squares.append(self._progress.distance(part, received))
        self._progress.end(part)
        super()._update(part, params, received, 1.0)


class MeanClockRounds(TravellingRounds, MeanRounds):
    """Rounds of the mean over all workers; the backend's own thread does the communication.

    Args:
        layout: The trainable parameters; at least one.
        algorithm: What to compute; its update sees the present parameters.
        exchange: The all-reduce.
        state: The algorithm's state.
        num_workers: Number of workers N.
    """

    def __init__(
        self,
        layout: FlatLayout,
        algorithm: Algorithm,
        exchange: MeanExchange,
        state: State,
        num_workers: int,
    ) -> None:
        super().__init__(layout, algorithm, exchange, state, layout.numel, num_workers)
        self._progress = Progress(layout)
        self._under_way: tuple[WorkerGroup, str, float] | None = None

    def announce(
        self, group: WorkerGroup, statistics: Statistics, row: Row, place: str
    ) -> PendingRows:
        """Send the row with the message, or by itself if all workers are at a meeting."""
        self._progress.valid = row.weight > 0
        self._under_way = (group, place, time.monotonic())
        return super().announce(group, statistics, row, place)

    def has_arrived(self) -> bool:
        """Whether the mean is here; invites those at a meeting when it is late."""
        if self._first is None or self._first.has_arrived():
            return True
        assert self._under_way is not None
        group, place, started = self._under_way
        if time.monotonic() > started + PATIENCE_S:
            self._invite(group, place)
        return False

    def close(self) -> None:
        """Nothing to end."""


class NeighborClockRounds(TravellingRounds):
    """Rounds of the neighbours of a topology; a thread waits for their messages.

    Args:
        layout: The trainable parameters.
        algorithm: What to compute; its update sees the present parameters.
        group: The workers.
        topology: Who is whose neighbour.
        state: The algorithm's state.
        statistics: Where bytes and seconds of the training thread are counted.
    """

    def __init__(
        self,
        layout: FlatLayout,
        algorithm: Algorithm,
        group: WorkerGroup,
        topology: Topology,
        state: State,
        statistics: Statistics,
    ) -> None:
        self._hidden = Statistics()
        exchange = NeighborExchange(group, self._hidden, topology)
        super().__init__(layout, algorithm, exchange, state, layout.numel)
        self._statistics = statistics
        self._progress = Progress(layout)
        self._arrival: _Arrival | None = None

    def announce(
        self, group: WorkerGroup, statistics: Statistics, row: Row, place: str
    ) -> PendingRows:
        """Exchange the rows; a worker with a round sends its message along."""
        self._progress.valid = row.weight > 0
        if row.place != ROUND:
            return super().announce(group, statistics, row, place)
        rows = super().announce(group, self._hidden, row, place)
        self._start(int(row.round_index), row.weight > 0, rows)
        return rows

    def _start(self, round_index: int, progress: bool, rows: PendingRows | None) -> _Arrival:
        (parcel,) = self._parcels
        handle = super()._send(parcel, round_index, progress)
        self._statistics.bytes_sent += self._hidden.bytes_sent
        self._hidden.bytes_sent = 0
        self._arrival = _Arrival(rows, handle, self._statistics)
        return self._arrival

    def has_arrived(self) -> bool:
        """Whether the mix of the neighbours is here."""
        return self._arrival is None or not self._arrival.is_alive()

    def _send(self, parcel: Parcel, round_index: int, progress: bool) -> Handle:
        arrival = self._arrival or self._start(round_index, progress, rows=None)
        self._arrival = None
        return arrival

    def close(self) -> None:
        """Wait a little for the thread; its messages have failed or arrived."""
        if self._arrival is not None:
            self._arrival.end()
            self._arrival = None


class Progress:
    """What this worker has learned since its message left, kept in the state of the algorithm.

    The snapshot waits in the memory of the progress, so that no more is needed.

    Args:
        layout: The trainable parameters.

    Attributes:
        valid: Whether this worker's parameters were finite when its message left.
    """

    def __init__(self, layout: FlatLayout) -> None:
        longest = max((len(chunk) for chunk in layout.chunks()), default=0)
        self._present = torch.empty(longest, dtype=layout.dtype, device=layout.device)
        self.valid = True

    def begin(self, parcel: Parcel) -> None:
        """Keep the message as the snapshot."""
        for part in parcel.parts:
            part.state["progress"].copy_(part.params)

    def distance(self, part: Part, mean: Tensor) -> Tensor:
        """How far the snapshot of one part is from the mean."""
        snapshot: Tensor = part.state["progress"]
        distance: Tensor = torch.linalg.vector_norm(mean - snapshot)
        return distance

    def end(self, part: Part) -> None:
        """Turn the snapshot of one part into the progress; none if it was not valid."""
        progress: Tensor = part.state["progress"]
        if not self.valid:
            progress.zero_()
            return
        present = self._present[: len(part)]
        part.chunk.pack(present)
        torch.sub(present, progress, out=progress)


class _Arrival(threading.Thread):
    """Waits for one message, and before it for the rows of all workers."""

    def __init__(self, rows: PendingRows | None, handle: Handle, statistics: Statistics) -> None:
        super().__init__(name="loco-arrival", daemon=True)
        self._rows = rows
        self._handle = handle
        self._statistics = statistics
        self._received: Tensor | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            if self._rows is not None:
                self._rows.wait()
            self._received = self._handle.wait(1.0)
        except RuntimeError as error:
            self._error = error

    def wait(self, total_weight: float) -> Tensor:
        """Return what was received, or raise what went wrong."""
        with Timed(self._statistics):
            self.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        assert self._received is not None
        return self._received

    def end(self) -> None:
        """Wait a little, and let go of what was received, and of the groups."""
        self.join(timeout=_LONGEST_JOIN_S)
        self._error = None

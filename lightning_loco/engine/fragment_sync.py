"""The rounds of one lane: propose, send, land, parcel by parcel.

Three turns are all there is: :meth:`Rounds.make` begins and ends a round, :meth:`Rounds.begin`
leaves one under way, after the one before has landed or while it does, :meth:`Rounds.land` ends it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms import Restart
from lightning_loco.distributed.work import labelled
from lightning_loco.distributed.worker_status import PendingRows, Row
from lightning_loco.engine.buckets import Arrived, Handle, Parcel, Part
from lightning_loco.engine.exchanges.base import Exchange, send, wait_for
from lightning_loco.engine.fragment import Lane
from lightning_loco.engine.settings import PARCELS_UNDER_WAY, RoundSettings
from lightning_loco.fault_points import reach
from lightning_loco.parameters.flat import are_finite


@dataclasses.dataclass
class Flight:
    """Messages of one lane under way, and what their landing needs to know.

    Attributes:
        index: Number of the round.
        rows: What the workers tell with it.
        valid: Whether this worker's message is one of its own progress, with weight in a mean.
        finite: Whether its parameters were finite when it began.
        began_at: Local steps of this worker when it began.
        handles: The parcels under way, in order.
        received: What they have brought; None before it is here.
        stayed: Whether local steps were made while it was under way.
        told: The algorithm's own numbers of all workers; None before they are known.
        is_divided: Whether what has arrived is divided by the total weight already, and what was
            lost on the wire is taken care of.
    """

    index: int
    rows: PendingRows
    valid: bool
    began_at: int
    handles: list[Handle] = dataclasses.field(default_factory=list)
    received: list[Tensor] | None = None
    stayed: bool = False
    told: list[tuple[float, ...]] | None = None
    is_divided: bool = False
    finite: bool = True

    def has_arrived(self) -> bool:
        """Whether everything is here; never waits, and calls others who may not know of it."""
        are_rows_here = self.rows.has_arrived()  # whatever the handles say: this is the call
        return all(handle.has_arrived() for handle in self.handles) and are_rows_here

    def state_dict(self) -> dict[str, Any]:
        """What to know of it besides what it brings."""
        return {
            name: getattr(self, name) for name in ("index", "valid", "began_at", "told", "finite")
        }

    @classmethod
    def arrived(cls, saved: dict[str, Any], received: Sequence[Tensor]) -> Flight:
        """A flight of which only the landing is left, as from a checkpoint.

        ``received`` has arrived, parcel by parcel, and is divided by the total weight.
        """
        rows = PendingRows(lambda: torch.zeros(0, Row.width(0)), f"round {saved['index']}")
        told = saved["told"] and [tuple(numbers) for numbers in saved["told"]]
        flight = cls(saved["index"], rows, saved["valid"], saved["began_at"], told=told)
        flight.finite = saved["finite"]
        flight.handles = [Arrived(tensor) for tensor in received]
        flight.stayed = flight.is_divided = True
        return flight


class Rounds:
    """All that one lane of one worker exchanges.

    Where every message has a place of its own, everything has arrived before anything changes: a
    round that fails leaves parameters and state as they were. A blocking round that is larger than
    the bucket lands in pieces, and one that fails in between is marked as torn.

    Args:
        lane: The parameters, their memory and their state.
        settings: What to compute and how; prepared.
        exchange: How messages move.

    Attributes:
        flight: The round under way, or None.
        began_at: Local steps of this worker when the last round began.
        fresh_at: Local steps after which this worker has something to tell; those of ``began_at``,
            unless its parameters have come from another worker since.
        landed_at: When a flight ended last, by the monotonic clock in seconds.
        measure_gradient: Whether rounds measure the norm of the outer gradient.
        gradient_norm: That of the last round.
        is_torn: Whether a round has failed after some of its parts had landed.
    """

    def __init__(self, lane: Lane, settings: RoundSettings, exchange: Exchange) -> None:
        self.lane = lane
        self.flight: Flight | None = None
        self.began_at, self.fresh_at, self.landed_at = 0, 0, -math.inf
        self.measure_gradient = False
        self.gradient_norm: float | None = None
        self.is_torn = False
        self._algorithm = settings.algorithm
        self._landing = settings.landing or Restart()
        self._exchange = exchange
        self._stays = settings.schedule.stays
        self._squares: list[Tensor] = []
        self._is_proposed = False
        self._is_finite = True
        self._first: Handle | None = None

    def look(self) -> bool:
        """Prepare a round as far as possible alone, and say whether the parameters are finite.

        Messages that have a place which is free are made here: then a look at the packed values,
        still in the cache, replaces one at the parameters.
        """
        self._make_ready()
        lane, sums = self.lane, [math.nan]
        self._is_proposed = lane.holds and self.flight is None
        if self._is_proposed:
            with labelled("loco/propose"):
                for part, total in zip(lane.parts, lane.sums.unbind(), strict=True):
                    self._propose_local(part, part.message, total)
            sums = lane.sums.tolist()
        self._is_finite = all(map(math.isfinite, sums)) or are_finite([p.chunk for p in lane.parts])
        return self._is_finite

    def _make_ready(self) -> None:
        layout = self.lane.layout
        if layout.before_write is not None:
            layout.before_write()
        self._tie()

    def _tie(self) -> None:
        if self.lane.layout.chunks() is not self.lane.tied_to:
            self.lane.tie()

    def go_back(self) -> None:
        """Go on from where the last round began, if the parameters hold NaN or infinity.

        For lanes that have no round now: one local step spreads NaN over all parameters, so that a
        lane alone cannot get rid of it. Of a flight under way the result is taken as it is.
        """
        self._tie()
        if are_finite([part.chunk for part in self.lane.parts]):
            return
        for part in self.lane.parts:
            if (start := part.start()) is not None:
                part.unpack(start)
        if self.flight is not None:
            self.flight.finite = False

    def _propose_local(self, part: Part, into: Tensor, total: Tensor | None = None) -> None:
        part.read_local(into)
        if total is not None:
            torch.sum(into, 0, out=total)
        if part.departure is not None:
            part.departure.copy_(into)
        part.propose(into)

    def _propose(self, part: Part, into: Tensor, valid: bool) -> None:
        """Make the message of a part; without valid parameters, that of where the round began."""
        is_weighted = self._exchange.is_weighted
        if valid or (self._is_finite and not is_weighted):
            self._propose_local(part, into)
            return
        if part.departure is not None and self._is_finite:
            part.read_local(part.departure)
        if is_weighted:
            into.zero_()
        elif (start := part.start()) is not None:
            part.propose(into.copy_(start))
        else:
            raise RuntimeError(
                "The parameters hold NaN or infinity, and the algorithm does not remember where "
                "the round began. Lower the learning rate, or go back to the last checkpoint."
            )

    def _send(self, parcel: Parcel, index: int, valid: bool) -> Handle:
        if not (valid and self._is_proposed):
            with labelled("loco/propose"):
                for part in parcel.parts:
                    self._propose(part, part.message, valid)
        goes_on = self.flight is not None or (self._landing.keeps_progress and self._is_finite)
        for part in parcel.parts if self._stays(index) and not goes_on else ():
            part.begin_again()
        return send(self._exchange, parcel, index)

    def send_first(self, index: int, valid: bool) -> Handle:
        """Send the first parcel ahead, because the workers' rows ride behind it."""
        self._first = self._send(self.lane.parcels[0], index, valid)
        return self._first

    def _send_next(self, parcel: Parcel, flight: Flight) -> Handle:
        first, self._first = self._first, None
        return first or self._send(parcel, flight.index, flight.valid)

    def make(self, flight: Flight) -> None:
        """Send all messages and apply what comes back, before the next local step."""
        if self.lane.holds:
            self.begin(flight, stays=False)
            self.land()
            return
        waiting: deque[tuple[Parcel, Handle]] = deque()
        for parcel in self.lane.parcels:
            if len(waiting) == PARCELS_UNDER_WAY:
                self._land_piece(flight, *waiting.popleft())
            waiting.append((parcel, self._send_next(parcel, flight)))
        while waiting:
            self._land_piece(flight, *waiting.popleft())
        self._finish()

    def begin(self, flight: Flight, stays: bool = True) -> None:
        """Send all messages; the flight before lands. ``stays``: local steps follow before this."""
        before, flight.stayed, flight.finite = self.flight, stays, self._is_finite
        if before is not None and not self._landing.keeps_progress:
            self._land(before, True, flight)
            return
        if before is not None:
            self._land(before, flight.finite)
        flight.handles = [self._send_next(parcel, flight) for parcel in self.lane.parcels]
        if self.lane.has_uncut_state:
            self.lane.take_back_state()
        self.flight = flight

    def land(self) -> None:
        """Wait for the flight under way, if any, and apply all that it brings, or nothing."""
        if self.flight is not None:
            self._make_ready()
            self._land(self.flight, True)

    @property
    def is_under_way(self) -> bool:
        """Whether messages may still be on their way."""
        return self.flight is not None and self.flight.received is None

    def wait(self) -> None:
        """Wait for all that the flight under way brings, without applying it."""
        if self.flight is not None:
            self._receive(self.flight)

    def _land(self, flight: Flight, valid: bool, successor: Flight | None = None) -> None:
        """Apply all of a flight; the message of a successor is made right before, part by part."""
        received, weight = self._receive(flight)
        self._commit(flight, self.lane.parts)
        self._keep_lost(flight)
        for parcel, whole in zip(self.lane.parcels, received, strict=True):
            with labelled("loco/apply"):
                for part, share in parcel.split(whole, weight):
                    if successor is not None:
                        self._propose(part, part.scratch, successor.valid)
                    leaving = None if successor is None else part.scratch
                    self._land_part(flight, part, share, valid, leaving)
                    if successor is not None:
                        part.message.copy_(part.scratch)
            if successor is not None:
                successor.handles.append(send(self._exchange, parcel, successor.index))
        for handle in flight.handles:
            handle.release()
        self.flight = successor
        self._finish()

    def _land_piece(self, flight: Flight, parcel: Parcel, handle: Handle) -> None:
        weight = self._weight(flight)
        with labelled("loco/exchange"):
            received = wait_for(handle)
        self._commit(flight, parcel.parts)
        parcel.keep(handle.lost, flight.valid)
        with labelled("loco/apply"):
            for part, share in parcel.split(received, weight):
                self._land_part(flight, part, share, True, None)
        handle.release()

    def _receive(self, flight: Flight) -> tuple[list[Tensor], float]:
        with labelled("loco/exchange"):
            weight = self._weight(flight)  # first, because it calls those who may be at a meeting
            if flight.received is None:
                flight.received = [wait_for(handle) for handle in flight.handles]
            return flight.received, weight

    def _weight(self, flight: Flight) -> float:
        """What sums are to be divided by; waits for the rows only if they matter."""
        if self._algorithm.num_scalars and flight.told is None:
            flight.told = [row.scalars for row in flight.rows.wait()]
        is_sum = self._exchange.is_weighted and not flight.is_divided
        return flight.rows.total_weight() if is_sum else 1.0

    def _commit(self, flight: Flight, parts: list[Part]) -> None:
        """From here on the round counts: these parts wait for no other worker any more."""
        reach("outer step")
        self.is_torn = True
        for part in parts if flight.told is not None else ():
            self._algorithm.hear(flight.told or (), part.state)

    def _keep_lost(self, flight: Flight) -> None:
        for parcel, handle in zip(self.lane.parcels, flight.handles, strict=True):
            parcel.keep(None if flight.is_divided else handle.lost, flight.valid)

    def _land_part(
        self, flight: Flight, part: Part, received: Tensor, valid: bool, leaving: Tensor | None
    ) -> None:
        if not flight.is_divided:
            part.make_absolute(received)
        part.note_received(received)
        if self.measure_gradient:
            gradient = self._algorithm.outer_gradient(part.message, received, part.state)
            if gradient is None and part.departure is not None:
                gradient = received - part.departure
            if gradient is not None:
                self._squares.append(torch.linalg.vector_norm(gradient))
        result = part.end(received, leaving)
        if flight.stayed and valid and flight.finite and self._landing.keeps_progress:
            part.read_local(part.scratch)
            result = self._landing.land(result, part.scratch, part.departure)
        result = part.begin(result)
        part.unpack(result)
        if part.departure is not None and part.departure is not result:
            part.departure.copy_(result)

    def _finish(self) -> None:
        lane = self.lane
        if lane.has_uncut_state or len(lane.state) != len(lane.parts[0].state):
            lane.take_back_state()
        self.is_torn = False
        if self._squares:
            self.gradient_norm = math.hypot(*(float(norm) for norm in self._squares))
            self._squares = []

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The algorithm's state with what has arrived for it, and what is this worker's own."""
        if self.is_torn:
            raise RuntimeError(
                "A round has failed while it was being applied, so the parameters are half those "
                "of before. Go back to the last checkpoint."
            )
        lane, received, flight = self.lane, None, None
        if self.flight is not None:
            received = self._arrived(self.flight)
            flight = self.flight.state_dict()
            if not self._exchange.is_weighted:
                flight["messages"] = lane.gather(lane.messages())
        shared = {"state": dict(lane.state), "received": received}
        return shared, {"flight": flight, **lane.state_dict()}

    def _arrived(self, flight: Flight) -> Tensor:
        """All that a flight has brought, once it is here, as it is applied later."""
        received, weight = self._receive(flight)
        self._keep_lost(flight)
        for parcel, whole in zip(self.lane.parcels, received, strict=True):
            whole[: len(parcel)].div_(weight)
            for part, share in parcel.split(whole) if not flight.is_divided else ():
                part.make_absolute(share)
        flight.is_divided = True
        return self.lane.gather(received)

    @torch.no_grad()
    def land_saved(self, flight: dict[str, Any]) -> None:
        """Apply a round that another run had left under way, where nothing stays under way.

        The parameters move by as much as the result moves the start. So the local steps made
        meanwhile stay, and are in the message of the next round.

        Args:
            flight: What to know of it; its ``"received"``, the own ``"messages"`` if the algorithm
                needs them, and the parameters at the ``"departure"``, flat, or None.
        """
        lane, algorithm = self.lane, self._algorithm
        received, departure = lane.split(flight["received"]), flight["departure"]
        messages = lane.split(flight["messages"]) if "messages" in flight else received
        for part, share, message in zip(lane.parts, received, messages, strict=True):
            local = torch.empty_like(share)
            part.read_local(local)
            before = part.start()
            if departure is not None:
                before = departure[part.chunk.start : part.chunk.stop].to(local)
            moved = None if before is None else local - before
            if flight["told"] is not None:
                algorithm.hear([tuple(numbers) for numbers in flight["told"]], part.state)
            result = algorithm.update(message, share, part.state)
            is_sound = moved is not None and bool(torch.isfinite(moved).all())
            part.unpack(moved.add_(result) if moved is not None and is_sound else result)
        if lane.has_uncut_state:
            lane.take_back_state()

    def give_up(self) -> list[Handle]:
        """Forget the flight under way; its handles are still to be released."""
        flight, self.flight = self.flight, None
        return [] if flight is None else flight.handles

    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` has given."""
        lane, flight = self.lane, own["flight"]
        if self.flight is not None:
            self._receive(self.flight)
        for handle in self.give_up():
            handle.release()
        lane.load_state_dict(shared["state"], own)
        if flight is None:
            return
        if not lane.holds:
            raise ValueError("The checkpoint holds a round under way, but overlap is off.")
        received = lane.take_flight(shared["received"], flight.get("messages"))
        self.flight = Flight.arrived(flight, received)

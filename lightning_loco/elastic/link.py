"""An engine's connection with the members: the exchange and the rows of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.rows import ROUND, PendingRows, Row
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import Timed
from lightning_loco.elastic.carried import Carried, rows_of
from lightning_loco.elastic.elastic import Elastic
from lightning_loco.elastic.flights import Flight, Flights
from lightning_loco.elastic.plan import UNKNOWING, resumed
from lightning_loco.elastic.resumed import is_ahead, land_saved_round
from lightning_loco.elastic.setup import begin_flights
from lightning_loco.elastic.sharing import DataShare
from lightning_loco.elastic.state import adopt_state
from lightning_loco.rounds.engine import Engine
from lightning_loco.rounds.exchange import make_exchange
from lightning_loco.rounds.flight import Flight as LaneFlight
from lightning_loco.rounds.membership import Host
from lightning_loco.rounds.parcels import Parcel
from lightning_loco.rounds.settings import RoundSettings


class ElasticLink:
    """Connects one engine; see :class:`lightning_loco.rounds.membership.Link`.

    Args:
        asked: What the user says.
        settings: Of the engine.

    Attributes:
        is_weighted: Whether messages are added up; otherwise they are mixed by a topology.
        share: Of the data.
        host: Reads the position of the program around the engine, as plain values, and goes on from
            that of another worker.
        last: The flight that has landed last, with the members' rows; None before the first one.
    """

    can_carry_rows = False

    def __init__(self, asked: Elastic, settings: RoundSettings) -> None:
        self.is_weighted = settings.algorithm.exchange == "mean"
        self._asked = asked
        self._settings = settings
        self._flights: Flights | None = None
        self._engine: Engine | None = None
        self._has_finished = False
        self._flight: Flight | None = None
        self.share = DataShare()
        self.host: Host | None = None
        self.last: Flight | None = None

    def _land(self, flight: Flight) -> None:
        self.last = flight
        worker, plan = self.engine.worker, flight.plan
        assert plan is not None
        worker.statistics.members = len(plan.names)
        worker.statistics.repaired += len(plan.drifted)
        if flight.state is not None and not flight.is_adopted:
            begun = worker.round_index - flight.round_index
            self._adopt(flight)
            worker.round_index = plan.round_index + begun

    @property
    def has_joined(self) -> bool:
        """Whether this worker takes part."""
        return self._flights is not None

    @property
    def engine(self) -> Engine:
        """Whose connection it is; RuntimeError before it takes part."""
        if self._engine is None:
            raise RuntimeError("This worker does not take part: call join() before training.")
        return self._engine

    def _carry(self, flight: Flight) -> Flight:
        assert self._flights is not None
        self._flights.carry(flight)
        return flight

    # ------------------------------------------------------------------ rounds

    def meet(self, statistics: Statistics, row: Row, place: str) -> PendingRows:
        """Nobody else comes to the meetings of this job."""
        table = torch.tensor([row.numbers], dtype=torch.float64)
        return PendingRows(lambda: table, place)

    def carry(self, statistics: Statistics, row: Row, place: str) -> PendingRows:
        """Begin a flight with the row; its message follows by :meth:`start`.

        A flight that stays begins then, not to take the processor from those who make messages.
        """
        flight = self._flight = Flight(int(row.round_index), row)
        flight.stays = self.engine.settings.schedule.stays(flight.round_index)
        if not flight.stays:
            self._carry(flight)
        return rows_of(flight, self.engine, place)

    def start(self, parcel: Parcel, round_index: int) -> Carried:
        """Give the flight its message."""
        flight = self._flight
        assert flight is not None
        flight.values = self._position(flight.round_index)
        flight.message = parcel.wire
        flight.is_sent.set()
        if flight.stays:
            self._carry(flight)
        return Carried(flight, self.engine, self._land)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """The mean, divided by the weights already; or the mix of each."""
        settings, alone = self._settings, WorkerGroup(0, 1)
        exchange = make_exchange(
            settings.algorithm, alone, Statistics(), settings.topology, settings.compression
        )
        return exchange.simulate(messages, round_index)

    def _position(self, round_index: int) -> dict[str, Any]:
        host, schedule = self.host, self.engine.settings.schedule
        return {
            "round_index": round_index,
            "steps": self.engine.worker.steps,
            "phase": schedule.steps_of_round(0, round_index),
            "host": None if host is None else host.read(),
        }

    def _adopt(self, flight: Flight, joins: bool = False, missed: int = 0) -> None:
        """Go on from the state of the run; the others have made ``missed`` local steps since.

        Of a round under way the message is nobody's own.
        """
        worker, host = self.engine.worker, self.host
        adopt_state(self.engine, flight)
        for message in self.engine.lanes[0].lane.messages():
            if self.is_weighted or flight.received is None:
                message.zero_()
            else:
                message.copy_(flight.received)
        if flight.has_drifted or flight.state is None:
            return
        if host is not None:
            host.go_on(flight.state.values["host"])
        for _ in range(missed):
            if host is not None:
                host.end_step()
            worker.steps += 1
        if host is not None:
            if joins and flight.received is not None:
                host.end_step()
            host.count(in_step=not joins)

    # ----------------------------------------------------------------- members

    def join(self, engine: Engine) -> None:
        """Take part from now on.

        It gets the state of the run; a round that is under way is its own too, with weight 0. A
        worker that knows a later round from a checkpoint begins with that one instead.
        """
        self._engine, self._has_finished = engine, False
        self._flights = begin_flights(self._asked, engine, self.share)
        worker = engine.worker
        land_saved_round(engine)
        told = resumed(worker.round_index) if worker.steps else UNKNOWING
        flight = Flight(told, Row(ROUND, UNKNOWING, 0, weight=0.0, finite=1.0))
        flight.values = self._position(worker.round_index)
        flight.values["steps_since_round"] = worker.steps_since_round
        flight.is_sent.set()
        try:
            self._carry(flight).wait()
            assert flight.plan is not None
            engine.statistics.members = len(flight.plan.names)
            if is_ahead(engine, flight):
                return
            if flight.state is not None:
                self._adopt(flight, joins=True)
            if flight.received is not None:
                self._take_part_in(flight)
        except BaseException:
            self.close()
            raise

    def _take_part_in(self, flight: Flight) -> None:
        """Land the round that was under way when this worker came, when it lands for all."""
        engine = self.engine
        (rounds,), worker = engine.lanes, engine.worker
        index = worker.round_index
        place = f"round {index}"
        late = LaneFlight(index, rows_of(flight, engine, place), False, worker.steps)
        late.handles = [Carried(flight, engine, self._land)]
        late.stayed = engine.settings.schedule.stays(index)
        rounds.flight = late
        worker.round_index += 1
        if not late.stayed:
            rounds.land()

    def catch_up(self) -> bool:
        """Wait for the round under way; whether this worker has been left behind by the others.

        It then goes on from the state of the run, without what it has made alone.
        """
        (rounds,), flight = self.engine.lanes, self._flight
        if rounds.flight is None or flight is None:
            return False
        with Timed(self.engine.statistics):
            flight.wait()
        if flight.state is None or flight.is_adopted:
            return False
        assert flight.plan is not None
        rounds.give_up()
        self._adopt(flight, missed=int(flight.state.values["phase"]))
        self.engine.worker.round_index = flight.plan.round_index
        self._take_part_in(flight)
        return True

    def finish(self) -> None:
        """Wait for no more members than there are: what is under way, or begins, is the last."""
        self._has_finished = True
        if self._flights is not None:
            self._flights.are_last = True

    def leave(self) -> None:
        """Take part no longer, when what is under way is over."""
        flights, self._flights = self._flights, None
        if flights is not None:
            flights.leave(self._has_finished)

    def close(self) -> None:
        """Take part no longer."""
        is_idle = self._flight is None or self._flight.is_over()
        if self._has_finished and is_idle:
            self.leave()
        elif self._flights is not None:
            self._flights.close()
            self._flights = None

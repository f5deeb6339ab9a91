"""An engine's connection with the members: the exchange and the rows of its rounds."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import Timed
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import ROUND, PendingRows, Row
from lightning_loco.elastic.averaging import Summing
from lightning_loco.elastic.consistency import Consistency, fingerprint
from lightning_loco.elastic.elastic_round import Carried, Flight, rows_of
from lightning_loco.elastic.gossip import Mixing
from lightning_loco.elastic.group import Groups
from lightning_loco.elastic.lighthouse import Lighthouse, address_towards
from lightning_loco.elastic.membership import Elastic
from lightning_loco.elastic.quorum import UNKNOWING, resumed
from lightning_loco.elastic.recovery import (
    follow,
    is_ahead,
    land_saved_rounds,
    outer_state,
    position_of,
    take_part,
)
from lightning_loco.elastic.rounds import Flights
from lightning_loco.engine.buckets import Parcel
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.exchanges.base import make_exchange
from lightning_loco.engine.membership import DataShare, Host
from lightning_loco.engine.settings import RoundSettings

_OWN_AFFAIRS = ("sync_every", "bucket_bytes")


class ElasticLink:
    """Connects one engine; see :class:`lightning_loco.engine.membership.Link`.

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

    def _note(self, flight: Flight) -> None:
        self.last = flight
        statistics, plan = self.engine.statistics, flight.plan
        assert plan is not None
        statistics.members = len(plan.names)
        statistics.repaired += len(plan.drifted)

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
        flight.values = position_of(self.engine, self.host, flight.round_index)
        flight.message = parcel.wire
        flight.is_sent.set()
        if flight.stays:
            self._carry(flight)
        return Carried(flight, self.engine, self._note)

    def simulate(self, messages: Sequence[Tensor], round_index: int) -> list[Tensor]:
        """The mean, divided by the weights already; or the mix of each."""
        settings, alone = self._settings, WorkerGroup(0, 1)
        exchange = make_exchange(
            settings.algorithm, alone, Statistics(), settings.topology, settings.compression
        )
        return exchange.simulate(messages, round_index)

    # ----------------------------------------------------------------- members

    def join(self, engine: Engine) -> None:
        """Take part from now on.

        It gets the state of the run; a round that is under way is its own too, with weight 0. A
        worker that knows a later round from a checkpoint begins with that one instead.
        """
        self._engine, self._has_finished = engine, False
        self._flights = _begin_flights(self._asked, engine, self.share)
        worker = engine.worker
        land_saved_rounds(engine)
        told = resumed(worker.round_index) if worker.steps else UNKNOWING
        flight = Flight(told, Row(ROUND, UNKNOWING, 0, weight=0.0, finite=1.0))
        flight.values = position_of(engine, self.host, worker.round_index)
        flight.values["steps_since_round"] = worker.steps_since_round
        flight.is_sent.set()
        try:
            self._carry(flight).wait()
            assert flight.plan is not None
            engine.statistics.members = len(flight.plan.names)
            if is_ahead(engine, flight):
                self._flights.made = ""
                return
            if flight.state is not None:
                follow(engine, self.host, flight)
            if flight.received is not None:
                rounds = take_part(engine, flight, Carried(flight, engine, self._note))
                if not engine.settings.schedule.stays(worker.round_index):
                    rounds.land()
                worker.round_index += 1
        except BaseException:
            self.close()
            raise

    def catch_up(self) -> None:
        """Wait for the round under way, and see whether the others have left this worker behind.

        It then goes on from the state of the run, without what it has made alone, and the round of
        the run is under way in place of its own, which may have been one of another lane.
        """
        engine, flight = self.engine, self._flight
        if flight is None or all(rounds.flight is None for rounds in engine.lanes):
            return
        with Timed(engine.statistics):
            flight.wait()
        if flight.state is None or flight.is_adopted:
            return
        assert flight.plan is not None
        begun = engine.worker.round_index - flight.round_index
        missed = self._missed(flight) if begun else 0
        for rounds in engine.lanes:
            rounds.give_up()
        follow(engine, self.host, flight, missed)
        take_part(engine, flight, Carried(flight, engine, self._note))
        engine.worker.round_index = flight.plan.round_index + begun

    def _missed(self, flight: Flight) -> int:
        """Local steps from the begin of the run's round to where this worker is in its own one."""
        assert flight.state is not None
        theirs, own = flight.state.values["steps_under_way"], flight.values
        made = self.engine.worker.steps - own["steps"]
        return int(theirs if made >= own["steps_under_way"] else min(made, theirs))

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


def _begin_flights(asked: Elastic, engine: Engine, share: DataShare) -> Flights:
    """Begin to carry flights; the lighthouse need not be there before the first one."""
    name = f"{asked.name or socket.gethostname()}-{secrets.token_hex(4)}"
    lighthouse = Lighthouse(asked.lighthouse, name)
    groups = Groups(asked.host or address_towards(asked.lighthouse), asked.timeout_s)
    sums = engine.settings.algorithm.exchange == "mean"
    carrier = Summing(groups, engine) if sums else Mixing(groups, engine)
    flights = Flights(
        lighthouse,
        lambda: engine.worker.stop.requested is not None,
        groups,
        carrier,
        {**_describe(engine), "check_every": asked.check_every or 0, "num_samples": share.sizes},
        share=share,
        min_workers=asked.min_workers,
        timeout_s=asked.timeout_s,
        consistency=Consistency(
            engine.settings.algorithm.replicated and asked.check_every or 0,
            lambda: fingerprint(outer_state(engine)),
        ),
    )
    flights.start()
    return flights


def _describe(engine: Engine) -> dict[str, Any]:
    """What must be equal on all workers, as plain values."""
    settings = engine.settings.describe()
    told = {key: value for key, value in settings.items() if key not in _OWN_AFFAIRS}
    told["parameters"] = engine.worker.replica.layout.schema()
    return cast(dict[str, Any], json.loads(json.dumps(told, default=str)))

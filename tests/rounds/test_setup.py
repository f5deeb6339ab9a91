"""What engines are made of: how rows travel, and one lane for each part."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_loco import DiLoCo, GASLoC, ModelAverage
from lightning_loco.algorithms import Algorithm
from lightning_loco.comm import Worker, WorkerGroup
from lightning_loco.comm.rows import Row, TravellingRows
from lightning_loco.rounds import RoundSettings
from lightning_loco.rounds.engine import make_lanes
from lightning_loco.rounds.mean_exchange import MeanExchange, RidingRows
from lightning_loco.rounds.neighbor_exchange import NeighborExchange
from lightning_loco.schedules import EveryInterval, EverySteps, Schedule


def test_rows_ride_with_sums_that_somebody_attends_to(subtests: pytest.Subtests) -> None:
    """A round that nobody looks after until the next one cannot call those at a meeting."""
    late = EverySteps(2, overlap=True)
    rows: dict[str, tuple[Algorithm, Schedule, type, type]] = {
        "attended": (DiLoCo(), EverySteps(2), RidingRows, MeanExchange),
        "left alone": (DiLoCo(outer_momentum=0.0), late, TravellingRows, MeanExchange),
        "by the clock": (ModelAverage(), EveryInterval(), RidingRows, MeanExchange),
        "neighbours": (GASLoC(), EverySteps(2), TravellingRows, NeighborExchange),
    }
    for name, (algorithm, schedule, carrier, exchange) in rows.items():
        with subtests.test(name):
            make = partial(RoundSettings, algorithm, schedule)
            worker, settings = Worker.join(torch.nn.Linear(2, 3), make, WorkerGroup(0, 1))
            (lane,), (made,), shared, link = make_lanes(worker, settings)
            assert link is None
            assert type(made) is carrier
            assert type(shared) is exchange
            room = Row.width(0) if carrier is RidingRows else 0
            assert lane.lane.rows_memory.numel() == room
            assert [len(parcel) for parcel in lane.lane.parcels] == [9]

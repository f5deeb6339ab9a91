"""What engines are made of: how rows travel, and one lane for each part."""

from __future__ import annotations

import pytest
import torch

from lightning_loco import DiLoCo, GASLoC, ModelAverage
from lightning_loco.algorithms import Algorithm
from lightning_loco.comm import Worker, WorkerGroup
from lightning_loco.comm.rows import Row, TravellingRows
from lightning_loco.rounds import RoundSettings
from lightning_loco.rounds.mean_exchange import MeanExchange, RidingRows
from lightning_loco.rounds.neighbor_exchange import NeighborExchange
from lightning_loco.rounds.setup import make_lanes
from lightning_loco.schedules import EveryInterval, EverySteps, Schedule


@pytest.mark.parametrize(
    ("algorithm", "schedule", "carrier", "exchange"),
    [
        (DiLoCo(), EverySteps(2), RidingRows, MeanExchange),
        (DiLoCo(outer_momentum=0.0), EverySteps(2, overlap=True), TravellingRows, MeanExchange),
        (ModelAverage(), EveryInterval(), RidingRows, MeanExchange),
        (GASLoC(), EverySteps(2), TravellingRows, NeighborExchange),
    ],
    ids=["attended", "left alone", "by the clock", "neighbours"],
)
def test_rows_ride_with_sums_that_somebody_attends_to(
    algorithm: Algorithm, schedule: Schedule, carrier: type, exchange: type
) -> None:
    """A round that nobody looks after until the next one cannot call those at a meeting."""
    model = torch.nn.Linear(2, 3)
    group = WorkerGroup(0, 1)
    worker, settings = Worker.join(model, lambda: RoundSettings(algorithm, schedule), group)
    (lane,), (made,), shared, link = make_lanes(worker, settings)
    assert link is None
    assert type(made) is carrier
    assert type(shared) is exchange
    room = Row.width(0) if carrier is RidingRows else 0
    assert lane.lane.rows_memory.numel() == room
    assert [len(parcel) for parcel in lane.lane.parcels] == [9]

"""What engines are made of: how rows travel, and one fragment for each part."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_loco import DiLoCo, GASLoC, ModelAverage
from lightning_loco.algorithms import Algorithm
from lightning_loco.distributed.worker_status import SeparateStatuses, WorkerStatus
from lightning_loco.engine import RoundSettings
from lightning_loco.engine.engine import make_fragments
from lightning_loco.engine.exchanges.all_reduce import MeanExchange, StatusesWithBucket
from lightning_loco.engine.exchanges.neighbor import NeighborExchange
from lightning_loco.schedules import EveryInterval, EverySteps, Schedule
from lightning_loco.worker import Worker, WorkerGroup


def test_rows_ride_with_sums_that_somebody_attends_to(subtests: pytest.Subtests) -> None:
    """A round that nobody looks after until the next one cannot call those at a sync point."""
    late = EverySteps(2, overlap=True)
    rows: dict[str, tuple[Algorithm, Schedule, type, type]] = {
        "attended": (DiLoCo(), EverySteps(2), StatusesWithBucket, MeanExchange),
        "left alone": (DiLoCo(outer_momentum=0.0), late, SeparateStatuses, MeanExchange),
        "by the clock": (ModelAverage(), EveryInterval(), StatusesWithBucket, MeanExchange),
        "neighbours": (GASLoC(), EverySteps(2), SeparateStatuses, NeighborExchange),
    }
    for name, (algorithm, schedule, carrier, exchange) in rows.items():
        with subtests.test(name):
            make = partial(RoundSettings, algorithm, schedule)
            worker, settings = Worker.join(torch.nn.Linear(2, 3), make, WorkerGroup(0, 1))
            (fragment,), (made,), shared, link = make_fragments(worker, settings)
            assert link is None
            assert type(made) is carrier
            assert type(shared) is exchange
            room = WorkerStatus.width(0) if carrier is StatusesWithBucket else 0
            assert fragment.fragment.status_memory.numel() == room
            assert [len(bucket) for bucket in fragment.fragment.buckets] == [9]

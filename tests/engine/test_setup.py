"""How an engine is set up: its exchange, how it sends statuses, and its fragments."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_loco import DiLoCo, GASLoC, ModelAverage
from lightning_loco.algorithms import Algorithm
from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.engine import RoundSettings
from lightning_loco.engine.engine import RoundHooks, make_exchange_and_hooks, make_fragments
from lightning_loco.engine.exchanges.all_reduce import AllReduce
from lightning_loco.engine.exchanges.neighbor import NeighborExchange
from lightning_loco.model.worker import Worker
from lightning_loco.schedules import EveryInterval, EverySteps, Schedule


def test_sums_carry_statuses_if_rounds_are_waited_for(subtests: pytest.Subtests) -> None:
    """Workers do not wait for an overlapped round, so it cannot call workers at a sync point."""
    late = EverySteps(2, overlap=True)
    rows: dict[str, tuple[Algorithm, Schedule, type, bool]] = {
        "blocking": (DiLoCo(), EverySteps(2), AllReduce, True),
        "overlapped": (DiLoCo(outer_momentum=0.0), late, AllReduce, False),
        "by time": (ModelAverage(), EveryInterval(), AllReduce, True),
        "neighbours": (GASLoC(), EverySteps(2), NeighborExchange, False),
    }
    for name, (algorithm, schedule, kind, carries_status) in rows.items():
        with subtests.test(name):
            make = partial(RoundSettings, algorithm, schedule)
            worker, settings = Worker.join(torch.nn.Linear(2, 3), make, WorkerGroup(0, 1))
            exchange, hooks = make_exchange_and_hooks(worker, settings)
            assert type(hooks) is RoundHooks
            assert type(exchange) is kind
            assert exchange.carries_status is carries_status
            (fragment,) = make_fragments(worker, settings, exchange)
            width = WorkerStatus.width(0) if carries_status else 0
            (bucket,) = fragment.memory.buckets
            assert (len(bucket), len(bucket.statuses)) == (9, width)

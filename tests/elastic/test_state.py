"""The state of a run that does not fit the model of the worker that gets it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_loco.algorithms import DiLoCo
from lightning_loco.distributed.worker_status import ROUND, Row
from lightning_loco.elastic.elastic_round import Flight
from lightning_loco.elastic.quorum import UNKNOWING
from lightning_loco.elastic.recovery import adopt_state, copy_state
from lightning_loco.engine import StepEngine


def test_a_state_of_another_size_changes_nothing(subtests: pytest.Subtests) -> None:
    engine = StepEngine(nn.BatchNorm1d(3), DiLoCo(), sync_every=2)
    flight = Flight(UNKNOWING, Row(ROUND, UNKNOWING, 0))
    before = engine.worker.replica.layout.new_flat()
    for name, message in [
        ("buffers", "has buffers of another size than this model"),
        ("state/outer", "does not fit this worker's: 'outer' differs"),
        ("state/momentum", "does not fit this worker's: 'momentum' differs"),
    ]:
        flight.state = copy_state(engine, flight)
        flight.state.tensors[name] = torch.ones(flight.state.tensors[name].numel() + 1)
        with subtests.test(name), pytest.raises(RuntimeError, match=message):
            adopt_state(engine, flight)
        assert torch.equal(engine.worker.replica.layout.new_flat(), before)
    engine.close()

"""The state of a run that does not fit the model of the worker that gets it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_loco.algorithms import DiLoCo
from lightning_loco.distributed.worker_status import IN_ROUND, WorkerStatus
from lightning_loco.elastic.elastic_round import ElasticRound
from lightning_loco.elastic.quorum import NO_STATE
from lightning_loco.elastic.recovery import adopt_state, copy_state
from lightning_loco.engine import StepEngine


def test_a_state_of_another_size_changes_nothing(subtests: pytest.Subtests) -> None:
    engine = StepEngine(nn.BatchNorm1d(3), DiLoCo(), sync_every=2)
    pending = ElasticRound(NO_STATE, WorkerStatus(IN_ROUND, NO_STATE, 0))
    before = engine.worker.replica.layout.new_flat()
    for name, message in [
        ("buffers", "has buffers of another size than this model"),
        ("state/outer", "does not fit this worker's: 'outer' differs"),
        ("state/momentum", "does not fit this worker's: 'momentum' differs"),
    ]:
        pending.state = copy_state(engine, pending)
        pending.state.tensors[name] = torch.ones(pending.state.tensors[name].numel() + 1)
        with subtests.test(name), pytest.raises(RuntimeError, match=message):
            adopt_state(engine, pending)
        assert torch.equal(engine.worker.replica.layout.new_flat(), before)
    engine.close()

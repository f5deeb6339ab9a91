"""A worker that comes with what it knows from a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_loco.algorithms import DiLoCo
from lightning_loco.distributed.worker_status import IN_ROUND, WorkerStatus
from lightning_loco.elastic.elastic_round import ElasticRound
from lightning_loco.elastic.quorum import resumed
from lightning_loco.elastic.recovery import apply_saved_rounds, is_ahead
from lightning_loco.elastic.state_transfer import StateTransfer
from lightning_loco.engine import StepEngine


def trained(steps: int) -> StepEngine:
    """A worker with overlap, after so many local steps of its own."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    engine = StepEngine(model, DiLoCo(0.7, 0.3), sync_every=3, overlap=True, warm_start=False)
    for _ in range(steps):
        with torch.no_grad():
            model.weight.add_(0.1)
        engine.step()
    return engine


@pytest.mark.parametrize(("round_of_others", "ahead"), [(1, True), (2, False), (3, False)])
def test_who_is_ahead(round_of_others: int, ahead: bool) -> None:
    """Those in round 2 will be in round 3 when this worker is."""
    engine = trained(9)
    assert engine.worker.round_index == 3
    pending = ElasticRound(resumed(3), WorkerStatus(IN_ROUND, -1, 0))
    assert not is_ahead(engine, pending)
    pending.state = StateTransfer({}, {"round_index": round_of_others})
    assert is_ahead(engine, pending) is ahead
    engine.close()


def test_a_round_that_was_saved_lands_once() -> None:
    engine, model = trained(7), nn.Linear(5, 1)
    again = StepEngine(model, DiLoCo(0.7, 0.3), sync_every=3, overlap=True, warm_start=False)
    again.load_state_dict(engine.state_dict())
    (rounds,) = again.fragments
    before = {name: value.clone() for name, value in rounds.memory.state.items()}
    received = again.state_dict()["shared"][0]["received"].clone()
    progress = again.worker.replica.layout.new_flat() - before["outer"]
    apply_saved_rounds(again)
    DiLoCo(0.7, 0.3).update(received, received.clone(), before)
    for name, value in before.items():
        torch.testing.assert_close(rounds.memory.state[name], value)
    moved = again.worker.replica.layout.new_flat() - before["outer"]
    torch.testing.assert_close(moved, progress)
    assert rounds.pending is None
    apply_saved_rounds(again)
    assert torch.equal(again.worker.replica.layout.new_flat() - before["outer"], moved)
    engine.close()
    again.close()

"""A worker resumes from the state of the run, or joins with the state of a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_loco.algorithms import DiLoCo, RoundInfo
from lightning_loco.elastic.recovery import (
    RunState,
    adopt_state,
    apply_saved_rounds,
    copy_state,
    is_ahead,
)
from lightning_loco.engine import StepEngine


def trained(steps: int) -> StepEngine:
    """Return a worker with overlap after some local steps without other workers."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    engine = StepEngine(model, DiLoCo(0.7, 0.3), sync_every=3, overlap=True, warm_start=False)
    for _ in range(steps):
        with torch.no_grad():
            model.weight.add_(0.1)
        engine.step()
    return engine


@pytest.mark.parametrize(("round_of_others", "ahead"), [(1, True), (2, False), (3, False)])
def test_a_worker_is_ahead_by_more_than_one_round(round_of_others: int, ahead: bool) -> None:
    """Workers in round 2 will reach round 3 together with this worker."""
    engine = trained(9)
    assert engine.worker.round_index == 3
    assert not is_ahead(engine, None)
    assert is_ahead(engine, RunState({}, {"round_index": round_of_others})) is ahead
    engine.close()


def test_a_saved_round_is_applied_once() -> None:
    engine, model = trained(7), nn.Linear(5, 1)
    resumed = StepEngine(model, DiLoCo(0.7, 0.3), sync_every=3, overlap=True, warm_start=False)
    resumed.load_state_dict(engine.state_dict())
    (sync,) = resumed.fragments
    before = {name: value.clone() for name, value in sync.state.items()}
    received = resumed.state_dict()["shared"][0]["received"].clone()
    progress = resumed.worker.replica.layout.new_flat() - before["outer"]
    apply_saved_rounds(resumed)
    DiLoCo(0.7, 0.3).update(None, None, received, before, RoundInfo())
    for name, value in before.items():
        torch.testing.assert_close(sync.state[name], value)
    moved = resumed.worker.replica.layout.new_flat() - before["outer"]
    torch.testing.assert_close(moved, progress)
    assert sync.pending is None
    apply_saved_rounds(resumed)
    assert torch.equal(resumed.worker.replica.layout.new_flat() - before["outer"], moved)
    engine.close()
    resumed.close()


def test_a_state_of_another_size_changes_nothing(subtests: pytest.Subtests) -> None:
    engine = StepEngine(nn.BatchNorm1d(3), DiLoCo(), sync_every=2)
    before = engine.worker.replica.layout.new_flat()
    for name, message in [
        ("buffers", "has buffers of another size than this model"),
        ("state/outer", "does not fit this worker's: 'outer' differs"),
        ("state/momentum", "does not fit this worker's: 'momentum' differs"),
    ]:
        state = copy_state(engine, {}, with_saved_rounds=True)
        state.tensors[name] = torch.ones(state.tensors[name].numel() + 1)
        with subtests.test(name), pytest.raises(RuntimeError, match=message):
            adopt_state(engine, state)
        assert torch.equal(engine.worker.replica.layout.new_flat(), before)
    engine.close()

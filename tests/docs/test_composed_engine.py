"""Code of pages runs: an engine built from parts, a manual round, and a simulation by the clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_loco import DiLoCo, StepEngine
from tests.harness.pages import doc


def block_with(text: str, page: str = "plain_pytorch.md") -> str:
    (code,) = [block for block in doc(page).blocks("python") if text in block]
    return code


def distances(rank: int, world: int, code: str) -> tuple[float, float]:
    """Return the consensus distance after some rounds without local progress, and at the end."""
    names: dict[str, Any] = {}
    exec(code, names)
    model = nn.Linear(3, 1)
    engine = names["make_engine"](model, local_steps=2)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    for _ in range(2 * 20):
        engine.step()
    worker = engine.worker
    worker.sync_point("the last step")
    distance = worker.measure_consensus(max_elements=100)
    engine.finish()
    spread = worker.measure_consensus(max_elements=100)
    engine.close()
    return distance, spread


def test_the_composed_engine_brings_workers_together(pool: Any) -> None:
    code = block_with("def make_engine")
    for distance, spread in pool.run(distances, code, world=3):
        assert distance < 1e-3
        assert spread == 0


def local_steps(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * (rank + 1) * (1.0 - parameter))


def by_hand_and_by_engine(rank: int, world: int, code: str) -> tuple[list[Any], list[Any]]:
    names: dict[str, Any] = {}
    exec(code, names)
    found = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
        if by_hand:
            names["make_rounds"](model, lambda model: local_steps(model, rank), num_rounds=5)
        else:
            engine = StepEngine(model, DiLoCo(), sync_every=1)
            for _ in range(5):
                local_steps(model, rank)
                engine.step()
            engine.close()
        found.append([parameter.detach() for parameter in model.parameters()])
    return found[0], found[1]


def test_rounds_by_hand_are_those_of_the_engine(pool: Any) -> None:
    for by_hand, by_engine in pool.run(by_hand_and_by_engine, block_with("RoundInfo"), world=3):
        torch.testing.assert_close(by_hand, by_engine, rtol=0, atol=1e-12)


def test_the_simulated_workers_make_steps_at_their_speed() -> None:
    names: dict[str, Any] = {}
    exec(block_with("EveryInterval(interval_s=0.5))", "simulation.md"), names)
    models = [nn.Linear(1, 1) for _ in range(3)]
    steps = names["simulate_async_averaging"](models, lambda worker: None)
    assert steps == pytest.approx([600, 480, 150], abs=1)

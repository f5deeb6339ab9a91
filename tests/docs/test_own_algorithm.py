"""The algorithm of docs/your_own_algorithm.md runs and behaves as its page says."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_loco import Algorithm, DiLoCo, LocalSGD, LocoStrategy, Simulation, StepEngine
from tests.harness.pages import doc

PAGE = doc("your_own_algorithm.md")
TARGETS = torch.linspace(-1, 1, 4)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that the page defines, in a separate module."""
    module = types.ModuleType("lookahead")
    monkeypatch.setitem(sys.modules, "lookahead", module)
    for code in PAGE.blocks("python"):
        exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return vars(module)


def loss_of(model: nn.Module, worker: int) -> Tensor:
    result: Tensor = (model(torch.ones(1, 1)) - TARGETS[worker]).square().sum()
    return result


@pytest.mark.parametrize(
    ("outer_lr", "same"),
    [(0.5, DiLoCo(0.5, outer_momentum=0.0)), (1.0, LocalSGD())],
    ids=["DiLoCo without momentum", "Local SGD"],
)
def test_it_equals_what_is_known(names: dict[str, Any], outer_lr: float, same: Algorithm) -> None:
    results = []
    for algorithm in (names["Lookahead"](outer_lr), same):
        torch.manual_seed(0)
        results.append(names["compare"](algorithm, lambda: nn.Linear(1, 1), loss_of))
    torch.testing.assert_close(*results)


def test_it_equals_async_diloco_with_overlap(names: dict[str, Any]) -> None:
    results = []
    for algorithm in (names["Lookahead"](0.5), DiLoCo(0.5, outer_momentum=0.0)):
        torch.manual_seed(0)
        models = [nn.Linear(1, 1) for _ in range(2)]
        simulation = Simulation(models, algorithm, sync_every=1, overlap=True)

        @torch.no_grad()
        def local_step(worker: int, models: list[nn.Linear] = models) -> None:
            models[worker].weight.mul_(0.9 + 0.05 * worker)

        simulation.run(local_step, num_rounds=7)
        simulation.drain()
        results.append(simulation.consensus())
    torch.testing.assert_close(*results)


def test_engine_and_strategy_take_it(names: dict[str, Any]) -> None:
    algorithm = names["Lookahead"](0.7)
    assert isinstance(names["strategy"], LocoStrategy)
    assert names["strategy"].settings.algorithm == algorithm
    model = nn.Linear(1, 1, bias=False)
    start = model.weight.item()
    engine = StepEngine(model, algorithm, sync_every=1)
    with torch.no_grad():
        model.weight.add_(1.0)
    assert engine.step()
    engine.close()
    assert model.weight.item() - start == pytest.approx(0.7)


def test_the_table_names_what_the_contract_has() -> None:
    listed = {name for first in ("function", "name") for name, *_ in PAGE.table(first)}
    words = {word.strip("`").partition("(")[0] for cell in listed for word in cell.split("`, `")}
    of_class = {name for name in vars(Algorithm) if not name.startswith("_")}
    shown = {"exchange", "consensus_key", "replicated"}  # in the example
    assert words == of_class - shown - {"round_start"}  # for the engine
    assert all(f"    {name} = " in PAGE.text for name in shown)

"""The baselines of the benchmark equal their papers' formulas, or methods that they contain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.baselines import LOSCAR, FactoredGossip, SlowMo, factored_gossip, loscar
from lightning_loco import DiLoCo, LocalSGD, Simulation
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EverySteps
from lightning_loco.simulation.simulation import SimulatedSettings
from lightning_loco.topology import Ring
from tests.harness.toys import Point, assert_close, randn

N, NUMEL, EVERY, RATE = 4, 22, 5, 0.2

targets = randn(N, NUMEL, seed=1)
curvatures = 0.5 + randn(N, NUMEL, seed=2).abs() / 3
start = randn(NUMEL, seed=3)


def step(x: Tensor, rate: float = RATE) -> Tensor:
    """Take a step of gradient descent of all workers, ``(N, P)``."""
    return x - rate * curvatures * (x - targets)


def trained(
    settings: SimulatedSettings, steps: int = 40, rate: Callable[[int], float] = lambda step: RATE
) -> Tensor:
    """Return the parameters of all workers after local steps, ``(N, P)``."""
    models, made = [Point(start) for _ in range(N)], [0] * N

    def local_step(worker: int) -> None:
        value = models[worker].value.data
        gradient = curvatures[worker] * (value - targets[worker])
        value.sub_(rate(made[worker]) * gradient)
        made[worker] += 1

    simulation = Simulation.from_settings(models, settings, speeds=[1.0] * N)
    simulation.run(local_step, seconds=steps)
    assert made == [steps] * N
    return torch.stack(simulation.params())


def test_slowmo() -> None:
    """Algorithm 1 of arXiv:1910.00643, with a learning rate that changes from round to round."""

    def rate(round_index: int) -> float:
        return 0.3 / (1 + round_index)

    x, u = start.clone(), torch.zeros_like(start)
    for index in range(8):
        local = x.repeat(N, 1)
        for _ in range(EVERY):
            local = step(local, rate(index))
        u = 0.6 * u + (x - local.mean(0)) / rate(index)
        x = x - 0.9 * rate(index) * u
    settings = RoundSettings(SlowMo(0.9, 0.6, rate), EverySteps(EVERY))
    assert_close(trained(settings, rate=lambda made: rate(made // EVERY)), x.repeat(N, 1))


@pytest.mark.parametrize(
    ("slowmo", "same"),
    [
        pytest.param(SlowMo(1.0, 0.0), LocalSGD(), id="local_sgd"),
        pytest.param(SlowMo(0.7, 0.5, 1e-3), DiLoCo(0.7, 0.5, nesterov=False), id="heavy_ball"),
    ],
)
def test_slowmo_contains(slowmo: SlowMo, same: LocalSGD | DiLoCo) -> None:
    schedule = EverySteps(EVERY)
    assert_close(trained(RoundSettings(slowmo, schedule)), trained(RoundSettings(same, schedule)))


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_loscar(fraction: float) -> None:
    """Results that are three local steps late; all later steps are kept, on and off the set."""
    x, y = start.repeat(N, 1), start.repeat(N, 1)
    for made in range(1, 44):
        x, index = step(x), made // EVERY - 1
        if made % EVERY == 0:
            y = x.clone()
        elif made % EVERY == 3 and index >= 0:
            part = LOSCAR(fraction).chosen(NUMEL, index)
            assert len(part.unique()) == round(fraction * NUMEL)
            x[:, part] += (y.mean(0) - y)[:, part]
    assert_close(trained(loscar(EVERY, 3, fraction), steps=43), x)


def test_loscar_without_a_delay_is_local_sgd() -> None:
    same = RoundSettings(LocalSGD(), EverySteps(EVERY))
    assert_close(trained(loscar(EVERY, 0, fraction=1.0)), trained(same))


def test_factored_gossip_on_a_ring() -> None:
    matrix = Ring().mixing_matrix(N)
    outer, m = start.repeat(N, 1), torch.zeros(N, NUMEL, dtype=start.dtype)
    for _ in range(8):
        local = outer
        for _ in range(EVERY):
            local = step(local)
        delta = outer - local
        m = 0.6 * m + delta
        outer = matrix @ (matrix @ outer - 0.8 * (delta + 0.6 * m))
    assert_close(trained(factored_gossip(EVERY, 0.8, 0.6, "ring")), outer)


def test_factored_gossip_on_a_complete_graph_is_diloco() -> None:
    found = trained(factored_gossip(EVERY, 0.8, 0.6, "complete"))
    assert_close(found, trained(RoundSettings(DiLoCo(0.8, 0.6), EverySteps(EVERY))))


def test_the_first_mix_of_factored_gossip_is_hidden() -> None:
    """On a link that needs three local steps, a phase takes them once and not twice."""
    models = [Point(start) for _ in range(N)]
    settings = factored_gossip(EVERY, 0.8, 0.6, "random_matching")
    link = {"latency_s": 3.0, "mbit_per_s": 1e9}
    simulation = Simulation.from_settings(models, settings, speeds=[1.0] * N, links=link)
    simulation.run(lambda worker: None, num_rounds=8)
    assert [cost.time_s for cost in simulation.costs] == pytest.approx([4 * (EVERY + 3)] * N)
    assert isinstance(simulation.algorithm, FactoredGossip)

"""The simulation: order of steps and rounds, common start, consensus and its distance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_loco import DiLoCo, GASLoC, LocalSGD, Simulation, StepEngine
from lightning_loco.algorithms import Algorithm
from tests.harness.pool import Pool
from tests.harness.toys import Point, randn


def points(num_workers: int, size: int = 3) -> list[Point]:
    return [Point(randn(size, seed=worker)) for worker in range(num_workers)]


class WithFrozenParts(nn.Module):
    """A trainable parameter, a frozen one and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.value = nn.Parameter(randn(2, seed=seed))
        self.frozen = nn.Parameter(randn(2, seed=seed + 10), requires_grad=False)
        self.register_buffer("scale", randn(2, seed=seed + 20))


def test_all_workers_start_from_the_first_one() -> None:
    models = points(3)
    start = models[0].value.detach().clone()
    simulation = Simulation(models, LocalSGD())
    assert simulation.num_workers == 3
    assert simulation.round_index == 0
    for model, params in zip(models, simulation.params(), strict=True):
        assert torch.equal(model.value.detach(), start)
        assert torch.equal(params, start)
    assert simulation.consensus_distance() < 1e-12


def frozen_parts(rank: int, world: int) -> list[Tensor]:
    model = WithFrozenParts(seed=rank)
    StepEngine(model, LocalSGD()).close()
    return [tensor.detach() for tensor in model.state_dict().values()]


def test_frozen_parameters_and_buffers_start_from_the_first_worker_too(pool: Pool) -> None:
    """As in a run with processes."""
    expected = [tensor.detach() for tensor in WithFrozenParts(seed=0).state_dict().values()]
    for tensors in pool.run(frozen_parts, world=2):
        assert all(map(torch.equal, tensors, expected))
    models = [WithFrozenParts(seed=worker) for worker in range(2)]
    Simulation(models, LocalSGD())
    for model in models:
        assert all(map(torch.equal, model.state_dict().values(), expected))


@pytest.mark.parametrize("sync_every", [1, 3, [1, 2, 4]])
def test_each_worker_makes_its_local_steps_before_each_round(sync_every: Any) -> None:
    models = points(3)
    simulation = Simulation(models, LocalSGD(), sync_every=sync_every)
    calls: list[tuple[int, int]] = []
    simulation.run(lambda worker: calls.append((simulation.round_index, worker)), num_rounds=2)
    every = sync_every if isinstance(sync_every, list) else [sync_every] * 3
    assert calls == [(t, i) for t in range(2) for i in range(3) for _ in range(every[i])]
    assert simulation.round_index == 2


def test_the_round_index_chooses_the_graph_of_the_round() -> None:
    """XOR partners: two consecutive rounds give the exact mean of 4 workers, from any start."""
    for begin in (0, 1):
        models = points(4, size=1)
        simulation = Simulation(models, GASLoC(1.0, 0.5, 0.0), topology="xor")
        simulation.run(lambda worker: None, begin)
        values = randn(4, 1, seed=7)
        for model, value in zip(models, values, strict=True):
            model.value.data.copy_(value)
        simulation.make_round()
        assert simulation.consensus_distance() > 0.1
        simulation.make_round()
        assert simulation.consensus_distance() < 1e-12
        torch.testing.assert_close(simulation.consensus(), values.mean(0))


def test_consensus_distance_is_the_root_mean_square_over_the_workers() -> None:
    models = points(2, size=4)
    simulation = Simulation(models, LocalSGD())
    models[0].value.data.fill_(1.0)
    models[1].value.data.fill_(3.0)
    assert simulation.consensus_distance() == pytest.approx(2.0)  # four elements, each 1 apart
    values = [randn(4, seed=worker + 5) for worker in range(2)]
    for model, value in zip(models, values, strict=True):
        model.value.data.copy_(value)
    mean = (values[0] + values[1]) / 2
    squares = [float((value - mean).square().sum()) for value in values]
    assert simulation.consensus_distance() == pytest.approx(math.sqrt(sum(squares) / 2))


def test_the_consensus_is_the_mean() -> None:
    for algorithm in (LocalSGD(), GASLoC(), DiLoCo()):
        models = [Point(torch.zeros(2)) for _ in range(3)]
        simulation = Simulation(models, algorithm)
        for worker, model in enumerate(models):
            model.value.data.fill_(float(worker))
        assert simulation.consensus().tolist() == [1.0, 1.0]


def test_returned_parameters_are_copies() -> None:
    models = points(2)
    simulation = Simulation(models, DiLoCo())
    before = simulation.params()[0].clone()
    simulation.params()[0].zero_()
    simulation.consensus().zero_()
    assert torch.equal(simulation.params()[0], before)
    assert torch.equal(simulation.consensus(), before)


@pytest.mark.parametrize(
    "algorithm", [LocalSGD(), DiLoCo(), GASLoC()], ids=lambda a: type(a).__name__
)
def test_without_overlap_there_is_nothing_to_drain(algorithm: Algorithm) -> None:
    models = points(3)
    simulation = Simulation(models, algorithm)
    simulation.run(lambda worker: models[worker].value.data.add_(worker), 2)
    before = torch.stack(simulation.params())
    simulation.drain()
    assert torch.equal(torch.stack(simulation.params()), before)


def test_optimizers_of_the_models_keep_working() -> None:
    """Parameters are written in place, so the optimizer's references stay valid."""
    models = [nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    simulation = Simulation(models, DiLoCo())

    def local_step(worker: int) -> None:
        optimizers[worker].zero_grad()
        models[worker](torch.ones(1, 2)).square().sum().backward()
        optimizers[worker].step()

    before = models[0](torch.ones(1, 2)).square().item()
    simulation.run(local_step, 10)
    assert models[0](torch.ones(1, 2)).square().item() < 0.5 * before
    assert all(p.requires_grad for model in models for p in model.parameters())


def test_invalid_settings_are_refused(subtests: pytest.Subtests) -> None:
    for models, settings, kind, message in (
        ([], {}, ValueError, "needs at least one model"),
        (points(2), {"sync_every": 0}, ValueError, "must be at least 1, got 0"),
        (points(2), {"sync_every": 1.5}, TypeError, "must be an integer"),
        (points(2), {"sync_every": True}, TypeError, "must be an integer"),
        (points(2), {"sync_every": "2"}, TypeError, "must be an integer"),
        (points(2), {"sync_every": [1, 2, 3]}, ValueError, "3 numbers for 2 workers"),
        (points(2), {"topology": "ring"}, ValueError, "takes no topology"),
        (points(2), {"algorithm": "diloco"}, TypeError, "must be an Algorithm such as DiLoCo"),
        (points(2), {"algorithm": DiLoCo}, TypeError, "must be an Algorithm such as DiLoCo"),
        (points(3), {"algorithm": GASLoC(), "topology": "hypercube"}, ValueError, "power of two"),
        (points(3), {"algorithm": GASLoC(), "topology": "rign"}, ValueError, "Did you mean 'ring'"),
        ([Point(randn(3)), Point(randn(4))], {}, ValueError, "different model"),
        ([nn.Linear(2, 3), nn.Linear(3, 2)], {}, ValueError, "different model"),
        ([nn.Tanh(), nn.Tanh()], {}, ValueError, "no trainable parameters"),
    ):
        with (
            subtests.test(message, models=models, settings=settings),
            pytest.raises(kind, match=message),
        ):
            Simulation(models, **{"algorithm": LocalSGD(), **settings})

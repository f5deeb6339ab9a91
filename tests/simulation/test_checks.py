"""Common checks of simulations: equal models, and the duration of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from lightning_loco.algorithms import LocalSGD, PairwiseAverage
from lightning_loco.engine import RoundSettings
from lightning_loco.gossip import PairwiseSettings
from lightning_loco.simulation import SimulatedSettings, Simulation


def maker(settings: SimulatedSettings) -> Callable[[Sequence[nn.Module]], Simulation]:
    return lambda models: Simulation.from_settings(models, settings, speeds=[1.0] * len(models))


MAKERS = {
    "rounds": maker(RoundSettings(LocalSGD())),
    "pairs": maker(PairwiseSettings(PairwiseAverage())),
}


class Model(nn.Module):
    """A trainable parameter, a frozen one and a buffer."""

    def __init__(
        self, seed: int = 0, frozen: int = 2, buffer: int = 2, is_trained: bool = True
    ) -> None:
        super().__init__()
        values = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        self.a = nn.Parameter(values[:2].clone())
        self.b = nn.Parameter(values[2:4].clone(), requires_grad=is_trained)
        self.frozen = nn.Parameter(values[4 : 4 + frozen].clone(), requires_grad=False)
        self.register_buffer("mean", values[6 : 6 + buffer].clone())


@pytest.mark.parametrize("kind", MAKERS)
def test_all_models_start_as_the_first_one(kind: str) -> None:
    models = [Model(seed) for seed in range(3)]
    first = {name: value.clone() for name, value in models[0].state_dict().items()}
    MAKERS[kind](models)
    for model in models:
        assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", MAKERS)
def test_models_that_differ_are_refused_before_any_is_changed(
    kind: str, subtests: pytest.Subtests
) -> None:
    for other, difference in (
        (Model(1, frozen=1), r"'frozen' has shape \(1,\) there and \(2,\) on worker 0"),
        (Model(1, buffer=1), r"'mean' has shape \(1,\) there and \(2,\) on worker 0"),
        (Model(1).double(), "'a' has dtype torch.float64 there and torch.float32"),
        (Model(1, is_trained=False), "'b' has requires_grad False there and True on worker 0"),
        (nn.Linear(2, 2), "it has parameter 'weight' where worker 0 has 'a'"),
    ):
        with subtests.test(difference):
            middle = Model(2)
            before = middle.a.clone()
            message = f"Worker 2 holds a different model than worker 0: {difference}"
            with pytest.raises(ValueError, match=message):
                MAKERS[kind]([Model(0), middle, other])
            assert torch.equal(middle.a, before)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_run_of_no_finite_time_is_refused(kind: str, seconds: float) -> None:
    simulation = MAKERS[kind]([Model(0), Model(1)])
    with pytest.raises(ValueError, match=f"seconds must be at least 0 and finite, got {seconds}"):
        simulation.run(lambda worker: None, seconds=seconds)


def test_a_number_of_rounds_is_an_integer() -> None:
    simulation = MAKERS["rounds"]([Model(0), Model(1)])
    with pytest.raises(TypeError, match="num_rounds must be an integer, got 1.5"):
        simulation.run(lambda worker: None, 1.5)  # type: ignore[arg-type]

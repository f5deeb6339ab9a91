"""CHOCO-SGD: equal to the paper's algorithm; consensus with any codec; what it reduces to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco import Elastic, NeighborAverage, StepEngine
from lightning_loco.algorithms import ChocoSGD
from lightning_loco.compression import Codec, Int4, Int8, Sparse
from lightning_loco.engine import RoundSettings
from lightning_loco.topology import Ring
from tests.algorithms.quadratics import RATE, distance, gossiped, gradient, start, trained
from tests.algorithms.toys import Point, assert_close, randn

CODECS = [
    pytest.param(None, 0.7, id="none"),
    pytest.param(Int8(block=8), 0.9, id="int8"),
    pytest.param(Int4(block=8), 0.5, id="int4"),
    pytest.param(Sparse(k=4, block=8), 0.2, id="sparse"),
]


def compressed(values: Tensor, codec: Codec | None) -> Tensor:
    """Q of each row."""
    if codec is None:
        return values
    return torch.stack([codec.decode(codec.encode(row), torch.empty_like(row)) for row in values])


def algorithm_2(
    matrix: Tensor, gossip_step: float, codec: Codec | None, rounds: int
) -> tuple[Tensor, Tensor]:
    """Algorithm 2 of arXiv:1902.00340 in coordinates whose origin is the start: x and x hat."""
    x = torch.zeros(len(matrix), len(start), dtype=torch.float64)
    estimates, history = torch.zeros_like(x), []
    for _ in range(rounds):
        half = x - RATE * gradient(start + x)
        estimates = estimates + compressed(half - estimates, codec)
        x = half.clone()
        for i in range(len(matrix)):
            for j in range(len(matrix)):
                x[i] += gossip_step * matrix[i, j] * (estimates[j] - estimates[i])
        history.append(x)
    return start + torch.stack(history), start + estimates


@pytest.mark.parametrize(("codec", "gossip_step"), CODECS)
def test_it_equals_the_algorithm_of_the_paper(codec: Codec | None, gossip_step: float) -> None:
    expected, estimates = algorithm_2(Ring().mixing_matrix(5), gossip_step, codec, 30)
    algorithm = ChocoSGD(gossip_step)
    found, simulation = trained(algorithm, 5, 30, topology="ring", compression=codec)
    assert_close(found, expected)
    for own, state in zip(estimates, simulation.states, strict=True):
        assert_close(state["estimate"], own)


@pytest.mark.parametrize(("codec", "gossip_step"), CODECS)
def test_the_mean_moves_by_the_gradients_only(codec: Codec | None, gossip_step: float) -> None:
    found, _ = trained(ChocoSGD(gossip_step), 5, 20, topology="ring", compression=codec)
    before = torch.cat([start.expand(1, 5, -1), found[:-1]])
    steps = torch.stack([RATE * gradient(x).mean(0) for x in before])
    assert_close(found.mean(1), before.mean(1) - steps)


def test_without_compression_and_a_step_of_1_it_is_decentralized_sgd() -> None:
    expected, _ = trained(NeighborAverage(), 6, 20, topology="ring")
    assert_close(trained(ChocoSGD(1.0), 6, 20, topology="ring")[0], expected)


def test_consensus_is_exact_with_rough_codecs() -> None:
    values = randn(6, 24)
    for codec, gossip_step in ((Int4(block=8), 0.6), (Sparse(k=4, block=8), 0.25)):
        found, _ = gossiped(ChocoSGD(gossip_step), values, 400, topology="ring", compression=codec)
        assert_close(found[-1].mean(0), values.mean(0))
        assert distance(found[-1]) < 1e-10 * distance(values)


def test_it_converges_at_least_as_fast_as_the_theorem_says() -> None:
    """Theorem 2 of the paper, with the step that it names, for a codec of quality omega."""
    values, matrix, codec = randn(4, 16), Ring().mixing_matrix(4), Sparse(k=8, block=16)
    omega = 0.5
    eigenvalues = torch.linalg.eigvalsh(matrix)
    delta = 1 - float(eigenvalues[:-1].abs().max())
    beta_2 = float((1 - eigenvalues).max()) ** 2
    step = delta**2 * omega
    step /= 16 * delta + delta**2 + 4 * beta_2 + 2 * delta * beta_2 - 8 * delta * omega
    estimates = torch.zeros_like(values)
    for rounds in (1, 100, 200, 400):
        found, simulation = gossiped(
            ChocoSGD(step), values, rounds, topology="ring", compression=codec
        )
        x = found[-1]
        estimates = torch.stack([state["estimate"] for state in simulation.states])
        for message in x - estimates:
            lost = message - compressed(message[None], codec)[0]
            assert lost.square().sum() <= (1 - omega) * message.square().sum()
        error = (x - x.mean(0)).square().sum()
        bound = (1 - delta**2 * omega / 82) ** rounds
        assert error <= bound * ((values - values.mean(0)).square().sum() + values.square().sum())
    assert distance(x) < 0.3 * distance(values)  # so the bound was not reached by chance


@pytest.mark.parametrize("gossip_step", [0.0, 1.1, float("nan")])
def test_refuses_steps_out_of_range(gossip_step: float) -> None:
    with pytest.raises(ValueError, match="gossip_step must be in \\(0, 1\\]"):
        ChocoSGD(gossip_step)


def test_refuses_graphs_that_change() -> None:
    with pytest.raises(ValueError, match="same neighbours in all rounds"):
        RoundSettings(ChocoSGD(), topology="random_matching").prepare(4)


def test_refuses_elastic_members() -> None:
    settings: dict[str, Any] = {"membership": Elastic("127.0.0.1:1"), "topology": "ring"}
    with pytest.raises(ValueError, match="exchanges or keeps no numbers of its own, got ChocoSGD"):
        StepEngine(Point(start), ChocoSGD(), **settings)


def test_refuses_overlap() -> None:
    with pytest.raises(ValueError, match="got ChocoSGD"):
        StepEngine(Point(start), ChocoSGD(), overlap=True)

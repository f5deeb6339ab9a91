"""What cannot work is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_loco import AsyncModelAverageStrategy, DiLoCoStrategy, Elastic, StepEngine
from lightning_loco.algorithms import Algorithm, DiLoCo, GASLoC, NeighborAverage
from tests.pool import Pool

HERE = "127.0.0.1:29510"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lighthouse": "somewhere"}, "lighthouse must be an address such as"),
        ({"lighthouse": 3}, "lighthouse must be an address such as"),
        ({"min_workers": 0}, "min_workers must be at least 1, got 0"),
        ({"min_workers": 2.0}, "min_workers must be at least 1, got 2.0"),
        ({"name": "a b"}, "name must be of letters"),
        ({"timeout_s": 0}, "timeout_s is in seconds and must be positive, got 0"),
        ({"check_every": -1}, "check_every counts rounds and must be at least 1, or 0"),
        ({"check_every": 2.5}, "check_every counts rounds and must be at least 1, or 0"),
    ],
)
def test_values_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Elastic(**{"lighthouse": HERE, **arguments})


@pytest.mark.parametrize("algorithm", [GASLoC(), NeighborAverage()])
def test_gossip_is_refused(algorithm: Algorithm) -> None:
    with pytest.raises(ValueError, match="needs an algorithm that averages over all workers"):
        StepEngine(nn.Linear(1, 1), algorithm, membership=Elastic(HERE))


def engine_of_two(rank: int, world: int) -> str:
    try:
        StepEngine(nn.Linear(1, 1), DiLoCo(), membership=Elastic(HERE))
    except ValueError as error:
        return str(error)
    return ""


def test_jobs_of_several_ranks_are_refused(pool: Pool) -> None:
    for message in pool.run(engine_of_two, world=2):
        assert "every job is one worker, but this one has 2 ranks" in message


def test_something_else_is_no_membership() -> None:
    with pytest.raises(TypeError, match=r"membership must be Elastic\(...\) or None, got 3"):
        DiLoCoStrategy(membership=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="membership"):
        AsyncModelAverageStrategy(membership=Elastic(HERE))  # type: ignore[call-arg]


def test_a_worker_that_has_not_joined_makes_no_round() -> None:
    model = nn.Linear(1, 1)
    engine = StepEngine(model, DiLoCo(), sync_every=1, membership=Elastic(HERE))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"call join\(\) before training"):
        engine.step()
    assert all(map(torch.equal, before, model.parameters()))
    engine.close()

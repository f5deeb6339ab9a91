"""Unsupported settings are refused before training."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lightning_loco import AsyncModelAverageStrategy, DiLoCoStrategy, Elastic, StepEngine
from lightning_loco.algorithms import (
    SPARTA,
    Algorithm,
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    Mix,
    NeighborAverage,
    NoLoCo,
    PairwiseAverage,
)
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import Staggered
from tests.harness.pool import Pool
from tests.harness.toys import Layers

HERE = "127.0.0.1:29510"


def test_values_out_of_range(subtests: pytest.Subtests) -> None:
    for name, value, message in [
        ("lighthouse", "somewhere", "lighthouse must be an address such as"),
        ("lighthouse", 3, "lighthouse must be an address such as"),
        ("min_workers", 0, "min_workers must be at least 1, got 0"),
        ("min_workers", 2.0, "min_workers must be at least 1, got 2.0"),
        ("name", "a b", "name must be of letters"),
        ("host", "10.0.0.1 ", "host must be a name or an address without a port, got '10.0.0.1 '"),
        ("host", "a..b", "host must be a name or an address without a port"),
        ("host", "10.0.0.1:5000", "host must be a name or an address without a port"),
        ("timeout_s", 0, "timeout_s is in seconds and must be positive, got 0"),
        ("check_every", -1, "check_every counts rounds and must be at least 1, or 0"),
        ("check_every", 2.5, "check_every counts rounds and must be at least 1, or 0"),
    ]:
        with subtests.test(name, value=value), pytest.raises(ValueError, match=message):
            Elastic(**{"lighthouse": HERE, name: value})


@pytest.mark.parametrize("algorithm", [GASLoC(), NoLoCo(), NeighborAverage(), PairwiseAverage()])
def test_gossip_is_refused(algorithm: Algorithm) -> None:
    message = re.escape(f"averages over all workers, got {algorithm}")
    with pytest.raises(ValueError, match=message):
        StepEngine(nn.Linear(1, 1), algorithm, membership=Elastic(HERE))


def test_an_algorithm_that_counts_the_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="the same with any number of workers, got EagerDiLoCo"):
        StepEngine(nn.Linear(1, 1), EagerDiLoCo(), overlap=True, membership=Elastic(HERE))


@pytest.mark.parametrize("algorithm", [SPARTA(), DiLoCo(aggregate="trimmed_mean")])
def test_messages_that_members_cannot_send_are_refused(algorithm: Algorithm) -> None:
    message = re.escape(
        f"sends all parameters, and exchanges no numbers of its own, got {algorithm}"
    )
    with pytest.raises(ValueError, match=message):
        StepEngine(nn.Linear(1, 1), algorithm, membership=Elastic(HERE))


def engine_of_two(rank: int, world: int) -> str:
    try:
        StepEngine(nn.Linear(1, 1), DiLoCo(), membership=Elastic(HERE))
    except ValueError as error:
        return str(error)
    return ""


def test_jobs_of_several_workers_are_refused(pool: Pool) -> None:
    for message in pool.run(engine_of_two, world=2):
        assert "every job is one worker, but the ranks of this one are 2 workers" in message
        assert "make all 2 ranks one worker: replica_size=2" in message


def settings_of(*schedule: int) -> RoundSettings:
    """Return the settings of streaming rounds: sync_every, fragments, delay."""
    return RoundSettings(
        DiLoCo(), Staggered(*schedule), merge_policy=Mix(0.5), membership=Elastic(HERE)
    )


def test_two_pending_rounds_are_refused(subtests: pytest.Subtests) -> None:
    for every, fragments, delay, longest in [
        (10, 2, 6, 5),
        (10, 3, 4, 3),
        (7, 2, 4, 3),
        (2, 2, 2, 1),
    ]:
        with subtests.test(sync_every=every, fragments=fragments, delay=delay):
            model = Layers()
            message = rf"at most sync_every // fragments = .* = {longest}, got {delay}\. Use"
            with pytest.raises(ValueError, match=message):
                Engine.from_settings(model, settings_of(every, fragments, delay))
            Engine.from_settings(model, settings_of(every, fragments, longest)).close()


def test_changing_numbers_of_local_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="after a fixed number of local steps"):
        StepEngine(nn.Linear(1, 1), DiLoCo(), sync_every={0: 2, 9: 3}, membership=Elastic(HERE))


def test_other_types_are_refused_as_membership() -> None:
    with pytest.raises(TypeError, match=r"membership must be Elastic\(...\) or None, got 3"):
        DiLoCoStrategy(membership=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="membership"):
        AsyncModelAverageStrategy(membership=Elastic(HERE))  # type: ignore[call-arg]


def test_a_worker_that_has_not_joined_makes_no_round() -> None:
    model = nn.Linear(1, 1)
    engine = StepEngine(model, DiLoCo(), sync_every=1, membership=Elastic(HERE))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"call start\(\) before training"):
        engine.step()
    assert all(map(torch.equal, before, model.parameters()))
    engine.close()

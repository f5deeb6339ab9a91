"""Unsupported settings are refused before training."""

from __future__ import annotations

import re
from typing import Any

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
from lightning_loco.elastic.membership import prepare_for_any_number, topologies_for_any_number
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import Staggered
from lightning_loco.topology import Torus, get_topology
from lightning_loco.values import plain
from tests.conftest import cover
from tests.engine.fragments import Layers
from tests.pool import Pool

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


def test_pulls_are_refused() -> None:
    with pytest.raises(ValueError, match="averages over all workers or neighbours"):
        StepEngine(nn.Linear(1, 1), PairwiseAverage(), membership=Elastic(HERE))


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


def test_topologies_of_some_numbers_only_are_refused(subtests: pytest.Subtests) -> None:
    alternatives = "Those that do: ring, .* random_matching"
    message = f"exist for any number of them.*{alternatives}"
    for topology in ("hypercube", "xor", Torus(rows=2), [[0.5, 0.5], [0.5, 0.5]]):
        with subtests.test(topology=topology), pytest.raises(ValueError, match=message):
            StepEngine(nn.Linear(1, 1), GASLoC(), topology=topology, membership=Elastic(HERE))


@pytest.mark.parametrize(
    ("algorithm", "topology"),
    cover(
        [
            pytest.param(GASLoC(), id="GASLoC"),
            pytest.param(GASLoC(momentum_on="gossiped"), id="GASLoC with gossiped momentum"),
            pytest.param(NoLoCo(), id="NoLoCo"),
            pytest.param(NeighborAverage(), id="NeighborAverage"),
        ],
        topologies_for_any_number(),
        strength=1,
    ),
)
def test_all_other_topologies_work(algorithm: Algorithm, topology: str) -> None:
    engine = StepEngine(nn.Linear(1, 1), algorithm, topology=topology, membership=Elastic(HERE))
    described = engine.settings.describe()
    assert described["topology"] == plain(get_topology(topology))
    assert described.get("momentum") != "auto"
    engine.close()


def test_gossip_that_diverges_with_some_number_is_refused() -> None:
    algorithm = GASLoC(gossip_step=1.45, momentum=0.0)
    algorithm.prepare(2, Torus())
    with pytest.raises(ValueError, match="makes gossip on this topology of .* workers diverge"):
        StepEngine(nn.Linear(1, 1), algorithm, topology="torus", membership=Elastic(HERE))


def test_auto_suits_the_number_of_members_that_needs_least() -> None:
    algorithm, grid = GASLoC(momentum_on="gossiped"), get_topology("grid")
    alone = algorithm.prepare(8, grid)
    with pytest.raises(ValueError, match="of 30 workers diverge"):
        alone.prepare(30, grid)
    ready = prepare_for_any_number(algorithm, grid)
    assert isinstance(alone.momentum, float)
    assert 0 < ready.momentum < alone.momentum


def test_default_random_topologies_do_not_depend_on_the_global_seed() -> None:
    seeds = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        engine = StepEngine(nn.Linear(1, 1), NoLoCo(), membership=Elastic(HERE))
        seeds.append(engine.settings.topology.seed)
        engine.close()
    assert seeds == [0, 0]


def test_random_pairs_cause_one_warning() -> None:
    with pytest.warns(UserWarning, match="makes gossip of 8 workers diverge") as caught:
        engine = StepEngine(nn.Linear(1, 1), NoLoCo(0.9), membership=Elastic(HERE))
    engine.close()
    assert len(caught) == 1


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


def settings_of(algorithm: Algorithm, *schedule: int, topology: Any = None) -> RoundSettings:
    """Settings of streaming rounds: sync_every, fragments, delay."""
    merge_policy = Mix(0.5) if algorithm.replicated else None
    return RoundSettings(
        algorithm,
        Staggered(*schedule),
        topology,
        merge_policy=merge_policy,
        membership=Elastic(HERE),
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
                Engine.from_settings(model, settings_of(DiLoCo(), every, fragments, delay))
            Engine.from_settings(model, settings_of(DiLoCo(), every, fragments, longest)).close()


def test_fragments_of_gossip_are_refused() -> None:
    settings = settings_of(NeighborAverage(), 10, 2, 3, topology="ring")
    with pytest.raises(ValueError, match="equal on all members, got NeighborAverage"):
        Engine.from_settings(Layers(), settings)


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
    with pytest.raises(RuntimeError, match=r"call join\(\) before training"):
        engine.step()
    assert all(map(torch.equal, before, model.parameters()))
    engine.close()

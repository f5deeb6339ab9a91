"""Every file in conf/ composes, and its objects can be built."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
import networkx as nx
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from lightning.fabric.plugins.environments import LightningEnvironment
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

import lightning_loco as loco
from lightning_loco import Elastic, Simulation
from lightning_loco.algorithms import Cosine, DiLoCo
from lightning_loco.app import command_line
from lightning_loco.app.configured_strategy import OPTIONAL_GROUPS, build_strategy
from lightning_loco.app.early_checks import SettingsError, early_settings
from lightning_loco.compression import (
    CODECS,
    Compensated,
    ErrorFeedback,
    Int8,
    Sparse,
    as_compression,
)
from lightning_loco.costs import LINKS, NETWORKS, Link, Links
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.costs.server_times import BUCKET_BYTES
from lightning_loco.elastic.elastic import check_settings
from lightning_loco.schedules import EverySteps, VaryingSteps
from lightning_loco.strategies import (
    METHODS,
    DecoupledModelParallelStrategy,
    LocoModelParallelStrategy,
)
from lightning_loco.strategies.arguments import argument_names
from lightning_loco.tools.plan.planner import make_plan
from lightning_loco.tools.plan.text import commands
from lightning_loco.topology import TOPOLOGIES, FromGraph, Topology
from tests.docs.test_tables import common_defaults
from tests.harness.toys import Point, assert_close, randn
from tests.tools.plan.test_planner import job

CONF = Path(command_line.conf_dir())
TARGETS = {"lightning_loco.", "lightning.pytorch."}


def names(group: str) -> list[str]:
    """Return the choices of a group; a file named ``_...`` is only included by others."""
    return sorted(file.stem for file in (CONF / group).glob("[!_]*.yaml"))


GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())
BUILT = {"algorithm", "compression", "link", "topology"}
"""Groups whose choices have a separate test, which also builds them."""


@pytest.fixture(autouse=True)
def conf() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def config(*overrides: str) -> DictConfig:
    """Return a function that composes a configuration, with paths for choices that need one."""
    files = [f"{group}.path=/file" for group in GROUPS if f"{group}=file" in overrides]
    return compose("train", [*overrides, "run_dir=/run", "++data.path=/text", *files])


def targets(node: object) -> Iterator[tuple[str, dict]]:
    if isinstance(node, dict):
        if node.get("_target_"):
            yield node["_target_"], node
        for value in node.values():
            yield from targets(value)


def test_the_groups_are_known() -> None:
    assert GROUPS == [
        "algorithm", "callbacks", "compression", "data", "experiment", "hydra", "link", "logger",
        "membership", "model", "topology", "trainer",
    ]  # fmt: skip
    assert set(names("algorithm")) == {*METHODS, "ddp"}
    assert set(names("topology")) == {*TOPOLOGIES, "none", "file", "matrix"}
    assert set(names("link")) == {*LINKS, *NETWORKS, "none", "file"}


def check_targets(composed: DictConfig) -> None:
    """Check that no value is missing, and that all targets can be imported."""
    plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    nodes = list(targets(plain))
    assert len(nodes) >= 5
    for target, node in nodes:
        assert target.startswith(tuple(TARGETS))
        assert callable(hydra.utils.get_object(target))
        # Without it Lightning would put OmegaConf's containers into checkpoints.
        assert node["_convert_"] == "all", target


def test_every_choice_composes(subtests: pytest.Subtests) -> None:
    """One choice of each group at a time; small groups are cycled through."""
    groups = {
        group: names(group) for group in GROUPS if group not in ("experiment", "hydra", *BUILT)
    }
    for number in range(max(map(len, groups.values()))):
        choices = [f"{group}={found[number % len(found)]}" for group, found in groups.items()]
        with subtests.test(" ".join(choices)):
            check_targets(config(*choices))


def test_experiments_compose_and_their_elastic_jobs_are_one_worker_each(
    subtests: pytest.Subtests,
) -> None:
    for name in names("experiment"):
        with subtests.test(name):
            check_targets(config(f"experiment={name}"))
            assert config(f"experiment={name}", "membership=elastic").trainer.devices == 1


def test_the_defaults_are_the_demo() -> None:
    assert config("experiment=demo", "topology=ring") == config("algorithm=gasloc", "topology=ring")
    assert config("algorithm=gasloc", "topology=none") == config()


def test_the_defaults_are_those_of_the_classes(subtests: pytest.Subtests) -> None:
    """Compares every field of every method in conf/, the table and the algorithm's class."""
    common = common_defaults()
    for name, strategy in METHODS.items():
        with subtests.test(name):
            given = OmegaConf.to_container(config(f"algorithm={name}").algorithm)
            assert isinstance(given, dict)
            row, own = METHOD_TABLE[name], inspect.signature(strategy).parameters
            names = given.keys() - {"_target_", "_convert_"}
            assert names <= argument_names(strategy)
            if row.settings is not None:  # a nested group, not a field
                groups = {"topology", "compression", "link"}
                assert names & own.keys() == row.defaults.keys() - groups
            chosen = row.defaults | row.demo
            for field in names:
                if field in chosen:
                    expected = chosen[field]
                else:
                    expected = own[field].default if field in own else common[field]
                assert given[field] == expected, field
            settings = getattr(strategy(), "settings", None)
            if settings is not None and name not in ("async_diloco", "streaming_diloco"):
                assert settings.algorithm == type(settings.algorithm)()


def test_the_planner_has_the_same_defaults(subtests: pytest.Subtests) -> None:
    for link, tokens in (("wan", 1e11), (Link(100_000), 1e9)):
        plan = make_plan(job(link, tokens=int(tokens)))
        for option in plan.options:
            name, compression = option.candidate.method, option.candidate.compression
            if name not in ("diloco", "streaming_diloco", "async_diloco"):
                continue
            with subtests.test(option.candidate.title, sync_every=option.sync_every):
                given: dict[str, Any] = {"sync_every": option.sync_every}
                if compression == "sparse":
                    given |= {"outer_lr": 1.5, "outer_momentum": 0.5}
                    given["compression"] = Compensated(Sparse())
                elif compression != "none":
                    given["compression"] = compression
                if name != "diloco":
                    given |= {"fragments": option.fragments, "delay": option.delay}
                _, python = commands(dataclasses.replace(plan, chosen=option))
                expression = python.removeprefix("Trainer(strategy=").partition(", devices")[0]
                known = {name: getattr(loco, name) for name in loco.__all__}
                known |= {"Compensated": Compensated, "Sparse": Sparse}
                assert eval(expression, known).settings == METHODS[name](**given).settings


def test_algorithms_are_built_as_the_file_says_with_every_link(subtests: pytest.Subtests) -> None:
    """One choice of both groups at a time, because they are independent."""
    pairs = zip(names("algorithm"), itertools.cycle(names("link")), strict=False)
    configs = {pair: config(f"algorithm={pair[0]}", f"link={pair[1]}") for pair in pairs}
    links = {link: composed.link for (_, link), composed in configs.items() if link in LINKS}
    assert links.keys() == LINKS.keys()
    for (name, first_link), composed in configs.items():
        with subtests.test(name, link=first_link):
            check_targets(composed)
            composed.link = {"_target_": None}
            strategy = build_strategy(composed)
            if name != "ddp":
                assert hydra.utils.get_class(composed.algorithm._target_) is METHODS[name]
            if name == "remote_optimizer":
                assert (strategy.counts, strategy.timeout_s) == ((None, 1, 1), 600)
                assert strategy.bucket_bytes == BUCKET_BYTES
            elif name != "ddp":
                if strategy.schedule is not None and "sync_every" in composed.algorithm:
                    every = 1 if name == "sparta" else 10
                    assert strategy.settings.schedule.sync_every == every
                assert strategy.evaluate == "average"
                for link, chosen in links.items():
                    composed.link = chosen
                    assert build_strategy(composed).settings.link == Links(LINKS[link]), link
                    composed.link = {**chosen, "mbit_per_s": 7}
                    assert build_strategy(composed).settings.link.default.mbit_per_s == 7


def test_early_settings_equal_those_of_the_strategy(
    subtests: pytest.Subtests,
) -> None:
    choices = [(f"algorithm={name}",) for name in names("algorithm")]
    choices += [
        ("algorithm=noloco", "topology=random_matching", "link=wan"),
        ("algorithm=diloco", "compression=sparse", "compression.error_feedback=model"),
        ("algorithm=async_diloco", "algorithm.fragments=null", "algorithm.sync_every={0:10,99:20}"),
        ("algorithm=async_model_average", "topology=star", "compression=int8"),
        ("algorithm=pairwise_gossip", "compression=bf16"),
    ]
    for choice in choices:
        with subtests.test(" ".join(choice)):
            composed = config(*choice)
            early, strategy = early_settings(composed), build_strategy(composed)
            if choice in (("algorithm=ddp",), ("algorithm=remote_optimizer",)):
                assert early is None
            else:
                assert early == strategy.settings


def test_topologies_are_passed_to_the_strategy(subtests: pytest.Subtests) -> None:
    for name in names("topology"):
        with subtests.test(name):
            composed = config(f"topology={name}")
            check_targets(composed)
            if name == "none":
                assert build_strategy(composed).settings.topology == "ring"
            elif name != "file":
                topology = build_strategy(composed).settings.topology
                assert isinstance(topology, Topology)
                assert topology.name == name


def test_compressions_are_passed_to_the_strategy(subtests: pytest.Subtests) -> None:
    for name in names("compression"):
        with subtests.test(name):
            composed = config("algorithm=diloco", f"compression={name}")
            check_targets(composed)
            strategy = build_strategy(composed)
            expected = as_compression(name, "mean", sends_parameters=False)
            assert strategy.settings.prepare(2).compression == expected


def test_an_error_feedback_by_hand() -> None:
    choice = ["algorithm=diloco", "compression=int8", "compression.error_feedback=0.5"]
    settings = build_strategy(config(*choice, "compression.block=64")).settings
    assert settings.compression == ErrorFeedback(Int8(64), 0.5)


def test_compression_errors_can_stay_in_the_model() -> None:
    choice = ["algorithm=diloco", "compression=sparse", "compression.error_feedback=model"]
    settings = build_strategy(config(*choice, "compression.k=32")).settings
    assert settings.compression == Compensated(Sparse(k=32))


def test_sparseloco_has_its_authors_settings() -> None:
    settings = build_strategy(config("experiment=sparseloco")).settings
    assert settings.algorithm == DiLoCo(outer_lr=1.0, outer_momentum=0.0)
    assert settings.schedule == EverySteps(30)
    assert settings.compression == ErrorFeedback(Sparse(k=128, mean_over="senders"), 0.95)


def printed_gasloc(starts: Tensor, targets: Tensor, rate: float, steps: int) -> Iterator[Tensor]:
    """Run the paper's update on a ring with lambda = 1; return the parameters after each round.

    The sum of the Laplacian contains each edge in both directions.
    """
    eta, alpha, gamma, num_workers = 1.0, 1 / 3, 0.5, len(starts)
    laplacian = torch.zeros(num_workers, num_workers, dtype=torch.float64)
    for i, step in itertools.product(range(num_workers), (-1, 1)):
        apart = torch.zeros(num_workers, dtype=torch.float64)
        apart[i], apart[(i + step) % num_workers] = 1, -1
        laplacian += 0.5 * torch.outer(apart, apart)
    theta, previous = starts, starts
    while True:
        local = theta
        for _ in range(steps):
            local = local - rate * (local - targets)
        moved = theta + eta * (local - theta)
        theta = moved - alpha * laplacian @ moved + gamma * (moved - previous)
        previous = moved
        yield theta


def test_paper_gasloc_is_the_printed_update(subtests: pytest.Subtests) -> None:
    named = build_strategy(config("experiment=paper_gasloc")).settings
    of_lambda = dataclasses.replace(
        named,
        algorithm=dataclasses.replace(named.algorithm, gossip_step=1 / 3),
        topology=FromGraph(nx.cycle_graph(5), "laplacian"),
    )
    targets, start = randn(5, 3), randn(3, seed=1)
    for settings in (named, of_lambda):
        with subtests.test(topology=settings.topology):
            assert settings.schedule == EverySteps(10)
            models = [Point(start) for _ in range(5)]
            simulation = Simulation.from_settings(models, settings)

            def local_step(worker: int, models: list[Point] = models) -> None:
                value = models[worker].value.data
                value.sub_(value - targets[worker], alpha=0.02)

            expected = printed_gasloc(start.expand(5, 3), targets, 0.02, 10)
            for _ in range(6):
                simulation.run(local_step, 1)
                assert_close(torch.stack(simulation.params()), next(expected))


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8"])
def test_compressions_of_a_remote_optimizer(name: str) -> None:
    strategy = build_strategy(config("algorithm=remote_optimizer", f"compression={name}"))
    assert strategy.compression == CODECS[name]()


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("compression=sparse", "algorithm: Sparse.* writes too roughly for a remote optimizer"),
        ("compression=int8 compression.error_feedback=1.0", "algorithm: .* Give the codec alone"),
    ],
)
def test_compressions_that_a_remote_optimizer_refuses(choice: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        build_strategy(config("algorithm=remote_optimizer", *choice.split()))


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8"])
def test_compressions_are_passed_to_pairwise_gossip(name: str) -> None:
    choice = ["algorithm=pairwise_gossip", f"compression={name}"]
    settings = build_strategy(config(*choice)).settings
    assert settings.codec == CODECS[name]()
    with pytest.raises(SettingsError, match="algorithm: Pulls take no error feedback"):
        build_strategy(config(*choice, "compression.error_feedback=0.5"))


@pytest.mark.parametrize("name", ["int4", "e3m0", "sparse"])
def test_compressions_that_pairwise_gossip_refuses(name: str) -> None:
    with pytest.raises(SettingsError, match="algorithm: .*too roughly for gossip"):
        build_strategy(config("algorithm=pairwise_gossip", f"compression={name}"))


def test_strategies_without_messages_refuse_compression() -> None:
    with pytest.raises(SettingsError, match="no messages to compress"):
        build_strategy(config("algorithm=ddp", "compression=int8"))


def test_algorithms_with_elastic_members_are_those_that_are_advised() -> None:
    def works(name: str) -> bool:
        with suppress(ValueError):
            strategy = build_strategy(compose("train", [f"algorithm={name}", "membership=elastic"]))
            settings = strategy.settings.prepare(1)
            check_settings(settings)
            return settings.membership == Elastic("localhost:29510")
        return False

    advised = OPTIONAL_GROUPS["membership"].partition("algorithm=")[2]
    assert [name for name in names("algorithm") if works(name)] == sorted(
        re.findall(r"\w+", advised.replace(" or ", ","))
    )


def test_without_a_link_there_is_none() -> None:
    assert build_strategy(compose("train", [])).settings.link is None


def test_links_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "links.yaml").write_text("default: wan\npairs: {0-1: lan}\n")
    strategy = build_strategy(compose("train", ["link=file", f"link.path={tmp_path}/links.yaml"]))
    assert strategy.settings.link.between(1, 0) == LINKS["lan"]


def test_a_topology_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "path.edges").write_text("0 1\n1 2\n")
    strategy = build_strategy(
        compose("train", ["topology=file", f"topology.path={tmp_path}/path.edges"])
    )
    assert strategy.settings.topology.receivers(1, 3) == [0, 2]


def test_random_topologies_follow_the_seed() -> None:
    assert (
        build_strategy(
            compose("train", ["topology=random_matching", "seed=7"])
        ).settings.topology.seed
        == 7
    )


def test_one_number_per_worker() -> None:
    strategy = build_strategy(compose("train", ["algorithm.sync_every=[10,20]"]))
    assert strategy.settings.schedule.sync_every == [10, 20]


def test_sync_every_that_changes() -> None:
    strategy = build_strategy(compose("train", ["algorithm.sync_every={0:10,1000:50}"]))
    assert strategy.settings.schedule == VaryingSteps({0: 10, 1000: 50})


@pytest.mark.parametrize(
    ("choice", "sizes"),
    [
        ("trainer=fsdp trainer.devices=8", (8, 1)),
        ("trainer=fsdp trainer.devices=8 inner.tensor_parallel_size=2", (4, 2)),
        ("trainer=fsdp inner.data_parallel_size=2", (2, 1)),
        ("inner.data_parallel_size=2 compression=int8", (2, 1)),
        ("inner.tensor_parallel_size=2 topology=none", (1, 2)),
    ],
)
def test_workers_that_shard_the_model(choice: str, sizes: tuple[int, int]) -> None:
    composed = config("algorithm=diloco", *choice.split())
    check_targets(composed)
    strategy = build_strategy(composed)
    assert isinstance(strategy, LocoModelParallelStrategy)
    strategy.cluster_environment = LightningEnvironment()
    strategy.cluster_environment.set_world_size(composed.trainer.devices)
    assert (strategy.data_parallel_size, strategy.tensor_parallel_size) == sizes
    assert strategy.settings == early_settings(composed)


def test_learners_that_shard_the_model() -> None:
    composed = config("algorithm=decoupled_diloco", "inner.data_parallel_size=2")
    check_targets(composed)
    strategy = build_strategy(composed)
    assert isinstance(strategy, DecoupledModelParallelStrategy)
    assert (strategy.data_parallel_size, strategy.tensor_parallel_size) == (2, 1)
    assert strategy.settings == early_settings(composed)


def test_outer_lr_schedules() -> None:
    schedule = "{_target_:lightning_loco.algorithms.Cosine,start:0.9,end:0.3,rounds:60}"
    strategy = build_strategy(
        compose("train", ["algorithm=diloco", f"algorithm.outer_lr={schedule}"])
    )
    assert strategy.settings.algorithm.outer_lr == Cosine(0.9, 0.3, rounds=60)


def test_values_that_cannot_work(subtests: pytest.Subtests) -> None:
    for overrides, message in [
        (["algorithm.sync_every={5:10}"], "algorithm: sync_every must begin at step 0"),
        (["algorithm.sync_every=0"], "algorithm: sync_every counts .* at least 1, got 0"),
        (["algorithm.sync_every=1.5"], "algorithm: .* an integer .*, got 1.5"),
        (["algorithm.outer_lr=-1"], "algorithm: outer_lr must be positive, got -1"),
        (["algorithm.evaluate=both"], "algorithm: evaluate must be one of .*, got 'both'"),
        (["+algorithm.sync_evry=1"], "no argument 'sync_evry'. Did you mean sync_every"),
        (
            ["algorithm=diloco", "topology=ring"],
            r"DiLoCo has no neighbours in a graph and takes no topology, got 'ring'\."
            r" Drop topology=\.\.\., or choose algorithm=gasloc\.",
        ),
        (["algorithm=ddp", "topology=star"], "DDP has no neighbours .*, got 'star'"),
        (["topology=file"], "topology.path has no value. Add topology.path=VALUE."),
        (["link=file"], "link.path has no value. Add link.path=VALUE."),
        (["link=file", "link.path=/no/links.yaml"], "There is no file of links '/no/links.yaml'"),
        (["link=dsl", "link.mbit_per_s=0"], "link: mbit_per_s of a link must be positive"),
        (["algorithm=ddp", "link=wan"], r"DDP runs no rounds .* Drop link=\.\.\., or choose"),
        (["algorithm=remote_optimizer", "link=wan"], "RemoteOptimizer runs no rounds or fetches"),
        (
            ["algorithm=ddp", "membership=elastic"],
            "DDP does not let workers join and leave. Drop m",
        ),
        (["membership=elastic", "link=wan"], "not the exchanges of elastic members. Drop link or"),
        (["inner.data_parallel_size=0"], "inner: data_parallel_size is .* at least 1, got 0"),
        (["inner.tensor_parallel_size=two"], "inner: tensor_parallel_size .* got 'two'"),
        (
            ["inner.data_parallel_size=2", "algorithm.replica_size=2"],
            "inner: The method has a replica_size",
        ),
        (["inner.data_parallel_size=2", "algorithm=ddp"], "inner: DDP cannot shard the model"),
        (
            ["inner.data_parallel_size=2", "algorithm=pairwise_gossip"],
            "inner: PairwiseGossip cannot shard the model .* algorithm=diloco",
        ),
        (
            ["inner.data_parallel_size=2", "algorithm=diloco", "algorithm.start_method=spawn"],
            "inner: The method has start_method='spawn'",
        ),
        (["topology.matrix=[[1,0],[0,1]]", "topology=matrix"], "topology: .*not connected"),
    ]:
        with subtests.test(" ".join(overrides)):
            with pytest.raises(SettingsError, match=message) as caught:
                build_strategy(compose("train", overrides))
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["algorithm.sync_evry=1", "trainer.divices=2", "sed=1"])
def test_a_misspelt_key_is_named(override: str) -> None:
    with pytest.raises(ConfigCompositionException, match=f"Could not override '{override[:-2]}'"):
        compose("train", [override])


def test_a_misspelt_choice_lists_the_right_ones() -> None:
    with pytest.raises(hydra.errors.MissingConfigException, match="hypercube"):
        compose("train", ["topology=rign"])

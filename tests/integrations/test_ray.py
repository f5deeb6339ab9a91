"""Ray Train: a local cluster trains with the same numbers as Trainer.fit, and resumes exactly."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lightning_loco as loco
from lightning_loco.strategies.worker_strategy import WorkerStrategy
from tests.harness.pool import Pool, make_trainer
from tests.integrations import ray_runs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")

NUMERIC = list(ray_runs.NUMERIC)


def results(folder: Path, name: str, world: int = 2) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}.{rank}.pt") for rank in range(world)]


def fit_in_pool(rank: int, world: int, name: str) -> dict[str, Any]:
    trainer = functools.partial(make_trainer, ray_runs.FAMILIES[name]())
    return ray_runs.fit(trainer, in_epoch=name == "in_epoch")


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert one["rounds"] == other["rounds"]
        # A resumed run has the losses since the checkpoint only.
        assert one["losses"] == other["losses"][-len(one["losses"]) :]


@pytest.mark.process
@pytest.mark.recovery
def test_same_numbers_as_trainer_fit_and_exact_resume(tmp_path: Path, pool: Pool) -> None:
    ray_runs.start(tmp_path, "smoke", "2")
    for name in NUMERIC:
        found = results(tmp_path, name)
        assert_equal(found, pool.run(fit_in_pool, name, world=2))
        assert [one["ranks"] for one in found] == [(2, 2, 1)] * 2
    first = results(tmp_path, "diloco")[0]
    assert first["resumed"]
    assert len(first["losses"]) == 16  # of 24: from the second of three epochs on
    assert first["process"] == results(tmp_path, "gasloc")[0]["process"]
    for errors in results(tmp_path, "errors"):
        for name, (kind, *parts) in EXPECTED_ERRORS.items():
            assert errors[name].startswith(kind), errors[name]
            for part in parts:
                assert part in errors[name]


EXPECTED_ERRORS = {
    "the method itself": ("ValueError", "strategy=RayLocoStrategy(DiLoCoStrategy(...))"),
    "by name": ("ValueError", "strategy=RayLocoStrategy(DiLoCoStrategy(...))"),
    "no environment": ("Misconfiguration", "plugins=[ray.train.lightning.RayLightningEnvironment"),
    "DDP and our callback": ("TypeError", "RayDDPStrategy", "strategy=RayLocoStrategy("),
    "our strategy and Ray's callback": ("ValueError", ".RayReportCallback()]"),
    "membership without torchft": ("ValueError", "torch_config=", "TorchftConfig("),
    "shards": ("ValueError", "prepare_trainer", "replica_size"),
    "no method": ("TypeError", "DiLoCoStrategy(sync_every=100)"),
}


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "world", "victim"),
    [
        ("async_diloco", 2, 0),
        ("gasloc", 2, 1),
        ("in_epoch", 2, 1),
        ("of_two", 4, 3),
        ("of_node", 2, 0),
    ],
)
def test_resume_after_a_kill(
    tmp_path: Path, pool: Pool, name: str, world: int, victim: int
) -> None:
    ray_runs.start(tmp_path, "resume_each", str(world), name, str(victim))
    found = results(tmp_path, name, world)
    assert all(one["resumed"] for one in found)
    assert_equal(found, pool.run(fit_in_pool, name, world=world))


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("victim", [0, 2])
def test_service_ranks(tmp_path: Path, victim: int) -> None:
    """The last worker of Ray serves; its reports have no files. Equal to a run without a kill."""
    found = []
    for kind, who in (("whole", -1), ("killed", victim)):
        (tmp_path / kind).mkdir()
        ray_runs.start(tmp_path / kind, "resume_each", "3", "remote", str(who))
        found.append(results(tmp_path / kind, "remote", 3))
    whole, killed = found
    assert [one["resumed"] for one in killed] == [True] * 3
    for rank in range(2):
        assert torch.equal(killed[rank]["weights"], whole[0]["weights"])
    assert killed[0]["class"] == "RayRemoteOptimizerStrategy"
    assert killed[2]["losses"] == []


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("name", ["gossip", "average", "decoupled"])
def test_methods_that_follow_the_clock(tmp_path: Path, name: str) -> None:
    ray_runs.start(tmp_path, "resume_each", "2", name, "1")
    first, second = results(tmp_path, name)
    assert first["resumed"]
    assert torch.equal(first["weights"], second["weights"])
    assert first["steps"] == ray_runs.EPOCHS * 4


@pytest.mark.soak
@pytest.mark.process
def test_members_are_restarted_one_by_one(tmp_path: Path) -> None:
    ray_runs.start(tmp_path, "members", "2")
    assert (tmp_path / "member.killed").exists()
    stayed, restarted = results(tmp_path, "members")
    assert stayed["ranks"] == restarted["ranks"] == (1, 0)
    assert stayed["steps"] == ray_runs.MEMBER_STEPS  # it was not restarted
    assert 0 < restarted["steps"] < ray_runs.MEMBER_STEPS - 20  # it got the other one's position
    assert torch.isfinite(stayed["weights"]).all()


@pytest.mark.soak
@pytest.mark.process
def test_trials_of_tune_in_one_process(tmp_path: Path) -> None:
    ray_runs.start(tmp_path, "trial", "1")
    first, second, third = torch.load(tmp_path / "trials.pt", weights_only=False)
    assert first["process"] == second["process"] == third["process"]
    assert first["loss"] == third["loss"] != second["loss"]


# ------------------------------------------------------------------------- without a cluster


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (lambda: loco.DiLoCoStrategy(start_method="fork"), "Ray has started the workers"),
        (lambda: loco.DiLoCoStrategy(checkpoint_folder="private"), "another machine"),
        (
            lambda: loco.DiLoCoStrategy(replica_size=2, membership=loco.Elastic("a:1")),
            "restarts workers one by one",
        ),
    ],
)
def test_refusals(of_ray: Any, method: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        of_ray.RayLocoStrategy(method())


METHODS: list[WorkerStrategy] = [
    loco.DiLoCoStrategy(sync_every=7, replica_size=2, timeout_s=9.0, summary=False),
    loco.AsyncModelAverageStrategy(interval_s=0.25, evaluate="local"),
    loco.PairwiseGossipStrategy(factor=0.4, find_unused_parameters=True),
    loco.DecoupledDiLoCoStrategy(sync_every=48, fragments=4, compression="bf16"),
    loco.RemoteOptimizerStrategy(num_workers=2, num_servers=2, compression="bf16", overlap=False),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda one: type(one).__name__)
def test_it_has_the_arguments_of_the_method(of_ray: Any, method: WorkerStrategy) -> None:
    strategy = of_ray.RayLocoStrategy(method)
    assert isinstance(strategy, of_ray.RayDDPStrategy)
    assert strategy.arguments == method.arguments
    for name in ("settings", "counts", "compression", "overlap", "bucket_bytes"):
        assert getattr(strategy, name, None) == getattr(method, name, None)
    with pytest.raises(TypeError, match="must be a strategy"):
        of_ray.RayLocoStrategy(strategy)


def test_outside_of_rays_workers(of_ray: Any) -> None:
    with pytest.raises(RuntimeError, match=r"TorchTrainer runs on its workers"):
        of_ray.RayLocoStrategy(loco.DiLoCoStrategy()).check_launcher()


def test_nodes_of_different_sizes(of_ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank knows the number of ranks of its own node only."""
    context = SimpleNamespace(get_local_world_size=lambda: 3)
    monkeypatch.setattr(of_ray.ray.train, "get_context", lambda: context)
    monkeypatch.setattr(of_ray.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(of_ray.dist, "get_world_size", lambda: 4)

    def all_gather(found: list[torch.Tensor], own: torch.Tensor) -> None:
        for one, size in zip(found, [own, own, own, torch.tensor(1)], strict=True):
            one.copy_(size)

    monkeypatch.setattr(of_ray.dist, "all_gather", all_gather)
    monkeypatch.setattr(
        importlib.import_module("ray.train.torch"), "get_device", lambda: torch.device("cpu")
    )
    strategy = of_ray.RayLocoStrategy(loco.DiLoCoStrategy(replica_size="node"))
    with pytest.raises(ValueError, match=r"have 3, 3, 3, 1\."):
        strategy.setup_environment()


@pytest.fixture
def of_ray() -> Any:
    """Return the module; importing Ray starts nothing."""
    return pytest.importorskip("lightning_loco.integrations.ray")

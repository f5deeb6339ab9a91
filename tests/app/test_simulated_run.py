"""``simulate=true``: the losses of a real run of four workers, its table, files and errors."""

from __future__ import annotations

import copy
import csv
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Callback, seed_everything
from omegaconf import DictConfig, open_dict

from lightning_loco import (
    DiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    NoLoCoStrategy,
    PairwiseAverage,
)
from lightning_loco.app import command_line
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.app.early_checks import SettingsError
from lightning_loco.app.simulated_run import SimulatedRun, run_simulation
from lightning_loco.app.simulated_training import Workers
from lightning_loco.gossip import PairwiseSettings
from lightning_loco.report.record import RunRecord
from lightning_loco.simulation import Simulation
from lightning_loco.topology.static import FixedGraph
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import flat

STEPS = 12
PAIRWISE = ["algorithm=pairwise_gossip"]
WRONG_CLIPPING = "^trainer: gradient_clip_algorithm must be one of norm, value, got 'max'"
MODEL = {"num_layers": 1, "num_heads": 2, "width": 32, "context": 32, "warmup_steps": 5}
DATA = {"batch_size": 4, "max_bytes": 200_000, "val_bytes": 2_048, "context": 32}


@pytest.fixture(autouse=True)
def conf() -> Iterator[None]:
    with initialize_config_dir(command_line.conf_dir(), version_base="1.3"):
        yield


@functools.cache
def composed(*choices: str) -> DictConfig:
    common = ["experiment=smoke", "simulate=true", "num_workers=4", "run_dir=/run"]
    return compose("train", [*common, f"simulation.max_steps={STEPS}", *choices])


def config(*overrides: str) -> DictConfig:
    """Compose a configuration; each choice of files is composed once, because that is slow."""
    groups = {path.name for path in Path(command_line.conf_dir()).iterdir() if path.is_dir()}
    choices = [one for one in overrides if one.partition("=")[0] in groups]
    found = copy.deepcopy(composed(*choices))
    with open_dict(found):
        found.merge_with_dotlist([one.lstrip("+") for one in overrides if one not in choices])
    return found


class Losses(Callback):
    """Records the training loss of each local step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, *_: Any) -> None:
        self.values.append(outputs["loss"].item())


def train_really(rank: int, world: int, strategy: str, clip: str) -> list[float]:
    seed_everything(0, workers=True, verbose=False)
    made = {
        "gasloc": lambda: GASLoCStrategy(sync_every=3),
        "noloco": lambda: NoLoCoStrategy(sync_every=3),
        "diloco": lambda: DiLoCoStrategy(sync_every=3),
        "local_sgd": lambda: LocalSGDStrategy(sync_every=3),
    }[strategy]()
    losses = Losses()
    trainer = make_trainer(
        made,
        max_steps=STEPS,
        max_epochs=-1,
        gradient_clip_val=0.01,
        gradient_clip_algorithm=clip,
        callbacks=[losses],
    )
    model, data = ByteGPT(lr=0.001, **MODEL), ByteTextData(**DATA)
    trainer.fit(model, datamodule=data)
    return losses.values


@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [
        ("gasloc", "norm"),
        ("gasloc", "value"),
        ("noloco", "norm"),
        ("diloco", "norm"),
        ("local_sgd", "norm"),
    ],
)
def test_losses_are_those_of_a_real_run(pool: Pool, algorithm: str, clip: str) -> None:
    """Bit for bit with gossip; gloo's all-reduce sums in another order.

    Links, speeds and jitter change times, but no numbers.
    """
    real = pool.run(train_really, algorithm, clip, world=4)
    choice = [f"algorithm={algorithm}", "algorithm.sync_every=3", "link=two_datacentres"]
    choice += ["trainer.gradient_clip_val=0.01", f"+trainer.gradient_clip_algorithm={clip}"]
    seed_everything(0, workers=True, verbose=False)
    run = SimulatedRun(config(*choice, "simulation.spread=0.5", "simulation.jitter=0.1"))
    progress = list(run.train())
    assert progress[-1].rounds == STEPS // 3
    for worker in range(4):
        simulated = [p.loss for p in run.simulation.losses if p.worker == worker]
        if run.topology is not None:
            assert simulated == real[worker]
        assert simulated == pytest.approx(real[worker], rel=1e-5)


def test_a_run_writes_a_table_files_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    composed = config("algorithm=async_diloco", "link=dsl", f"run_dir={tmp_path}")
    composed.algorithm.sync_every = 4
    loss = run_simulation(composed)
    assert 2 < loss < 5.6
    table = (tmp_path / "report.txt").read_text()
    assert table in capsys.readouterr().out
    header, own, ddp = table.splitlines()
    assert header.split() == ["loss", "virtual", "time", "sent", "per", "worker", "rounds",
                              "utilisation"]  # fmt: skip
    assert own.startswith("DiLoCo")
    assert f"{loss:.4f}" in own
    assert ddp.startswith("DDP")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["val_loss"] == loss
    assert report["rounds"] == 12
    with (tmp_path / "simulation.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert float(rows[-1]["val_loss"]) == loss
    assert [float(row["time_s"]) for row in rows] == sorted(float(row["time_s"]) for row in rows)
    record = RunRecord.load(tmp_path)
    assert {kind for _, kind, *_ in record.events} == {"compute", "wait", "send"}
    (validation,) = record.of_kind("validation")
    assert validation.points[-1][3] == pytest.approx(loss, rel=1e-6)
    with (tmp_path / "workers.csv").open() as lines:
        assert [int(row["steps"]) for row in csv.DictReader(lines)] == [STEPS] * 4
    page = (tmp_path / "report.html").read_text()
    assert "The bar below a lane shows messages that are under way." in page
    assert "DiLoCo, 4 simulated workers" in page


def test_all_methods_write_the_same_files(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    files = []
    for algorithm in ("pairwise_gossip", "local_sgd"):
        folder = tmp_path / algorithm
        folder.mkdir()
        choice = [f"algorithm={algorithm}", "link=lan", "num_workers=2", f"run_dir={folder}"]
        composed = config(*choice)
        if algorithm == "local_sgd":
            composed.algorithm.sync_every = 4
        run_simulation(composed)
        files.append({file.name for file in folder.iterdir()})
    assert files[0] == files[1]
    assert "report.html" in files[0]
    report = (tmp_path / "pairwise_gossip" / "report.txt").read_text()
    assert report.splitlines()[1].startswith("PairwiseAverage")
    record = RunRecord.load(tmp_path / "pairwise_gossip")
    assert {kind for _, kind, *_ in record.events} == {"compute", "send"}


def test_decoupled_learners_report_their_merges(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    choice = ["algorithm=decoupled_diloco", "link=wan", "num_workers=3", f"run_dir={tmp_path}"]
    run_simulation(
        config(
            *choice,
            "simulation.spread=0.8",
            "simulation.max_steps=60",
            "simulation.mean_between_failures_s=4",
            "simulation.mean_away_s=1",
            "algorithm.fragments=3",
            "algorithm.sync_every=6",
        )
    )
    lines = (tmp_path / "report.txt").read_text().splitlines()
    assert lines[1].startswith("DecoupledDiLoCo")
    assert re.fullmatch(
        r"\d+ merges: of each fragment every \d+\.\d local steps, with \d\.\d pushes of age .*",
        lines[3],
    )
    assert re.search(r"time of a worker: .*% merged.*% lost.*% joining.*% away", lines[4])
    merges = json.loads((tmp_path / "report.json").read_text())["merges"]
    assert merges["merges"] > 10
    assert merges["sync_every"] == pytest.approx(6, rel=0.5)
    with (tmp_path / "workers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["steps"] for row in rows}) > 1
    assert all(0 < float(row["merged"]) < 1 for row in rows)
    assert lines[4] in (tmp_path / "report.html").read_text()


def test_pairwise_gossip_is_that_of_its_simulation() -> None:
    """It gives the numbers of ``Simulation`` with the data and optimizers of a real run."""
    choice = [*PAIRWISE, "link=wan", "simulation.spread=0.5", "simulation.jitter=0.1"]
    choice += [
        "algorithm.fetch_probability=1.0",
        "algorithm.interpolation=loss",
        "algorithm.divergence_threshold=1",
        "compression=int8",
    ]
    seed_everything(0, workers=True, verbose=False)
    run = SimulatedRun(config(*choice))
    progress = list(run.train())
    steps = [costs.steps for costs in run.simulation.costs]
    assert min(steps) < STEPS < max(steps)
    assert progress[-1].rounds > 1
    assert progress[-1].val_loss < progress[0].val_loss

    seed_everything(0, workers=True, verbose=False)
    cfg = config(*choice, "model.total_steps=12")
    model, data = hydra.utils.instantiate(cfg.model), hydra.utils.instantiate(cfg.data)
    data.check(4)
    workers = Workers(model, data, cfg)
    average = PairwiseAverage(1.0, "loss", divergence_threshold=1.0)
    again = Simulation.from_settings(
        workers.models,
        PairwiseSettings(average, compression="int8"),
        speeds=[1 / step_s for step_s in run.steps.step_s],
        jitter=0.1,
        links="wan",
    )
    again.run(workers.step, seconds=STEPS * 0.1 * (1 + 1e-9))
    assert again.losses == run.simulation.losses
    assert torch.equal(again.consensus(), run.simulation.consensus())
    assert torch.equal(again.consensus(), torch.stack([flat(m) for m in workers.models]).mean(0))


def test_all_local_steps_of_a_time_are_made() -> None:
    """Also if the sum of their durations is rounded up."""
    for algorithm in ("pairwise_gossip", "async_model_average"):
        run = SimulatedRun(
            config(f"algorithm={algorithm}", "simulation.step_s=0.3", "simulation.reports=7")
        )
        assert list(run.train())[-1].steps == STEPS


class Line(FixedGraph):
    """A topology from a user's module."""

    name = "line"

    def neighbors(self, worker: int, num_workers: int) -> list[int]:
        return [j for j in (worker - 1, worker + 1) if 0 <= j < num_workers]


def test_topologies_of_users_are_simulated() -> None:
    run = SimulatedRun(config(f"topology._target_={__name__}.Line", "algorithm.sync_every=4"))
    assert isinstance(run.topology, Line)
    assert list(run.train())[-1].rounds == STEPS // 4


def test_workers_that_fail_come_back() -> None:
    choice = ["algorithm=diloco", "algorithm.sync_every=2", "simulation.step_s=10"]
    failures = ["simulation.mean_between_failures_s=60", "simulation.mean_away_s=5"]
    run = SimulatedRun(config(*choice, *failures))
    progress = list(run.train())
    assert progress[-1].rounds == STEPS // 2
    assert "away" in {event.kind for event in run.simulation.timeline}


def test_averaging_by_the_clock() -> None:
    run = SimulatedRun(config("algorithm=async_model_average", "link=lan"))
    *_, last = run.train()
    assert last.steps == STEPS
    assert last.rounds > 1


def test_precision_32_makes_a_simulation_of_the_settings_for_gpus() -> None:
    SimulatedRun(config("trainer=slurm", "trainer.precision=32-true"))


def test_what_cannot_work_is_an_error(tmp_path: Path, subtests: pytest.Subtests) -> None:
    links = tmp_path / "links.yaml"
    links.write_text("default: lan\npairs: {0-9: wan}\n")
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text(
        "nodes: [{name: a, host: h, port: 1}, {name: b, host: h, port: 2}]\n", encoding="utf-8"
    )
    for overrides, message in (
        (["algorithm=ddp"], "DDP cannot be simulated. Choose another algorithm"),
        (
            ["algorithm=remote_optimizer"],
            "RemoteOptimizer cannot be simulated.*lightning-loco plan",
        ),
        (["+algorithm.outer_lrs=1"], "^algorithm: .*outer_lrs"),
        (["algorithm.replica_size=2"], "have one rank each. Drop algorithm.replica_size=2"),
        (["inner.data_parallel_size=2"], "have one rank each. Drop inner.data_parallel_size"),
        (["ckpt_path=/none.ckpt"], "Simulations continue no run. Drop ckpt_path=/none.ckpt"),
        (["test=true"], "Simulations run no test loop. Drop test=True"),
        (["sample=true"], "Simulations generate no text. Drop sample=True"),
        (["simulation.step_s=0"], "simulation.step_s are seconds, more than 0, got 0"),
        (["simulation.step_s=fast"], "simulation.step_s are seconds, more than 0, got fast"),
        (["membership=elastic", "membership.lighthouse=h:1"], "Use it instead of membership="),
        (["algorithm=diloco", "compression=int8", "compression.block=0"], "^compression: "),
        (["algorithm=diloco", "algorithm.timeout_s=0"], "^algorithm: timeout_s must be positive"),
        (["algorithm=diloco", "topology=ring"], "^algorithm: DiLoCo .* takes no topology"),
        ([*PAIRWISE, "topology=ring"], "PairwiseGossip has no neighbours in a graph and takes no"),
        ([*PAIRWISE, "algorithm.nodes=n.yaml", "algorithm.name=a"], "^algorithm: .*n.yaml"),
        ([*PAIRWISE, f"algorithm.nodes={nodes}", "algorithm.name=a"], "Drop algorithm.nodes"),
        (
            [*PAIRWISE, "simulation.mean_between_failures_s=9"],
            "PairwiseGossip is simulated with",
        ),
        (["algorithm=decoupled_diloco", "algorithm.syncer=h:1"], "^algorithm: .*Drop syncer"),
        ([*PAIRWISE, "num_workers=1"], "^algorithm: .*at least two"),
        ([*PAIRWISE, "compression=int4"], "^algorithm: .* too roughly for gossip"),
        (["algorithm=diloco", "+trainer.gradient_clip_algorithm=max"], WRONG_CLIPPING),
        (["trainer.gradient_clip_val=-1"], "^trainer: gradient_clip_val must be at least 0"),
        (["trainer.gradient_clip_val=much"], "^trainer: gradient_clip_val must be .*got 'much'"),
        (["num_workers=0"], "num_workers must be at least 1, got 0"),
        (
            ["trainer.accumulate_grad_batches=2"],
            "a local step for each batch.*accumulate_grad_batches=2",
        ),
        (["trainer=gpu"], "float32, got trainer.precision=bf16-mixed. Add .*32-true, or leave out"),
        (["simulation.max_steps=0"], "simulation.max_steps must be at least 1, got 0"),
        (["simulation.jitter=2"], "simulation: jitter is the largest part"),
        (["algorithm.sync_every=99"], "fewer local steps than the 99 of a round"),
        (["topology=hypercube", "num_workers=6"], "^algorithm: .*power of two"),
        (["simulation.mean_between_failures_s=-1"], "^simulation: "),
        (["link=file", f"link.path={links}"], "^link: link names worker 9"),
    ):
        with subtests.test(message), pytest.raises(SettingsError, match=message):
            list(SimulatedRun(config(*overrides)).train())

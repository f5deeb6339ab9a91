"""Callbacks: what they log, where, and that they have no side effects."""

from __future__ import annotations

import csv
import logging
import math
import re
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_loco import (
    CommunicationMonitor,
    ConsensusMonitor,
    DiLoCo,
    GASLoC,
    LocalSGD,
    LocoStrategy,
    PairwiseGossipStrategy,
    PeerMonitor,
    ReportCallback,
    StragglerSimulator,
    WorkerLogs,
)
from lightning_loco._util.goodput import PARTS
from lightning_loco.algorithms import Algorithm, Cosine, Piecewise
from lightning_loco.callbacks import straggler
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.report.record import RunRecord
from tests.harness.manual_clock import sleeps
from tests.harness.messages import RANK_ZERO, messages_of
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader, quiet_trainer

LR = 0.05
P_BYTES = 26 * 8  # the small model in float64


class RecordingSGD(torch.optim.SGD):
    """Records the parameters after each optimizer step, right before a round."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.recorded = [*getattr(self, "recorded", []), flat(nn.ParameterList(parameters))]
        return loss


class RecordingModule(TinyModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.sgd = RecordingSGD(self.parameters(), lr=self.lr)
        return self.sgd


def read(folder: Path) -> list[dict[str, float]]:
    """Read the rows of a CSVLogger, without empty cells."""
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


def fit(
    rank: int,
    world: int,
    folder: Path,
    callbacks: list[pl.Callback],
    strategy: dict[str, Any],
    trainer: dict[str, Any],
    num_batches: int = 12,
) -> dict[str, Any]:
    module = RecordingModule(lr=LR)
    settings: dict[str, Any] = {"log_every_n_steps": 1, "max_epochs": 1, **trainer}
    runner = make_trainer(
        LocoStrategy(**{"sync_every": 3, **strategy}),
        use_distributed_sampler=False,
        callbacks=callbacks,
        logger=CSVLogger(folder),
        **settings,
    )
    with messages_of(RANK_ZERO) as texts:
        runner.fit(module, make_loader(rank, num_batches))
    statistics = runner.strategy.statistics
    return {
        "texts": texts,
        "weights": flat(module),
        "before_rounds": module.sgd.recorded,
        "progress_bar": runner.progress_bar_metrics,
        "callback_metrics": {k: v.item() for k, v in runner.callback_metrics.items()},
        "bytes_sent": statistics.bytes_sent,
        "losses": module.losses,
    }


def column(rows: list[dict[str, float]], name: str) -> dict[int, float]:
    return {int(row["step"]): row[name] for row in rows if name in row}


# -------------------------------------------------------------------- CommunicationMonitor


@pytest.mark.parametrize("world", [1, 2, 3])
def test_communication_of_diloco(pool: Pool, tmp_path: Path, world: int) -> None:
    callbacks: list[pl.Callback] = [CommunicationMonitor()]
    results = pool.run(fit, tmp_path, callbacks, {"algorithm": DiLoCo(0.7, 0.9)}, {}, world=world)
    rows = read(tmp_path)
    rows_bytes = world * WorkerStatus.width(0) * 8  # the statuses are sent with the messages
    per_round = 2 * (world - 1) * (P_BYTES + rows_bytes) // world
    # A round runs before steps 3, 6 and 9; its metrics are unchanged until the next one.
    rounds = {step: float(step // 3) for step in range(3, 12)}
    assert column(rows, "loco/round") == rounds
    assert column(rows, "loco/bytes_sent") == {s: per_round * r for s, r in rounds.items()}
    assert set(column(rows, "loco/staleness").values()) == {0.0}
    waits = list(column(rows, "loco/wait_s").values())
    assert waits == sorted(waits)
    assert waits[0] > 0 or world == 1
    assert results[0]["progress_bar"] == {}

    # The outer gradient: mean progress of the workers since the last round.
    outer = flat(TinyModule())
    momentum = torch.zeros_like(outer)
    norms = column(rows, "loco/outer_grad_norm")
    losses = column(rows, "loco/train_loss_mean")
    for step in (2, 5, 8):
        gradient = outer - torch.stack([r["before_rounds"][step] for r in results]).mean(0)
        assert norms[step + 1] == pytest.approx(gradient.norm().item(), rel=1e-6)
        momentum = 0.9 * momentum + gradient
        outer = outer - 0.7 * (gradient + 0.9 * momentum)
        # The losses are sent with the round: the mean over the workers.
        mean = sum(result["losses"][step] for result in results) / world
        assert losses[step + 1] == pytest.approx(mean, rel=1e-6)


def test_goodput_of_a_worker_that_waits_for_a_straggler(pool: Pool, tmp_path: Path) -> None:
    callbacks = [CommunicationMonitor(), StragglerSimulator({1: 0.05}), ReportCallback(tmp_path)]
    with_summary = {"algorithm": LocalSGD(), "summary": True}
    results = pool.run(fit, tmp_path, callbacks, with_summary, {}, 36, world=2)
    rows = read(tmp_path)
    parts = {part: list(column(rows, f"loco/{part}").values()) for part in PARTS}
    for shares in zip(*parts.values(), strict=True):
        assert sum(shares) == pytest.approx(1.0)
    assert parts["joining"][-1] < 0.01
    assert parts["lost"][-1] == pytest.approx(0.0, abs=1e-12)
    assert parts["restarting"][-1] == 0.0
    assert parts["waiting"][-1] > 0.25
    assert set(column(rows, "loco/participation").values()) == {1.0}

    record = RunRecord.load(tmp_path)
    fast, slow = record.goodput
    assert fast["goodput"] + 0.2 < slow["goodput"]
    assert str(record.numbers["straggler"]).startswith("worker 1 took ")
    (summary,) = (text for text in results[0]["texts"] if "Training is over" in text)
    assert re.search(r"goodput +\d+% \(waiting \d+%", summary)
    assert re.search(
        r"straggler +worker 1 took [\d.]+x the median step in the last 11 rounds", summary
    )


def test_communication_of_gossip(pool: Pool, tmp_path: Path) -> None:
    strategy = {"algorithm": GASLoC(), "topology": "ring"}
    results = pool.run(fit, tmp_path, [CommunicationMonitor()], strategy, {}, world=4)
    rows = read(tmp_path)
    rounds = {step: float(step // 3) for step in range(3, 12)}
    assert column(rows, "loco/round") == rounds
    # To two neighbours, for any number of workers.
    assert column(rows, "loco/bytes_sent") == {s: 2 * P_BYTES * r for s, r in rounds.items()}
    drift = 0.7 * (results[0]["before_rounds"][2] - flat(TinyModule()))
    norm = pytest.approx(drift.norm().item(), rel=1e-6)
    assert column(rows, "loco/outer_grad_norm")[3] == norm


def test_staleness_of_overlap(pool: Pool, tmp_path: Path) -> None:
    strategy = {"algorithm": DiLoCo(outer_momentum=0.0), "overlap": True}
    pool.run(fit, tmp_path, [CommunicationMonitor()], strategy, {}, world=2)
    assert set(column(read(tmp_path), "loco/staleness").values()) == {1.0}


def test_log_every_n_steps_is_respected(pool: Pool, tmp_path: Path) -> None:
    settings = {"log_every_n_steps": 4}
    pool.run(fit, tmp_path, [CommunicationMonitor()], {"algorithm": LocalSGD()}, settings, world=2)
    assert column(read(tmp_path), "loco/round") == {3: 1.0, 7: 2.0, 11: 3.0}


def test_progress_bar(pool: Pool, tmp_path: Path) -> None:
    callbacks: list[pl.Callback] = [
        CommunicationMonitor(prog_bar=True),
        ConsensusMonitor(prog_bar=True),
    ]
    settings = {"log_every_n_steps": 4}
    results = pool.run(fit, tmp_path, callbacks, {"algorithm": LocalSGD()}, settings, world=2)
    shown = results[0]["progress_bar"]
    assert shown["loco/round"] == 3.0
    assert shown["loco/consensus_distance"] > 0
    assert (
        shown["loco/consensus_distance"]
        == results[0]["callback_metrics"]["loco/consensus_distance"]
    )
    # Metrics in the progress bar are still logged at the logger's own steps.
    assert column(read(tmp_path), "loco/round") == {3: 1.0, 7: 2.0, 11: 3.0}


# ------------------------------------------------------------------------ ConsensusMonitor


def distance(params: list[Tensor]) -> float:
    stacked = torch.stack(params)
    return math.sqrt((stacked - stacked.mean(0)).square().sum(1).mean().item())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_consensus_distance_equals_a_direct_computation(
    pool: Pool, tmp_path: Path, world: int
) -> None:
    strategy = {"algorithm": GASLoC(), "topology": "ring"}
    results = pool.run(fit, tmp_path, [ConsensusMonitor()], strategy, {}, world=world)
    logged = column(read(tmp_path), "loco/consensus_distance")
    for step in (2, 5, 8):
        expected = distance([result["before_rounds"][step] for result in results])
        assert logged[step + 1] == pytest.approx(expected, rel=1e-6)
    assert (logged[3] == 0) == (world == 1)
    # The measurement all-reduces one number per parameter, and one more. Without the monitor it
    # runs once, at the end, instead of before each of the three rounds.
    first = results[0]["bytes_sent"]
    plain = pool.run(fit, tmp_path / "plain", [], strategy, {}, world=world)[0]["bytes_sent"]
    assert first - plain == 2 * (2 * (world - 1) * (P_BYTES + 8) // world)


def test_consensus_is_measured_every_n_rounds(pool: Pool, tmp_path: Path) -> None:
    callbacks: list[pl.Callback] = [ConsensusMonitor(every_n_rounds=2)]
    results = pool.run(fit, tmp_path, callbacks, {"algorithm": LocalSGD()}, {}, world=2)
    logged = column(read(tmp_path), "loco/consensus_distance")
    first, third = (distance([r["before_rounds"][s] for r in results]) for s in (2, 8))
    assert list(logged.values()) == pytest.approx([first] * 6 + [third] * 3, rel=1e-6)


class LargeModule(pl.LightningModule):
    """400,000 parameters with different noise on each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.zeros(100, 1000), torch.zeros(300_000)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.global_rank + batch_idx)
        return sum((p * torch.randn(p.shape, generator=generator)).sum() for p in self.layers)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def measure_large(rank: int, world: int) -> list[float]:
    seen: list[float] = []

    class RecordDistance(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step > 1:
                seen.append(trainer.strategy.statistics.consensus_distance)

    strategy = LocoStrategy(LocalSGD(), sync_every=1)
    trainer = make_trainer(
        strategy, max_steps=3, callbacks=[ConsensusMonitor(max_elements=4096), RecordDistance()]
    )
    trainer.fit(LargeModule(), make_loader(rank, 3))
    return seen


def test_consensus_distance_of_a_large_model_is_estimated(pool: Pool) -> None:
    # Two workers with independent standard normal noise: half the squared difference, 1/2 each.
    expected = math.sqrt(400_000 / 2)
    for seen in pool.run(measure_large, world=2):
        assert seen == pytest.approx([expected] * 2, rel=0.1)
        assert seen[0] != seen[1]  # each round measures other elements


def test_bad_settings(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"every_n_rounds": 0}, ValueError, "every_n_rounds must be at least 1, got 0"),
        ({"max_elements": -1}, ValueError, "max_elements must be at least 1, got -1"),
        ({"every_n_rounds": 1.5}, TypeError, "every_n_rounds must be an integer, got 1.5"),
    ]
    for settings, error, text in rows:
        with subtests.test(**settings), pytest.raises(error, match=text):
            ConsensusMonitor(**settings)


# ----------------------------------------------------------------------------- PeerMonitor


class Away(pl.Callback):
    """Sets all parameters of worker 1 to one value before each batch, and delays each batch."""

    def __init__(self, value: float | None) -> None:
        self.value = value

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        time.sleep(0.005)
        if trainer.global_rank == 1 and self.value is not None:
            for parameter in pl_module.parameters():
                parameter.data.fill_(self.value)


def gossip(rank: int, world: int, folder: Path, value: float | None) -> dict[str, float]:
    strategy = PairwiseGossipStrategy(1.0, finalize="keep", timeout_s=30)
    trainer = make_trainer(
        strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[Away(value), PeerMonitor()],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
    )
    trainer.fit(TinyModule(lr=0.01), make_loader(rank, 150))
    return {name: value.item() for name, value in trainer.logged_metrics.items()}


@pytest.mark.parametrize("value", [None, 1e6])
def test_fetches_of_too_large_parameters_are_counted(
    pool: Pool, tmp_path: Path, value: float | None
) -> None:
    logged = pool.run(gossip, tmp_path, value, world=2)[0]
    too_large = list(column(read(tmp_path), "loco/fetches_too_large").values())
    assert too_large[-1] == logged["loco/fetches_too_large"]
    assert too_large == sorted(too_large)
    if value is None:
        assert set(too_large) == {0.0}
        assert logged["loco/fetches"] > 3
    else:
        assert too_large[-1] > 3
    assert logged["loco/fetches_not_finite"] == logged["loco/malformed"] == 0.0


# -------------------------------------------------------------------------------- effects


def test_callbacks_do_not_change_the_result(pool: Pool, tmp_path: Path) -> None:
    strategy = {"algorithm": GASLoC(), "topology": "random_matching"}
    callbacks: list[pl.Callback] = [
        CommunicationMonitor(prog_bar=True),
        ConsensusMonitor(max_elements=5),
        WorkerLogs(tmp_path / "logs"),
        StragglerSimulator({1: 0.001}),
    ]
    plain = pool.run(fit, tmp_path / "plain", [], strategy, {}, world=3)
    watched = pool.run(fit, tmp_path / "watched", callbacks, strategy, {}, world=3)
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert one["losses"] == other["losses"]


def fit_twice(rank: int, world: int) -> list[float]:
    monitor = CommunicationMonitor()
    rounds: list[float] = []
    for _ in range(2):
        trainer = make_trainer(
            LocoStrategy(LocalSGD(), sync_every=3),
            max_epochs=1,
            log_every_n_steps=1,
            callbacks=[monitor],
        )
        trainer.fit(TinyModule(), make_loader(rank, 4))
        rounds.append(trainer.callback_metrics["loco/round"].item())
    return rounds


def test_a_monitor_can_be_used_again(pool: Pool) -> None:
    assert pool.run(fit_twice, world=1) == [[1.0, 1.0]]


class Steady(TinyModule):
    """Moves by the same vector in every local step, so that pseudo-gradients are equal."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return sum((p.sum() for p in self.parameters()), torch.zeros(()))


def warnings_of_outer_steps(
    rank: int, world: int, algorithm: Algorithm, rounds: int
) -> tuple[list[str], dict[str, float]]:
    trainer = make_trainer(
        LocoStrategy(algorithm, sync_every=2),
        max_epochs=1,
        log_every_n_steps=1,
        callbacks=[CommunicationMonitor()],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Steady(), make_loader(rank, 2 * (2 * rounds + 1)))  # one step after the last
    texts = [str(one.message) for one in caught]
    found = [text for text in texts if "outer_momentum * persistence" in text]
    return found, {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("algorithm", "step"),
    [
        (DiLoCo(0.7, 0.9), "7"),
        (DiLoCo(Piecewise({0: 0.7, 5: 0.4}), 0.9), "5.2"),  # 7 four times and 4 six times
        (DiLoCo(Cosine(0.2, 0.1, rounds=9), 0.0), None),  # a rate that falls makes short steps
        (DiLoCo(0.2, 0.0), "0.2"),
        (DiLoCo(0.7, 0.5), None),
        (DiLoCo(0.7, "auto"), None),
        (DiLoCo(outer_optimizer=torch.optim.Adagrad), None),
        (GASLoC(0.2, momentum=0.0), None),
    ],
    ids=str,
)
def test_an_outer_step_that_is_too_long_or_too_short_is_warned_of_once(
    pool: Pool, algorithm: Algorithm, step: str | None
) -> None:
    for found, metrics in pool.run(warnings_of_outer_steps, algorithm, 25, world=2)[:1]:
        assert metrics["loco/persistence"] == pytest.approx(1)
        assert len(found) == (step is not None)
        assert step is None or f"was {step}, with outer_lr=" in found[0]
        assert (DiLoCo(0.7, "auto") == algorithm) == ("loco/outer_momentum" in metrics)


def test_an_outer_step_is_not_warned_of_before_ten_rounds_are_measured(pool: Pool) -> None:
    for rounds, count in ((10, 0), (11, 1)):
        found, _ = pool.run(warnings_of_outer_steps, DiLoCo(0.7, 0.9), rounds, world=2)[0]
        assert len(found) == count


@pytest.mark.parametrize("monitor", [CommunicationMonitor(), ConsensusMonitor()])
def test_monitors_log_a_message_for_strategies_without_rounds(
    monitor: pl.Callback, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"{type(monitor).__name__} logs nothing with SingleDeviceStrategy"
    trainer = quiet_trainer(devices=1, max_steps=2, callbacks=[monitor])
    with caplog.at_level(logging.INFO):
        trainer.fit(TinyModule(), make_loader(0, 2))
    assert caplog.text.count(text) == 1
    assert not [key for key in trainer.callback_metrics if key.startswith("loco/")]


# ------------------------------------------------------------------------ StragglerSimulator


def run_with_delays(rank: int, world: int, delays: dict[int, float]) -> tuple[list[float], float]:
    """Return the simulator's sleep time and the worker's waiting time, in seconds."""
    trainer = make_trainer(
        LocoStrategy(LocalSGD(), sync_every=5),
        max_epochs=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[StragglerSimulator(delays)],
    )
    with pytest.MonkeyPatch.context() as patch:
        asked = sleeps(patch, straggler)
        trainer.fit(ValidatedModule(), make_loader(rank, 5), make_loader(rank, 50))
    return asked, trainer.strategy.statistics.wait_s


def test_straggler_simulator_delays_training_batches_of_chosen_workers(pool: Pool) -> None:
    found = pool.run(run_with_delays, {1: 0.2, 7: 60.0}, world=2)
    (asked_0_s, wait_0_s), (asked_1_s, wait_1_s) = found
    assert sum(asked_0_s) == 0
    assert asked_1_s == [0.2] * 5  # five training batches, none of the fifty others
    assert wait_0_s > 0.1  # worker 0 waits for worker 1 in the round
    assert wait_1_s < wait_0_s


def test_straggler_simulator_refuses_invalid_delays(subtests: pytest.Subtests) -> None:
    text = "delays are seconds.* got .* for worker 2"
    for delay_s in (-0.1, math.nan, math.inf):
        with subtests.test(delay_s=delay_s), pytest.raises(ValueError, match=text):
            StragglerSimulator({2: delay_s})


# -------------------------------------------------------------------------------- WorkerLogs


class LoggingModule(TinyModule):
    """Logs values that depend on the worker and the batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log("mark", 100.0 * self.global_rank + batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_mark", 1000.0 + self.global_rank + 10 * self.current_epoch, batch_size=4)


def fit_with_logs(rank: int, world: int, folder: Path | None, root: Path) -> None:
    trainer = make_trainer(
        LocoStrategy(LocalSGD(), sync_every=3),
        max_epochs=2,
        log_every_n_steps=2,
        default_root_dir=root,
        use_distributed_sampler=False,
        callbacks=[WorkerLogs(folder)],
    )
    trainer.fit(LoggingModule(), make_loader(rank, 4), make_loader(rank, 1))


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
@pytest.mark.parametrize("given", [True, False])
def test_worker_logs(pool: Pool, tmp_path: Path, given: bool) -> None:
    folder = tmp_path / "of" / "workers" if given else tmp_path
    pool.run(fit_with_logs, folder if given else None, tmp_path, world=3)
    names = ["worker_00000.csv", "worker_00001.csv", "worker_00002.csv"]
    assert sorted(path.name for path in folder.glob("*.csv")) == names
    for worker, name in enumerate(names):
        with (folder / name).open() as file:
            header, *rows = list(csv.reader(file))
        assert header == ["step", "metric", "value"]
        marks = [(int(s), float(value)) for s, metric, value in rows if metric == "mark"]
        batches = [(2, 1), (4, 3), (6, 1), (8, 3)]
        assert marks == [(step, 100.0 * worker + batch) for step, batch in batches]
        marks = [(int(s), float(value)) for s, metric, value in rows if metric == "val_mark"]
        assert marks == [(4, 1000.0 + worker), (8, 1010.0 + worker)]

"""PairwiseGossipStrategy with the ranks of one job and with separate Trainers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_loco import (
    PairwiseAverage,
    PairwiseGossipStrategy,
)
from lightning_loco.compression import Codec
from tests.harness.gossip_nodes import peers
from tests.harness.pool import Pool, run_each
from tests.harness.programs import python_path
from tests.harness.small_model import (
    FEATURES,
    TinyModule,
    flat,
    loss_of,
    make_loader,
    make_model,
)
from tests.harness.sources import ROOT
from tests.strategies.families import fit_with

# ------------------------------------------------------------------------- ranks of one job


class Slow(Callback):
    """Makes each step a few milliseconds long, so that fetches can complete."""

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(0.005)


class Wide(TinyModule):
    """A module whose float32 parameters fill many blocks of a codec."""

    def __init__(self) -> None:
        super().__init__(lr=1e-4)
        self.model = nn.Sequential(nn.Linear(FEATURES, 4000), nn.Tanh(), nn.Linear(4000, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([tensor.float() for tensor in batch], batch_idx)


class FitResult(NamedTuple):
    """Results of a fit on one worker: rounds, bytes, model and losses."""

    rounds: int
    served_bytes: int
    sent: int
    saved: int
    model: Tensor
    losses: list[float]


def fit_compressed(
    rank: int, world: int, compression: Codec | str | None, folder: str, resume: str | None
) -> FitResult:
    strategy = PairwiseGossipStrategy(1.0, compression=compression, timeout_s=30)
    served = []

    class Served(Callback):
        def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
            served.append(strategy.engine.node.bytes_sent)

    torch.manual_seed(1)
    module = Wide()
    fit_with(
        strategy,
        module,
        make_loader(rank, 60),
        ckpt_path=resume,
        max_epochs=1 if resume is None else 2,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}"), Slow(), Served()],
        enable_checkpointing=True,
    )
    counts = strategy.statistics
    sent, saved = counts.bytes_sent, counts.bytes_saved
    return FitResult(counts.rounds, served[0], sent, saved, flat(module), module.losses)


@pytest.mark.recovery
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    "second_compression", ["int8", pytest.param("bf16", marks=pytest.mark.soak), None]
)
def test_compressed_ranks_train_and_resume(
    pool: Pool, tmp_path: Path, second_compression: str | None
) -> None:
    first = pool.run(fit_compressed, "int8", str(tmp_path / "1"), None, world=2)
    for one in first:
        assert one.rounds > 3
        assert 0.6 < one.saved / (one.saved + one.served_bytes) < 0.75
        assert sum(one.losses[-10:]) < sum(one.losses[:10])
        assert torch.equal(one.model, first[0].model)
        assert torch.isfinite(one.model).all()
    path = str(tmp_path / "1" / "epoch=0.ckpt")
    second = pool.run(fit_compressed, second_compression, str(tmp_path / "2"), path, world=2)
    for one, before in zip(second, first, strict=True):
        assert len(one.losses) == 60
        assert one.rounds > before.rounds
        assert one.sent > before.sent
        assert one.saved > before.saved or second_compression is None
        assert sum(one.losses[:10]) < sum(before.losses[:10])
        assert torch.isfinite(one.model).all()


class Gan(LightningModule):
    """Lightning's GAN recipe: manual optimization with two optimizers and no returned loss."""

    def __init__(self, loss: Tensor | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = make_model(1), make_model(2)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer, net in zip(self.optimizers(), self.children(), strict=True):
            loss = loss_of(net, batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return self.loss if batch_idx == 0 else None

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in self.children()]


def fit_gan(rank: int, world: int, loss: Tensor | None, interpolation: str) -> Any:
    strategy = PairwiseGossipStrategy(1.0, interpolation, timeout_s=30)
    clocks = []

    class Clocks(Callback):
        def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
            clocks.append((strategy.engine.state_dict()["clock"], trainer.global_step))

    module = Gan(loss)
    fit_with(strategy, module, make_loader(rank, 40), callbacks=[Slow(), Clocks()])
    return strategy.statistics.rounds, flat(module), *clocks[0]


def test_manual_optimization_need_not_return_a_loss(pool: Pool, subtests: pytest.Subtests) -> None:
    rows: dict[str, tuple[Any, str]] = {
        "no loss": (None, "constant"),
        "no loss, by clock": (None, "clock"),
        "a loss": (torch.tensor(2.0), "loss"),
        "a matrix": (torch.ones(2, 3), "constant"),
    }
    for name, found in run_each(pool, fit_gan, rows, world=2).items():
        with subtests.test(name):
            for blends, model, clock, steps in found:
                assert blends > 3
                assert torch.isfinite(model).all()
                assert steps == 80
                assert clock <= 40 + 1e-9  # local steps are counted once for all optimizers


class Skipping(TinyModule):
    """Skips every third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 0 else super().training_step(batch, batch_idx)


def fit_skipping(rank: int, world: int, interpolation: str) -> tuple[int, Tensor]:
    strategy = PairwiseGossipStrategy(1.0, interpolation, nodes=peers(1, "w"), name="w0")
    module = Skipping()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned `None`")
        fit_with(strategy, module, make_loader(rank, 40), callbacks=[Slow()])
    return len(module.losses), flat(module)


@pytest.mark.parametrize("interpolation", ["constant", "loss"])
def test_separate_trainer_may_skip_batches(pool: Pool, interpolation: str) -> None:
    ((steps, model),) = pool.run(fit_skipping, interpolation, world=1)
    assert steps == 26
    assert torch.isfinite(model).all()


def test_from_file_reads_nodes_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        """
- nodes:
  - {name: w1, host: localhost, port: 45000}
  - {name: w2, host: localhost, port: 45001}
- fetch_probability: 0.5
- timeout_ms: 1500
- interpolation: loss
- divergence_threshold: 0.2
- constant: { value: 0.25 }
"""
    )
    strategy = PairwiseGossipStrategy.from_file(path, "w2")
    settings = strategy.settings
    assert settings.node_number == 1
    assert settings.fetch_timeout_s == 1.5
    assert settings.algorithm == PairwiseAverage(0.5, "loss", 0.25, 0.2)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}


# ------------------------------------------------------------------------- separate Trainers

SCRIPT = """
import sys, time
import torch
from lightning.pytorch import Callback
from lightning_loco import PairwiseGossipStrategy
from tests.harness.small_model import TinyModule, make_loader, quiet_trainer

class Report(Callback):
    def on_train_batch_end(self, trainer, *args):
        time.sleep(0.01)
        blends = trainer.strategy.statistics.rounds
        print(trainer.global_step, blends, time.monotonic(), flush=True)

nodes, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
trainer = quiet_trainer(
    strategy=PairwiseGossipStrategy(1.0, nodes=nodes, name=name, fetch_timeout_s=1.0),
    devices=1, max_steps=steps, callbacks=[Report()],
)
trainer.fit(TinyModule(), make_loader(int(name[1:]), steps))
"""


LATE_S = 20
STOPPED_S = 10


class Worker:
    """A Trainer in another process, and the steps that it has reported."""

    def __init__(self, nodes: Path, name: str, steps: int = 100000) -> None:
        self.steps: list[tuple[int, int, float]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(nodes), name, str(steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        self._reader = threading.Thread(target=self._read, name="reader")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if re.fullmatch(r"\d+ \d+ [\d.]+\n", line):
                step, blends, now = line.split()
                self.steps.append((int(step), int(blends), float(now)))

    @property
    def blends(self) -> int:
        return self.steps[-1][1] if self.steps else 0

    def wait_for_blends(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait for ``count`` more blends."""
        goal = self.blends + count
        deadline = time.monotonic() + timeout_s
        while self.blends < goal:
            assert self.process.poll() is None, "the worker has ended"
            assert time.monotonic() < deadline, f"{self.blends} blends of {goal}"
            time.sleep(0.02)

    def longest_pause_s(self, since: float) -> float:
        """Return the longest time between two steps, of those that ended after ``since``."""
        times = [now for _, _, now in self.steps if now >= since]
        return max(b - a for a, b in zip(times, times[1:], strict=False))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.yaml"
    entries = [f"  - {{name: {n}, host: {h}, port: {p}}}" for n, h, p in peers(3, "w")]
    path.write_text("\n".join(["- nodes:", *entries, "- timeout_ms: 1000", ""]))
    return path


@pytest.fixture
def workers(nodes: Path) -> Iterator[dict[str, Worker]]:
    started: dict[str, Worker] = {}
    yield started
    for worker in started.values():
        worker.end()


@pytest.mark.alone
@pytest.mark.soak
@pytest.mark.process
def test_workers_are_killed_stopped_late_and_restarted(
    nodes: Path, workers: dict[str, Worker]
) -> None:
    first = workers["w0"] = Worker(nodes, "w0")
    second = workers["w1"] = Worker(nodes, "w1")
    first.wait_for_blends(5)
    time.sleep(LATE_S)
    third = workers["w2"] = Worker(nodes, "w2")
    third.wait_for_blends(5)

    since = time.monotonic()
    third.process.send_signal(signal.SIGSTOP)
    first.wait_for_blends(5)
    time.sleep(STOPPED_S)
    third.process.send_signal(signal.SIGCONT)
    for worker in (first, second, third):
        worker.wait_for_blends(5)

    third.process.kill()
    third.end()
    for worker in (first, second):
        worker.wait_for_blends(5)
    restarted = workers["w2"] = Worker(nodes, "w2")  # on the same port
    restarted.wait_for_blends(5)
    first.wait_for_blends(5)
    for worker in (first, second):
        assert worker.process.poll() is None
        assert worker.longest_pause_s(since) < 1.5


@pytest.mark.soak
@pytest.mark.process
def test_separate_trainers_finish_on_their_own(nodes: Path, workers: dict[str, Worker]) -> None:
    for name in ("w0", "w1"):
        workers[name] = Worker(nodes, name, steps=150)
    for worker in workers.values():
        assert worker.process.wait(timeout=60) == 0

"""DecoupledDiLoCoStrategy: workers of one job, and jobs of their own that are killed and return."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_loco import DecoupledDiLoCoStrategy, DecoupledModelParallelStrategy
from lightning_loco.strategies.decoupled_diloco import count_samples
from lightning_loco.syncer import replay
from tests.harness.pool import Pool
from tests.harness.programs import Program
from tests.harness.small_model import ValidatedModule, flat, loss_of, make_loader
from tests.strategies.families import (
    SHARDED,
    ShardedModule,
    fit_with,
    loader,
    saved_weights,
    whole,
)
from tests.syncer.test_engine import serving


class Slow(Callback):
    """Makes each step a few milliseconds long, so that fragments can arrive."""

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.004)


class Watch(Callback):
    """Records the model at every validation, and what the learner counts at the end."""

    def __init__(self) -> None:
        self.validated: list[Tensor] = []
        self.counts: dict[str, Any] = {}

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.validated.append(flat(module))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        learner = trainer.strategy.engine.learner
        if learner is not None:
            self.counts = dict(learner.counts, tokens=sum(learner.rounds.tokens))


class WatchShards(Watch):
    """Records whole models: those that are validated, and the local one after the last step."""

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.validated.append(whole(module))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        self.local = whole(module)


class Resumed(DecoupledModelParallelStrategy):
    """Records the local model that training starts with."""

    def _start(self) -> None:
        assert self.lightning_module is not None
        self.start = whole(self.lightning_module)
        super()._start()


def fit(
    rank: int, world: int, folder: str, resume: str | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    strategy = DecoupledDiLoCoStrategy(6, 3, timeout_s=30, **arguments)
    torch.manual_seed(1)
    module, watch = ValidatedModule(), Watch()
    size = arguments.get("replica_size", 1)
    fit_with(
        strategy,
        module,
        make_loader(rank // size, 60),
        make_loader(9, 2),
        ckpt_path=resume,
        max_epochs=2 if resume is None else 3,
        callbacks=[
            ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1),
            Slow(),
            watch,
        ],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    return {
        "model": flat(module),
        "validated": watch.validated,
        "rounds": strategy.statistics.rounds,
        "sent": strategy.statistics.bytes_sent,
        "saved": strategy.statistics.bytes_saved,
        "losses": module.losses,
        **watch.counts,
    }


@pytest.mark.filterwarnings("ignore:The dirpath has changed|Checkpoint directory")
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"evaluate": "outer", "outer_momentum": 0.5, "mix": 0.5},
        {"compression": "bf16", "min_quorum": 2, "aggregate": "mean"},
    ],
    ids=["default", "outer", "compressed"],
)
def test_workers_of_a_job(pool: Pool, tmp_path: Path, arguments: dict[str, Any]) -> None:
    first = pool.run(fit, str(tmp_path), None, arguments, world=2)
    for one in first:
        assert one["rounds"] > 12
        assert one["refused"] == 0
        assert (one["saved"] != 0) == ("compression" in arguments)
        assert sum(one["losses"][-10:]) < sum(one["losses"][:10])
        # Validated = saved = returned, on all workers.
        assert torch.equal(one["model"], one["validated"][-1])
        assert torch.equal(one["model"], first[0]["model"])
    assert torch.equal(saved_weights(tmp_path / "epoch=1.ckpt"), first[0]["model"])
    second = pool.run(fit, str(tmp_path), str(tmp_path / "epoch=1.ckpt"), arguments, world=2)
    for one, before in zip(second, first, strict=True):
        assert len(one["losses"]) == 60
        assert one["rounds"] > before["rounds"]
        assert sum(one["losses"][:10]) < sum(before["losses"][:10])
        assert torch.equal(one["model"], second[0]["model"])


def test_workers_of_two_ranks(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(fit, str(tmp_path), None, {"replica_size": 2}, world=4)
    for one in found:
        assert one["rounds"] > 12
        assert torch.equal(one["model"], found[0]["model"])


def fit_shards(rank: int, world: int, folder: str, layout: str, to_resume: bool) -> dict[str, Any]:
    sizes = SHARDED[layout]
    method = DecoupledDiLoCoStrategy(6, 3, timeout_s=30, evaluate="outer")
    strategy = Resumed(method, *sizes)
    module, watch = ShardedModule("Adam"), WatchShards()
    fit_with(
        strategy,
        module,
        loader(rank, sizes, 60),
        loader(rank, sizes, 2),
        ckpt_path=f"{folder}/epoch=1.ckpt" if to_resume else None,
        max_epochs=3 if to_resume else 2,
        callbacks=[
            ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1),
            Slow(),
            watch,
        ],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    return {
        "model": whole(module),
        "start": strategy.start,
        "local": watch.local,
        "validated": watch.validated,
        "rounds": strategy.statistics.rounds,
        "losses": module.losses,
        **watch.counts,
    }


@pytest.mark.filterwarnings("ignore:The dirpath has changed|Checkpoint directory")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize(
    ("layout", "then"), [("fsdp", "tensor"), ("tensor", "fsdp"), ("both", "both")]
)
def test_workers_that_hold_shards(pool: Pool, tmp_path: Path, layout: str, then: str) -> None:
    """Two workers of two ranks, or one of four; resumed with shards of another kind."""
    first = pool.run(fit_shards, str(tmp_path), layout, False)
    second = pool.run(fit_shards, str(tmp_path), then, True)
    for found in (first, second):
        for one in found:
            assert torch.equal(one["model"], one["validated"][-1])
            assert torch.equal(one["model"], found[0]["model"])
    assert first[0]["rounds"] > 12
    assert first[0]["tokens"] % SHARDED[layout][0] == 0
    assert second[0]["rounds"] > first[0]["rounds"]
    assert len(second[0]["losses"]) == 60
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one["local"], other["start"])
        assert not torch.equal(one["local"], one["model"])


# ------------------------------------------------------------------------ jobs of their own


SCRIPT = """
import sys, time
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_loco import DecoupledDiLoCoStrategy
from tests.harness.small_model import quiet_trainer
from tests.strategies.test_decoupled import Line

class Report(Callback):
    def on_train_batch_end(self, trainer, *args):
        time.sleep(step_s)
        rounds = trainer.strategy.statistics.rounds
        print("step", trainer.global_step, rounds, time.monotonic(), flush=True)

port, name, step_s, steps, folder = sys.argv[1], sys.argv[2], float(sys.argv[3]), *sys.argv[4:]
torch.set_num_threads(1)
torch.manual_seed(0)
module = Line()
trainer = quiet_trainer(
    strategy=DecoupledDiLoCoStrategy(12, 3, syncer="127.0.0.1:" + port, name=name, timeout_s=30),
    devices=1,
    max_steps=int(steps),
    max_epochs=-1,
    callbacks=[Report(), ModelCheckpoint(folder, save_last="link", every_n_train_steps=20)],
    enable_checkpointing=True,
)
trainer.fit(module, module.loader(), ckpt_path="last")
print("end", trainer.global_step, module.error(), flush=True)
"""


class Line(ValidatedModule):
    """Linear regression on data with Lightning's own sampler."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        self.model = nn.Sequential(nn.Linear(3, 1)).double()
        self.order: list[float] = []

    def loader(self) -> DataLoader[Any]:
        inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)).double()
        target = inputs @ torch.arange(1.0, 4.0).double()
        return DataLoader(TensorDataset(inputs, target), batch_size=4, shuffle=True)

    def error(self) -> float:
        return float(loss_of(self.model, next(iter(self.loader()))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.order += batch[0][:, 0].tolist()
        return super().training_step(batch, batch_idx)


def start(port: int, name: str, step_s: float, steps: int, folder: Path) -> Program:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    values = map(str, (port, name, step_s, steps, folder / name))
    return Program([sys.executable, str(script), *values], folder)


def steps_of(output: str) -> list[tuple[int, int, float]]:
    """Return step, rounds and time of the lines of a learner."""
    lines = [line.split() for line in output.splitlines() if line.startswith("step")]
    return [(int(step), int(rounds), float(at)) for _, step, rounds, at in lines]


@pytest.mark.process
def test_a_killed_learner_returns_and_holds_nobody_up(tmp_path: Path) -> None:
    with serving(tmp_path) as server, ExitStack() as stack:
        port = server.server.port
        kept = stack.enter_context(start(port, "kept", 0.01, 1200, tmp_path))
        killed = stack.enter_context(start(port, "killed", 0.03, 1200, tmp_path))
        step, seen = 60, killed.wait_for("step 60 ")
        while steps_of(seen)[-1][1] <= 3:  # rounds, under load
            step += 20
            seen += killed.wait_for(f"step {step} ")
        killed.signal(signal.SIGKILL)
        killed.finish()
        time.sleep(1.0)
        again = stack.enter_context(start(port, "killed", 0.03, step + 60, tmp_path))
        returned = steps_of(again.succeed())
        output = kept.succeed()
        status = server.status()
    first_step, first_rounds, _ = returned[0]
    assert step - 20 < first_step <= step + 1  # its last checkpoint
    rounds = {at: received for at, received, _ in steps_of(seen)}
    assert first_rounds >= rounds[first_step - 1] > 0
    assert returned[-1][0] == step + 60
    # It has received each fragment within two rounds of it.
    assert returned[min(24, len(returned) - 1)][1] >= first_rounds + 3
    steps = steps_of(output)
    gaps = [later[2] - one[2] for one, later in zip(steps, steps[1:], strict=False)]
    assert max(gaps) < 1.0  # it has not waited, also not for the one that was killed
    (end,) = [line for line in output.splitlines() if line.startswith("end")]
    assert float(end.split()[2]) < 1e-3
    assert status["refused"] <= 3  # what was merged after the last checkpoint, once a fragment
    assert {one.problem for one in replay(tmp_path / "tape")} == {None}


def fit_alone(rank: int, world: int, folder: str) -> Any:
    """A single job in this process: what is validated, saved and returned; the order of data."""
    found = {}
    with serving(Path(folder)) as server:
        for name in ("a", "a", "b"):
            address, module, watch = f"127.0.0.1:{server.server.port}", Line(), Watch()
            strategy = DecoupledDiLoCoStrategy(
                6, 3, syncer=address, timeout_s=30, name=name, count_tokens=lambda batch: 10.0
            )
            trainer = fit_with(
                strategy,
                module,
                module.loader(),
                make_loader(9, 2),
                max_epochs=5,
                callbacks=[Slow(), watch],
                use_distributed_sampler=True,
            )
            trainer.save_checkpoint(Path(folder) / "end.ckpt")
            found.setdefault(name, []).append((module.order, flat(module), watch))
            assert torch.equal(saved_weights(Path(folder) / "end.ckpt"), flat(module))
            assert torch.equal(watch.validated[-1], flat(module))
            assert watch.counts["tokens"] % 10 == 0
            assert server.status()["learners"] == {}
    (first, again), (other,) = found["a"], found["b"]
    assert first[0] == again[0] != other[0]
    assert sorted(first[0]) == sorted(other[0])


def test_one_job_with_a_syncer_elsewhere(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit_alone, str(tmp_path), world=1)


class Scheduled(Line):
    """With a learning rate that falls with the local steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.05 / (1 + step))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Rates(Slow):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def join_later(rank: int, world: int, folder: str) -> Any:
    found = []
    with serving(Path(folder)) as server:
        for name, max_steps in (("a", 120), ("b", 200), ("c", 40)):
            rates, module = Rates(), Scheduled()
            address = f"127.0.0.1:{server.server.port}"
            strategy = DecoupledDiLoCoStrategy(6, 3, syncer=address, timeout_s=30, name=name)
            trainer = fit_with(
                strategy,
                module,
                module.loader(),
                make_loader(9, 2),
                max_steps=max_steps,
                max_epochs=-1,
                callbacks=[rates],
                use_distributed_sampler=True,
            )
            found.append((trainer.global_step, rates.rates, server.status()["committed"]))
    return found


def test_a_new_learner_begins_where_the_others_are(pool: Pool, tmp_path: Path) -> None:
    ((first, second, third),) = pool.run(join_later, str(tmp_path), world=1)
    assert first[0] == len(first[1]) == 120
    begun = first[2] / 3 * 6  # merges of each fragment, every 6 local steps
    assert second[0] == 200
    assert len(second[1]) == 200 - begun
    assert second[1] == [pytest.approx(0.05 / (1 + step)) for step in range(round(begun), 200)]
    assert third[1] == []  # the run is over


def test_samples_are_counted_if_they_can_be_told() -> None:
    assert count_samples({"x": torch.zeros(5, 2)}) == 5.0
    assert count_samples(None) == 1.0
    assert count_samples(object()) == 1.0

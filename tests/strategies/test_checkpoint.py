"""Checkpoints: an ordinary main file, and side files that make a resumed run exact."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import LocalSGD, LocoStrategy
from tests.cases import CASES, Case, rows, without_variants
from tests.conftest import cover
from tests.pool import Pool, PoolError, make_trainer
from tests.small_model import flat

SYNC_EVERY = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]
STEPS = 22


class NoisyModule(LightningModule):
    """Dropout, BatchNorm, AdamW, a schedule and Python randomness: all that a resume must keep."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.losses: dict[int, float] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.model(batch[0]) - batch[1]).square().mean() * random.uniform(0.5, 1.5)
        self.losses[self.global_step] = loss.item()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", (self.model(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.03)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def noisy_loader(world: int) -> StatefulDataLoader[Any]:
    """An epoch of 8 batches on each worker, shuffled and shared by Lightning's sampler."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(32 * world, 3, generator=generator)
    return StatefulDataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


def fit(
    rank: int,
    world: int,
    case: Case,
    folder: str,
    resume: str | None = None,
    max_steps: int = STEPS,
    every: int | str = 10,
) -> tuple[dict[int, float], Tensor]:
    random.seed(rank)
    checkpoint = ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        every_n_train_steps=every if isinstance(every, int) else None,
        every_n_epochs=None if isinstance(every, int) else 1,
        save_on_train_epoch_end=every == "epoch",
        save_top_k=-1,
    )
    trainer = make_trainer(
        case.strategy(SYNC_EVERY),
        max_steps=max_steps,
        callbacks=[checkpoint],
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    module = NoisyModule()
    validation = noisy_loader(1) if every == "validation" else None
    trainer.fit(module, noisy_loader(world), validation, ckpt_path=resume)
    return module.losses, torch.cat([flat(module), *(b.flatten() for b in module.buffers())])


@rows("resume")
def test_run_resumed_within_a_round_equals_unbroken_run(
    pool: Pool, tmp_path: Path, case: Case
) -> None:
    check_resumed_run(pool, tmp_path, case, every=10)


@pytest.mark.parametrize(
    ("case", "every"),
    [
        *cover(
            rows("resume", without_variants()).args[1],
            [3, 8, "epoch", "validation"],  # an epoch has 8 steps
            strength=1,
        ),
        pytest.param(CASES["async_diloco"], "validation", id="async_diloco, in a validation"),
        pytest.param(CASES["gasloc"], "validation", id="gasloc, in a validation"),
    ],
)
def test_resumed_run_equals_unbroken_run(
    pool: Pool, tmp_path: Path, case: Case, every: int | str
) -> None:
    check_resumed_run(pool, tmp_path, case, every)


def check_resumed_run(pool: Pool, tmp_path: Path, case: Case, every: int | str) -> None:
    world = 3
    whole = pool.run(fit, case, str(tmp_path), None, STEPS, every, world=world)
    step = 2 * (every if isinstance(every, int) else 8)
    resume = str(tmp_path / f"step={step}.ckpt")
    resumed = pool.run(fit, case, str(tmp_path), resume, STEPS, every, world=world)
    for (losses, final), (losses_again, final_again) in zip(whole, resumed, strict=True):
        assert sorted(losses_again) == list(range(step, STEPS))
        assert losses_again == {k: v for k, v in losses.items() if k >= step}
        assert torch.equal(final, final_again)
    assert whole[0][0] != whole[1][0]  # the workers saw different data


def test_main_file_is_the_consensus_for_plain_lightning(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit, CASES["gasloc"], str(tmp_path), None, 10, 10, world=4)
    path = tmp_path / "step=10.ckpt"
    workers = sorted(Path(f"{path}.loco").glob("*/worker_*.pt"))
    assert len(workers) == 4
    local = [torch.load(file)["engine"]["params"] for file in workers]
    assert not torch.equal(local[0], local[1])
    module = NoisyModule.load_from_checkpoint(path)
    torch.testing.assert_close(flat(module), torch.stack(local).mean(0))


def test_shared_state_is_written_once(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit, CASES["async_diloco_momentum"], str(tmp_path), None, 10, 10, world=3)
    folder = next(Path(f"{tmp_path}/step=10.ckpt.loco").iterdir())
    shared = torch.load(folder / "shared.pt")
    (lane,) = shared["shared"]
    assert sorted(lane["state"]) == ["momentum", "outer"]
    assert lane["received"] is not None
    assert sorted(p.name for p in folder.iterdir()) == [
        "shared.pt",
        "worker_00000.pt",
        "worker_00001.pt",
        "worker_00002.pt",
    ]
    own = torch.load(folder / "worker_00001.pt")["engine"]
    assert "shared" not in own
    assert "state" not in own["lanes"][0]


def fit_keeping_best(rank: int, world: int, folder: str) -> None:
    checkpoint = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=1, save_last="link"
    )
    trainer = make_trainer(
        LocoStrategy(LocalSGD(), sync_every=3),
        max_steps=8,
        callbacks=[checkpoint],
        enable_checkpointing=True,
    )
    trainer.fit(NoisyModule(), noisy_loader(world))
    again = make_trainer(
        LocoStrategy(LocalSGD(), sync_every=3),
        max_steps=10,
        callbacks=[checkpoint],
        enable_checkpointing=True,
    )
    again.fit(NoisyModule(), noisy_loader(world), ckpt_path=f"{folder}/last.ckpt")
    assert again.global_step == 10


def test_deletion_removes_the_side_files_and_a_link_resumes(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit_keeping_best, str(tmp_path), world=2)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=10.ckpt", "step=10.ckpt.loco"]


def fit_overwriting(rank: int, world: int, folder: str) -> None:
    trainer = make_trainer(LocoStrategy(LocalSGD(), sync_every=3), max_steps=4)
    module = NoisyModule()

    def save_twice(*_: Any) -> None:
        trainer.save_checkpoint(f"{folder}/same.ckpt")

    module.on_train_batch_end = save_twice  # type: ignore[method-assign]
    trainer.fit(module, noisy_loader(world))


def test_overwriting_leaves_one_complete_set(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit_overwriting, str(tmp_path), world=2)
    main = torch.load(tmp_path / "same.ckpt")["lightning_loco"]
    sets = list((tmp_path / "same.ckpt.loco").iterdir())
    assert [folder.name for folder in sets] == [main["stamp"]]
    assert main["stamp"].startswith("step4-")


def test_side_files_of_another_format_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit, CASES["local_sgd"], str(tmp_path), None, 10, 10, world=2)
    path = tmp_path / "step=10.ckpt"
    content = torch.load(path)
    content["lightning_loco"]["format"] = 2
    torch.save(content, path)
    with pytest.raises(
        PoolError, match="have format 2, and this version .* reads format 4"
    ) as error:
        pool.run(fit, CASES["local_sgd"], str(tmp_path), str(path), STEPS, 10, world=2)
    assert sorted(error.value.failures) == [0, 1]


def test_missing_side_file_is_an_error_on_every_worker(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit, CASES["local_sgd"], str(tmp_path), None, 10, 10, world=2)
    path = tmp_path / "step=10.ckpt"
    next(Path(f"{path}.loco").glob("*/worker_00001.pt")).unlink()
    with pytest.raises(PoolError, match="Keep the folder step=10.ckpt.loco beside") as error:
        pool.run(fit, CASES["local_sgd"], str(tmp_path), str(path), STEPS, 10, world=2)
    assert sorted(error.value.failures) == [0, 1]
    assert all("worker_00001.pt" in f.message for f in error.value.failures.values())


def test_plain_checkpoint_is_a_common_start(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit, CASES["local_sgd"], str(tmp_path), None, 10, 10, world=2)
    content = torch.load(tmp_path / "step=10.ckpt")
    del content["lightning_loco"]
    torch.save(content, tmp_path / "plain.ckpt")
    results = pool.run(
        fit, CASES["diloco"], str(tmp_path), str(tmp_path / "plain.ckpt"), 14, 10, world=3
    )
    assert all(min(losses) == 10 for losses, _ in results)

"""The data of an epoch that resumes with another number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import DiLoCo, LocoStrategy
from lightning_loco.app.demo.loader import ResumableDataLoader
from tests.cases import CASES
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.strategies.save_and_resume import (
    STEPS,
    Run,
    SaveAt,
    fit,
    recorded_warnings,
    resume_each,
)
from tests.strategies.test_resume import VALIDATIONS

SAMPLES = 24  # samples in an epoch: 8 batches for each of 3 workers
LOADERS = {
    "stateful": StatefulDataLoader,
    "resumable": ResumableDataLoader,
    "ordinary": DataLoader,
}
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
]


class Reading(pl.LightningModule):
    """Records the number of each sample, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (samples,) = batch
        self.seen += [(self.current_epoch, int(sample)) for sample in samples]
        return (self.weight - samples.mean()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Saving(pl.Callback):
    """Saves at a step, and ends the run."""

    def __init__(self, path: str, at: int) -> None:
        self.path = path
        self.at = at

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def read(
    rank: int,
    world: int,
    kind: str,
    path: str,
    save_at: int,
    resume: str | None,
    sync_every: int | list[int] = 2,
) -> tuple[list[tuple[int, int]], list[str]]:
    """Return this worker's training samples, and the warnings."""
    module = Reading()
    at = save_at if isinstance(sync_every, int) else save_at * sync_every[rank % 2]
    trainer = make_trainer(
        LocoStrategy(DiLoCo(), sync_every=sync_every, timeout_s=30),
        max_epochs=2,
        callbacks=[Saving(path, at)],
    )
    data = TensorDataset(torch.arange(float(SAMPLES)))
    loader = LOADERS[kind](data, batch_size=1, shuffle=kind == "ordinary")
    with recorded_warnings() as warned:
        trainer.fit(module, loader, ckpt_path=resume)
    return module.seen, warned


def read_each(
    rank: int, world: int, runs: Sequence[tuple[str, int, str]]
) -> list[tuple[list[tuple[int, int]], list[str]]]:
    """Resume several runs from a checkpoint, in one job."""
    return [read(rank, world, "stateful", *run) for run in runs]


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    cover(
        [
            pytest.param(3, 2, id="3 to 2"),
            pytest.param(2, 3, id="2 to 3"),
            pytest.param(3, 1, id="3 to 1"),
            pytest.param(1, 2, id="1 to 2"),
        ],
        LOADERS,
        strength=1,
    ),
)
def test_no_sample_is_skipped_or_repeated(
    pool: Pool, tmp_path: Path, before: int, now: int, kind: str
) -> None:
    """Half of the samples are read before the number of workers changes, half after it."""
    path, steps = str(tmp_path / "cut.ckpt"), SAMPLES // 2 // before
    first = pool.run(read, kind, path, steps, None, world=before)
    then = pool.run(read, kind, str(tmp_path / "no.ckpt"), -1, path, world=now)
    assert all(len(seen) == steps for seen, _ in first)
    of_epoch = [seen for worker in (*first, *then) for seen in worker[0] if seen[0] == 0]
    if now > 1 and before > 1 or kind != "ordinary":  # a single worker draws another shuffle
        assert sorted(sample for _, sample in of_epoch) == list(range(SAMPLES))
    assert len(of_epoch) == SAMPLES
    later = [seen for worker in then for seen in worker[0] if seen[0] == 1]
    assert sorted(sample for _, sample in later) == list(range(SAMPLES))
    left = SAMPLES // 2 // now
    note = f"the data of the epoch are divided again, from batch {left} of {2 * left} on"
    assert note in then[0][1][0]


def test_a_finished_epoch_is_not_read_again(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "cut.ckpt")
    pool.run(read, "stateful", path, SAMPLES // 3, None, world=3)
    then = pool.run(read, "stateful", str(tmp_path / "no.ckpt"), -1, path, world=2)
    for seen, _ in then:
        assert [epoch for epoch, _ in seen] == [1] * (SAMPLES // 2)


def test_a_run_with_divided_data_is_resumed_exactly(pool: Pool, tmp_path: Path) -> None:
    """Checkpoints of the resumed run have the new positions."""
    first, second, end = (str(tmp_path / f"{name}.ckpt") for name in ("first", "second", "no"))
    pool.run(read, "stateful", first, 4, None, world=3)
    runs = [(end, -1, first), (second, 7, first), (end, -1, second)]
    for whole, cut, rest in pool.run(read_each, runs, world=2):
        assert len(cut[0]) == 3
        assert whole[0] == cut[0] + rest[0]
        assert rest[1] == []


def test_unequal_shares_can_change(pool: Pool, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """In 4 of 8 rounds, workers read 1 and 2 samples."""
    path, end = str(tmp_path / "cut.ckpt"), str(tmp_path / "no.ckpt")
    first = pool.run(read, "stateful", path, 4, None, [1, 2], world=2)
    assert [len(seen) for seen, _ in first] == [4, 8]
    for now in [[1, 1, 2], [2, 1], [1], [1, 2]]:
        with subtests.test(now=now):
            shares = [3 * n for n in now]
            then = pool.run(read, "stateful", end, -1, path, shares, world=len(now))
            for epoch in (0, 1):
                seen = [one for worker in (*first, *then) for at, one in worker[0] if at == epoch]
                assert sorted(seen) == list(range(SAMPLES))
            assert bool(then[0][1]) == (now != [1, 2])
    with pytest.raises(PoolError, match="sync_every lists 2 numbers for 3 workers") as error:
        pool.run(read, "stateful", end, -1, path, [1, 2], world=3)
    assert sorted(error.value.failures) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:Using `isinstance")
@pytest.mark.parametrize(
    ("validation", "points"),
    [
        pytest.param(
            "every epoch",
            {"batch 8": [13, 19, 25], "batch 12": [12, 18, 24], "epoch 12": [18, 24]},
            marks=pytest.mark.soak,
        ),
        ("every 4 steps", {"batch 8": [8, 12, 16, 20, 24], "validation 12": [16, 20, 24]}),
    ],
)
def test_validations_are_made_when_they_are_due(
    pool: Pool, tmp_path: Path, validation: str, points: dict[str, list[int]]
) -> None:
    """An epoch has 6 batches; 2 batches of 2 workers are 1 of 3 workers, so one more remains."""
    run = Run(
        CASES["async_diloco"],
        str(tmp_path),
        [SaveAt(*points)],
        validates=True,
        trainer=VALIDATIONS[validation],
    )
    pool.run(fit, run, world=2)
    paths = [f"{point}.ckpt" for point in points]
    for resumed in pool.run(resume_each, replace(run, callbacks=[]), paths, world=3):
        for (point, expected), outcome in zip(points.items(), resumed, strict=True):
            assert sorted(outcome.losses) == list(range(int(point.split()[1]), STEPS))
            assert sorted(outcome.validated) == expected

"""Checkpoints: an ordinary main file, and side files for an exact resume."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.cases import CASES, Case, params
from tests.harness.cover import cover
from tests.harness.pool import Pool
from tests.harness.small_model import flat
from tests.strategies.save_and_resume import (
    DrawingModule,
    Run,
    SaveEvery,
    check_resumed,
    first_steps,
    fit,
    train_save_resume,
)

pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Using `isinstance"),
]


@pytest.mark.parametrize(
    ("case", "in_validation"),
    [
        *cover(params("resume"), [False, True], strength=1),
        *cover([pytest.param(CASES["async_diloco"], id="async_diloco")], [True]),
    ],
)
def test_resumed_run_equals_uninterrupted_run(
    pool: Pool, tmp_path: Path, case: Case, in_validation: bool
) -> None:
    """Resume during a round, and at the end of an epoch that is also the end of a round.

    With three workers the result depends on the partners of each exchange.
    """
    epochs = {"every_n_epochs": 2, "save_on_train_epoch_end": not in_validation}
    run = Run(
        case,
        str(tmp_path),
        callbacks=[
            ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **settings)
            for settings in ({"every_n_train_steps": 10}, epochs)
        ],
        max_steps=17,
        validates=in_validation,
        trainer={"enable_checkpointing": True},
    )
    world = 2 if case.graph is None else 3
    steps = (10, 12)
    paths = [f"step={step}.ckpt" for step in steps]
    whole, *resumed = zip(*pool.run(train_save_resume, run, paths, world=world), strict=True)
    for step, outcomes in zip(steps, resumed, strict=True):
        assert first_steps(outcomes) == [step] * world
        check_resumed(whole, outcomes, f"from step {step}")
    assert whole[0].losses != whole[1].losses  # the workers had different data


def test_main_file_is_the_consensus_for_plain_lightning(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit, Run(CASES["gasloc"], str(tmp_path), [SaveEvery(6)], 6), world=3)
    path = tmp_path / "often.ckpt"
    workers = sorted(Path(f"{path}.loco").glob("*/worker_*.pt"))
    assert len(workers) == 3
    local = [torch.load(file)["engine"]["params"] for file in workers]
    assert not torch.equal(local[0], local[1])
    module = DrawingModule.load_from_checkpoint(path)
    torch.testing.assert_close(flat(module), torch.stack(local).mean(0))


def test_shared_state_is_written_once(pool: Pool, tmp_path: Path) -> None:
    run = Run(CASES["async_diloco_momentum"], str(tmp_path), [SaveEvery(10)], 10)
    pool.run(fit, run, world=2)
    folder = next(Path(f"{tmp_path}/often.ckpt.loco").iterdir())
    shared = torch.load(folder / "shared.pt")
    (fragment,) = shared["shared"]
    assert sorted(fragment["state"]) == ["momentum", "outer"]
    assert fragment["received"] is not None
    assert sorted(p.name for p in folder.iterdir()) == [
        "shared.pt",
        "worker_00000.pt",
        "worker_00001.pt",
    ]
    own = torch.load(folder / "worker_00001.pt")["engine"]
    assert "shared" not in own
    assert "state" not in own["fragments"][0]


def test_deletion_removes_the_side_files_and_a_link_resumes(pool: Pool, tmp_path: Path) -> None:
    newest = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=1, save_last="link"
    )
    settings = {"enable_checkpointing": True}
    run = Run(CASES["local_sgd"], str(tmp_path), [newest], 8, trainer=settings)
    results = pool.run(train_save_resume, run, ["last.ckpt"], replace(run, max_steps=10), world=2)
    for _, again in results:
        assert sorted(again.losses) == [8, 9]
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=10.ckpt", "step=10.ckpt.loco"]


def test_overwriting_leaves_one_complete_set(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit, Run(CASES["local_sgd"], str(tmp_path), [SaveEvery(1)], 4), world=2)
    main = torch.load(tmp_path / "often.ckpt")["lightning_loco"]
    sets = list((tmp_path / "often.ckpt.loco").iterdir())
    assert [folder.name for folder in sets] == [main["stamp"]]
    assert main["stamp"].startswith("step4-")


def test_plain_checkpoint_is_a_common_start(pool: Pool, tmp_path: Path) -> None:
    run = Run(CASES["local_sgd"], str(tmp_path), [SaveEvery(10)], 10)
    pool.run(fit, run, world=1)
    content = torch.load(tmp_path / "often.ckpt")
    del content["lightning_loco"]
    torch.save(content, tmp_path / "plain.ckpt")
    again = Run(CASES["diloco"], str(tmp_path), max_steps=14)
    assert first_steps(pool.run(fit, again, "plain.ckpt", world=2)) == [10, 10]

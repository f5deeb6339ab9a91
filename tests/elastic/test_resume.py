"""Runs that resume from the checkpoints of their jobs, with different numbers of jobs."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_loco import DiLoCoStrategy
from tests.elastic import resume_worker
from tests.elastic.cluster import Cluster, cluster, until
from tests.elastic.resume_worker import SYNC_EVERY
from tests.elastic.test_fit import check_samples
from tests.elastic.trainer_worker import Model, Numbered
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import quiet_trainer

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:You're resuming from a")]


def saved_round(path: Path) -> int:
    (file,) = Path(f"{path}.loco").glob("*/worker_00000.pt")
    return int(torch.load(file)["engine"]["round_index"])


def newest(folder: Path, index: int) -> Path:
    """Return the last checkpoint of a job, regular or interrupted."""
    return max((folder / str(index)).glob("*.ckpt"), key=lambda path: path.stat().st_mtime)


def start_of(folder: Path, index: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / str(index) / "start.json").read_text())
    return found


def checksum_of(state: dict[str, Any]) -> int:
    value = 0
    for _, vector in sorted(state.items()):
        value = zlib.crc32(vector.numpy().tobytes(), value)
    return value


def samples_of(workers: Cluster, indices: range, first: int = 0, last: int = 10**9) -> set[int]:
    """Return the samples that jobs used in a range of rounds."""
    lines = [line for index in indices for line in workers.lines(index)]
    return {s for line in lines if first <= line["round"] <= last for s in line["samples"]}


def learning_rates(steps: int) -> list[float]:
    """Return the learning rates after each number of steps."""
    (optimizer,), (config,) = Model().configure_optimizers()
    rates = []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        config["scheduler"].step()
    return rates


def check_positions(workers: Cluster, indices: range) -> None:
    """Check that steps and learning rates of all members fit the rounds."""
    rates = learning_rates(400)
    steps: dict[int, int] = {}
    for index in indices:
        for line in workers.lines(index):
            assert line["lr"] == pytest.approx(rates[line["steps"]], rel=1e-12)
            assert steps.setdefault(line["round"], line["steps"]) == line["steps"]


def end_four_jobs(folder: Path, *schedule: str, more: int = 4) -> tuple[list[Path], Cluster]:
    """End jobs one after the other; return the last checkpoints of three of them."""
    folder.mkdir()
    with cluster(folder, "--max-steps=4000", *schedule, program=resume_worker.main) as workers:
        for index in range(4):
            workers.start(index)
        workers.wait_for_round(0, 3)
        workers.kill(3)
        workers.wait_for_round(0, 5)
        workers.kill(0, SIGTERM)
        workers.exit_status(0)
        workers.wait_for_round(1, workers.lines(0)[-1]["round"] + more)
        workers.kill(1, SIGKILL)
        workers.kill(2, SIGKILL)
    return [newest(folder, index) for index in range(3)], workers


@pytest.mark.parametrize(
    "schedule",
    [pytest.param((), id="blocking"), pytest.param(("--overlap",), id="overlap")],
)
@pytest.mark.soak
def test_four_jobs_resume_as_three_then_as_five(tmp_path: Path, schedule: tuple[str, ...]) -> None:
    paths, before = end_four_jobs(tmp_path / "first", *schedule)
    rounds = [saved_round(path) for path in paths]
    assert rounds[0] + 2 < max(rounds)
    folder = tmp_path / "second"
    folder.mkdir()
    steps = SYNC_EVERY * (max(rounds) + 25)
    with cluster(folder, f"--max-steps={steps}", *schedule, program=resume_worker.main) as workers:
        order = sorted(range(3), key=lambda index: -rounds[index])
        for index in order:
            workers.start(index, f"--resume={paths[index]}")
        for index in range(3):
            workers.wait_for_round(index, max(rounds) + 5)
        workers.start(3)
        workers.start(4)
        until(
            lambda: len(workers.lines(3)) > 3 and len(workers.lines(4)) > 3,
            "rounds of joining workers",
        )
        workers.wait_for_success(*range(5))
        workers.check_rounds()
        check_samples(workers, *range(5))
        check_positions(workers, range(5))
        for index in range(5):
            lines = workers.lines(index)
            assert lines[0]["round"] >= max(rounds)
            assert lines[-1]["steps"] == steps
        assert {len(line["members"]) for line in workers.lines(order[0])} >= {3, 5}
        trained = samples_of(before, range(4), last=max(rounds))
        assert len(trained) > 50
        assert not trained & samples_of(workers, range(5))
        assert min(start_of(folder, index)["round"] for index in range(3)) == max(rounds)


@pytest.mark.soak
def test_others_resume_from_the_state_of_a_job_with_a_later_checkpoint(tmp_path: Path) -> None:
    paths, _ = end_four_jobs(tmp_path / "first", more=40)
    rounds = [saved_round(path) for path in paths]
    last = rounds.index(max(rounds))
    folder = tmp_path / "second"
    folder.mkdir()
    steps = SYNC_EVERY * (max(rounds) + 20)
    with cluster(folder, f"--max-steps={steps}", program=resume_worker.main) as workers:
        for index in (3, 4):
            workers.start(index, f"--resume={paths[0]}")
        workers.wait_for_round(3, rounds[0] + 1)
        workers.start(last, f"--resume={paths[last]}")
        workers.wait_for_success(last, 3, 4)
        own = {line["round"]: line["checksum"] for line in workers.lines(last)}
        assert min(own) > max(rounds)
        for index in (3, 4):
            found = {line["round"]: line["checksum"] for line in workers.lines(index)}
            common = found.keys() & own.keys()
            assert len(common) >= 15
            assert max(rounds) not in found  # they skipped it
            assert all(found[round_index] == own[round_index] for round_index in common)


def test_jobs_that_start_from_a_checkpoint_of_plain_lightning_end_together(tmp_path: Path) -> None:
    """Local steps continue from the checkpoint, also for the job that receives the state."""
    path, module = tmp_path / "plain.ckpt", Model()
    trainer = quiet_trainer(max_steps=10)
    trainer.fit(module, DataLoader(Numbered(), batch_size=2))
    trainer.save_checkpoint(path)
    with cluster(tmp_path, "--max-steps=31", program=resume_worker.main) as workers:
        for index in range(2):
            workers.start(index, f"--resume={path}")
        workers.wait_for_success(0, 1)
        workers.check_rounds()
        assert [start_of(tmp_path, index)["steps"] for index in range(2)] == [10, 10]
        assert workers.lines(0)[-1]["steps"] == workers.lines(1)[-1]["steps"] == 31


# ----------------------------------------------------------------------- static runs


def fit_static(
    rank: int, world: int, path: str, max_steps: int, resume: str | None = None
) -> tuple[set[int], list[str], int]:
    """Return samples, warnings, and a checksum of the outer state where training started."""
    import warnings

    from lightning.pytorch import Callback

    from tests.elastic.worker import checksum

    samples: set[int] = set()
    sums: list[int] = []

    class Note(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, i: int) -> None:
            sums.append(checksum(trainer.strategy.engine))
            samples.update(batch[0].tolist())

    strategy = DiLoCoStrategy(sync_every=SYNC_EVERY, timeout_s=30)
    trainer = make_trainer(strategy, max_steps=max_steps, callbacks=[Note()])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(Model(), DataLoader(Numbered(), batch_size=2, shuffle=True), ckpt_path=resume)
        warned = [str(one.message) for one in found if "go on from it" in str(one.message)]
    return samples, warned, sums[0]


def fit_and_save(rank: int, world: int, path: str) -> set[int]:
    """Return the samples of a static run that saves during a round, at its end."""
    strategy = DiLoCoStrategy(sync_every=SYNC_EVERY, timeout_s=30)
    samples: set[int] = set()
    module = Model()

    def on_train_batch_end(out: Any, batch: Any, index: int) -> None:
        samples.update(batch[0].tolist())
        if module.trainer.global_step == 10:
            module.trainer.save_checkpoint(path)

    module.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]
    trainer = make_trainer(strategy, max_steps=10)
    trainer.fit(module, DataLoader(Numbered(), batch_size=2, shuffle=True))
    return samples


@pytest.mark.soak
def test_a_static_run_continues_as_jobs_and_back(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "static.ckpt"
    trained = set().union(*pool.run(fit_and_save, str(path), world=4))
    assert len(trained) == 4 * 2 * 10
    (stamp,) = Path(f"{path}.loco").iterdir()
    (fragment,) = torch.load(stamp / "shared.pt")["shared"]
    folder = tmp_path / "jobs"
    folder.mkdir()
    with cluster(folder, "--max-steps=41", program=resume_worker.main) as workers:
        for index in range(3):
            workers.start(index, f"--resume={path}")
        workers.wait_for_success(0, 1, 2)
        workers.check_rounds()
        check_samples(workers, 0, 1, 2)
        check_positions(workers, range(3))
        for index in range(3):
            start = start_of(folder, index)
            assert start["checksum"] == checksum_of(fragment["state"]) or start["round"] > 2
            text = workers.output(index)
            assert text.count("The checkpoint was written by 4 workers with DiLoCo") == 1
            assert "and positions of workers 1 to 3 are dropped" in text
            assert "all workers start from the consensus" in text
        assert min(start_of(folder, index)["steps"] for index in range(3)) == 10
        assert not trained & samples_of(workers, range(3))
    back = folder / "0" / "often.ckpt"
    (stamp,) = Path(f"{back}.loco").iterdir()
    (fragment,) = torch.load(stamp / "shared.pt")["shared"]
    results = pool.run(fit_static, str(path), 50, str(back), world=2)
    assert [first for _, _, first in results] == [checksum_of(fragment["state"])] * 2
    assert [len(warned) for _, warned, _ in results] == [1, 0]
    assert "was written by 1 worker with DiLoCo, and 2 workers with DiLoCo" in results[0][1][0]
    assert "new are worker 1, with the optimizers" in results[0][1][0]

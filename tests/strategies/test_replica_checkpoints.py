"""Checkpoints of workers of several ranks: exact resume, other numbers of ranks, and failures."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import DiLoCo, GASLoC, LocoStrategy
from lightning_loco.compression import ErrorFeedback, Int8
from lightning_loco.engine.gathered_state import gather_state
from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO
from lightning_loco.strategies.checkpoint.writer import Save
from tests.cases import CASES, Case
from tests.harness.pool import Pool, PoolEnvironment, PoolError, make_trainer
from tests.harness.small_model import TinyModule, flat, quiet_trainer
from tests.strategies import save_and_resume
from tests.strategies.families import loader
from tests.strategies.save_and_resume import (
    Outcome,
    Run,
    SaveAt,
    SaveEvery,
    check_resumed,
    files_in,
    first_steps,
    train_save_resume,
)
from tests.strategies.test_divided_data import SAMPLES, Reading, Saving
from tests.strategies.test_other_numbers import assert_same, copied, files_of
from tests.strategies.test_resume import Interrupt, fit_interrupted

SIZE = 2  # ranks of a worker
WORLD = 4
STEPS = 12
SAVED_AT = 10
EXACT = 1e-11
INT8 = {"compression": Int8(8)}  # with blocks that span several of the few parameters
FEEDBACK = {"compression": ErrorFeedback(Int8(8))}
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Method(NamedTuple):
    """A method, and more settings of its strategy."""

    case: Case
    settings: dict[str, Any] = {}


METHODS = {
    "local_sgd": Method(CASES["local_sgd"]),
    "diloco": Method(CASES["diloco"]),
    "diloco, error feedback": Method(CASES["diloco"], FEEDBACK),
    "diloco, Adam outside": Method(CASES["diloco_adamw"]),  # the first rank owns all
    "async_diloco": Method(CASES["async_diloco_momentum"], FEEDBACK),
    "fragments": Method(Case(DiLoCo(0.4, 0.3), fragments=2, delay=3, mix=0.5)),
    "gasloc, int8": Method(Case(GASLoC(momentum=0.3), "ring"), INT8),
    "gasloc_overlap, int8": Method(CASES["gasloc_overlap"], INT8),
    "by the clock": Method(CASES["async_model_average"]),
}


class OwnRandomNumbers(pl.Callback):
    """Gives each rank a different random seed."""

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        torch.manual_seed(100 + trainer.global_rank)


class OwnInterrupt(Interrupt, OwnRandomNumbers):
    """Interrupts a run with :class:`OwnRandomNumbers`."""


def run_of(method: str, folder: Path | Sequence[str], *callbacks: pl.Callback, **more: Any) -> Run:
    """Return a run of workers of two ranks, which saves at the points of the callbacks."""
    case, settings = METHODS[method]
    strategy = {"replica_size": SIZE, "timeout_s": 30, **settings, **more}
    where = str(folder) if isinstance(folder, Path) else folder
    return Run(case, where, [OwnRandomNumbers(), *callbacks], STEPS, strategy=strategy)


# ------------------------------------------------------------------- exact resume


def pending_in(path: Path) -> bool:
    """Whether a fragment of the first worker has a pending round in a checkpoint."""
    fragments = files_of(path).workers[0]["engine"]["fragments"]
    return any(fragment["pending"] is not None for fragment in fragments)


@pytest.mark.parametrize(
    ("method", "point"),
    [
        ("local_sgd", "batch 9"),
        ("diloco", "batch 10"),
        ("diloco, error feedback", "batch 9"),
        ("diloco, Adam outside", "batch 10"),
        ("async_diloco", "batch 10"),
        ("fragments", "batch 9"),
        ("gasloc, int8", "batch 9"),
        ("gasloc_overlap, int8", "batch 10"),
    ],
)
def test_resumed_run_equals_uninterrupted_run(
    pool: Pool, tmp_path: Path, method: str, point: str
) -> None:
    """During a round; with dropout, BatchNorm, AdamW, a schedule and shuffled data."""
    again = run_of(method, tmp_path)
    run = run_of(method, tmp_path, SaveAt(point))
    results = pool.run(train_save_resume, run, [f"{point}.ckpt"], again, world=WORLD)
    whole, resumed = zip(*results, strict=True)
    assert len({str(outcome.losses) for outcome in whole}) == WORLD
    assert first_steps(resumed) == [int(point.split()[1])] * WORLD
    check_resumed(whole, resumed, f"{method} from {point}")
    shared = ["shared.pt"] if METHODS[method].case.algorithm.replicated else []
    workers = [f"worker_{worker:05d}.pt" for worker in range(WORLD // SIZE)]
    side = [f"{point}.ckpt.loco/S/{name}" for name in [*shared, *workers]]
    assert files_in(tmp_path) == [f"{point}.ckpt", *side]
    is_late = method in ("async_diloco", "fragments", "gasloc_overlap, int8")
    assert pending_in(tmp_path / f"{point}.ckpt") == is_late
    assert all(outcome.warned == [] for outcome in resumed)


def test_the_end_of_an_epoch_with_validations(pool: Pool, tmp_path: Path) -> None:
    again = replace(run_of("diloco", tmp_path), validates=True)
    run = replace(again, callbacks=[OwnRandomNumbers(), SaveAt("validation 6", "epoch 6")])
    paths = ["validation 6.ckpt", "epoch 6.ckpt"]
    whole, *resumed = zip(*pool.run(train_save_resume, run, paths, again, world=WORLD), strict=True)
    for path, outcomes in zip(paths, resumed, strict=True):
        check_resumed(whole, outcomes, path)


def test_a_run_that_is_stopped_saves_and_resumes(pool: Pool, tmp_path: Path) -> None:
    """One rank gets the signal, not the first of its worker."""
    run = replace(run_of("async_diloco", tmp_path), max_steps=24)
    interrupt = OwnInterrupt(signal.SIGTERM, 9, 3)
    pool.run(fit_interrupted, run, None, interrupt, world=WORLD)
    results = pool.run(train_save_resume, run, ["interrupted.ckpt"], world=WORLD)
    whole, resumed = zip(*results, strict=True)
    assert len({*first_steps(resumed)}) == 1
    check_resumed(whole, resumed, "SIGTERM on rank 3")


def test_model_checkpoint_keeps_and_deletes_whole_saves(pool: Pool, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=1)
    monitor = "val/dataloader_idx_0"
    best = ModelCheckpoint(tmp_path / "best", "{step}", monitor=monitor, save_top_k=1)
    run = replace(
        run_of("diloco", tmp_path, checkpoint, best),
        validates=True,
        trainer={"enable_checkpointing": True},
    )
    whole = pool.run(save_and_resume.fit, run, world=WORLD)
    names = sorted(os.listdir(tmp_path))
    assert names == ["best", "step=12.ckpt", "step=12.ckpt.loco"]
    (main, folder) = sorted(os.listdir(tmp_path / "best"))
    assert folder == f"{main}.loco"
    assert len(list(tmp_path.rglob("worker_*.pt"))) == 2 * WORLD // SIZE
    again = pool.run(save_and_resume.fit, replace(run, max_steps=14), str(tmp_path / names[1]))
    assert first_steps(again) == [STEPS] * WORLD
    assert len(whole) == len(again)


def test_averaging_by_the_clock_goes_on(pool: Pool, tmp_path: Path) -> None:
    """The run cannot be repeated exactly, but the ranks of a worker stay equal."""
    again = run_of("by the clock", tmp_path)
    run = run_of("by the clock", tmp_path, SaveEvery(9))
    results = pool.run(train_save_resume, run, ["often.ckpt"], again, world=WORLD)
    resumed = [resumed for _, resumed in results]
    assert first_steps(resumed) == [9] * WORLD
    for first in range(0, WORLD, SIZE):
        assert torch.equal(resumed[first].state, resumed[first + 1].state)


def test_weights_alone_have_no_side_files(pool: Pool, tmp_path: Path) -> None:
    run = run_of("diloco", tmp_path, SaveEvery(6, "one.ckpt", weights_only=True))
    pool.run(save_and_resume.fit, run, world=WORLD)
    assert files_in(tmp_path) == ["one.ckpt"]


# --------------------------------------------------- the files do not depend on the ranks


def fit_rows(rank: int, world: int, method: str, size: int, path: str) -> None:
    """Train on the same rows with a given number of ranks per worker, and save during a round."""
    case, settings = METHODS[method]
    trainer = make_trainer(
        case.strategy(4, replica_size=size, timeout_s=30, **settings),
        max_steps=SAVED_AT,
        callbacks=[SaveEvery(SAVED_AT, path)],
        use_distributed_sampler=False,
    )
    module = TinyModule(lr=0.01, optimizer="Adam")
    trainer.fit(module, loader(rank, size, SAVED_AT))


def check_close(found: Any, expected: Any, name: str, tolerance: float = EXACT) -> None:
    """Check that two trees have the same entries, and nearly the same numbers."""
    if isinstance(expected, Tensor) and expected.is_floating_point():
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=name)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            check_close(found[key], value, f"{name}, {key}", tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), name
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_close(one, other, f"{name}, {index}", tolerance)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=tolerance, nan_ok=True), name
    else:
        assert_same(found, expected)


@pytest.mark.parametrize("method", ["diloco", "fragments", "gasloc_overlap, int8"])
def test_files_are_those_of_workers_of_one_rank(pool: Pool, tmp_path: Path, method: str) -> None:
    one, several = tmp_path / "one.ckpt", tmp_path / "several.ckpt"
    pool.run(fit_rows, method, 1, str(one), world=WORLD // SIZE)
    pool.run(fit_rows, method, SIZE, str(several), world=WORLD)
    expected, found = files_of(one), files_of(several)
    check_close(found.main["state_dict"], expected.main["state_dict"], "the consensus")
    manifests = [dict(files.main["lightning_loco"]) for files in (found, expected)]
    stamps = [manifest.pop("stamp") for manifest in manifests]
    assert manifests[0] == manifests[1]
    assert [re.sub("-.*", "", stamp) for stamp in stamps] == [f"step{SAVED_AT}"] * 2
    check_close(without_header(found.shared), without_header(expected.shared), "shared")
    for worker, content in enumerate(found.workers):
        own, theirs = without_header(content), without_header(expected.workers[worker])
        assert len(own.pop("other_ranks")) == SIZE - 1
        assert own.pop("readers") == SIZE
        for state in (own, theirs):
            for ours in ("position", "stream"):
                del state[ours]
            del state["lightning"]["loops"]
            for counter in ("bytes_sent", "wait_s", "bytes_saved"):
                state["engine"]["statistics"].pop(counter, None)
        check_close(own, theirs, f"worker {worker}")


def without_header(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != "seal"}


# ------------------------------------------------------- other numbers of ranks and workers


class Start(NamedTuple):
    """The whole state of a worker right before its first resumed step, and the warnings."""

    step: int
    engine: dict[str, Any] | None
    optimizer: dict[str, Any]
    params: Tensor
    warnings: list[str]


class RecordStart(pl.Callback):
    """Records the whole state of this worker before the first step."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if self.seen:
            return
        engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
        self.seen = {
            "step": trainer.global_step,
            "engine": copied(gather_state(engine.state_dict(), engine.worker.replica)),
            "optimizer": copied(trainer.optimizers[0].state_dict()),
            "params": flat(module).clone(),
        }


def start(rank: int, world: int, size: int, method: str, path: str) -> Start:
    """Resume with workers of several ranks; return the state before the first step."""
    case, settings = METHODS[method]
    recorder = RecordStart()
    trainer = make_trainer(
        case.strategy(4, replica_size=size, timeout_s=30, **settings),
        max_steps=SAVED_AT + 3,
        callbacks=[recorder],
        use_distributed_sampler=False,
    )
    module = TinyModule(lr=0.01, optimizer="Adam")
    with save_and_resume.recorded_warnings() as warned:
        trainer.fit(module, loader(rank, size, SAVED_AT + 3), ckpt_path=path)
    return Start(**recorder.seen, warnings=warned)


def starts_of(pool: Pool, numbers: tuple[int, int], method: str, path: Path) -> list[Start]:
    """Resume with ``numbers`` of workers and of ranks per worker; return the start of each rank."""
    workers, size = numbers
    return pool.run(start, size, method, str(path), world=workers * size)


def of_workers(starts: Sequence[Start], size: int) -> list[Start]:
    """Check that the ranks of each worker start equal; return the starts of the first ranks."""
    for rank, one in enumerate(starts):
        first = starts[rank - rank % size]
        assert torch.equal(one.params, first.params)
        assert_same(one.optimizer, first.optimizer)
        assert (one.engine is None) == (rank % size > 0)
    return [*starts[::size]]


@pytest.fixture(scope="module")
def saved(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, tuple[int, int]], Path]:
    """Return the checkpoint of a method, by the numbers of workers and of ranks per worker."""

    @functools.cache
    def path_of(method: str, numbers: tuple[int, int]) -> Path:
        path = tmp_path_factory.mktemp("saved") / "before.ckpt"
        pool.run(fit_rows, method, numbers[1], str(path), world=numbers[0] * numbers[1])
        return path

    return path_of


Saved = Callable[[str, tuple[int, int]], Path]


def check_like_one_rank(
    pool: Pool, path: Path, method: str, now: tuple[int, int]
) -> tuple[list[Start], list[Start]]:
    """Check that workers of several ranks start like workers of one rank."""
    workers, size = now
    ranks = starts_of(pool, now, method, path)
    found, expected = of_workers(ranks, size), starts_of(pool, (workers, 1), method, path)
    for one, other in zip(found, expected, strict=True):
        assert one.step == other.step == SAVED_AT
        assert one.engine is not None
        assert other.engine is not None
        for state in (one.engine, other.engine):
            del state["statistics"]
        check_close(one.engine, other.engine, "the engine", 0.0)
        assert torch.equal(one.params, other.params)
        assert_same(one.optimizer, other.optimizer)
    assert [len(one.warnings) > 0 for one in ranks[1:]] == [False] * (len(ranks) - 1)
    return found, expected


@pytest.mark.parametrize("method", ["async_diloco", "fragments", "gasloc_overlap, int8"])
def test_two_workers_may_have_another_number_of_ranks(
    pool: Pool, saved: Saved, method: str
) -> None:
    """With the saved states, including a pending round."""
    path = saved(method, (2, 2))
    assert pending_in(path)
    files = files_of(path)
    for found in check_like_one_rank(pool, path, method, (2, 2)):
        for one, content in zip(found, files.workers, strict=True):
            expected = {**content["engine"], **files.shared}
            assert one.engine is not None
            for name in ("params", "fragments", "shared", "began_at", "round_index", "steps"):
                check_close(one.engine[name], expected[name], name, 0.0)
            assert_same(one.optimizer, content["lightning"]["optimizer_states"][0])


NUMBERS = [((2, 2), (1, 4)), ((2, 2), (4, 1)), ((2, 2), (3, 1)), ((4, 1), (2, 2)), ((4, 1), (1, 3))]


@pytest.mark.parametrize(
    ("method", "before", "now"),
    [
        ("gasloc_overlap, int8", *NUMBERS[0]),
        ("diloco, error feedback", *NUMBERS[1]),
        ("async_diloco", *NUMBERS[2]),
        ("gasloc_overlap, int8", *NUMBERS[3]),
        ("diloco, Adam outside", *NUMBERS[4]),
    ],
    ids=str,
)
def test_another_number_of_workers(
    pool: Pool, saved: Saved, method: str, before: tuple[int, int], now: tuple[int, int]
) -> None:
    path, names = saved(method, before), [numbered(*numbers) for numbers in (before, now)]
    if now[1] == 1:
        found = starts_of(pool, now, method, path)
    else:
        found, _ = check_like_one_rank(pool, path, method, now)
    files = files_of(path)
    for one in found:
        assert torch.equal(one.params, files.consensus)
        assert one.engine is not None
        if files.shared:
            assert_same(one.engine["shared"][0]["state"], files.of_fragment(0))
    (text,) = found[0].warnings
    kind = type(METHODS[method].case.algorithm).__name__
    assert f"was written by {names[0]} with {kind}, and {names[1]} with {kind} go on" in text


def numbered(workers: int, size: int) -> str:
    text = f"{workers} workers" if workers > 1 else "1 worker"
    return f"{text} of {size} ranks" if size > 1 else text


def test_the_warning_names_random_numbers_of_new_and_removed_ranks(
    pool: Pool, saved: Saved
) -> None:
    path = saved("diloco", (2, 2))
    (text,) = starts_of(pool, (2, 1), "diloco", path)[0].warnings
    assert "2 workers of 2 ranks with DiLoCo, and 2 workers with DiLoCo" in text
    assert "the random numbers of place 1 of a worker are dropped" in text
    path = saved("diloco", (1, 1))
    (text,) = starts_of(pool, (1, 3), "diloco", path)[0].warnings
    assert "new are places 1 to 2 of a worker, with random numbers from their own seed" in text


def test_a_pending_round_is_dropped_by_blocking_rounds(pool: Pool, saved: Saved) -> None:
    """Other settings make it another run; each rank takes the elements that it owns."""
    found, _ = check_like_one_rank(pool, saved("async_diloco", (2, 2)), "diloco", (2, 2))
    assert "a pending round is dropped" in found[0].warnings[0]
    assert "the residual of the compression is dropped" in found[0].warnings[0]


def test_another_algorithm_starts_at_the_consensus(pool: Pool, saved: Saved) -> None:
    path = saved("fragments", (2, 2))
    found, _ = check_like_one_rank(pool, path, "gasloc_overlap, int8", (2, 2))
    assert torch.equal(found[0].params, files_of(path).consensus)


def test_plain_lightning_reads_the_main_file(saved: Saved) -> None:
    path = saved("gasloc_overlap, int8", (2, 2))
    files = files_of(path)
    assert torch.equal(flat(TinyModule.load_from_checkpoint(path)), files.consensus)
    trainer = quiet_trainer(devices=1, max_steps=SAVED_AT + 1)
    trainer.fit(TinyModule(lr=0.01, optimizer="Adam"), loader(0, 1, 20), ckpt_path=str(path))
    assert trainer.global_step == SAVED_AT + 1


# ------------------------------------------------------------------------------- data


def read(
    rank: int, world: int, size: int, path: str, save_at: int, resume: str | None
) -> list[tuple[int, int]]:
    """Return the epochs and samples that this rank trains on."""
    module = Reading()
    trainer = make_trainer(
        LocoStrategy(DiLoCo(), sync_every=2, replica_size=size, timeout_s=30),
        max_epochs=2,
        callbacks=[Saving(path, save_at)],
    )
    data = TensorDataset(torch.arange(float(SAMPLES)))
    with save_and_resume.recorded_warnings():
        trainer.fit(module, StatefulDataLoader(data, batch_size=1), ckpt_path=resume)
    return module.seen


@pytest.mark.parametrize(
    ("before", "now"),
    [((2, 2), (2, 1)), ((2, 2), (1, 4)), ((2, 2), (3, 1)), ((1, 1), (2, 2)), ((1, 3), (1, 1))],
    ids=str,
)
def test_no_sample_is_skipped_or_repeated(
    pool: Pool, tmp_path: Path, before: tuple[int, int], now: tuple[int, int]
) -> None:
    """Half of an epoch is read before the number of ranks changes, half after it."""
    path, ranks = str(tmp_path / "cut.ckpt"), before[0] * before[1]
    steps = SAMPLES // 2 // ranks
    first = pool.run(read, before[1], path, steps, None, world=ranks)
    world = now[0] * now[1]
    then = pool.run(read, now[1], str(tmp_path / "no.ckpt"), -1, path, world=world)
    assert [len(seen) for seen in first] == [steps] * ranks
    for epoch, runs in ((0, [*first, *then]), (1, then)):
        samples = sorted(sample for seen in runs for at, sample in seen if at == epoch)
        assert len(samples) == SAMPLES
        if epoch == 1 or 1 not in (ranks, world):  # a single rank draws another order
            assert samples == list(range(SAMPLES))


# ----------------------------------------------------------------- separate disks


def run_on(disk_of: Sequence[Path], *callbacks: pl.Callback, **more: Any) -> Run:
    """Return a run in which each rank has one of several disks."""
    folders = [str(disk) for disk in disk_of]
    return run_of("diloco", folders, *callbacks, checkpoint_folder="private", **more)


def test_workers_with_disks_of_their_own(pool: Pool, tmp_path: Path) -> None:
    disks = [tmp_path / f"disk{worker}" for worker in range(2)]
    of_ranks = [disks[0], disks[0], disks[1], disks[1]]
    again, run = run_on(of_ranks), run_on(of_ranks, SaveEvery(5, "one.ckpt"))
    results = pool.run(train_save_resume, run, ["one.ckpt"], again, world=WORLD)
    whole, resumed = zip(*results, strict=True)
    assert first_steps(resumed) == [10] * WORLD
    check_resumed(whole, resumed, "private folders")
    for worker, disk in enumerate(disks):
        side = [f"one.ckpt.loco/S/{name}" for name in ("shared.pt", f"worker_{worker:05d}.pt")]
        assert files_in(disk) == ["one.ckpt", *side]


def test_ranks_of_a_worker_must_see_the_same_disk(pool: Pool, tmp_path: Path) -> None:
    disks = [tmp_path / f"disk{rank}" for rank in range(WORLD)]
    run = run_on(disks, SaveEvery(10, "one.ckpt"))
    with pytest.raises(PoolError, match="no checkpoint") as error:
        pool.run(train_save_resume, run, ["one.ckpt"], run_on(disks), world=WORLD)
    assert sorted(error.value.failures) == [*range(WORLD)]
    for failure in error.value.failures.values():
        assert "The ranks of a worker must see the same disk." in failure.message


def fit_on_nodes(rank: int, world: int, num_nodes: int) -> None:
    trainer = make_trainer(
        LocoStrategy(DiLoCo(), replica_size=world, checkpoint_folder="private", timeout_s=30),
        devices=world // num_nodes,
        num_nodes=num_nodes,
        plugins=[PoolEnvironment(num_nodes)],
        max_steps=1,
    )
    trainer.fit(TinyModule(), loader(rank, 1, 1))


def test_a_worker_on_several_nodes_needs_a_shared_folder(pool: Pool) -> None:
    with pytest.raises(PoolError, match="workers whose ranks are all on one node") as error:
        pool.run(fit_on_nodes, 2, world=4)
    assert sorted(error.value.failures) == [*range(WORLD)]


# --------------------------------------------------------------------------- failures


class Position:
    """A value that is neither a tensor nor a plain value."""


class OwnState(StatefulDataLoader[Any]):
    """A loader with a state that other processes cannot read."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": Position()}


def save_own_state(rank: int, world: int, path: str) -> None:
    trainer = make_trainer(
        LocoStrategy(DiLoCo(), sync_every=2, replica_size=SIZE, timeout_s=30),
        max_steps=2,
        callbacks=[SaveEvery(2, path)],
    )
    data = TensorDataset(torch.arange(8.0))
    trainer.fit(Reading(), (StatefulDataLoader if rank < SIZE else OwnState)(data, batch_size=1))


def test_loaders_whose_state_is_not_plain_are_named(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="Position") as error:
        pool.run(save_own_state, str(tmp_path / "one.ckpt"), world=WORLD)
    assert sorted(error.value.failures) == [*range(WORLD)]
    for failure in error.value.failures.values():
        assert re.search(r"Place \d of worker 1, in a checkpoint: ", failure.message)
    assert files_in(tmp_path) == []


class FailingIO(WholeFileIO):
    """Fails to write the second file of this name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.count = 0

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.count += Path(path).name == self.name
        if self.count == 2:
            raise OSError(28, "No space left on device", str(path))
        super().save_checkpoint(checkpoint, path, storage_options)


class FailAt(pl.Callback):
    """Makes one rank fail in the save after a given step."""

    def __init__(self, rank: int, step: int, kind: str) -> None:
        self.rank = rank
        self.step = step
        self.kind = kind

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) != (self.rank, self.step):
            return
        if self.kind == "torn":
            trainer.strategy.engine.fragments[0].is_torn = True  # type: ignore[attr-defined]
        elif self.kind == "in gather":
            dist.gather = die
        elif self.kind == "in write":
            Save.to_shared_folder = die  # type: ignore[assignment, method-assign]
        elif self.kind == "in file":
            WholeFileIO.save_checkpoint = die  # type: ignore[method-assign]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAILURES: dict[str, tuple[str | None, FailAt | None, str, list[int]]] = {
    "a file cannot be written": (
        "worker_00001.pt",
        None,
        "Worker 1, place 0 (rank 2): .*No space left",
        [],
    ),
    "a rank has no whole state": (
        None,
        FailAt(3, 10, "torn"),
        "Worker 1, place 1 (rank 3): A round has failed",
        [],
    ),
    "a rank dies while its state is gathered": (
        None,
        FailAt(1, 10, "in gather"),
        "worker 0, place 1 (rank 1)",
        [1],
    ),
    "a rank dies while others write": (
        None,
        FailAt(3, 10, "in write"),
        "worker 1, place 1 (rank 3)",
        [3],
    ),
    "a rank dies while it writes": (
        None,
        FailAt(2, 10, "in file"),
        "worker 1, place 0 (rank 2)",
        [2],
    ),
}


SLOW = ("a rank dies while others write", "a rank dies while it writes")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] if name in SLOW else []) for name in FAILURES],
)
def test_a_rank_that_fails_is_named_and_the_last_save_is_complete(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    file, callback, text, missing = FAILURES[name]
    callbacks = [SaveEvery(5)] if callback is None else [callback, SaveEvery(5)]
    io = None if file is None else FailingIO(file)
    run = run_of("diloco", tmp_path, *callbacks, checkpoint_io=io)
    with pytest.raises(PoolError) as error:
        pool.run(save_and_resume.fit, run, world=WORLD, grace_s=30)
    assert error.value.missing == missing
    assert sorted({*error.value.failures, *missing}) == [*range(WORLD)]
    pattern = text.replace("(", r"\(").replace(")", r"\)")
    for rank, failure in error.value.failures.items():
        is_own = f"(rank {rank})" in text
        assert is_own or re.search(pattern, failure.message), failure.message
    assert files_in(tmp_path)[0] == "often.ckpt"
    run = run_of("diloco", tmp_path / "whole")
    whole: Sequence[Outcome] = pool.run(save_and_resume.fit, run, world=WORLD)
    resumed = pool.run(save_and_resume.fit, run, str(tmp_path / "often.ckpt"), world=WORLD)
    assert first_steps(resumed) == [5] * WORLD
    check_resumed(whole, resumed, name)

"""Resume with another number of workers, other settings, or another algorithm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_loco as loco
from lightning_loco import DiLoCo, GASLoC
from lightning_loco.strategies.checkpoint.position import random_states
from tests.cases import CASES, Case, without_variants
from tests.harness.cover import cover
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, WorkerData, flat, quiet_trainer
from tests.strategies import save_and_resume

SAVED_AT = 10
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
]


class Start(NamedTuple):
    """State of a worker right before its first resumed step, and its warnings."""

    step: int
    engine: dict[str, Any]
    optimizer: dict[str, Any]
    random: Tensor
    consensus: Tensor
    warnings: list[str]
    final: Tensor


class RecordStart(pl.Callback):
    """Records the state before the first step, and saves after a given step."""

    def __init__(self, path: str | None, save_at: int) -> None:
        self.path = path
        self.save_at = save_at
        self.seen: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if self.seen:
            return
        strategy: Any = trainer.strategy
        self.seen = {
            "step": trainer.global_step,
            "engine": {},
            "optimizer": copied(trainer.optimizers[0].state_dict()),
            "random": random_states()["torch"],
        }
        if getattr(strategy, "engine", None) is not None:
            self.seen["engine"] = copied(strategy.engine.state_dict())
            strategy.engine.worker.show_consensus("a test")
        self.seen["consensus"] = flat(module).clone()
        if self.seen["engine"]:
            strategy.engine.worker.show_local()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.path is not None and trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)


def copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {name: copied(value) for name, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def strategy_of(case: Case | str, sync_every: int) -> Any:
    if case == "pairwise":
        return loco.PairwiseGossipStrategy(1.0, timeout_s=30)
    return DDPStrategy() if isinstance(case, str) else case.strategy(sync_every, timeout_s=30)


def fit(
    rank: int,
    world: int,
    case: Case | str,
    path: str | None,
    resume: str | None = None,
    save_at: int = SAVED_AT,
    sync_every: int = 4,
) -> Start:
    """Train, optionally from a checkpoint, and optionally save; each worker has different data."""
    recorder = RecordStart(path, save_at)
    torch.manual_seed(1000 + rank)
    module = TinyModule(lr=0.01, optimizer="Adam")
    torch.manual_seed(1000 + rank)
    trainer = make_trainer(
        strategy_of(case, sync_every),
        max_steps=save_at + 2,
        callbacks=[recorder],
        use_distributed_sampler=False,
    )
    loader = StatefulDataLoader(WorkerData(rank, 100), batch_size=None)
    with save_and_resume.recorded_warnings() as warned:
        trainer.fit(module, loader, ckpt_path=resume)
    return Start(**recorder.seen, warnings=warned, final=flat(module))


def fit_each(rank: int, world: int, runs: Sequence[tuple[Any, ...]]) -> list[Start]:
    """Run several fits in one job."""
    return [fit(rank, world, *run) for run in runs]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case | str], Path]:
    """Return checkpoints of two workers, by method."""

    @functools.cache
    def path_of(name: str) -> Path:
        path = tmp_path_factory.mktemp(name) / "before.ckpt"
        pool.run(fit, CASES.get(name, name), str(path), world=2)
        return path

    return path_of


class Files(NamedTuple):
    """The contents of a checkpoint."""

    main: dict[str, Any]
    shared: dict[str, Any]
    workers: list[dict[str, Any]]

    @property
    def consensus(self) -> Tensor:
        return torch.cat([value.reshape(-1) for value in self.main["state_dict"].values()])

    def of_fragment(self, worker: int) -> dict[str, Any]:
        """Return the state of a worker's algorithm."""
        source = self.shared or self.workers[worker]["engine"]
        state: dict[str, Any] = source["shared"][0]["state"]
        return state

    @property
    def has_pending(self) -> bool:
        return self.workers[0]["engine"]["fragments"][0]["pending"] is not None


def files_of(path: Path) -> Files:
    (folder,) = Path(f"{path}.loco").iterdir()
    shared = folder / "shared.pt"
    workers = [torch.load(file) for file in sorted(folder.glob("worker_*.pt"))]
    return Files(torch.load(path), torch.load(shared) if shared.exists() else {}, workers)


def assert_same(one: Any, other: Any) -> None:
    """Check that two trees are equal bit for bit."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_same(mine, yours)
    else:
        assert one == other


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


NUMBERS = (
    "local_sgd",
    "diloco",
    "async_diloco_momentum",
    "eager_diloco_momentum",
    "delayed_nesterov",
    "gasloc_overlap",
    "diloco_compensated",
)
SHORT = ("diloco", "gasloc_overlap")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SHORT else pytest.mark.soak) for name in NUMBERS],
)
def test_three_workers_resume_as_two_and_then_as_four(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    case, before = CASES[name], tmp_path / "3.ckpt"
    pool.run(fit, case, str(before), world=3)
    for world in (2, 4):
        files, path = files_of(before), tmp_path / f"{world}.ckpt"
        starts = pool.run(fit, case, str(path), str(before), SAVED_AT + 1, world=world)
        check_start(case, files, starts)
        check_warning(case, files, starts)
        for start in starts[1:]:
            assert torch.equal(start.final, starts[0].final)
        before = path


def check_start(case: Case, saved: Files, starts: list[Start]) -> None:
    """Check consensus, outer parameters, momentum, optimizers, random numbers and positions."""
    fresh = case.prepared(len(starts)).init(saved.consensus)
    for worker, start in enumerate(starts):
        is_new = worker >= len(saved.workers)
        own = saved.workers[0 if is_new else worker]
        engine = start.engine
        near(start.consensus, saved.consensus)
        assert torch.equal(engine["params"], saved.consensus)
        assert_same(engine["shared"][0]["state"], saved.of_fragment(0) if saved.shared else fresh)
        assert engine["fragments"][0]["pending"] is None
        assert_same(start.optimizer["state"], own["lightning"]["optimizer_states"][0]["state"])
        since = own["engine"]["steps_since_round"] if saved.shared else 0
        assert (engine["steps"], engine["steps_since_round"]) == (own["engine"]["steps"], since)
        assert engine["round_index"] == (0 if case.overlap else own["engine"]["round_index"])
        assert torch.equal(start.random, own["position"]["random"]["torch"]) != is_new


def check_warning(case: Case, saved: Files, starts: list[Start]) -> None:
    """Check that there is a single warning, on worker 0, that lists all changes."""
    assert [len(start.warnings) for start in starts] == [1] + [0] * (len(starts) - 1)
    (text,) = starts[0].warnings
    algorithm, before, now = type(case.algorithm).__name__, len(saved.workers), len(starts)
    assert text.startswith(
        f"The checkpoint was written by {before} workers with {algorithm}, and {now} workers with "
        f"{algorithm} go on from it: all workers start from the consensus; "
    )
    if now == 2:
        assert "the optimizers, schedules and positions of worker 2 are dropped" in text
    else:
        assert "new are workers 2 to 3, with the optimizers, schedules and positions of" in text
    assert ("a pending round is dropped" in text) == saved.has_pending
    has_own = not saved.shared and case.algorithm != loco.LocalSGD()
    assert (f"the state of {algorithm} (" in text) == has_own


def test_one_worker_becomes_two_and_one_again(pool: Pool, tmp_path: Path) -> None:
    case, one, two = CASES["diloco"], tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    pool.run(fit, case, str(one), world=1)
    starts = pool.run(fit, case, str(two), str(one), SAVED_AT + 1, world=2)
    check_start(case, files_of(one), starts)
    assert "was written by 1 worker with DiLoCo" in starts[0].warnings[0]
    again = pool.run(fit, case, None, str(two), SAVED_AT + 2, world=1)
    check_start(case, files_of(two), again)
    assert "and 1 worker with DiLoCo go on" in again[0].warnings[0]


# ------------------------------------------------------------------ other settings


Resume = Callable[..., tuple[Files, list[Start]]]


@pytest.fixture
def resumed(pool: Pool, saved: Callable[[str], Path]) -> Resume:
    """Return what two workers saved, and what two workers with other settings resume."""

    def resume(before: str, now: Case | str, sync_every: int = 4) -> tuple[Files, list[Start]]:
        path = saved(before)
        starts = pool.run(fit, now, None, str(path), SAVED_AT + 1, sync_every, world=2)
        return files_of(path), starts

    return resume


def test_another_algorithm_starts_from_the_consensus(
    pool: Pool, saved: Callable[[str], Path], subtests: pytest.Subtests
) -> None:
    rows = [
        ("local_sgd", "diloco", "the state of DiLoCo (momentum) is reset"),
        ("diloco", "gasloc", "the state of DiLoCo (momentum, outer) is dropped"),
        ("diloco", "local_sgd", "the state of DiLoCo (momentum, outer) is dropped"),
        ("async_diloco", "gasloc", "a pending round is dropped"),
        ("gasloc", "noloco", "the state of GASLoC (previous, start) is dropped"),
        ("noloco", "diloco", "the state of DiLoCo (momentum) is reset"),
    ]
    runs = [(CASES[now], None, str(saved(before)), SAVED_AT + 1) for before, now, _ in rows]
    found = zip(*pool.run(fit_each, runs, world=2), strict=True)
    for (before, now, text), starts in zip(rows, found, strict=True):
        with subtests.test(before=before, now=now):
            check_another_algorithm(files_of(saved(before)), starts, before, now, text)


def check_another_algorithm(
    files: Files, starts: Sequence[Start], before: str, now: str, text: str
) -> None:
    names = [type(CASES[name].algorithm).__name__ for name in (before, now)]
    prepared = CASES[now].prepared(2)
    for worker, start in enumerate(starts):
        assert torch.equal(start.engine["params"], files.consensus)
        expected = prepared.init(files.consensus)
        assert_same(start.engine["shared"][0]["state"], expected)
        own = files.workers[worker]
        assert_same(start.optimizer["state"], own["lightning"]["optimizer_states"][0]["state"])
        assert torch.equal(start.random, own["position"]["random"]["torch"])
        assert start.engine["steps"] == start.step == SAVED_AT
        assert start.engine["round_index"] == start.engine["steps_since_round"] == 0
    assert [len(start.warnings) for start in starts] == [1, 0]
    assert f"2 workers with {names[0]}, and 2 workers with {names[1]}" in starts[0].warnings[0]
    assert "all workers start from the consensus" in starts[0].warnings[0]
    assert text in starts[0].warnings[0]


def test_other_settings_of_the_same_algorithm_drop_nothing(
    pool: Pool, saved: Callable[[str], Path], subtests: pytest.Subtests
) -> None:
    """Every value is as each worker saved it, without a warning."""
    rows = {
        "learning rate": ("diloco", Case(DiLoCo(0.5, 0.7))),
        "overlap": ("diloco", CASES["async_diloco_momentum"]),
        "topology": ("gasloc", Case(GASLoC(momentum=0.3), "complete")),
        "learning rate of Adam": (
            "diloco_adam",
            Case(DiLoCo(outer_optimizer=partial(torch.optim.Adam, lr=0.01))),
        ),
    }
    runs = [(now, None, str(saved(name)), SAVED_AT + 1, 3) for name, now in rows.values()]
    found = zip(*pool.run(fit_each, runs, world=2), strict=True)
    for (setting, (before, _)), starts in zip(rows.items(), found, strict=True):
        files = files_of(saved(before))
        for worker, start in enumerate(starts):
            with subtests.test(setting, worker=worker):
                assert torch.equal(
                    start.engine["params"], files.workers[worker]["engine"]["params"]
                )
                assert_same(start.engine["shared"][0]["state"], files.of_fragment(worker))
                assert start.warnings == []


def test_rounds_that_newly_overlap_start_with_a_blocking_one(resumed: Resume) -> None:
    _, starts = resumed("diloco", CASES["async_diloco_momentum"])
    assert [start.engine["round_index"] for start in starts] == [0, 0]
    assert [start.engine["steps_since_round"] for start in starts] == [2, 2]


def test_momentum_is_kept_where_both_have_it(resumed: Resume) -> None:
    files, starts = resumed("diloco", CASES["diloco_plain"])
    for start in starts:
        assert_same(start.engine["shared"][0]["state"], {"outer": files.of_fragment(0)["outer"]})
    assert "go on from it: the state of DiLoCo (momentum) is dropped." in starts[0].warnings[0]


def test_momentum_is_reset_if_there_was_none(resumed: Resume) -> None:
    files, starts = resumed("gasloc_plain", Case(GASLoC(), "ring"))
    for worker, start in enumerate(starts):
        params = files.of_fragment(worker)["start"]
        expected = {"start": params, "previous": params}
        assert_same(start.engine["shared"][0]["state"], expected)
        assert torch.equal(start.engine["params"], files.workers[worker]["engine"]["params"])
    assert "go on from it: the state of GASLoC (previous) is reset." in starts[0].warnings[0]


def test_round_counts_are_reset_if_they_were_not_used(resumed: Resume) -> None:
    files, starts = resumed("diloco", CASES["diloco_schedule"])
    for start in starts:
        assert_same(start.engine["shared"][0]["state"], {**files.of_fragment(0), "rounds": 0})
    assert "go on from it: the state of DiLoCo (rounds) is reset." in starts[0].warnings[0]


def test_a_pending_round_is_dropped_if_rounds_are_blocking_now(resumed: Resume) -> None:
    files, starts = resumed("async_diloco_momentum", CASES["diloco"])
    assert files.has_pending
    for worker, start in enumerate(starts):
        assert_same(start.engine["shared"][0]["state"], files.of_fragment(0))
        assert start.engine["fragments"][0]["pending"] is None
        assert torch.equal(start.engine["params"], files.workers[worker]["engine"]["params"])
    assert "go on from it: a pending round is dropped." in starts[0].warnings[0]


def test_pairs_resume_with_other_numbers(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "3.ckpt"
    pool.run(fit, "pairwise", str(path), world=3)
    files = files_of(path)
    for world in (2, 4):
        starts = pool.run(fit, "pairwise", None, str(path), world=world)
        for worker, start in enumerate(starts):
            own = files.workers[worker if worker < 3 else 0]
            assert start.step == start.engine["steps"] == SAVED_AT
            near(start.consensus, files.consensus)
            assert start.engine["clock"] >= own["engine"]["clock"]
            assert_same(start.optimizer["state"], own["lightning"]["optimizer_states"][0]["state"])
        assert "3 workers with PairwiseAverage, and" in starts[0].warnings[0]


@pytest.mark.parametrize(("before", "now"), [("diloco", "pairwise"), ("pairwise", "diloco")])
def test_rounds_resume_as_pairs_and_pairs_as_rounds(resumed: Resume, before: str, now: str) -> None:
    files, starts = resumed(before, CASES.get(now, now))
    for start in starts:
        near(start.consensus, files.consensus)
    assert "all workers start from the consensus" in starts[0].warnings[0]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.parametrize(
    ("before", "now", "world"),
    [
        *cover(
            [pytest.param(name, name, id=name) for name in without_variants()],
            [2, 4],
            strength=1,
        ),
        ("local_sgd", "gasloc", 2),
        ("async_diloco", "diloco_adamw", 4),
        ("gasloc_overlap", "async_model_average", 2),
        ("async_model_average", "async_diloco", 4),
    ],
)
def test_statistics_and_schedules_are_resumed(
    pool: Pool, tmp_path: Path, before: str, now: str, world: int
) -> None:
    """With BatchNorm, dropout, AdamW, a schedule and a sampler: all workers end with one model."""
    save = [save_and_resume.SaveEvery(10)]
    run = save_and_resume.Run(CASES[before], str(tmp_path), save, 10)
    pool.run(save_and_resume.fit, run, world=3)
    run = save_and_resume.Run(CASES[now], str(tmp_path), max_steps=14)
    found = pool.run(save_and_resume.fit, run, "often.ckpt", world=world)
    for outcome in found:
        assert sorted(outcome.losses) == list(range(10, 14))
        assert torch.isfinite(outcome.state).all()
        if before != "async_model_average" and now != "async_model_average":
            assert torch.equal(outcome.state[:-1], found[0].state[:-1])  # last: local batches


# ------------------------------------------------------------------ plain Lightning


def test_a_checkpoint_of_ddp_is_a_common_start(
    pool: Pool, saved: Callable[[str], Path], subtests: pytest.Subtests
) -> None:
    path = saved("ddp")
    main = torch.load(path)
    expected = torch.cat([value.reshape(-1) for value in main["state_dict"].values()])
    names = ("local_sgd", "async_diloco", "gasloc")
    runs = [(CASES[name], None, str(path), SAVED_AT + 1) for name in names]
    found = zip(*pool.run(fit_each, runs, world=2), strict=True)
    for name, starts in zip(names, found, strict=True):
        for worker, start in enumerate(starts):
            with subtests.test(name, worker=worker):
                assert start.step == SAVED_AT
                assert torch.equal(start.engine["params"], expected)
                near(start.consensus, expected)
                assert_same(start.optimizer["state"], main["optimizer_states"][0]["state"])
                assert start.warnings == []


def fit_plain(path: str, resume: str | None, save_at: int) -> Start:
    """Train in one process with plain Lightning."""
    recorder = RecordStart(path, save_at)
    module = TinyModule(lr=0.01, optimizer="Adam")
    trainer = quiet_trainer(devices=1, max_steps=save_at + 2, callbacks=[recorder])
    loader = StatefulDataLoader(WorkerData(0, 100), batch_size=None)
    trainer.fit(module, loader, ckpt_path=resume)
    return Start(**recorder.seen, warnings=[], final=flat(module))


@pytest.mark.parametrize(
    ("name", "with_ddp"), cover(["diloco", "gasloc"], [False, True], strength=1)
)
def test_plain_lightning_resumes_the_consensus_and_the_reverse(
    pool: Pool, saved: Callable[[str], Path], tmp_path: Path, name: str, with_ddp: bool
) -> None:
    ours, plain = saved(name), str(tmp_path / "plain.ckpt")
    files = files_of(ours)
    if with_ddp:
        starts = pool.run(fit, "ddp", plain, str(ours), SAVED_AT + 2, world=2)
    else:
        starts = [fit_plain(plain, str(ours), SAVED_AT + 2)]
    for start in starts:
        assert start.step == SAVED_AT
        assert torch.equal(start.consensus, files.consensus)
        expected = files.workers[0]["lightning"]["optimizer_states"][0]["state"]
        assert_same(start.optimizer["state"], expected)
    back = pool.run(fit, CASES[name], None, plain, SAVED_AT + 3, world=2)
    main = torch.load(plain)["state_dict"]
    expected_params = torch.cat([value.reshape(-1) for value in main.values()])
    for start in back:
        assert start.step == SAVED_AT + 2
        assert torch.equal(start.engine["params"], expected_params)
        assert start.warnings == []

"""Resume with another number of workers or ranks, other settings, or another algorithm."""

from __future__ import annotations

import functools
import re
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

from lightning_loco import DiLoCo, GASLoC, LocalSGD
from lightning_loco.engine.gathered_state import gather_state
from lightning_loco.strategies.checkpoint.position import random_states
from tests.cases import Case, without_variants
from tests.harness.cover import cover
from tests.harness.pool import Pool, make_trainer, run_each
from tests.harness.small_model import TinyModule, flat, quiet_trainer
from tests.strategies import save_and_resume
from tests.strategies.families import Family, ShardedModule, Sizes, loader, whole
from tests.strategies.save_and_resume import METHODS, Files, files_of, maker_of

SAVED_AT = 10  # two steps after the last round
NEAR = 1e-15
pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that"),
]


class Start(NamedTuple):
    """State of a rank right before its first step, and its warnings.

    Attributes:
        step: The global step.
        engine: State of the whole worker; None on its other ranks, or if it is sharded.
        optimizer: State of the optimizer, unless it is sharded.
        random: State of the random numbers.
        params: Parameters of the worker.
        consensus: Parameters that a validation would use.
        warnings: Warnings that other workers had written the checkpoint.
        saved: Parameters of the worker when it has saved.
        final: Parameters after the fit.
    """

    step: int
    engine: Any
    optimizer: Any
    random: Tensor
    params: Tensor
    consensus: Tensor
    warnings: list[str]
    saved: Any
    final: Tensor


class RecordStart(pl.Callback):
    """Records the state before the first step, and saves after a given step."""

    def __init__(self, path: str | None, save_at: int) -> None:
        self.path = path
        self.save_at = save_at
        self.seen: dict[str, Any] = {}
        self.saved: Tensor | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if self.seen:
            return
        engine: Any = getattr(trainer.strategy, "engine", None)
        self.seen = {
            "step": trainer.global_step,
            "engine": None,
            "optimizer": None,
            "random": random_states()["torch"],
            "params": whole(module),
        }
        if not isinstance(module, ShardedModule):
            self.seen["optimizer"] = copied(trainer.optimizers[0].state_dict())
            if engine is not None:
                state = gather_state(engine.state_dict(), engine.worker.replica)
                self.seen["engine"] = copied(state)
        if engine is not None:
            engine.worker.show_consensus("a test")
        self.seen["consensus"] = whole(module).clone()
        if engine is not None:
            engine.worker.show_local()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if self.path is not None and trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)
            self.saved = whole(module)


def copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {name: copied(value) for name, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def fit(
    rank: int,
    world: int,
    method: str | Case,
    sizes: Sizes,
    path: str | None,
    resume: str | None = None,
    save_at: int = SAVED_AT,
    sync_every: int = 4,
    make: Callable[..., TinyModule] | None = None,
) -> Start:
    """Train, optionally from a checkpoint, and optionally save; each worker has different data."""
    recorder = RecordStart(path, save_at)
    if method == "ddp":
        strategy: Any = DDPStrategy()
    else:
        recipe = partial(maker_of(method), sync_every)
        in_folder = not str(path).endswith("file.ckpt")
        strategy = Family(recipe, sizes, in_folder=in_folder).strategy(timeout_s=30)
    default = ShardedModule if isinstance(sizes, tuple) else partial(TinyModule, 0.01)
    module = (make or default)(optimizer="Adam")
    torch.manual_seed(1000 + rank)
    trainer = make_trainer(
        strategy,
        max_steps=save_at + 2,
        callbacks=[recorder],
        use_distributed_sampler=False,
    )
    data = StatefulDataLoader(loader(rank, sizes, 100).dataset, batch_size=None)
    with save_and_resume.recorded_warnings() as warned:
        trainer.fit(module, data, ckpt_path=resume)
    return Start(**recorder.seen, warnings=warned, saved=recorder.saved, final=whole(module))


Numbers = tuple[int, int]
"""The number of workers, and of ranks of each."""
Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the checkpoint of a method, by the numbers of workers and of ranks of each."""

    @functools.cache
    def path_of(method: str, numbers: Numbers = (2, 1)) -> Path:
        path, (workers, size) = tmp_path_factory.mktemp("saved") / "before.ckpt", numbers
        starts = pool.run(fit, method, size, str(path), world=workers * size)
        if method != "ddp":
            files = files_of(path)
            for start, content in zip(starts[::size], files.workers, strict=True):
                assert torch.equal(start.saved, content["engine"]["params"])
                assert (content["engine"]["steps"], start.warnings) == (SAVED_AT, [])
            local = torch.stack([one.saved for one in starts[::size]])
            assert workers == 1 or not torch.equal(local[0], local[1])
            near(files.consensus, local.mean(0))
        return path

    return path_of


def assert_same(one: Any, other: Any) -> None:
    """Check that two trees are equal bit for bit."""
    check_close(one, other, "values", 0.0)


def check_close(found: Any, expected: Any, name: str, tolerance: float = 1e-11) -> None:
    """Check that two trees have the same entries, and nearly the same numbers."""
    if isinstance(expected, Tensor) and expected.is_floating_point() and tolerance:
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=name)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected), name
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
        assert found == expected, name


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=NEAR)


def of_workers(starts: Sequence[Start], size: int) -> list[Start]:
    """Check that the ranks of each worker start equal; return the starts of the first ranks."""
    for rank, one in enumerate(starts):
        first = starts[rank - rank % size]
        assert torch.equal(one.params, first.params)
        assert_same(one.optimizer, first.optimizer)
        assert (one.engine is None) == (rank % size > 0)
        assert rank == 0 or one.warnings == []
    return [*starts[::size]]


def name_of(method: str) -> str:
    """Return the name of a method's algorithm."""
    case = METHODS[method]
    return type(case.algorithm).__name__ if isinstance(case, Case) else "PairwiseAverage"


def numbered(workers: int, size: int) -> str:
    text = f"{workers} workers" if workers > 1 else "1 worker"
    return f"{text} of {size} ranks" if size > 1 else text


# ----------------------------------------------------- other numbers of workers or ranks


THREE_TWO_FOUR = [(3, 1), (2, 1), (4, 1)]
NUMBERS: list[tuple[str, list[Numbers]]] = [
    ("diloco", THREE_TWO_FOUR),
    ("gasloc_overlap", THREE_TWO_FOUR),
    ("pairwise", THREE_TWO_FOUR),
    ("diloco", [(1, 1), (2, 1), (1, 1)]),
    ("gasloc_overlap, int8", [(2, 2), (1, 4)]),
    ("diloco, feedback", [(2, 2), (4, 1)]),
    ("async_diloco, feedback", [(2, 2), (3, 1)]),
    ("gasloc_overlap, int8", [(4, 1), (2, 2)]),
    ("diloco_adamw", [(4, 1), (1, 3)]),
    ("pairwise", [(2, 2), (1, 4)]),
]
OFTEN_IN_SOAK = (
    "local_sgd",
    "async_diloco_momentum",
    "eager_diloco_momentum",
    "delayed_nesterov",
    "diloco_compensated",
)


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        *NUMBERS,
        *(pytest.param(name, THREE_TWO_FOUR, marks=pytest.mark.soak) for name in OFTEN_IN_SOAK),
    ],
    ids=str,
)
def test_another_number_of_workers(
    pool: Pool, saved: Saved, tmp_path: Path, method: str, numbers: list[Numbers]
) -> None:
    """All start from the consensus, with the outer state; all else is each worker's, or new."""
    before, *others = numbers
    path = saved(method, before)
    for index, now in enumerate(others, 1):
        files, following, (workers, size) = files_of(path), tmp_path / f"{index}.ckpt", now
        arguments = method, size, str(following), str(path), SAVED_AT + index
        starts = pool.run(fit, *arguments, world=workers * size)
        found = of_workers(starts, size)
        check_start(method, files, found)
        if size > 1 and method != "pairwise":
            alone = pool.run(fit, method, 1, None, str(path), world=workers)
            for one, other in zip(found, alone, strict=True):
                assert_same(*(without(start.engine, "statistics") for start in (one, other)))
        check_warning(method, files, starts[0].warnings, before, now)
        for start in starts if method != "pairwise" else ():
            assert torch.equal(start.final, starts[0].final)
        before, path = now, following


def check_start(method: str, saved: Files, starts: list[Start]) -> None:
    """Check consensus, outer parameters, momentum, optimizers, random numbers and positions."""
    case = METHODS[method]
    for worker, start in enumerate(starts):
        is_new = worker >= len(saved.workers)
        own = saved.workers[0 if is_new else worker]
        engine = start.engine
        near(start.consensus, saved.consensus)
        assert torch.equal(start.params, saved.consensus)
        assert_same(start.optimizer["state"], own["lightning"]["optimizer_states"][0]["state"])
        assert torch.equal(start.random, own["position"]["random"]["torch"]) != is_new
        assert engine["steps"] == own["engine"]["steps"] == start.step
        if not isinstance(case, Case):
            assert engine["clock"] >= own["engine"]["clock"]
            continue
        fresh = case.prepared(len(starts)).init(saved.consensus)
        assert torch.equal(engine["params"], saved.consensus)
        assert_same(engine["shared"][0]["state"], saved.of_fragment(0) if saved.shared else fresh)
        assert engine["fragments"][0]["pending"] is None
        since = own["engine"]["steps_since_round"] if saved.shared else 0
        assert engine["steps_since_round"] == since
        assert engine["round_index"] == (0 if case.overlap else own["engine"]["round_index"])


def check_warning(
    method: str, saved: Files, warnings: list[str], before: Numbers, now: Numbers
) -> None:
    """Check that there is a single warning, that lists all changes."""
    (text,) = warnings
    case, kind = METHODS[method], name_of(method)
    assert text.startswith(
        f"The checkpoint was written by {numbered(*before)} with {kind}, and {numbered(*now)} with "
        f"{kind} go on from it: all workers start from the consensus; "
    )
    own = "the optimizers, schedules and positions"
    first, last = sorted((before[0], now[0]))
    span = f"worker {first}" if last == first + 1 else f"workers {first} to {last - 1}"
    if now[0] < before[0]:
        assert f"{own} of {span} are dropped" in text
    else:
        assert f"new are {span}, with {own} of worker 0 and random numbers" in text
    check_places_named(text, before[1], now[1])
    if isinstance(case, Case):
        assert ("a pending round is dropped" in text) == saved.has_pending
        has_own = not saved.shared and case.algorithm != LocalSGD()
        assert (f"the state of {kind} (" in text) == has_own


def check_places_named(text: str, before: int, now: int) -> None:
    """Check that a warning names the random numbers of new and removed places of a worker."""
    first, last = sorted((before, now))
    span = f"place {first}" if last == first + 1 else f"places {first} to {last - 1}"
    lost, new = (
        f"the random numbers of {span} of a worker are dropped",
        f"new are {span} of a worker, with random numbers from their own seed",
    )
    assert (lost in text, new in text) == (now < before, now > before)


@pytest.mark.parametrize(
    ("method", "before", "sizes"),
    [
        ("async_diloco, feedback", (2, 2), (2, 1)),
        ("fragments", (2, 2), (2, 1)),
        ("gasloc_overlap, int8", (2, 2), (2, 1)),
        ("pairwise", (2, 2), (2, 1)),
        ("diloco", (1, 1), (1, 3)),
    ],
)
def test_the_same_workers_may_have_another_number_of_ranks(
    pool: Pool, saved: Saved, method: str, before: Numbers, sizes: tuple[int, ...]
) -> None:
    """With the saved states, including a pending round."""
    path, kind, (workers, size_before) = saved(method, before), name_of(method), before
    files, engines = files_of(path), []
    assert method in ("pairwise", "diloco") or files.has_pending
    names = ["clock"] if method == "pairwise" else ["fragments", "shared", "began_at"]
    for size in sizes:
        starts = pool.run(fit, method, size, None, str(path), world=workers * size)
        for start, content in zip(of_workers(starts, size), files.workers, strict=True):
            near(start.consensus, files.consensus)
            assert torch.equal(start.params, content["engine"]["params"])
            assert_same(start.optimizer, content["lightning"]["optimizer_states"][0])
            expected = {**content["engine"], **files.shared}
            for name in ("params", "round_index", "steps", *names):
                if name in expected:
                    assert_same(start.engine[name], expected[name])
        engines.append([without(start.engine, "statistics") for start in starts[::size]])
        if size == size_before:
            assert starts[0].warnings == []
            continue
        (text,) = starts[0].warnings
        who = f"{numbered(*before)} with {kind}, and {numbered(workers, size)} with {kind} go on"
        assert who in text
        check_places_named(text, size_before, size)
    if method != "pairwise":  # its clock runs on
        assert_same(engines[0], engines[1])


def without(content: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in names}


@pytest.mark.parametrize("method", ["diloco", "fragments", "gasloc_overlap, int8"])
def test_files_are_those_of_workers_of_one_rank(saved: Saved, method: str) -> None:
    """On the same rows, which the ranks of a worker divide."""
    expected, found = (files_of(saved(method, (2, size))) for size in (1, 2))
    check_close(found.main["state_dict"], expected.main["state_dict"], "the consensus")
    manifests = [dict(files.main["lightning_loco"]) for files in (found, expected)]
    stamps = [manifest.pop("stamp") for manifest in manifests]
    assert manifests[0] == manifests[1]
    assert [re.sub("-.*", "", stamp) for stamp in stamps] == [f"step{SAVED_AT}"] * 2
    check_close(without(found.shared, "seal"), without(expected.shared, "seal"), "shared")
    for worker, content in enumerate(found.workers):
        own, theirs = (
            without(one, "seal", "position", "stream")
            for one in (content, expected.workers[worker])
        )
        assert len(own.pop("other_ranks")) == own.pop("readers") - 1 == 1
        for state in (own, theirs):
            del state["lightning"]["loops"]
            for counter in ("bytes_sent", "wait_s", "bytes_saved", "spent"):
                state["engine"]["statistics"].pop(counter, None)
        check_close(own, theirs, f"worker {worker}")


# --------------------------------------------------- other settings and other algorithms


class Change(NamedTuple):
    """Two workers resume with other settings of the same algorithm.

    Attributes:
        before: The method that saves.
        now: The method that resumes, with another ``sync_every``.
        text: The warning, after "go on from it: "; empty if nothing is dropped.
        state: Returns the expected state of the algorithm from the saved one.
        entries: Further expected entries of the engine's state.
        size: Ranks of a worker.
    """

    before: str
    now: str | Case
    text: str = ""
    state: Callable[[dict[str, Any]], dict[str, Any]] = dict
    entries: dict[str, Any] = {}
    size: int = 1


OTHER_ADAM = Case(DiLoCo(outer_optimizer=partial(torch.optim.Adam, lr=0.01)))
CHANGES = {
    "learning rate": Change("diloco", Case(DiLoCo(0.5))),
    "topology": Change("gasloc", Case(GASLoC(momentum=0.3), "complete")),
    "learning rate of Adam": Change("diloco_adam", OTHER_ADAM),
    "overlap, which starts with a blocking round": Change(
        "diloco_momentum",
        "async_diloco_momentum",
        entries={"round_index": 0, "steps_since_round": 2},
    ),
    "no overlap": Change("async_diloco_momentum", "diloco_momentum", "a pending round is dropped."),
    "no overlap and no compression": Change(
        "async_diloco, feedback",
        "diloco_momentum",
        "a pending round is dropped; the residual of the compression is dropped.",
        size=2,
    ),
    "no momentum": Change(
        "diloco",
        "diloco_plain",
        "the state of DiLoCo (momentum, persistence) is dropped.",
        lambda old: {"outer": old["outer"]},
    ),
    "a number as momentum": Change(
        "diloco",
        "diloco_momentum",
        "the state of DiLoCo (persistence) is dropped.",
        lambda old: {"outer": old["outer"], "momentum": old["momentum"]},
    ),
    "automatic momentum": Change(
        "diloco_momentum",
        "diloco",
        "the state of DiLoCo (persistence) is reset.",
        lambda old: {**DiLoCo().init(old["outer"]), **old},
    ),
    "new momentum": Change(
        "gasloc_plain",
        Case(GASLoC(), "ring"),
        "the state of GASLoC (previous) is reset.",
        lambda old: {"start": old["start"], "previous": old["start"]},
    ),
    "a schedule, which counts rounds": Change(
        "diloco_momentum",
        "diloco_schedule",
        "the state of DiLoCo (rounds) is reset.",
        lambda old: {**old, "rounds": 0},
    ),
}


def resumed(
    pool: Pool, saved: Saved, rows: dict[str, Any], sync_every: int = 4
) -> dict[str, tuple[Files, list[Start]]]:
    """Return the files of each row, and what two workers resume with the method ``now``."""
    found = {}
    for size in (1, 2):
        runs = {
            name: (row.now, size, None, str(saved(row.before, (2, size))), SAVED_AT + 1, sync_every)
            for name, row in rows.items()
            if row.size == size
        }
        for name, starts in run_each(pool, fit, runs, world=2 * size).items():
            files = files_of(saved(rows[name].before, (2, size)))
            found[name] = files, of_workers(starts, size)
    return found


def test_other_settings_of_the_same_algorithm(
    pool: Pool, saved: Saved, subtests: pytest.Subtests
) -> None:
    """Every value is as each worker saved it, unless a warning names it."""
    for name, (files, starts) in resumed(pool, saved, CHANGES, sync_every=3).items():
        row = CHANGES[name]
        for worker, start in enumerate(starts):
            with subtests.test(name, worker=worker):
                own, engine = files.workers[worker]["engine"], start.engine
                assert torch.equal(engine["params"], own["params"])
                state = row.state(files.of_fragment(worker))
                assert_same(engine["shared"][0]["state"], state)
                assert engine["fragments"][0]["pending"] is None
                assert {key: engine[key] for key in row.entries} == row.entries
                assert len(start.warnings) == bool(row.text and worker == 0)
                for text in start.warnings:
                    assert text.partition("go on from it: ")[2] == row.text
        assert files.has_pending == ("pending" in row.text)


class Switch(NamedTuple):
    """Two workers resume with another algorithm; ``text`` is in the warning."""

    before: str
    now: str
    text: str = ""
    size: int = 1


SWITCHES = [
    Switch("local_sgd", "diloco", "the state of DiLoCo (momentum, persistence) is reset"),
    Switch("diloco", "gasloc", "the state of DiLoCo (momentum, outer, persistence) is dropped"),
    Switch("diloco", "local_sgd", "the state of DiLoCo (momentum, outer, persistence) is dropped"),
    Switch("async_diloco", "gasloc", "a pending round is dropped"),
    Switch("gasloc", "noloco", "the state of GASLoC (previous, start) is dropped"),
    Switch("noloco", "diloco", "the state of DiLoCo (momentum, persistence) is reset"),
    Switch("fragments", "gasloc_overlap, int8", "a pending round is dropped", size=2),
    Switch("diloco", "pairwise"),
    Switch("pairwise", "diloco"),
]


def test_another_algorithm_starts_from_the_consensus(
    pool: Pool, saved: Saved, subtests: pytest.Subtests
) -> None:
    rows = {f"{row.before} to {row.now}": row for row in SWITCHES}
    for name, (files, starts) in resumed(pool, saved, rows).items():
        row, case = rows[name], METHODS[rows[name].now]
        for worker, start in enumerate(starts):
            with subtests.test(name, worker=worker):
                own, engine = files.workers[worker], start.engine
                near(start.consensus, files.consensus)
                assert torch.equal(start.params, files.consensus)
                assert_same(
                    start.optimizer["state"], own["lightning"]["optimizer_states"][0]["state"]
                )
                assert torch.equal(start.random, own["position"]["random"]["torch"])
                assert engine["steps"] == start.step == SAVED_AT
                if isinstance(case, Case):
                    expected = case.prepared(2).init(files.consensus)
                    assert torch.equal(engine["params"], files.consensus)
                    assert_same(engine["shared"][0]["state"], expected)
                    assert engine["round_index"] == engine["steps_since_round"] == 0
                assert len(start.warnings) == (worker == 0)
                for text in start.warnings:
                    before, now = (
                        f"{numbered(2, row.size)} with {name_of(method)}"
                        for method in (row.before, row.now)
                    )
                    assert f"was written by {before}, and {now} go on" in text
                    assert "all workers start from the consensus" in text
                    assert row.text in text


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
    run = save_and_resume.Run(before, str(tmp_path), save, 10)
    pool.run(save_and_resume.fit, run, world=3)
    run = save_and_resume.Run(now, str(tmp_path), max_steps=14)
    found = pool.run(save_and_resume.fit, run, "often.ckpt", world=world)
    for outcome in found:
        assert sorted(outcome.losses) == list(range(10, 14))
        assert torch.isfinite(outcome.state).all()
        if before != "async_model_average" and now != "async_model_average":
            assert torch.equal(outcome.state[:-1], found[0].state[:-1])  # last: local batches


# ------------------------------------------------------------------ plain Lightning


def test_a_checkpoint_of_ddp_is_a_common_start(
    pool: Pool, saved: Saved, subtests: pytest.Subtests
) -> None:
    path = saved("ddp")
    main = torch.load(path)
    expected = torch.cat([value.reshape(-1) for value in main["state_dict"].values()])
    names = ("local_sgd", "async_diloco", "gasloc")
    runs = {name: (name, 1, None, str(path), SAVED_AT + 1) for name in names}
    for name, starts in run_each(pool, fit, runs, world=2).items():
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
    data = StatefulDataLoader(loader(0, 1, 100).dataset, batch_size=None)
    trainer.fit(module, data, ckpt_path=resume)
    return Start(**recorder.seen, warnings=[], saved=recorder.saved, final=flat(module))


@pytest.mark.parametrize(
    ("name", "size", "with_ddp"),
    [("diloco", 1, False), ("gasloc", 1, True), ("gasloc_overlap, int8", 2, False)],
)
def test_plain_lightning_resumes_the_consensus_and_the_reverse(
    pool: Pool, saved: Saved, tmp_path: Path, name: str, size: int, with_ddp: bool
) -> None:
    ours, plain = saved(name, (2, size)), str(tmp_path / "plain.ckpt")
    files = files_of(ours)
    assert torch.equal(flat(TinyModule.load_from_checkpoint(ours)), files.consensus)
    if with_ddp:
        starts = pool.run(fit, "ddp", None, plain, str(ours), SAVED_AT + 2, world=2)
    else:
        starts = [fit_plain(plain, str(ours), SAVED_AT + 2)]
    for start in starts:
        assert start.step == SAVED_AT
        assert torch.equal(start.consensus, files.consensus)
        expected = files.workers[0]["lightning"]["optimizer_states"][0]["state"]
        assert_same(start.optimizer["state"], expected)
    back = pool.run(fit, name, size, None, plain, SAVED_AT + 3, world=2 * size)
    main = torch.load(plain)["state_dict"]
    expected_params = torch.cat([value.reshape(-1) for value in main.values()])
    for start in back:
        assert start.step == SAVED_AT + 2
        assert torch.equal(start.params, expected_params)
        assert start.warnings == []

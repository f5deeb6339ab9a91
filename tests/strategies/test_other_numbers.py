"""A run goes on with other numbers: of workers, and of an algorithm's settings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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
from lightning_loco import DiLoCo, EagerDiLoCo, GASLoC
from lightning_loco.strategies.random_states import random_states
from tests.cases import CASES, Case, without_variants
from tests.conftest import cover
from tests.pool import Pool, make_trainer
from tests.small_model import TinyModule, WorkerData, flat, quiet_trainer
from tests.strategies import test_checkpoint

SAVED_AT = 10
pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that")


@pytest.fixture(scope="module")
def five() -> Iterator[Pool]:
    """Five gloo processes."""
    processes = Pool(5)
    yield processes
    processes.close()


class Start(NamedTuple):
    """What a worker holds right before its first resumed step, and what it was told."""

    step: int
    engine: dict[str, Any]
    optimizer: dict[str, Any]
    random: Tensor
    consensus: Tensor
    warnings: list[str]
    final: Tensor


class Look(pl.Callback):
    """Notes what is there before the first step, and saves after some step."""

    def __init__(self, path: str, save_at: int) -> None:
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
            strategy.engine.worker.show_consensus("a look")
        self.seen["consensus"] = flat(module).clone()
        if self.seen["engine"]:
            strategy.engine.worker.show_local()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)


def copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {name: copied(value) for name, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def strategy_of(case: Case | str, sync_every: int) -> Any:
    if case == "pairwise":
        return loco.PairwiseGossipStrategy(timeout_s=30)
    return DDPStrategy() if isinstance(case, str) else case.strategy(sync_every, timeout_s=30)


def fit(
    rank: int,
    world: int,
    case: Case | str,
    path: str,
    resume: str | None = None,
    save_at: int = SAVED_AT,
    sync_every: int = 4,
) -> Start:
    """Train and save, perhaps from a checkpoint; each worker has data of its own."""
    look = Look(path, save_at)
    torch.manual_seed(1000 + rank)
    module = TinyModule(lr=0.01, optimizer="Adam")
    torch.manual_seed(1000 + rank)
    trainer = make_trainer(
        strategy_of(case, sync_every),
        max_steps=save_at + 4,
        callbacks=[look],
        use_distributed_sampler=False,
    )
    loader = StatefulDataLoader(WorkerData(rank, 100), batch_size=None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(module, loader, ckpt_path=resume)
    told = [str(warning.message) for warning in found if "go on from it" in str(warning.message)]
    return Start(**look.seen, warnings=told, final=flat(module))


class Files(NamedTuple):
    """What a checkpoint holds."""

    main: dict[str, Any]
    shared: dict[str, Any]
    workers: list[dict[str, Any]]

    @property
    def consensus(self) -> Tensor:
        return torch.cat([value.reshape(-1) for value in self.main["state_dict"].values()])

    def of_lane(self, worker: int) -> dict[str, Any]:
        """What the algorithm of a worker remembers."""
        source = self.shared or self.workers[worker]["engine"]
        state: dict[str, Any] = source["shared"][0]["state"]
        return state

    def mean(self, *keys: Any) -> Tensor:
        """The mean over the workers."""
        found = []
        for content in self.workers:
            value: Any = content["engine"]
            for key in keys:
                value = value[key]
            found.append(value)
        return torch.stack(found).mean(0)


def files_of(path: Path) -> Files:
    (folder,) = Path(f"{path}.loco").iterdir()
    shared = folder / "shared.pt"
    workers = [torch.load(file) for file in sorted(folder.glob("worker_*.pt"))]
    return Files(torch.load(path), torch.load(shared) if shared.exists() else {}, workers)


def assert_same(one: Any, other: Any) -> None:
    """Two trees are equal bit for bit."""
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
    "diloco_schedule",
    "async_diloco_momentum",
    "eager_diloco_momentum",
    "delayed_nesterov",
    "gasloc",
    "gasloc_overlap",
    "noloco",
    "diloco_compensated",
)
SHORT = ("diloco", "gasloc_overlap")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SHORT else pytest.mark.soak) for name in NUMBERS],
)
def test_four_workers_go_on_as_three_and_then_as_five(
    five: Pool, tmp_path: Path, name: str
) -> None:
    case, before = CASES[name], tmp_path / "4.ckpt"
    five.run(fit, case, str(before), world=4)
    for world in (3, 5):
        saved, path = files_of(before), tmp_path / f"{world}.ckpt"
        steps = SAVED_AT + (1 if world == 3 else 3)
        starts = five.run(fit, case, str(path), str(before), steps, world=world)
        check_start(case, saved, starts)
        check_words(case, len(saved.workers), starts)
        for start in starts[1:]:
            assert torch.equal(start.final, starts[0].final)
        before = path


def check_start(case: Case, saved: Files, starts: list[Start]) -> None:
    """Consensus, outer parameters, momentum, optimizers, random numbers and positions."""
    key = case.consensus_key
    for worker, start in enumerate(starts):
        is_new = worker >= len(saved.workers)
        own = saved.workers[0 if is_new else worker]
        engine = start.engine
        if key is None:
            near(start.consensus, saved.consensus)
            assert torch.equal(engine["params"], saved.consensus)
        else:
            assert torch.equal(start.consensus, saved.consensus)
            near(engine["params"], saved.mean("params"))
        state = engine["shared"][0]["state"]
        assert state.keys() == saved.of_lane(0).keys()
        for entry, value in state.items():
            if saved.shared or not isinstance(value, Tensor):
                assert_same(value, saved.of_lane(0)[entry])
            else:
                near(value, saved.mean("shared", 0, "state", entry))
            assert_same(value, starts[0].engine["shared"][0]["state"][entry])
        check_flight(saved, engine)
        assert_same(start.optimizer["state"], own["lightning"]["optimizer_states"][0]["state"])
        for counter in ("steps", "steps_since_round", "round_index"):
            assert engine[counter] == own["engine"][counter], counter
        assert torch.equal(start.random, own["position"]["random"]["torch"]) != is_new


def check_flight(saved: Files, engine: dict[str, Any]) -> None:
    """A round under way stays under way, with the mean of what it brings."""
    before, now = saved.workers[0]["engine"]["lanes"][0]["flight"], engine["lanes"][0]["flight"]
    assert (before is None) == (now is None)
    if now is None:
        return
    assert now["index"] == before["index"]
    received = engine["shared"][0]["received"]
    if saved.shared:
        assert torch.equal(received, saved.shared["shared"][0]["received"])
    else:
        near(received, saved.mean("shared", 0, "received"))
        assert ("messages" in now) == ("messages" in before)
        if "messages" in now:
            near(now["messages"], saved.mean("lanes", 0, "flight", "messages"))


def check_words(case: Case, before: int, starts: list[Start]) -> None:
    """One warning, on worker 0, says it all."""
    assert [len(start.warnings) for start in starts] == [1] + [0] * (len(starts) - 1)
    (text,) = starts[0].warnings
    algorithm, now = type(case.algorithm).__name__, len(starts)
    assert text.startswith(
        f"The checkpoint was written by {before} workers with {algorithm}, and {now} workers with "
        f"{algorithm} go on from it: "
    )
    place = "the consensus" if case.consensus_key is None else "the mean of the"
    assert f"all workers begin at {place}" in text
    if now == 3:
        assert "the optimizers, schedules and positions of worker 3 are dropped" in text
    else:
        assert "new are workers 3 to 4, with the optimizers, schedules and positions of" in text
    assert "under way" not in text


def test_one_worker_becomes_two_and_one_again(five: Pool, tmp_path: Path) -> None:
    one, two = tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    five.run(fit, CASES["diloco"], str(one), world=1)
    starts = five.run(fit, CASES["diloco"], str(two), str(one), SAVED_AT + 2, world=2)
    check_start(CASES["diloco"], files_of(one), starts)
    assert "was written by 1 worker with DiLoCo" in starts[0].warnings[0]
    again = five.run(fit, CASES["diloco"], str(one), str(two), SAVED_AT + 4, world=1)
    check_start(CASES["diloco"], files_of(two), again)
    assert "and 1 worker with DiLoCo go on" in again[0].warnings[0]


def test_a_worker_that_is_not_finite_is_left_out_of_the_mean(five: Pool, tmp_path: Path) -> None:
    path = tmp_path / "4.ckpt"
    five.run(fit, CASES["diloco"], str(path), world=4)
    saved = files_of(path)
    worker = Path(f"{path}.loco") / saved.main["lightning_loco"]["stamp"] / "worker_00003.pt"
    spoil(worker)
    starts = five.run(fit, CASES["diloco"], str(tmp_path / "3.ckpt"), str(path), 12, world=3)
    params = [content["engine"]["params"] for content in saved.workers[:3]]
    near(starts[0].engine["params"], torch.stack(params).mean(0))


def spoil(file: Path) -> None:
    """Make the parameters of a worker NaN."""
    from lightning_loco.strategies.sealed import seal

    content = torch.load(file)
    made = content.pop("seal")
    content["engine"]["params"][0] = float("nan")
    torch.save(seal(content, made["stamp"], made["worker"]), file)


# ------------------------------------------------------------------ other settings


def resumed(
    pool: Pool, folder: Path, before: Case | str, now: Case | str, sync_every: int = 4
) -> tuple[Files, list[Start]]:
    """What two workers saved, and how two workers with other settings go on from it."""
    path = folder / "before.ckpt"
    pool.run(fit, before, str(path), world=2)
    saved = files_of(path)
    now_path = str(folder / "now.ckpt")
    return saved, pool.run(fit, now, now_path, str(path), SAVED_AT + 3, sync_every, world=2)


def test_another_algorithm_begins_at_the_consensus(
    pool: Pool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for before, now, words in (
        ("local_sgd", "diloco", "what DiLoCo remembers (momentum) begins anew"),
        ("diloco", "gasloc", "what DiLoCo remembered (momentum) is dropped"),
        ("diloco", "local_sgd", "the last 2 local steps, which no round has shared, are dropped"),
        ("async_diloco", "gasloc", "a round that was under way is dropped"),
        ("gasloc", "noloco", "what GASLoC remembered (previous, start) is dropped"),
        ("noloco", "diloco", "what DiLoCo remembers (momentum) begins anew"),
    ):
        folder = tmp_path / f"{before} {now}"
        folder.mkdir()
        with subtests.test(before=before, now=now):
            check_another_algorithm(pool, folder, before, now, words)


def check_another_algorithm(pool: Pool, folder: Path, before: str, now: str, words: str) -> None:
    saved, starts = resumed(pool, folder, CASES[before], CASES[now])
    names = [type(CASES[name].algorithm).__name__ for name in (before, now)]
    prepared = CASES[now].prepared(2)
    for worker, start in enumerate(starts):
        assert torch.equal(start.engine["params"], saved.consensus)
        expected = prepared.init(saved.consensus)
        assert_same(start.engine["shared"][0]["state"], expected)
        own = saved.workers[worker]
        assert_same(start.optimizer["state"], own["lightning"]["optimizer_states"][0]["state"])
        assert torch.equal(start.random, own["position"]["random"]["torch"])
        assert start.engine["steps"] == start.step == SAVED_AT
        assert start.engine["round_index"] == start.engine["steps_since_round"] == 0
    assert [len(start.warnings) for start in starts] == [1, 0]
    assert f"2 workers with {names[0]}, and 2 workers with {names[1]}" in starts[0].warnings[0]
    assert "all workers begin at the consensus" in starts[0].warnings[0]
    assert words in starts[0].warnings[0]


def kept(saved: Files, starts: list[Start]) -> None:
    """Everything is as each worker saved it, without a word."""
    for worker, start in enumerate(starts):
        own = saved.workers[worker]["engine"]
        assert torch.equal(start.engine["params"], own["params"])
        assert_same(start.engine["shared"][0]["state"], saved.of_lane(worker))
        assert start.warnings == []


def test_other_settings_of_the_same_algorithm_drop_nothing(
    pool: Pool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    slower_adam = partial(torch.optim.Adam, lr=0.01)
    for name, before, now in (
        ("learning rate", CASES["diloco"], Case(DiLoCo(0.5, 0.7))),
        ("overlap", CASES["diloco"], CASES["async_diloco_momentum"]),
        ("topology", CASES["gasloc"], Case(GASLoC(momentum=0.3), "complete")),
        (
            "learning rate of Adam",
            CASES["diloco_adam"],
            Case(DiLoCo(outer_optimizer=slower_adam)),
        ),
    ):
        folder = tmp_path / name
        folder.mkdir()
        with subtests.test(name):
            kept(*resumed(pool, folder, before, now, sync_every=3))


def test_rounds_that_begin_to_overlap_begin_with_a_blocking_one(pool: Pool, tmp_path: Path) -> None:
    _, starts = resumed(pool, tmp_path, CASES["diloco"], CASES["async_diloco_momentum"])
    assert [start.engine["round_index"] for start in starts] == [0, 0]
    assert [start.engine["steps_since_round"] for start in starts] == [2, 2]


def test_momentum_is_kept_where_both_have_it(pool: Pool, tmp_path: Path) -> None:
    saved, starts = resumed(pool, tmp_path, CASES["diloco"], CASES["diloco_plain"])
    for start in starts:
        assert_same(start.engine["shared"][0]["state"], {"outer": saved.of_lane(0)["outer"]})
    assert "go on from it: what DiLoCo remembered (momentum) is dropped." in starts[0].warnings[0]


def test_momentum_begins_anew_where_there_was_none(pool: Pool, tmp_path: Path) -> None:
    saved, starts = resumed(pool, tmp_path, CASES["gasloc_plain"], Case(GASLoC(), "ring"))
    for worker, start in enumerate(starts):
        begun = saved.of_lane(worker)["start"]
        expected = {"start": begun, "previous": begun}
        assert_same(start.engine["shared"][0]["state"], expected)
        assert torch.equal(start.engine["params"], saved.workers[worker]["engine"]["params"])
    assert "go on from it: what GASLoC remembers (previous) begins anew." in starts[0].warnings[0]


def test_rounds_are_counted_anew_where_they_begin_to_matter(pool: Pool, tmp_path: Path) -> None:
    saved, starts = resumed(pool, tmp_path, CASES["diloco"], CASES["diloco_schedule"])
    for start in starts:
        assert_same(start.engine["shared"][0]["state"], {**saved.of_lane(0), "rounds": 0})
    assert "go on from it: what DiLoCo remembers (rounds) begins anew." in starts[0].warnings[0]


def test_an_eager_round_under_way_is_made_up_for(pool: Pool, tmp_path: Path) -> None:
    blocking = Case(EagerDiLoCo(0.4, 0.5))
    saved, starts = resumed(pool, tmp_path, CASES["eager_diloco_momentum"], blocking)
    for worker, start in enumerate(starts):
        before = saved.of_lane(worker)
        assert before["under_way"] == 1
        late = saved.workers[worker]["engine"]["shared"][0]["received"] - before["own"]
        state = start.engine["shared"][0]["state"]
        assert state["under_way"] == 0
        near(state["momentum"], before["momentum"] + late)
        near(state["outer"], before["outer"] - 0.4 * 1.5 * late)


def test_a_round_under_way_lands_where_none_stays_under_way(pool: Pool, tmp_path: Path) -> None:
    saved, starts = resumed(pool, tmp_path, CASES["async_diloco_momentum"], CASES["diloco"])
    lane = saved.shared["shared"][0]
    expected = {name: value.clone() for name, value in lane["state"].items()}
    CASES["diloco"].algorithm.update(lane["received"], lane["received"].clone(), expected)
    for worker, start in enumerate(starts):
        assert_same(start.engine["shared"][0]["state"], expected)
        assert start.engine["lanes"][0]["flight"] is None
        progress = saved.workers[worker]["engine"]["params"] - lane["state"]["outer"]
        near(start.engine["params"], expected["outer"] + progress)
    assert "go on from it: a round that was under way is landed at once." in starts[0].warnings[0]


def test_a_round_with_neighbours_lands_under_the_progress(pool: Pool, tmp_path: Path) -> None:
    saved, starts = resumed(pool, tmp_path, CASES["gasloc_overlap"], CASES["gasloc"])
    algorithm = CASES["gasloc"].prepared(2)
    for worker, start in enumerate(starts):
        own = saved.workers[worker]["engine"]
        lane, flight = own["lanes"][0], own["lanes"][0]["flight"]
        state = {name: value.clone() for name, value in saved.of_lane(worker).items()}
        received = own["shared"][0]["received"].clone()
        result = algorithm.update(flight["messages"].clone(), received, state)
        near(start.engine["params"], result + own["params"] - lane["departure"])
        assert_same(start.engine["shared"][0]["state"], state)


def test_pairs_go_on_with_other_numbers(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "3.ckpt"
    pool.run(fit, "pairwise", str(path), world=3)
    saved = files_of(path)
    for world in (2, 4):
        starts = pool.run(fit, "pairwise", str(tmp_path / "now.ckpt"), str(path), 12, world=world)
        for worker, start in enumerate(starts):
            own = saved.workers[worker if worker < 3 else 0]
            assert start.step == start.engine["steps"] == SAVED_AT
            near(start.consensus, saved.consensus)
            assert start.engine["clock"] >= own["engine"]["clock"]
            assert_same(start.optimizer["state"], own["lightning"]["optimizer_states"][0]["state"])
        assert "3 workers with PairwiseAverage, and" in starts[0].warnings[0]


@pytest.mark.parametrize(("before", "now"), [("diloco", "pairwise"), ("pairwise", "diloco")])
def test_rounds_become_pairs_and_pairs_rounds(
    pool: Pool, tmp_path: Path, before: str, now: str
) -> None:
    saved, starts = resumed(pool, tmp_path, CASES.get(before, before), CASES.get(now, now))
    for start in starts:
        near(start.consensus, saved.consensus)
    assert "all workers begin at the consensus" in starts[0].warnings[0]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The checkpoint was written by 3 workers")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
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
def test_statistics_and_schedules_go_on(
    pool: Pool, tmp_path: Path, before: str, now: str, world: int
) -> None:
    """With BatchNorm, dropout, AdamW, a schedule and a sampler: all workers end with one model."""
    folder = str(tmp_path)
    pool.run(test_checkpoint.fit, CASES[before], folder, None, 10, 10, world=3)
    path, more = f"{folder}/step=10.ckpt", 14
    found = pool.run(test_checkpoint.fit, CASES[now], folder, path, more, 10, world=world)
    for losses, final in found:
        assert sorted(losses) == list(range(10, more))
        assert torch.isfinite(final).all()
        if before != "async_model_average" and now != "async_model_average":
            assert torch.equal(final[:-1], found[0][1][:-1])  # the last one counts own batches


# ------------------------------------------------------------------ plain Lightning


def test_a_checkpoint_of_ddp_is_a_common_start(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "ddp.ckpt"
    (plain, _) = pool.run(fit, "ddp", str(path), world=2)
    main = torch.load(path)
    expected = torch.cat([value.reshape(-1) for value in main["state_dict"].values()])
    for name in ("local_sgd", "async_diloco", "gasloc"):
        starts = pool.run(
            fit, CASES[name], str(tmp_path / "ours.ckpt"), str(path), SAVED_AT + 3, world=3
        )
        for start in starts:
            assert start.step == SAVED_AT
            assert torch.equal(start.engine["params"], expected)
            near(start.consensus, expected)
            assert_same(start.optimizer["state"], main["optimizer_states"][0]["state"])
            assert start.warnings == []
    assert plain.step == 0


def fit_plain(path: str, resume: str | None, save_at: int) -> Start:
    """One process of plain Lightning."""
    look = Look(path, save_at)
    module = TinyModule(lr=0.01, optimizer="Adam")
    trainer = quiet_trainer(devices=1, max_steps=save_at + 2, callbacks=[look])
    loader = StatefulDataLoader(WorkerData(0, 100), batch_size=None)
    trainer.fit(module, loader, ckpt_path=resume)
    return Start(**look.seen, warnings=[], final=flat(module))


@pytest.mark.parametrize("name", ["diloco", "gasloc"])
def test_plain_lightning_goes_on_from_the_consensus_and_we_from_that(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    ours, plain = tmp_path / "ours.ckpt", tmp_path / "plain.ckpt"
    pool.run(fit, CASES[name], str(ours), world=3)
    saved = files_of(ours)
    one = fit_plain(str(plain), str(ours), SAVED_AT + 2)
    two = pool.run(fit, "ddp", str(tmp_path / "ddp.ckpt"), str(ours), SAVED_AT + 2, world=2)
    for start in (one, *two):
        assert start.step == SAVED_AT
        assert torch.equal(start.consensus, saved.consensus)
        expected = saved.workers[0]["lightning"]["optimizer_states"][0]["state"]
        assert_same(start.optimizer["state"], expected)
    back = pool.run(fit, CASES[name], str(ours), str(plain), SAVED_AT + 5, world=2)
    main = torch.load(plain)["state_dict"]
    expected_params = torch.cat([value.reshape(-1) for value in main.values()])
    for start in back:
        assert start.step == SAVED_AT + 2
        assert torch.equal(start.engine["params"], expected_params)
        assert start.warnings == []

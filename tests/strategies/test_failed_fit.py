"""State after a failed fit: never half of a round, and always the outer state."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

import lightning_loco as loco
from lightning_loco._util.fault_points import on_reach
from tests.harness.failing import lose_connection
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import flat
from tests.strategies.save_and_resume import DrawingModule, loader, recorded_warnings

pytestmark = [
    pytest.mark.recovery,
    pytest.mark.filterwarnings("ignore:.*was called without a model"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Using `isinstance"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint"),
]

STEPS, FAILS_AFTER, MORE_STEPS = 100, 10, 4
PATHS = "on_exception.ckpt", "after.ckpt"
STRATEGIES: dict[str, Callable[[], Any]] = {
    "at once": lambda: loco.DiLoCoStrategy(sync_every=4, outer_momentum=0.6),
    "late": lambda: loco.AsyncDiLoCoStrategy(sync_every=2, fragments=None, outer_momentum=0.3),
    "gossip": lambda: loco.GASLoCStrategy(topology="ring", sync_every=4),
    "pairs": loco.PairwiseGossipStrategy,
}


class FailIn(pl.Callback):
    """Makes one worker fail, and records its engine's state right before."""

    def __init__(self, rank: int, hook: str = "on_train_batch_start") -> None:
        self.rank = rank
        self.state: list[dict[str, Any]] = []
        setattr(self, hook, self.fail)

    def fail(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step < FAILS_AFTER:
            return
        engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
        self.state = outer_state(engine)
        if trainer.global_rank == self.rank:
            raise LookupError("trouble")


class Watch(pl.Callback):
    """Records the engine's state at the start of a resumed run."""

    def __init__(self) -> None:
        self.state: list[dict[str, Any]] = []
        self.params: Any = None
        self.step = -1

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if self.step < 0:
            self.state = outer_state(trainer.strategy.engine)  # type: ignore[attr-defined]
            self.step, self.params = trainer.global_step, flat(module)


def outer_state(engine: Any) -> list[dict[str, Any]]:
    fragments = getattr(engine, "fragments", ())
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in one.state.items()}
        for one in fragments
    ]


def equal(states: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    return len(states) == len(others) and all(
        one.keys() == other.keys()
        and all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one)
        for one, other in zip(states, others, strict=True)
    )


def fail_and_resume(rank: int, world: int, name: str, folder: str) -> tuple[Any, ...]:
    """Fail during the checkpoint on exception, write another one, and resume from both."""
    os.chdir(folder)
    failing, module = FailIn(1), DrawingModule()
    trainer = make_trainer(
        STRATEGIES[name](),
        max_steps=STEPS,
        enable_checkpointing=True,
        callbacks=[failing, OnExceptionCheckpoint(folder)],
        default_root_dir=folder,
    )
    error = ""
    try:
        trainer.fit(module, loader(world))
    except (LookupError, RuntimeError) as raised:
        error = str(raised)
    trainer.save_checkpoint("after.ckpt")
    found = []
    for path in PATHS:
        torch.distributed.barrier()
        saved = torch.load(path, weights_only=True)
        step, watch, again = saved["global_step"], Watch(), DrawingModule()
        resumed = make_trainer(
            STRATEGIES[name](),
            max_steps=step + MORE_STEPS,
            callbacks=[watch],
            default_root_dir=folder,
        )
        with recorded_warnings() as warned:
            resumed.fit(again, loader(world), ckpt_path=path)
        continues, ends = watch.step == step, resumed.global_step == step + MORE_STEPS
        is_same = torch.equal(watch.params, flat_of(saved["state_dict"], again))
        kept = equal(failing.state, watch.state)
        found.append((continues, ends, is_same, kept, warned))
    return error, found


def flat_of(state: dict[str, Any], module: DrawingModule) -> torch.Tensor:
    return torch.cat([state[name].flatten() for name, _ in module.named_parameters()])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_failed_fit_leaves_the_outer_state_and_says_what_it_is(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    for rank, (error, found) in enumerate(pool.run(fail_and_resume, name, str(tmp_path), world=2)):
        assert "trouble" in error
        for path, (continues, ends, is_same, kept, warned) in zip(PATHS, found, strict=True):
            assert continues
            assert ends
            assert is_same, "all workers start from the model in the file"
            if name == "pairs" and path == "after.ckpt":
                assert warned == [], "an ordinary checkpoint: there is no outer state to keep"
            elif rank == 0:
                # All workers share the outer state of DiLoCo. The momentum of gossip is each
                # worker's own, and the others have saved none.
                is_shared = name != "gossip"
                assert kept == is_shared, "the outer state is that before the error"
                (text,) = warned
                assert "worker 0 has saved its own model and state alone, after an error" in text
                assert (" is reset" in text) != is_shared


def tear(rank: int, world: int, folder: str) -> tuple[list[str], list[str], bool]:
    """Lose the fourth of five buckets of a round on worker 0; then save in every possible way."""
    os.chdir(folder)
    module = DrawingModule()
    module.model = torch.nn.Sequential(torch.nn.Linear(3, 1000), torch.nn.Linear(1000, 1))
    strategy = loco.DiLoCoStrategy(sync_every=2, bucket_bytes=1024)
    trainer = make_trainer(
        strategy,
        max_steps=STEPS,
        enable_checkpointing=True,
        callbacks=[OnExceptionCheckpoint(folder)],
        default_root_dir=folder,
    )
    reached: list[str] = []

    def act(point: str) -> None:
        reached.append(point)
        if rank == 0 and point == "after receiving" and reached.count(point) == 4:
            lose_connection()

    errors: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(on_reach(act))
        try:
            trainer.fit(module, loader(world))
        except RuntimeError as raised:
            errors.append(str(raised))
            errors.append(str(raised.__context__))
    try:
        trainer.save_checkpoint("after.ckpt")
    except RuntimeError as raised:
        errors.append(str(raised))
    return errors, os.listdir("."), strategy.engine is None


def test_half_of_a_round_is_never_saved(pool: Pool, tmp_path: Path) -> None:
    """With two pending buckets, the first one is already applied when the fourth is lost."""
    torn = "A round has failed while it was being applied"
    (errors, files, is_closed), others = pool.run(tear, str(tmp_path), world=2)
    in_callback, before, later = errors
    assert in_callback.startswith(torn)
    assert later.startswith(torn)
    assert before == "the connection is lost"
    assert files == []
    assert is_closed
    assert "the connection is lost" in others[0][0], "the other worker has its error"

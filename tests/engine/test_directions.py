"""Calls go downwards: in rounds, sync points and checkpoints no module calls a higher one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import tomllib
import torch

from lightning_loco import DiLoCo, DiLoCoStrategy, GASLoC, StepEngine
from tests.harness.pool import Pool, make_trainer
from tests.harness.rounds import approach
from tests.harness.small_model import TinyModule, make_loader
from tests.harness.sources import ROOT
from tests.harness.toys import Point

PREFIX = "lightning_loco."
DRIVER = "lightning_loco._util.decisions"
"""Calls what it is given, like a function of the standard library: its own caller counts."""


def layers() -> dict[str, int]:
    """Return the rank of each package and module in import-linter's layers; the lowest is 0."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = settings["tool"]["importlinter"]["contracts"][0]
    rows = [re.split(" [|:] ", row) for row in reversed(contract["layers"])]
    return {name: rank for rank, row in enumerate(rows) for name in row}


def is_of_same_object(caller: FrameType, callee: FrameType) -> bool:
    """Whether an object calls its own method: a base class may call what it declares."""
    return "self" in caller.f_locals and caller.f_locals["self"] is callee.f_locals.get("self")


@contextmanager
def traced_calls() -> Iterator[set[tuple[str, str]]]:
    """Record callers and callees within the package: names of functions with their modules."""
    calls: set[tuple[str, str]] = set()

    def is_ours(frame: FrameType) -> bool:
        name = frame.f_globals.get("__name__", "")
        return name.startswith(PREFIX) and name != DRIVER

    def name_of(frame: FrameType) -> str:
        return f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_qualname}"

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and is_ours(frame):
            caller = frame.f_back
            while caller and not is_ours(caller):
                caller = caller.f_back
            if caller is not None and not is_of_same_object(caller, frame):
                calls.add((name_of(caller), name_of(frame)))

    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def upward(calls: set[tuple[str, str]]) -> list[str]:
    rank_of = layers()

    def rank(name: str) -> int:
        return rank_of[name.removeprefix(PREFIX).split(":")[0].split(".")[0]]

    return sorted(f"{a} -> {b}" for a, b in calls if rank(b) > rank(a))


def work(rank: int, world: int) -> list[str]:
    found: set[tuple[str, str]] = set()
    for overlap, algorithm in [(False, DiLoCo()), (True, DiLoCo(0.7, 0.0)), (True, GASLoC())]:
        model = Point(torch.zeros(50, dtype=torch.float64))
        engine = StepEngine(model, algorithm, sync_every=2, overlap=overlap)
        with traced_calls() as calls:
            for _ in range(6 + 2 * rank):
                approach(rank, model)
                engine.step()
            engine.show_consensus("validation")
            engine.worker.show_local()
            engine.state_dict()
            engine.finish()
            engine.close()
        found |= calls
    return upward(found)


def test_calls_go_downwards(pool: Pool) -> None:
    for found in pool.run(work, world=2):
        assert not found, "\n".join(found)


def fit_and_save(rank: int, world: int, folder: str) -> list[str]:
    trainer = make_trainer(
        DiLoCoStrategy(sync_every=2), max_steps=6, default_root_dir=folder, callbacks=[SaveTraced()]
    )
    trainer.fit(TinyModule(), make_loader(rank, 6))
    (callback,) = [c for c in trainer.callbacks if isinstance(c, SaveTraced)]
    return callback.found


class SaveTraced(pl.Callback):
    """Saves a checkpoint after four steps, and records upward calls."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            with traced_calls() as calls:
                trainer.save_checkpoint(f"{trainer.default_root_dir}/saved.ckpt")
            self.found = upward(calls)


def test_calls_of_a_checkpoint_go_downwards(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(fit_and_save, str(tmp_path), world=2):
        assert not found, "\n".join(found)

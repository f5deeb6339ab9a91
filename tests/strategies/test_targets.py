"""Parameters in no optimizer: teachers and targets that a module updates by hand."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune

from lightning_loco import LearnerEngine, PairwiseEngine
from tests.cases import Case, rows, without_variants
from tests.harness.cover import cover
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, flat, make_loader, make_model
from tests.strategies.families import ALL_METHODS, fit_with, strategy_of


class TeacherModule(TinyModule):
    """A teacher follows the weights after every batch; optionally it requires gradients.

    Args:
        kind: "frozen", "in place" or "replaced" (a new copy of the network at every batch).
    """

    def __init__(self, kind: str) -> None:
        super().__init__(lr=0.05)
        self.teacher = make_model().requires_grad_(kind != "frozen")
        self.kind = kind
        self.own: list[Tensor] = []
        self.validated: list[Tensor] = []
        self.unwritten: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.start = flat(self.teacher)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        engine = self.trainer.strategy.engine
        while isinstance(engine, PairwiseEngine) and not engine.check_due():
            time.sleep(0.001)  # so that this step ends with a blend
        if isinstance(engine, LearnerEngine):
            time.sleep(0.05)  # so that fragments arrive
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.unwritten.append((self.start, flat(self.teacher)))
        if self.kind == "replaced":
            self.teacher = copy.deepcopy(self.model)
        else:
            pairs = zip(self.teacher.parameters(), self.model.parameters(), strict=True)
            for teacher, student in pairs:
                teacher.data.lerp_(student.data, 0.5)
        self.own.append(flat(self.teacher))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(flat(self.teacher))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)


def fit(
    rank: int, world: int, name: str, kind: str
) -> tuple[list[Tensor], list[Tensor], list[tuple[Tensor, Tensor]], Tensor]:
    module = TeacherModule(kind)
    data = make_loader(rank, 5), make_loader(0, 1)
    trainer = fit_with(strategy_of(name), module, *data, max_epochs=2, num_sanity_val_steps=0)
    assert trainer.strategy.statistics.rounds > 0  # type: ignore[attr-defined]
    return module.own, module.validated, module.unwritten, flat(module.teacher)


@pytest.mark.parametrize(
    ("name", "kind"), cover(ALL_METHODS, ["frozen", "in place", "replaced"], strength=1)
)
def test_a_teacher_is_local_in_training_and_a_mean_in_the_consensus(
    pool: Pool, name: str, kind: str
) -> None:
    results = pool.run(fit, name, kind, world=2)
    means = [sum(one) / 2 for one in zip(*(own for own, *_ in results), strict=True)]
    for own, validated, unwritten, final in results:
        for before, (start, ended) in zip(own, unwritten[1:], strict=False):
            assert torch.equal(before, start)
            assert torch.equal(start, ended)  # no round has changed the teacher
        for seen, mean in zip(validated, (means[4], means[9]), strict=True):
            torch.testing.assert_close(seen, mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(final, means[9], rtol=0, atol=1e-12)
    assert not torch.equal(results[0][0][4], results[1][0][4])


def fit_resumed(rank: int, world: int, case: Case, folder: str) -> list[Tensor]:
    """Return states of an uninterrupted run and of one that is resumed in its middle.

    Both runs' last batches, then the worker's teacher in the middle, and the saved teacher.
    """
    found = []
    for path in (None, f"{folder}/middle.ckpt"):
        module = TeacherModule("frozen")
        trainer = make_trainer(
            case.strategy(sync_every=3), max_epochs=2, use_distributed_sampler=False
        )
        if path is None:

            def save(module: Any = module, trainer: Any = trainer) -> None:
                if trainer.current_epoch == 0:
                    trainer.save_checkpoint(f"{folder}/middle.ckpt")

            module.on_train_epoch_end = save  # type: ignore[method-assign]
        trainer.fit(module, make_loader(rank, 5), make_loader(0, 1), ckpt_path=path)
        found.append(torch.stack(module.own[-5:]))
        if path is None:
            own = module.own[4]
    state = torch.load(f"{folder}/middle.ckpt", weights_only=False)["state_dict"]
    saved = [state[f"teacher.{name}"].reshape(-1) for name, _ in module.teacher.named_parameters()]
    return [*found, own, torch.cat(saved)]


@pytest.mark.recovery
@rows("resume", [name for name in ALL_METHODS if name in without_variants()])
def test_a_resumed_run_restores_the_teacher_of_each_worker(
    pool: Pool, tmp_path: Path, case: Case
) -> None:
    results = pool.run(fit_resumed, case, str(tmp_path), world=2)
    mean = sum(own for _, _, own, _ in results) / 2
    for unbroken, resumed, own, saved in results:
        assert torch.equal(unbroken, resumed)
        torch.testing.assert_close(saved, mean, rtol=0, atol=1e-12)
        assert not torch.equal(saved, own)


class Renames(TinyModule):
    """Renames a parameter."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            prune.identity(self.model[0], "weight")


def fit_renaming(rank: int, world: int) -> Tensor:
    module = Renames(lr=0.05)
    fit_with(strategy_of("diloco"), module, make_loader(rank, 9))
    return flat(module)


def test_a_renamed_parameter_is_still_exchanged(pool: Pool) -> None:
    first, second = pool.run(fit_renaming, world=2)
    assert torch.equal(first, second)

"""AsyncModelAverageStrategy in the Trainer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import (
    AsyncModelAverageStrategy,
    DiLoCoStrategy,
    PauseAveraging,
    StragglerSimulator,
)
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.small_model import (
    TinyModule,
    ValidatedModule,
    WorkerData,
    flat,
    make_loader,
)
from tests.strategies.families import fit_with


def fit_clipped(rank: int, world: int, strategy: DDPStrategy, accumulate: int) -> Tensor:
    module, data = TinyModule(optimizer="Adam"), make_loader(rank, 12)
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    fit_with(strategy, module, data, **settings)
    return flat(module)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_warm_up_is_ddp(pool: Pool, accumulate: int) -> None:
    expected = pool.run(fit_clipped, DDPStrategy(), accumulate, world=2)[0]
    warming_up = AsyncModelAverageStrategy(interval_s=0, warmup_steps=100)
    for result in pool.run(fit_clipped, warming_up, accumulate, world=2):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


class RecordsCopies(TinyModule):
    """Records in each step whether a snapshot of the parameters is pending."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        assert isinstance(strategy, AsyncModelAverageStrategy)
        assert strategy.engine is not None
        self.was_pending = [
            *getattr(self, "was_pending", ()),
            strategy.engine.fragments[0].pending is not None,
        ]
        return super().training_step(batch, batch_idx)


def fit_recording(rank: int, world: int) -> list[bool]:
    module = RecordsCopies()
    fit_with(AsyncModelAverageStrategy(interval_s=0), module, make_loader(rank, 2))
    return module.was_pending


def test_no_round_starts_before_the_first_step(pool: Pool) -> None:
    assert pool.run(fit_recording, world=2) == [[False, True]] * 2


class Stops(Callback):
    """User code that pauses averaging."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, AsyncModelAverageStrategy)
        if batch_idx == 10:
            strategy.abort()
            strategy.abort()
            self.rounds = strategy.statistics.rounds
        if batch_idx == 20:
            assert strategy.statistics.rounds == self.rounds
            strategy.resume()
            strategy.resume()


def fit_stopping(rank: int, world: int) -> tuple[int, int]:
    stops, strategy = Stops(), AsyncModelAverageStrategy(interval_s=0)
    fit_with(strategy, TinyModule(), make_loader(rank, 40), callbacks=[stops])
    return stops.rounds, strategy.statistics.rounds


def test_abort_and_resume_from_user_code(pool: Pool) -> None:
    for aborted, finally_ in pool.run(fit_stopping, world=2):
        assert 0 < aborted < finally_


class RecordsRounds(ValidatedModule):
    """Records whether averaging is paused, and the number of rounds, in steps and validations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[tuple[bool, int]]] = {"training": [], "validation": []}

    def _record(self, part: str) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, AsyncModelAverageStrategy)
        assert strategy.engine is not None
        self.seen[part].append((strategy.engine.paused, strategy.statistics.rounds))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._record("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._record("validation")
        super().validation_step(batch, batch_idx)


PAUSES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "by step": ({"steps": (5, 25)}, [*range(5, 25)]),
    "by epoch": ({"epochs": (1, 2)}, [*range(10, 20)]),
    "to the end": ({"steps": (12, None)}, [*range(12, 30)]),
    "in validations": ({"validation": True}, []),
}


def fit_with_pause(rank: int, world: int, name: str) -> tuple[dict[str, Any], int]:
    module, strategy = RecordsRounds(), AsyncModelAverageStrategy(interval_s=0, timeout_s=20)
    fit_with(
        strategy,
        module,
        make_loader(rank, 10),
        make_loader(rank, 1),
        max_epochs=3,
        num_sanity_val_steps=0,
        callbacks=[PauseAveraging(**PAUSES[name][0])],
    )
    return module.seen, strategy.statistics.rounds


def test_a_callback_pauses_the_averaging(pool: Pool, subtests: pytest.Subtests) -> None:
    for name, (_, paused) in PAUSES.items():
        with subtests.test(name):
            for seen, rounds in pool.run(fit_with_pause, name, world=2):
                in_training = seen["training"]
                assert [
                    step for step, (is_paused, _) in enumerate(in_training) if is_paused
                ] == paused
                assert len({in_training[step][1] for step in paused}) <= 1
                assert rounds > 0
                if name == "in validations":
                    assert all(is_paused for is_paused, _ in seen["validation"])


def fit_diloco_with_pause(rank: int, world: int) -> None:
    callbacks = [PauseAveraging(epochs=(1, None))]
    make_trainer(DiLoCoStrategy(2), max_epochs=1, callbacks=callbacks).fit(
        TinyModule(), make_loader(rank, 4)
    )


def test_bad_pauses(pool: Pool, subtests: pytest.Subtests) -> None:
    with pytest.raises(PoolError, match="needs AsyncModelAverageStrategy, but .* DiLoCoStrategy"):
        pool.run(fit_diloco_with_pause, world=2)
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, ValueError, "needs steps=.* or validation=True"),
        ({"steps": 5}, TypeError, r"steps must be a pair of integers .* got 5"),
        ({"steps": (None, 5)}, TypeError, "steps must be a pair"),
        ({"epochs": (1, 2, 3)}, TypeError, "epochs must be a pair"),
        ({"epochs": (1.5, 2)}, TypeError, "epochs must be a pair"),
        ({"steps": (5, 5)}, ValueError, "0 <= FIRST < END, got"),
        ({"steps": (-1, None)}, ValueError, "0 <= FIRST < END, got"),
    ]
    for settings, error, text in rows:
        with subtests.test(**settings), pytest.raises(error, match=text):
            PauseAveraging(**settings)


def fit_then_resume(rank: int, world: int, folder: str) -> tuple[int, int, bool]:
    def trainer(max_steps: int) -> Trainer:
        return make_trainer(
            AsyncModelAverageStrategy(interval_s=0),
            max_steps=max_steps,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )

    def loader() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(WorkerData(rank, 20), batch_size=None)

    first, module = trainer(10), TinyModule(optimizer="Adam")
    local: dict[str, Tensor] = {}

    class Remember(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 8:
                trainer.save_checkpoint(f"{folder}/middle.ckpt")
                local["saved"] = flat(module)

    first.callbacks.append(Remember())
    first.fit(module, loader())
    again, module = trainer(12), TinyModule(optimizer="Adam")

    class Compare(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            local.setdefault("resumed", flat(module))

    again.callbacks.append(Compare())
    again.fit(module, loader(), ckpt_path=f"{folder}/middle.ckpt")
    return first.global_step, again.global_step, torch.equal(local["saved"], local["resumed"])


@pytest.mark.recovery
def test_a_resumed_run_starts_from_the_state_of_each_worker(pool: Pool, tmp_path: Path) -> None:
    for first, again, same in pool.run(fit_then_resume, str(tmp_path), world=2):
        assert (first, again) == (10, 12)
        assert same


def fit_with_straggler(rank: int, world: int) -> float:
    module = TinyModule()
    strategy = AsyncModelAverageStrategy(interval_s=0.02)
    seconds: list[float] = []

    class Clock(Callback):
        def on_train_start(self, *args: Any) -> None:
            seconds.append(time.perf_counter())

        def on_train_epoch_end(self, *args: Any) -> None:
            seconds.append(time.perf_counter())

    callbacks = [StragglerSimulator({0: 0.3, 1: 0.005, 2: 0.005}), Clock()]
    fit_with(strategy, module, make_loader(rank, 40 if rank else 6), callbacks=callbacks)
    return seconds[1] - seconds[0]


@pytest.mark.alone
@pytest.mark.process
def test_a_straggler_does_not_slow_others(pool: Pool) -> None:
    slow, *fast = pool.run(fit_with_straggler, world=3)
    assert slow > 1.8
    assert max(fast) < 1.0

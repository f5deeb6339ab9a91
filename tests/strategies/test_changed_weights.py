"""Hooks and callbacks that write weights: all workers restart from them, or refuse them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_loco import DiLoCoStrategy, LocalSGDStrategy, PairwiseGossipStrategy
from lightning_loco.strategies.engine_strategy import EngineStrategy
from tests.cases import CASES, KINDS, Case, params, rows, without_variants
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader
from tests.strategies.families import fit_with, remote_or_ddp

AT_START = (
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
)
VALUE = 5.0


class Writer(pl.Callback):
    """Writes all weights in one hook, once, and sets the learning rate to zero.

    Args:
        hook: Name of the hook.
        epoch: The epoch; None for the first call.
        values: The values, by worker; None writes nothing on a worker.
    """

    def __init__(self, hook: str, epoch: int | None, values: Sequence[float | None]) -> None:
        self.values: Sequence[float | None] = values
        self.epoch = epoch
        self.has_written = False
        setattr(self, hook, self.write)

    def write(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if self.has_written or self.epoch not in (None, trainer.current_epoch):
            return
        self.has_written = True
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.0
        value = self.values[trainer.global_rank]
        for parameter in module.parameters() if value is not None else ():
            parameter.data.fill_(value)


class RecordingModule(TinyModule):
    """Records the weights in each validation."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(flat(self))


NAMES = [
    "local_sgd",
    "sparta",
    "diloco",
    "async_diloco",
    "streaming_diloco",
    "eager_diloco",
    "delayed_nesterov",
    "gasloc",
    "noloco",
    "async_model_average",
    "pairwise_gossip",
]
QUICK = ("diloco", "streaming_diloco", "pairwise_gossip")
METHODS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in NAMES]
BY_TIME = ("async_model_average", "pairwise_gossip")


def strategy_of(case: Case | None) -> EngineStrategy:
    return PairwiseGossipStrategy(1.0) if case is None else case.strategy(sync_every=3)


def fit_at_start(
    rank: int, world: int, case: Case | None, values: Mapping[str, Sequence[float | None]]
) -> dict[str, tuple[Tensor, Tensor]]:
    found = {}
    for hook, of_workers in values.items():
        module = RecordingModule()
        trainer = make_trainer(
            strategy_of(case),
            max_epochs=1,
            use_distributed_sampler=False,
            callbacks=[Writer(hook, None, of_workers)],
        )
        trainer.fit(module, make_loader(rank, 8), make_loader(0, 1))
        found[hook] = module.validated[0], flat(module)
    return found


def check_start(
    pool: Pool, case: Case | None, values: Mapping[str, Sequence[float | None]]
) -> None:
    for found in pool.run(fit_at_start, case, values, world=2):
        for hook, (sanity, final) in found.items():
            assert (final - VALUE).abs().max() <= 1e-12, hook
            if hook in ("on_fit_start", "on_sanity_check_start"):
                assert (sanity - VALUE).abs().max() <= 1e-12, hook


@pytest.mark.process
@rows("external updates", without_variants())
def test_weights_set_before_the_first_batch_are_the_start(pool: Pool, case: Case) -> None:
    check_start(pool, case, dict.fromkeys(AT_START, [VALUE, VALUE]))


def test_weights_set_before_the_first_batch_with_pairwise_gossip(pool: Pool) -> None:
    check_start(pool, None, dict.fromkeys(AT_START, [VALUE, VALUE]))


def test_at_the_start_the_weights_of_worker_0_are_used(pool: Pool) -> None:
    others = dict(zip(AT_START, [None, 7.0, None, 7.0, None], strict=True))
    check_start(pool, CASES["diloco"], {hook: [VALUE, other] for hook, other in others.items()})


def fit_later(
    rank: int,
    world: int,
    case: Case | None,
    hook: str,
    values: Sequence[float | None],
    batches: Sequence[int],
) -> tuple[str, Tensor]:
    module = TinyModule(lr=0.05)
    trainer = make_trainer(
        strategy_of(case),
        max_epochs=2,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[Writer(hook, 1 if hook == "on_train_epoch_start" else 0, values)],
    )
    try:
        trainer.fit(module, make_loader(rank, batches[rank]))
    except RuntimeError as error:
        return str(error), flat(module)
    return "", flat(module)


@pytest.mark.parametrize(
    ("case", "batches"),
    cover(
        params("external updates", without_variants(), KINDS), [(4, 4), (3, 5), (6, 6)], strength=1
    ),
)
def test_training_restarts_from_equal_weights_on_all_workers(
    pool: Pool, case: Case, batches: tuple[int, int]
) -> None:
    values = [VALUE, VALUE]
    hook = "on_train_epoch_start"
    for error, weights in pool.run(fit_later, case, hook, values, batches, world=2):
        assert error == ""
        assert (weights - VALUE).abs().max() <= 1e-12


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end"])
def test_pairwise_gossip_restarts_from_equal_weights(pool: Pool, hook: str) -> None:
    for error, weights in pool.run(fit_later, None, hook, [VALUE, VALUE], (2, 5), world=2):
        assert error == ""
        assert (weights - VALUE).abs().max() <= 1e-12


def fit_each_later(
    rank: int, world: int, names: Sequence[str], values: Sequence[float | None]
) -> list[str]:
    """Return the errors of several methods."""
    hook = "on_train_epoch_start"
    return [fit_later(rank, world, CASES.get(name), hook, values, (4, 4))[0] for name in names]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (
            [1.0, 2.0],
            [
                "set weights between two epochs",
                "'model.0.weight' is not the same on workers 0 and 1",
            ],
        ),
        (
            [1.0, None],
            [
                "a new start from weights that a hook has set on this worker",
                "worker 0 at a new start",
                "not all do the same in their hooks",
            ],
        ),
    ],
    ids=["others on each worker", "on one worker alone"],
)
def test_different_weights_are_refused_on_every_worker(
    pool: Pool, subtests: pytest.Subtests, values: list[float | None], texts: list[str]
) -> None:
    names = ("diloco", "gasloc", "async_model_average", "pairwise_gossip")
    for errors in pool.run(fit_each_later, names, values, world=2):
        for name, error in zip(names, errors, strict=True):
            with subtests.test(name):
                for text in texts:
                    assert text in error


class Clipped(RecordingModule):
    """Clips its weights after every batch, with a different bound on each worker."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.3, 0.3)


SHIFTS = (0.1, 0.3)


class Shifting(TinyModule):
    """Does not train; each worker adds its number to all weights after two batches of an epoch.

    The second of these batches is the last one of the epoch.
    """

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.left: list[Tensor] = []
        self.found: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.found.append(flat(self))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 6):
            for parameter in self.parameters():
                parameter.data.add_(SHIFTS[self.global_rank])
        self.left.append(flat(self))


def fit_shifting(rank: int, world: int, name: str) -> tuple[list[Tensor], list[Tensor], Tensor]:
    module = Shifting()
    trainer = make_trainer(
        strategy_of(CASES.get(name)), max_epochs=2, use_distributed_sampler=False
    )
    trainer.fit(module, make_loader(rank, 7))
    return module.left, module.found, flat(module)


@pytest.mark.parametrize("name", METHODS)
def test_writes_within_a_batch_are_progress_of_the_worker(pool: Pool, name: str) -> None:
    results = pool.run(fit_shifting, name, world=2)
    mean = 4 * sum(SHIFTS) / 2
    for left, found, final in results:
        for before, after in zip(left, found[1:], strict=False):
            assert torch.equal(before, after)
        moved = final - found[0]
        assert moved.min() > mean / 4
        if name == "local_sgd":
            torch.testing.assert_close(moved, torch.full_like(moved, mean), rtol=0, atol=1e-12)
        assert torch.equal(final, results[0][2])


def fit_clipped(rank: int, world: int) -> Tensor:
    module = Clipped()
    trainer = make_trainer(
        LocalSGDStrategy(sync_every=4), max_epochs=2, use_distributed_sampler=False
    )
    trainer.fit(module, make_loader(rank, 6), make_loader(0, 1))
    return flat(module)


def test_writes_within_a_batch_belong_to_the_local_step(pool: Pool) -> None:
    for weights in pool.run(fit_clipped, world=2):
        assert weights.abs().max() <= 0.3


IN_VALIDATION = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
)


class WritesInValidation(pl.Callback):
    """Writes useless weights, different on each worker, in every validation."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.write)

    def write(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data.fill_(1e9 + trainer.global_rank)


def fit_validating(
    rank: int, world: int, name: str, hooks: Sequence[str]
) -> dict[str | None, RecordingModule]:
    """Return results for each hook that writes, and without one."""
    found: dict[str | None, Any] = {}
    for hook in (None, *hooks):
        module = RecordingModule()
        trainer = make_trainer(
            strategy_of(CASES.get(name)),
            max_epochs=1,
            val_check_interval=4,
            use_distributed_sampler=False,
            callbacks=[] if hook is None else [WritesInValidation(hook)],
        )
        trainer.fit(module, make_loader(rank, 7), make_loader(0, 1))
        found[hook] = flat(module), module.validated[-1]
    return found


@pytest.mark.parametrize(
    ("name", "hooks"),
    [
        *zip(QUICK, zip(IN_VALIDATION[:3], IN_VALIDATION[3:], strict=True), strict=True),
        *(pytest.param(name, IN_VALIDATION, marks=pytest.mark.soak) for name in NAMES),
    ],
)
def test_writes_in_a_validation_are_undone_after_it(
    pool: Pool, name: str, hooks: Sequence[str]
) -> None:
    for rank, found in enumerate(pool.run(fit_validating, name, hooks, world=2)):
        expected, _ = found.pop(None)
        for hook, (final, validated) in found.items():
            assert final.abs().max() < 10.0, hook
            if name not in BY_TIME:
                assert torch.equal(final, expected), hook
            is_seen = hook in IN_VALIDATION[:3]
            assert torch.equal(validated, torch.full_like(validated, 1e9 + rank)) == is_seen, hook


class SwappingModule(RecordingModule):
    """Swaps in an average of its weights for each validation, and restores the weights after it.

    Args:
        hooks: In which hooks; None for no average.
    """

    def __init__(self, hooks: Sequence[str] | None) -> None:
        super().__init__()
        self.at_validation: list[Tensor] = []
        self.average: dict[str, Tensor] = {}
        self.own: dict[str, Tensor] = {}
        if hooks is not None:
            for hook, swap in zip(hooks, (self.swap_in, self.swap_out), strict=True):
                setattr(self, hook, swap)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():
            before = self.average.get(name, parameter.detach())
            self.average[name] = before.lerp(parameter.detach(), 0.5)

    def swap_in(self) -> None:
        if self.average:
            self.own = {name: p.detach().clone() for name, p in self.named_parameters()}
            self.load_state_dict(self.average)
            self.at_validation.append(flat(self))

    def swap_out(self) -> None:
        if self.average:
            self.load_state_dict(self.own)


def fit_swapping(
    rank: int, world: int, name: str, hooks: Sequence[str] | None
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    module = SwappingModule(hooks)
    trainer = make_trainer(
        strategy_of(CASES.get(name)),
        max_epochs=2,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    trainer.fit(module, make_loader(rank, 7), make_loader(0, 1))
    return flat(module), module.validated, module.at_validation


def fit_swapping_or_not(rank: int, world: int, name: str, hooks: Sequence[str]) -> list[Any]:
    return [fit_swapping(rank, world, name, chosen) for chosen in (hooks, None)]


@pytest.mark.parametrize(
    ("name", "hooks"),
    cover(
        METHODS,
        [
            pytest.param(("on_validation_start", "on_validation_end"), id="validation"),
            pytest.param(("on_validation_epoch_start", "on_validation_epoch_end"), id="epoch"),
        ],
        strength=1,
    ),
)
def test_an_average_that_a_module_swaps_in_is_only_validated(
    pool: Pool, name: str, hooks: Sequence[str]
) -> None:
    results = pool.run(fit_swapping_or_not, name, hooks, world=2)
    for (final, validated, expected), (without, *_) in results:
        assert len(validated) == len(expected) == 2
        for seen, average in zip(validated, expected, strict=True):
            assert torch.equal(seen, average)
        if name not in BY_TIME:
            assert torch.equal(final, without)
        assert torch.equal(final, results[0][0][0])


def fit_swapping_remotely(
    rank: int, world: int, num_workers: int | None, swaps: bool, batches: Sequence[int]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    module = SwappingModule(("on_validation_start", "on_validation_end") if swaps else None)
    fit_with(
        remote_or_ddp(num_workers),
        module,
        make_loader(rank, batches[rank]),
        make_loader(0, 1),
        max_epochs=2,
        num_sanity_val_steps=0,
    )
    return flat(module), module.validated, module.at_validation


def test_with_a_remote_optimizer_an_average_is_swapped_as_under_ddp(pool: Pool) -> None:
    *workers, _ = pool.run(fit_swapping_remotely, 2, True, (4, 4, 0), world=3)
    expected = pool.run(fit_swapping_remotely, None, True, (4, 4), world=2)
    for (final, validated, _), (final_ddp, validated_ddp, _) in zip(workers, expected, strict=True):
        assert torch.equal(final, final_ddp)
        assert torch.equal(torch.stack(validated), torch.stack(validated_ddp))


@pytest.mark.parametrize("batches", [(2, 5, 0), (5, 2, 0)], ids=str)
def test_with_a_remote_optimizer_an_average_is_swapped_when_all_workers_are_up_to_date(
    pool: Pool, batches: Sequence[int]
) -> None:
    *workers, _ = pool.run(fit_swapping_remotely, 2, True, batches, world=3)
    plain = pool.run(fit_swapping_remotely, 2, False, batches, world=3)
    for final, validated, expected in workers:
        assert torch.equal(final, plain[0][0])
        assert torch.equal(torch.stack(validated), torch.stack(expected))


def fit_resumed(
    rank: int, world: int, folder: str, hooks: Sequence[str]
) -> list[tuple[str, Tensor]]:
    """Return the error and weights of runs in which a hook writes after a checkpoint is loaded."""
    path, found = f"{folder}/first.ckpt", []
    for hook in (None, *hooks):
        trainer = make_trainer(
            DiLoCoStrategy(sync_every=4),
            max_epochs=1 if hook is None else 2,
            use_distributed_sampler=False,
            callbacks=[] if hook is None else [Writer(hook, None, [VALUE, VALUE])],
        )
        module = TinyModule(lr=0.05)
        if hook is None:
            save = partial(trainer.save_checkpoint, path)
            module.on_train_epoch_end = save  # type: ignore[method-assign]
        try:
            trainer.fit(module, make_loader(rank, 6), ckpt_path=path if hook else None)
        except ValueError as error:
            found.append((str(error), flat(module)))
        else:
            found.append(("", flat(module)))
    return found[1:]


def test_weights_over_a_checkpoint_are_refused_until_the_next_epoch(
    pool: Pool, tmp_path: Path
) -> None:
    """Then training restarts from them."""
    hooks = ("on_fit_start", "on_train_start", "on_train_epoch_start")
    for *refused, (error, weights) in pool.run(fit_resumed, str(tmp_path), hooks, world=2):
        assert len(refused) == 2
        for texts, _ in refused:
            assert "has set weights after the checkpoint was loaded" in texts
            assert "trainer.ckpt_path is None" in texts
        assert error == ""
        assert (weights - VALUE).abs().max() <= 1e-12


# ----------------------------------------------------- optimizers that switch weights


class Switching(torch.optim.SGD):
    """Has different weights between eval() and train(), as schedule-free optimizers do."""

    @torch.no_grad()
    def _move(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(factor)

    def eval(self) -> None:
        self._move(2.0)

    def train(self) -> None:
        self._move(0.5)


class ScheduleFree(ValidatedModule):
    """Switches with the mode of the module, or at the start of validation and of the next epoch.

    Args:
        with_mode: Whether it is the first.
    """

    def __init__(self, with_mode: bool) -> None:
        super().__init__(lr=0.05)
        self.with_mode = with_mode
        self.shown: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        self.own = Switching(self.parameters(), lr=self.lr)
        return self.own

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        if self.with_mode:
            self.own.eval()

    def on_validation_epoch_start(self) -> None:
        if not self.with_mode:
            self.own.eval()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.shown.append(flat(self))

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        if self.with_mode:
            self.own.train()

    def on_train_epoch_start(self) -> None:
        if not self.with_mode and self.trainer.current_epoch > 0:
            self.own.train()


def fit_schedule_free(
    rank: int, world: int, case: Case, with_mode: bool
) -> tuple[Tensor, list[Tensor]]:
    module: TinyModule = ScheduleFree(with_mode)
    trainer = make_trainer(
        case.strategy(sync_every=3), max_epochs=2, num_sanity_val_steps=0, max_steps=10
    )
    trainer.fit(module, make_loader(rank, 5), make_loader(0, 1))
    return flat(module), module.shown


@pytest.mark.parametrize("name", ["diloco", "gasloc"])
def test_a_schedule_free_optimizer_is_switched_for_the_validation_only(
    pool: Pool, name: str
) -> None:
    for final, shown in pool.run(fit_schedule_free, CASES[name], True, world=2):
        assert len(shown) == 2
        torch.testing.assert_close(shown[-1], 2 * final, rtol=0, atol=1e-12)


def test_a_schedule_free_optimizer_switched_elsewhere_gets_advice(pool: Pool) -> None:
    with pytest.raises(PoolError, match="in on_validation_model_eval and its train\\(\\)"):
        pool.run(fit_schedule_free, CASES["diloco"], False, world=2)

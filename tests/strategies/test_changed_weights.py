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

from lightning_loco import DiLoCoStrategy
from tests.cases import CASES, KINDS, Case, params, without_variants
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolError, make_trainer
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader
from tests.strategies.families import ALL_METHODS, BY_TIME, fit_with, strategy_of

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


QUICK = ("diloco", "streaming_diloco", "pairwise_gossip")
METHODS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in ALL_METHODS
]
CASE_ROWS = [
    *params("external updates", without_variants()),
    pytest.param("pairwise_gossip", id="pairwise_gossip"),
]


def fit_at_start(
    rank: int, world: int, method: str | Case, values: Mapping[str, Sequence[float | None]]
) -> dict[str, tuple[Tensor, Tensor]]:
    found = {}
    for hook, of_workers in values.items():
        module, data = RecordingModule(), (make_loader(rank, 8), make_loader(0, 1))
        fit_with(strategy_of(method), module, *data, callbacks=[Writer(hook, None, of_workers)])
        found[hook] = module.validated[0], flat(module)
    return found


EQUAL = dict.fromkeys(AT_START, [VALUE, VALUE])
OTHERS = dict(
    zip(AT_START, [[VALUE, other] for other in (None, 7.0, None, 7.0, None)], strict=True)
)


@pytest.mark.process
@pytest.mark.parametrize(
    ("method", "values"),
    [
        *cover(CASE_ROWS, [pytest.param(EQUAL, id="equal")]),
        pytest.param("diloco", OTHERS, id="those of worker 0 are used"),
    ],
)
def test_weights_set_before_the_first_batch_are_the_start(
    pool: Pool, method: str | Case, values: Mapping[str, Sequence[float | None]]
) -> None:
    for found in pool.run(fit_at_start, method, values, world=2):
        for hook, (sanity, final) in found.items():
            assert (final - VALUE).abs().max() <= 1e-12, hook
            if hook in ("on_fit_start", "on_sanity_check_start"):
                assert (sanity - VALUE).abs().max() <= 1e-12, hook


def fit_later(
    rank: int,
    world: int,
    method: str | Case,
    hook: str,
    values: Sequence[float | None],
    batches: Sequence[int],
) -> tuple[str, Tensor]:
    module, data = TinyModule(lr=0.05), make_loader(rank, batches[rank])
    writer = Writer(hook, 1 if hook == "on_train_epoch_start" else 0, values)
    try:
        fit_with(strategy_of(method), module, data, max_epochs=2, callbacks=[writer])
    except RuntimeError as error:
        return str(error), flat(module)
    return "", flat(module)


@pytest.mark.parametrize(
    ("method", "hook", "batches"),
    [
        *cover(
            params("external updates", without_variants(), KINDS),
            ["on_train_epoch_start"],
            [(4, 4), (3, 5), (6, 6)],
            strength=1,
        ),
        ("pairwise_gossip", "on_train_epoch_start", (2, 5)),
        ("pairwise_gossip", "on_train_epoch_end", (2, 5)),
    ],
)
def test_training_restarts_from_equal_weights_on_all_workers(
    pool: Pool, method: str | Case, hook: str, batches: tuple[int, int]
) -> None:
    for error, weights in pool.run(fit_later, method, hook, [VALUE, VALUE], batches, world=2):
        assert error == ""
        assert (weights - VALUE).abs().max() <= 1e-12


def fit_each_later(
    rank: int, world: int, names: Sequence[str], values: Sequence[float | None]
) -> list[str]:
    """Return the errors of several methods."""
    hook = "on_train_epoch_start"
    return [fit_later(rank, world, name, hook, values, (4, 4))[0] for name in names]


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
    fit_with(strategy_of(name), module, make_loader(rank, 7), max_epochs=2)
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
    module, data = Clipped(), (make_loader(rank, 6), make_loader(0, 1))
    fit_with(strategy_of("local_sgd", 4), module, *data, max_epochs=2)
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
        module, data = RecordingModule(), (make_loader(rank, 7), make_loader(0, 1))
        callbacks = [] if hook is None else [WritesInValidation(hook)]
        fit_with(strategy_of(name), module, *data, val_check_interval=4, callbacks=callbacks)
        found[hook] = flat(module), module.validated[-1]
    return found


@pytest.mark.parametrize(
    ("name", "hooks"),
    [
        *zip(QUICK, zip(IN_VALIDATION[:3], IN_VALIDATION[3:], strict=True), strict=True),
        *(pytest.param(name, IN_VALIDATION, marks=pytest.mark.soak) for name in ALL_METHODS),
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


VALIDATION = ("on_validation_start", "on_validation_end")


def fit_swapping(
    rank: int,
    world: int,
    method: str,
    hooks: Sequence[str] | None,
    batches: Sequence[int] = (7, 7),
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the final weights, those that were validated, and the averages."""
    module, data = SwappingModule(hooks), (make_loader(rank, batches[rank]), make_loader(0, 1))
    fit_with(strategy_of(method), module, *data, max_epochs=2, num_sanity_val_steps=0)
    return flat(module), module.validated, module.at_validation


def fit_swapping_or_not(rank: int, world: int, name: str, hooks: Sequence[str]) -> list[Any]:
    return [fit_swapping(rank, world, name, chosen) for chosen in (hooks, None)]


@pytest.mark.parametrize(
    ("name", "hooks"),
    cover(
        METHODS,
        [
            pytest.param(VALIDATION, id="validation"),
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


@pytest.mark.parametrize("batches", [(4, 4, 0), (2, 5, 0), (5, 2, 0)], ids=str)
def test_with_a_remote_optimizer_an_average_is_swapped_when_all_workers_are_up_to_date(
    pool: Pool, batches: Sequence[int]
) -> None:
    """As under DDP, which needs equal numbers of batches."""
    found = pool.run(fit_swapping, "remote_optimizer", VALIDATION, batches, world=3)[:2]
    plain = pool.run(fit_swapping, "remote_optimizer", None, batches, world=3)
    for final, validated, expected in found:
        assert torch.equal(final, plain[0][0])
        assert torch.equal(torch.stack(validated), torch.stack(expected))
    if batches[0] == batches[1]:
        of_ddp = pool.run(fit_swapping, "ddp", VALIDATION, batches, world=2)
        for own, other in zip(found, of_ddp, strict=True):
            assert torch.equal(own[0], other[0])
            assert torch.equal(torch.stack(own[1]), torch.stack(other[1]))


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

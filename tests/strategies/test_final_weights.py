"""Callbacks that write the final weights: these are kept, as a mean over the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from lightning_loco.model.consensus import pruning_masks
from tests.harness.cover import cover
from tests.harness.pool import Pool
from tests.harness.small_model import TinyModule, ValidatedModule, flat, make_loader, norm_model
from tests.harness.weight_averaging import (
    EMAWeightAveraging,
    WeightAveraging,
    needs_weight_averaging,
)
from tests.strategies.families import ALL_METHODS, fit_with, saved_weights, strategy_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*num_workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
METHODS = [*ALL_METHODS, "gasloc_overlap"]
QUICK = {"diloco", "streaming_diloco", "gasloc", "gasloc_overlap", "async_model_average"}
DECAY = 0.9


def methods(quick: set[str]) -> list[Any]:
    """Return all methods; slow ones run in the soak."""
    return [pytest.param(name, marks=[pytest.mark.soak] * (name not in quick)) for name in METHODS]


class AveragingModule(ValidatedModule):
    """Averages its local weights by hand, and records the validated weights."""

    def __init__(self, decay: float | None) -> None:
        super().__init__()
        self.decay = decay
        self.average: Tensor | None = None
        self.averaged = 0
        self.validated: list[Tensor] = []
        self.ended: list[Tensor | None] = []

    def on_train_epoch_end(self) -> None:
        self.ended.append(self.average)

    def on_train_batch_end(self, *args: Any) -> None:
        now = flat(self)
        self.averaged += 1
        share = 1 / self.averaged if self.decay is None else 1 - self.decay
        self.average = now if self.average is None else self.average + share * (now - self.average)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append(flat(self))


class RecordAverages(Callback):
    """Records the hand-made averages right before every validation."""

    def __init__(self) -> None:
        self.averages: list[Tensor] = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            assert isinstance(pl_module, AveragingModule)
            assert pl_module.average is not None
            self.averages.append(pl_module.average)


def fit_averaging(
    rank: int,
    world: int,
    method: str,
    kind: str,
    folder: str,
    batches: tuple[int, ...] = (4, 4, 4),
    until: str = "validation",
) -> dict[str, Any]:
    module, recorder = AveragingModule(DECAY if kind == "ema" else None), RecordAverages()
    averaging = EMAWeightAveraging(decay=DECAY) if kind == "ema" else WeightAveraging()
    saving = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    fit_with(
        strategy_of(method),
        module,
        make_loader(rank, batches[rank]),
        make_loader(0, 1),
        limit_val_batches=1 if until == "validation" else 0,
        max_epochs=2,
        callbacks=[averaging, recorder, *([] if until == "end" else [saving])],
        enable_checkpointing=until != "end",
    )
    (held,) = [v for v in vars(averaging).values() if isinstance(v, AveragedModel)]
    return {
        "final": flat(module),
        "held": flat(held),
        "by hand": module.average,
        "validated": module.validated,
        "at validation": recorder.averages,
        "at epochs' ends": module.ended,
    }


@needs_weight_averaging
@pytest.mark.parametrize(
    ("method", "kind"),
    cover(methods(QUICK), ["ema", "mean"], strength=1),
)
def test_the_average_of_all_workers_is_validated_saved_and_final(
    pool: Pool, tmp_path: Path, method: str, kind: str
) -> None:
    world = 3 if "gasloc" in method else 2  # with neighbours, or with all workers
    results = pool.run(fit_averaging, method, kind, str(tmp_path), world=world)
    expected = torch.stack([result["by hand"] for result in results]).mean(0)
    assert not torch.equal(results[0]["by hand"], results[1]["by hand"])
    for result in results:
        assert torch.equal(result["final"], result["held"])  # as under DDP
        assert torch.equal(result["final"], results[0]["final"])
        torch.testing.assert_close(result["final"], expected, rtol=0, atol=1e-12)
        for epoch, validated in enumerate(result["validated"]):
            local = torch.stack([one["at validation"][epoch] for one in results])
            torch.testing.assert_close(validated, local.mean(0), rtol=0, atol=1e-12)
            assert torch.equal(validated, results[0]["validated"][epoch])
    for epoch in range(2):
        values = saved_weights(tmp_path / f"epoch={epoch}.ckpt")
        torch.testing.assert_close(values, results[0]["validated"][epoch], rtol=0, atol=0)


@needs_weight_averaging
@pytest.mark.parametrize("kind", ["ema", "mean"])
def test_with_a_remote_optimizer_the_average_is_that_of_ddp(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    *workers, _ = pool.run(
        fit_averaging, "remote_optimizer", kind, str(tmp_path / "remote"), world=3
    )
    expected = pool.run(fit_averaging, "ddp", kind, str(tmp_path / "ddp"), world=2)[0]
    torch.testing.assert_close(expected["final"], expected["by hand"], rtol=0, atol=1e-12)
    for result in workers:
        assert torch.equal(result["final"], expected["final"])
        assert torch.equal(result["held"], expected["final"])
        for one, other in zip(result["validated"], expected["validated"], strict=True):
            assert torch.equal(one, other)
    for epoch, validated in enumerate(expected["validated"]):
        saved = saved_weights(tmp_path / "remote" / f"epoch={epoch}.ckpt")
        assert torch.equal(saved, validated)


@needs_weight_averaging
@pytest.mark.parametrize(
    ("batches", "until"),
    cover([(2, 5, 0), (5, 2, 0)], ["validation", "checkpoint", "end"], strength=1),
    ids=str,
)
def test_with_a_remote_optimizer_the_average_of_the_worker_with_the_most_data_is_used(
    pool: Pool, tmp_path: Path, batches: tuple[int, ...], until: str
) -> None:
    settings = "remote_optimizer", "ema", str(tmp_path), batches, until
    *workers, _ = pool.run(fit_averaging, *settings, world=3)
    full = workers[batches.index(5)]
    averages = full["at epochs' ends"]
    for result in workers:
        torch.testing.assert_close(result["final"], full["by hand"], rtol=0, atol=1e-12)
        assert len(result["validated"]) == (2 if until == "validation" else 0)
        for seen, average in zip(result["validated"], averages, strict=False):
            torch.testing.assert_close(seen, average, rtol=0, atol=1e-12)
    for epoch, average in enumerate(() if until == "end" else averages):
        values = saved_weights(tmp_path / f"epoch={epoch}.ckpt")
        torch.testing.assert_close(values, average, rtol=0, atol=1e-12)


def fit_twice(rank: int, world: int, folder: str) -> list[Tensor]:
    """Return the final weights of a run, and of one resumed after its first epoch."""
    found = []
    for resume in (None, f"{folder}/epoch=0.ckpt"):
        saving = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
        module = ValidatedModule()
        fit_with(
            strategy_of("diloco"),
            module,
            make_loader(rank, 7),
            make_loader(0, 1),
            ckpt_path=resume,
            max_epochs=2,
            callbacks=[EMAWeightAveraging(decay=DECAY), saving],
            enable_checkpointing=True,
        )
        found.append(flat(module))
    return found


@pytest.mark.recovery
@needs_weight_averaging
def test_a_resumed_run_continues_the_average(pool: Pool, tmp_path: Path) -> None:
    for whole, again in pool.run(fit_twice, str(tmp_path), world=2):
        assert torch.equal(whole, again)


class NormModule(TinyModule):
    """A module with or without BatchNorm."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        if has_norm:
            self.model = norm_model()

    def on_train_epoch_start(self) -> None:
        self.starts = [*getattr(self, "starts", []), flat(self)]


def fit_swa(rank: int, world: int, method: str, has_norm: bool) -> dict[str, Any]:
    module = NormModule(has_norm)
    swa = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2)
    fit_with(strategy_of(method), module, make_loader(rank, 4), max_epochs=3, callbacks=[swa])
    assert swa._average_model is not None
    buffers = [b.reshape(-1) for b in module.buffers() if b.is_floating_point()]
    return {
        "final": flat(module),
        "held": flat(swa._average_model),
        "buffers": torch.cat([torch.zeros(0), *buffers]),
        "starts": module.starts,
    }


@pytest.mark.parametrize(
    ("method", "has_norm"),
    cover(methods({*QUICK, "pairwise_gossip"}), [True, False], strength=1),
)
def test_stochastic_weight_averaging(pool: Pool, method: str, has_norm: bool) -> None:
    results = pool.run(fit_swa, method, has_norm, world=2)
    averaged = [torch.stack(result["starts"][1:3]).mean(0) for result in results]
    for result in results:
        assert torch.equal(result["final"], result["held"])
        assert torch.equal(result["final"], results[0]["final"])
        assert torch.equal(result["buffers"], results[0]["buffers"])
        expected = torch.stack(averaged).mean(0)
        torch.testing.assert_close(result["final"], expected, rtol=0, atol=1e-12)


class RecordMasks(Callback):
    """Records each worker's masks before a checkpoint makes them equal."""

    def __init__(self) -> None:
        self.masks = torch.zeros(0)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.masks = torch.cat([mask.reshape(-1) for _, mask in pruning_masks(pl_module)])


def fit_pruning(
    rank: int, world: int, method: str, how: str, lottery: bool, folder: str
) -> tuple[dict[str, Any], Tensor]:
    module, recorder = ValidatedModule(), RecordMasks()
    module.model = norm_model()
    torch.manual_seed(rank)
    pruning = ModelPruning(
        how,
        parameters_to_prune=[(module.model[0], "weight"), (module.model[3], "weight")],
        amount=0.5,
        use_lottery_ticket_hypothesis=lottery,
    )
    saving = ModelCheckpoint(dirpath=folder, filename="last", save_on_train_epoch_end=True)
    fit_with(
        strategy_of(method),
        module,
        make_loader(rank, 7),
        make_loader(0, 1),
        max_epochs=2,
        callbacks=[pruning, recorder, saving],
        enable_checkpointing=True,
    )
    return {name: value.clone() for name, value in module.state_dict().items()}, recorder.masks


def count_zeros(state: dict[str, Tensor]) -> int:
    return sum(int((state[f"model.{layer}.weight"] == 0).sum()) for layer in (0, 3))


@pytest.mark.parametrize(
    ("method", "how", "lottery"),
    [
        pytest.param("gasloc", "random_unstructured", False, id="gasloc"),
        *cover(
            [pytest.param(method, marks=pytest.mark.soak) for method in METHODS],
            [
                pytest.param("l1_unstructured", False, id="by size"),
                pytest.param("l1_unstructured", True, id="by size, back to the start"),
                pytest.param("random_unstructured", False, id="at random"),
            ],
            strength=1,
        ),
    ],
)
def test_pruning_keeps_its_zeros(
    pool: Pool, tmp_path: Path, method: str, how: str, lottery: bool
) -> None:
    expected, _ = pool.run(fit_pruning, "ddp", how, lottery, str(tmp_path / "ddp"), world=2)[0]
    results = pool.run(fit_pruning, method, how, lottery, str(tmp_path / "own"), world=2)
    (first, masks), (second, masks_1) = results
    if how == "random_unstructured":
        assert not torch.equal(masks, masks_1)
    saved = torch.load(next((tmp_path / "own").glob("last*.ckpt")), weights_only=True)["state_dict"]
    for state in (first, second, saved):
        assert set(state) == set(expected)
        assert count_zeros(state) == count_zeros(expected) == 15  # of 20, pruned by half twice
    for name, value in first.items():
        if value.is_floating_point():
            assert torch.equal(value, second[name]), name


class WritesAtTheEnd(Callback):
    """Writes into the model when training ends."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for parameter in pl_module.parameters():
            parameter.data.fill_(5.0)
        trainer.save_checkpoint(f"{trainer.default_root_dir}/end.ckpt")


def fit_writing(rank: int, world: int, finalize: str, folder: str) -> Tensor:
    module = TinyModule()
    strategy = strategy_of("diloco", finalize=finalize)
    callbacks = [WritesAtTheEnd()]
    fit_with(strategy, module, make_loader(rank, 4), callbacks=callbacks, default_root_dir=folder)
    return flat(module)


@pytest.mark.parametrize("finalize", ["average", "keep"])
def test_weights_that_a_callback_writes_at_the_end_are_kept(
    pool: Pool, tmp_path: Path, finalize: str
) -> None:
    for final in pool.run(fit_writing, finalize, str(tmp_path), world=2):
        assert torch.equal(final, torch.full_like(final, 5.0))
    content = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert content["lightning_loco"]["num_workers"] == 2
    assert len(list((tmp_path / "end.ckpt.loco").glob("*/worker_*.pt"))) == 2
    if finalize == "average":
        for value in content["state_dict"].values():
            assert torch.equal(value, torch.full_like(value, 5.0))


class AddsToCheckpoint(TinyModule):
    """Adds entries to checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = [parameter.detach() for parameter in self.parameters()]


def fit_adding_to_checkpoint(rank: int, world: int, folder: str) -> tuple[Tensor, Tensor]:
    module = AddsToCheckpoint()
    local: list[Tensor] = []

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 5:
                local.append(flat(module))
                trainer.save_checkpoint(f"{folder}/mine.ckpt")
                local.append(flat(module))

    fit_with(strategy_of("local_sgd"), module, make_loader(rank, 7), callbacks=[Save()])
    return local[0], local[1]


def test_hooks_of_checkpoints_get_the_consensus(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(fit_adding_to_checkpoint, str(tmp_path), world=2)
    content = torch.load(tmp_path / "mine.ckpt", weights_only=True)
    mine = torch.cat([value.reshape(-1) for value in content["mine"]])
    torch.testing.assert_close(mine, torch.stack([before for before, _ in results]).mean(0))
    for before, after in results:
        assert torch.equal(before, after)
        assert not torch.equal(before, mine)

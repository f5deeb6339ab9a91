"""Rows: idioms of code that was written for DDP, failures, and packages built on Lightning."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

from tests.lightning_matrix.optimization_rows import Manual
from tests.lightning_matrix.row_run import (
    Facts,
    Model,
    RowRun,
    are_all,
    fill,
    loader,
    make_strategy,
)
from tests.lightning_matrix.trainer_rows import fit

# ------------------------------------------------------------- models that are not all trained


class Teacher(Model):
    """Has a teacher that averages the module's weights, as in BYOL and DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                old.lerp_(new, 0.1)


def teacher(run: RowRun) -> Facts:
    return fit(run, Teacher())


class Target(Model):
    """Has a network that is set by hand and is in no optimizer, as in DQN."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.layers)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            bootstrapped = 0 * self.target(batch[0])
        return (self(batch[0]) - batch[1] - bootstrapped).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            fill(self.target, float(self.current_epoch + 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), lr=self.lr)


def target(run: RowRun) -> Facts:
    """Weights set by hand in the last epoch are kept, equal on all workers."""
    module = Target()
    facts = fit(run, module)
    return {**facts, "target": are_all(module.target, 2.0)}


class Buffered(Model):
    """Has a running mean of its inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.center.lerp_(batch[0].mean(0), 0.5)
        return super().training_step(batch, batch_idx)


def buffer(run: RowRun) -> Facts:
    """A buffer changed by hand is equal on all workers at the end."""
    module = Buffered()
    fit(run, module)
    run.models.append(module.center.double())
    return {}


class Observing(Model):
    """Resizes a buffer in its first step, like quantization observers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 0:
            self.largest.resize_(4).fill_(3.0)
        return super().training_step(batch, batch_idx)


def resized_buffer(run: RowRun) -> Facts:
    """A buffer resized in place keeps its new shape and values."""
    module = Observing()
    return {**fit(run, module), "largest": module.largest.tolist()}


class Replacing(Model):
    """Replaces a parameter object."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[0].weight = nn.Parameter(self.layers[0].weight.detach().clone())


def replaced_parameter(run: RowRun) -> Facts:
    return fit(run, Replacing())


class Unfreezes(Model):
    """Trains a layer from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[0].requires_grad_(True)


def unfreezing(run: RowRun) -> Facts:
    return fit(run, Unfreezes())


class Freezing(Model):
    """Freezes a layer from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[0].requires_grad_(False)


def freezing(run: RowRun) -> Facts:
    return fit(run, Freezing())


class Clipped(Manual):
    """Clips its weights by hand after every step, like the critic of a WGAN."""

    def step(self, batch: Any) -> Tensor:
        loss = super().step(batch)
        self.clip()
        return loss

    @torch.no_grad()
    def clip(self) -> None:
        for parameter in self.parameters():
            parameter.clamp_(-0.01, 0.01)


def clipped_weights(run: RowRun) -> Facts:
    """Weights are within the bounds at the end, as means of clipped weights are."""
    return fit_clipped(run, Clipped())


def always_clipped_weights(run: RowRun) -> Facts:
    """The same with weights that are also clipped before the first step."""
    module = Clipped()
    module.clip()
    return fit_clipped(run, module)


def fit_clipped(run: RowRun, module: Clipped) -> Facts:
    facts = fit(run, module)
    largest = max(float(parameter.detach().abs().max()) for parameter in module.parameters())
    return {**facts, "bounded": largest < 0.0101}


# --------------------------------------------------------------------------- failures


class NotANumber(Model):
    """One worker's loss is NaN in one step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        bad = self.trainer.global_rank == 1 and self.calls["training_step"] == 3
        return loss * float("nan") if bad else loss


def nan_on_one(run: RowRun) -> Facts:
    module, trainer = NotANumber(), run.trainer()
    trainer.fit(module, loader())
    run.must_be_equal(module)
    return {}


class Broken(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1 and batch_idx == 2:
            raise ArithmeticError("a mistake of worker 1")
        return super().training_step(batch, batch_idx)


def error_on_one(run: RowRun) -> Facts:
    return fit(run, Broken())


def error_on_all(run: RowRun) -> Facts:
    class BrokenEverywhere(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ArithmeticError("a mistake of all workers")

    return fit(run, BrokenEverywhere())


# ------------------------------------------------------------------------ other packages


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


def lightning_cli(run: RowRun) -> Facts:
    """Fit with the Trainer that LightningCLI creates from arguments and defaults."""
    trainer = {
        "strategy": make_strategy(run.strategy_name, {}),
        "plugins": [run.environment],
        "devices": run.environment.world_size(),
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    cli = LightningCLI(
        Model,
        Data,
        args=["--trainer.max_epochs=2", "--model.lr=0.05"],
        run=False,
        save_config_callback=None,
        trainer_defaults=trainer,
    )
    cli.trainer.fit(cli.model, cli.datamodule)
    return run.facts(cli.trainer, cli.model)


class HuggingFace(Model):
    """A transformers model with random weights; tokens are the signs of the inputs.

    Args:
        kind: ``"gpt2"`` or ``"bert"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__()

    def make_layers(self) -> nn.Module:
        import transformers

        if self.kind == "gpt2":
            small = transformers.GPT2Config(
                vocab_size=16,
                n_positions=8,
                n_embd=8,
                n_layer=1,
                n_head=2,
                bos_token_id=0,
                eos_token_id=0,
            )
            return transformers.GPT2LMHeadModel(small)
        small = transformers.BertConfig(
            vocab_size=16,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
        )
        return transformers.BertForMaskedLM(small)

    def loss(self, batch: Any) -> Tensor:
        tokens = (batch[0] > 0).long() + 3
        return self.layers(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def gpt2(run: RowRun) -> Facts:
    return fit(run, HuggingFace("gpt2"))


def bert(run: RowRun) -> Facts:
    return fit(run, HuggingFace("bert"))

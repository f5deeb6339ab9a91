"""What a user may give RemoteOptimizerStrategy, with messages that say what to do instead."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateFinder
from torch.optim import Optimizer

from lightning_loco.comm.checks import check_model
from lightning_loco.remote.backends import check_optimizer
from lightning_loco.strategies import lightning_private


def check_before_setup(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse what the ranks that serve could not take part in.

    Raises:
        ValueError: If the learning rate is searched for, or a parameter cannot be sent.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, LearningRateFinder) for callback in callbacks):
        raise ValueError(
            "LearningRateFinder and Tuner.lr_find do not work with RemoteOptimizerStrategy: they "
            "make steps before training, and then go back to a checkpoint. Search with "
            'strategy="ddp" or on one device, which gives the same numbers.'
        )
    check_model(module)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise ValueError(
                f"Parameter {name!r} is complex, which cannot be sent to another rank. Store it as "
                "real numbers (torch.view_as_real), and use torch.view_as_complex in forward."
            )


def check_optimizers(optimizers: list[Optimizer], module: pl.LightningModule) -> None:
    """Refuse what cannot be done on another rank.

    Raises:
        ValueError: If there is not exactly one optimizer, or it needs a closure.
    """
    given = sum(not lightning_private.is_no_optimizer(optimizer) for optimizer in optimizers)
    if given != 1:
        raise ValueError(
            "RemoteOptimizerStrategy needs exactly one optimizer, but configure_optimizers of "
            f"{type(module).__name__} gives {given or 'none'}. Put all parameters into one "
            "optimizer, in several parameter groups if need be."
        )
    check_optimizer(optimizers[0])

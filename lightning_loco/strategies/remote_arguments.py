"""What a user gives RemoteOptimizerStrategy: what is refused, and what must not be streamed."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateFinder
from torch.optim import Optimizer

from lightning_loco.parameter_server.backends import check_optimizer
from lightning_loco.parameters.schema import check_model
from lightning_loco.strategies import lightning_compat

_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")


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
    given = sum(not lightning_compat.is_no_optimizer(optimizer) for optimizer in optimizers)
    if given != 1:
        raise ValueError(
            "RemoteOptimizerStrategy needs exactly one optimizer, but configure_optimizers of "
            f"{type(module).__name__} gives {given or 'none'}. Put all parameters into one "
            "optimizer, in several parameter groups if need be."
        )
    check_optimizer(optimizers[0])


def sees_gradients(module: pl.LightningModule, callbacks: list[pl.Callback]) -> bool:
    """Whether the module or a callback may look at gradients before the optimizer's step.

    With manual optimization the module may do so at any point of its ``training_step``.
    """
    return (
        not module.automatic_optimization
        or any(_overrides(module, pl.LightningModule, hook) for hook in _GRADIENT_HOOKS)
        or any(_overrides(one, pl.Callback, hook) for one in callbacks for hook in _GRADIENT_HOOKS)
        or _overrides(module, pl.LightningModule, "configure_gradient_clipping")
    )


def _overrides(owner: object, base: type, hook: str) -> bool:
    return getattr(getattr(owner, hook), "__func__", None) is not getattr(base, hook)

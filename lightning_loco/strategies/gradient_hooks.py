"""Who wants to see or change gradients between the backward pass and the step."""

from __future__ import annotations

import lightning.pytorch as pl

_HOOKS = ("on_after_backward", "on_before_optimizer_step")


def sees_gradients(module: pl.LightningModule, callbacks: list[pl.Callback]) -> bool:
    """Whether the module or a callback may look at gradients before the optimizer's step.

    With manual optimization the module may do so at any point of its ``training_step``.
    """
    return (
        not module.automatic_optimization
        or any(_overrides(module, pl.LightningModule, hook) for hook in _HOOKS)
        or any(_overrides(one, pl.Callback, hook) for one in callbacks for hook in _HOOKS)
        or _overrides(module, pl.LightningModule, "configure_gradient_clipping")
    )


def _overrides(owner: object, base: type, hook: str) -> bool:
    return getattr(getattr(owner, hook), "__func__", None) is not getattr(base, hook)

"""The demo's inner optimizers: AdamW, and Muon for the matrices beside AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

OPTIMIZERS = ("adamw", "muon")
BETAS = (0.9, 0.95)


def check_optimizer(name: str) -> None:
    """Raise ValueError for a name that is unknown, or not in this version of PyTorch."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}.")
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"optimizer='muon' needs torch.optim.Muon of PyTorch 2.9 or newer, got PyTorch "
            f"{torch.__version__}. Use optimizer='adamw', or a newer PyTorch."
        )


def make_optimizer(
    name: str, hidden: nn.Module, whole: nn.Module, lr: float, weight_decay: float
) -> Optimizer:
    """Make one of :data:`OPTIMIZERS`; Muon optimizes the matrices of ``hidden``, a part of it all.

    Vectors (norms, biases) have no weight decay.
    """
    trainable = [p for p in whole.parameters() if p.requires_grad]
    chosen = {id(p) for p in hidden.parameters() if p.ndim == 2} if name == "muon" else set()
    matrices = [p for p in trainable if id(p) in chosen]
    others = [p for p in trainable if id(p) not in chosen]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = AdamW(groups, lr=lr, betas=BETAS)
    if name == "adamw":
        return adamw
    # Steps have the size of AdamW's, so that the same learning rate and weight decay suit both.
    muon = torch.optim.Muon(
        matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return Together(muon, adamw)


class Together(Optimizer):
    """Several optimizers of different parameters, which Lightning steps and saves as one.

    It has the parameter groups and the state of its parts, so that a learning-rate schedule and a
    checkpoint include all of them.

    Args:
        parts: New optimizers, which have taken no step.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        begin = 0
        for part in self._parts:
            end = begin + len(part.param_groups)
            part.param_groups = self.param_groups[begin:end]
            part.state = self.state
            begin = end

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` has returned."""
        super().load_state_dict(state_dict)
        self._share()

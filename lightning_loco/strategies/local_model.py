"""What ``trainer.model`` is during fit: the module in a shell with the names that DDP's has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_loco.strategies import lightning_compat


class LocalModel(nn.Module):
    """A module whose backward pass reduces no gradients, for code that was written for DDP.

    ``trainer.model.module`` is the module, and ``trainer.model.no_sync()`` does nothing. All other
    names are the module's, and it counts as equal to the module.

    Args:
        module: The module to train.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context without any effect: the backward pass leaves gradients on their worker."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        """Look for other names in the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __eq__(self, other: object) -> bool:
        """Equal to its module: Lightning then calls the module's steps without a detour."""
        return other is self or other is self.module

    def __hash__(self) -> int:
        """As the module's, to which it is equal."""
        return hash(self.module)


def check_batch_norm(strategy: DDPStrategy) -> None:
    """Refuse BatchNorm that is synchronised in every forward pass."""
    if lightning_compat.syncs_batch_norm(strategy):
        raise MisconfigurationException(
            "sync_batchnorm=True communicates in every forward pass, which low-communication "
            "training avoids. Use Trainer(sync_batchnorm=False); statistics of BatchNorm are "
            "averaged for validation and checkpoints."
        )


def leave_shared_memory(model: nn.Module) -> None:
    """Give this rank parameters of its own: forkserver hands all ranks the same memory."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and not is_lazy(tensor) and tensor.is_shared():
            tensor.data = tensor.data.clone()

"""Collectives of foreign code in hooks of epochs: torchmetrics, ``torch.distributed.barrier``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_loco.strategies.lightning_private import TorchDispatchMode


class ForeignCollectives(TorchDispatchMode):
    """While it is entered, all workers meet before a collective of the default process group.

    A worker with fewer batches reaches the end of its epoch, and what hooks do there, while others
    still make rounds. At a meeting it takes part in these; inside a collective that does not go
    through the strategy it could not.

    Args:
        meet: Waits for all workers; gets the name of the place.
    """

    def __init__(self, meet: Callable[[str], None]) -> None:
        super().__init__()
        self._meet = meet

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Meet, then do what was to be done."""
        if func.namespace == "c10d" and any(map(_is_default_group, args)):
            name = func.name().removeprefix("c10d::").strip("_")
            self._meet(f"{name} in a hook of an epoch")
        return func(*args, **(kwargs or {}))


def _is_default_group(argument: object) -> bool:
    if not isinstance(argument, torch.ScriptObject):
        return False
    try:
        return ProcessGroup.unbox(argument) is dist.group.WORLD
    except RuntimeError:  # another object of C++, such as an option
        return False

"""Memory of a model that several processes were given."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy


def leave_shared_memory(model: torch.nn.Module) -> None:
    """Give this rank parameters of its own: forkserver hands all ranks the same memory."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and not is_lazy(tensor) and tensor.is_shared():
            tensor.data = tensor.data.clone()

"""Clipping the gradients of a worker whose ranks hold shards of the parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_loco.distributed.work import PendingWork
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.model.flat import local_tensor
from lightning_loco.model.ownership import Block, find_holders

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class GradientClipping:
    r"""Clips gradients by the norm of the whole gradient, or element by element.

    With the shards :math:`g_i` of the parameters that this rank holds, each of which :math:`c_i`
    ranks of the worker hold, the norm is

    .. math:: \lVert g \rVert^2 = \sum_{ranks} \sum_i \lVert g_i \rVert^2 / c_i

    so that each element counts once, whether it is in a ``DTensor`` of any mesh or in a plain
    tensor. ``torch.nn.utils.clip_grad_norm_`` refuses gradients of several meshes. Gradients that
    are partial sums, as with sequence parallelism, are added up before.

    Args:
        named: Names and parameters, in the same order on all ranks of the worker. All of them must
            construct it.
        group: The worker.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], group: WorkerGroup) -> None:
        parameters = [parameter for _, parameter in named]
        holders = find_holders([Block.of(parameter) for parameter in parameters], group)
        pairs = zip(parameters, holders, strict=True)
        self._copies = {id(parameter): len(places) for parameter, places in pairs}
        self._divisors: dict[tuple[int, ...], Tensor] = {}
        self._group = group
        has_float64 = any(parameter.dtype == torch.float64 for parameter in parameters)
        self._dtype = torch.float64 if has_float64 else torch.float32

    @torch.no_grad()
    def by_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale the gradients such that their norm is at most ``max_norm``.

        All ranks of the worker must call it, with gradients of the same parameters. Returns the
        norm before. RuntimeError if a rank is missing or has failed.
        """
        present = [p for p in parameters if p.grad is not None]
        if not present:
            return torch.zeros((), dtype=self._dtype, device="cpu")
        gradients = list(map(_local_gradient, present))
        norms = torch.stack([norm.to(self._dtype) for norm in torch._foreach_norm(gradients)])
        key = tuple(map(id, present))
        if (divisors := self._divisors.get(key)) is None:
            copies = [self._copies[number] for number in key]
            self._divisors[key] = divisors = torch.tensor(copies, device=norms.device).to(norms)
        total = (norms.square() / divisors).sum()
        if (inside := self._group.whole_inside) is not None:
            work = dist.all_reduce(total, group=inside, async_op=True)
            PendingWork(self._group, "the norm of the gradients", [work]).wait()
        norm = total.sqrt()
        factor = (max_norm / (norm + _EPSILON)).clamp_(max=1.0)
        torch._foreach_mul_(gradients, factor)
        return norm

    @torch.no_grad()
    def by_value(self, parameters: Iterable[Tensor], max_value: float) -> None:
        """Clamp every element of the gradients to ``[-max_value, max_value]``."""
        for parameter in parameters:
            if parameter.grad is not None:
                _local_gradient(parameter).clamp_(-max_value, max_value)


def _local_gradient(parameter: Tensor) -> Tensor:
    """Return the memory of a gradient on this rank, after it is sharded as its parameter is."""
    gradient = parameter.grad
    assert gradient is not None
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        return gradient
    if gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return local_tensor(gradient)

"""Running statistics of BatchNorm, which a round leaves behind the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_MEMORY_LENGTHS = 2.0


class RunningStatistics:
    r"""The running statistics of BatchNorm, reduced to the batches since the last round.

    A round moves the weights as far as many local steps do, and the running statistics follow only
    within tens of batches; until then they describe the weights before the round. With momentum m,
    the statistics of the k batches since the round alone are

    .. math:: s = \frac{s_k - (1 - m)^k s_0}{1 - (1 - m)^k}

    where :math:`s_0` are the statistics at the end of the round and :math:`s_k` the present ones.
    It is the bias correction of Adam's averages.

    Statistics are left unchanged if rounds come faster than they are forgotten (within 2 / m local
    steps), in modules whose statistics have no momentum, and without batches since the round.

    Args:
        model: Its modules with ``running_mean``, ``running_var``, ``num_batches_tracked`` and
            ``momentum``, such as BatchNorm, are the ones that count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._recorded: dict[str, ModuleStatistics] = {}

    def _modules(self) -> Iterator[tuple[str, nn.Module, float]]:
        for name, module in self._model.named_modules():
            momentum = getattr(module, "momentum", None)
            if isinstance(momentum, float) and all(
                isinstance(getattr(module, entry, None), Tensor)
                for entry in ("running_mean", "running_var", "num_batches_tracked")
            ):
                yield name, module, momentum

    @torch.no_grad()
    def record(self, steps_since_round: int) -> None:
        """Record the statistics at the end of a round, ``steps_since_round`` after the last one."""
        for name, module, momentum in self._modules():
            if steps_since_round * momentum >= _MEMORY_LENGTHS:
                values = module.running_mean, module.running_var, module.num_batches_tracked
                self._recorded[name] = ModuleStatistics(*(value.clone() for value in values))  # type: ignore[operator]

    @torch.no_grad()
    def remove_before_round(self) -> None:
        """Reduce the statistics in the modules to the batches since the last round."""
        for name, module, momentum in self._modules():
            start = self._recorded.get(name)
            mean, var = module.running_mean, module.running_var
            assert isinstance(mean, Tensor)
            assert isinstance(var, Tensor)
            if start is None or start.mean.shape != mean.shape:
                continue
            num_batches = int(module.num_batches_tracked) - int(start.num_batches)  # type: ignore[arg-type]
            if num_batches > 0:
                decay = (1 - momentum) ** num_batches
                mean.sub_(start.mean.to(mean), alpha=decay).div_(1 - decay)
                var.sub_(start.var.to(var), alpha=decay).div_(1 - decay).clamp_(min=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded statistics by the names of the modules."""
        return {name: recorded._asdict() for name, recorded in self._recorded.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._recorded = {name: ModuleStatistics(**value) for name, value in saved.items()}


class ModuleStatistics(NamedTuple):
    """The running statistics of one module at the end of a round."""

    mean: Tensor
    var: Tensor
    num_batches: Tensor

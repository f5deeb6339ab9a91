"""Running statistics of BatchNorm that belong to the weights which are shown with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_MEMORIES = 2.0


class Noted(NamedTuple):
    """The statistics of one module when a round ended."""

    mean: Tensor
    var: Tensor
    num_batches: Tensor


class RunningStatistics:
    r"""Takes the batches before the last round out of the running statistics.

    A round moves the weights by as much as many local steps do, and the statistics follow within
    tens of batches only: until then they are those of other weights. With momentum m, those of the
    k batches since the round alone are

    .. math:: s = \frac{s_k - (1 - m)^k s_0}{1 - (1 - m)^k}

    where :math:`s_0` are the statistics at the end of the round and :math:`s_k` those of now. This
    is the correction of Adam's averages for their start.

    Nothing is done where rounds come more often than the statistics forget (within 2 / m local
    steps), and for modules whose statistics have no momentum or see no batches.

    Args:
        model: Its modules are those with ``running_mean``, ``running_var``, ``num_batches_tracked``
            and ``momentum``, as BatchNorm has them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._noted: dict[str, Noted] = {}

    def _modules(self) -> Iterator[tuple[str, nn.Module, float]]:
        for name, module in self._model.named_modules():
            momentum = getattr(module, "momentum", None)
            if isinstance(momentum, float) and all(
                isinstance(getattr(module, entry, None), Tensor)
                for entry in ("running_mean", "running_var", "num_batches_tracked")
            ):
                yield name, module, momentum

    @torch.no_grad()
    def note(self, steps_since_round: int) -> None:
        """A round has ended; it was begun so many local steps after the one before."""
        for name, module, momentum in self._modules():
            if steps_since_round * momentum >= _MEMORIES:
                values = module.running_mean, module.running_var, module.num_batches_tracked
                self._noted[name] = Noted(*(value.clone() for value in values))  # type: ignore[operator]

    @torch.no_grad()
    def leave_since_round(self) -> None:
        """Leave in the modules what comes from the batches since the last round alone."""
        for name, module, momentum in self._modules():
            noted = self._noted.get(name)
            mean, var = module.running_mean, module.running_var
            assert isinstance(mean, Tensor)
            assert isinstance(var, Tensor)
            if noted is None or noted.mean.shape != mean.shape:
                continue
            num_batches = int(module.num_batches_tracked) - int(noted.num_batches)  # type: ignore[arg-type]
            if num_batches > 0:
                rest = (1 - momentum) ** num_batches
                mean.sub_(noted.mean.to(mean), alpha=rest).div_(1 - rest)
                var.sub_(noted.var.to(var), alpha=rest).div_(1 - rest).clamp_(min=0)

    def state_dict(self) -> dict[str, Any]:
        """What was noted, by the names of the modules."""
        return {name: noted._asdict() for name, noted in self._noted.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` has given."""
        self._noted = {name: Noted(**noted) for name, noted in saved.items()}

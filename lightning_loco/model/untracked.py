"""Untracked values, which rounds do not move: buffers, and parameters such as a teacher network."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.model.fingerprint import crc32, fingerprints
from lightning_loco.model.flat import Cuts, FlatLayout, local_tensor
from lightning_loco.model.schema import schema_checksum

_MEMORY_LENGTHS = 2.0
_LABEL = "the comparison of buffers and frozen parameters"


class UntrackedParameters:
    """The floating-point values of a model that rounds do not exchange.

    These are buffers, and parameters that are frozen or in no optimizer. Values that are equal on
    all workers (a mask, a frozen backbone) are left unchanged. Values that differ (statistics of
    BatchNorm, a teacher that follows the local parameters) are replaced by their mean over the
    workers in the consensus. The parameters are read from the module at each comparison, because a
    target network may be replaced by a copy of the trained one.

    Args:
        model: The module to train.
        exchanged: Parameters of the module that rounds exchange.
        chunk_elements: Longest chunk of a mean.

    Attributes:
        differing: Parameters that differed between the workers in the last comparison.
    """

    def __init__(
        self, model: nn.Module, exchanged: Iterable[Tensor], chunk_elements: int | None
    ) -> None:
        self._model = model
        self._exchanged = {id(tensor) for tensor in exchanged}
        self._cuts = Cuts(chunk_elements)
        self._has_warned = False
        self.differing = FlatLayout((), self._cuts)

    def compare(self, group: WorkerGroup, buffers: FlatLayout) -> tuple[FlatLayout, FlatLayout]:
        """Find the parameters and the buffers that differ between the workers; all must call it.

        It reads their memory once, and gathers a single number when nothing differs. Values whose
        shape or dtype differs between workers cannot be averaged: a warning names them.
        """
        named = [
            (name, local_tensor(p))
            for name, p in self._model.named_parameters()
            if id(p) not in self._exchanged and p.is_floating_point()
        ]
        checksums = fingerprints([p for _, p in named])
        named_buffers = list(zip(buffers.names, buffers.tensors, strict=True))
        checksums += [crc32(buffer) for buffer in buffers.tensors]
        own = {
            name: [f"{tuple(value.shape)} {value.dtype}", number]
            for (name, value), number in zip([*named, *named_buffers], checksums, strict=True)
        }
        differing: set[str] = set()
        if len(set(group.gather_objects(schema_checksum(sorted(own.items())), _LABEL))) > 1:
            gathered = group.gather_objects(own, _LABEL)
            incompatible = {
                name
                for name in set().union(*gathered)
                if len({each[name][0] if name in each else None for each in gathered}) > 1
            }
            if group.worker == 0:
                self._warn(incompatible)
            differing = {
                name
                for name in own.keys() - incompatible
                if len({each[name][1] for each in gathered}) > 1
            }
        self.differing, differing_buffers = (
            FlatLayout([(name, value) for name, value in all_of if name in differing], self._cuts)
            for all_of in (named, named_buffers)
        )
        return self.differing, differing_buffers

    def _warn(self, incompatible: set[str]) -> None:
        if incompatible and not self._has_warned:
            self._has_warned = True
            names = ", ".join(sorted(incompatible))
            warnings.warn(
                f"{names}: these buffers, or parameters that no optimizer has, differ in shape or "
                "dtype between the workers, so the consensus has those of one worker. Keep values "
                "of one worker only out of the module's parameters and persistent buffers.",
                stacklevel=2,
            )

    def load(self, names: list[str], values: Tensor) -> None:
        """Write flat values of this worker, in the order of ``names``, into the module."""
        named = dict(self._model.named_parameters())
        found = [(name, local_tensor(named[name])) for name in names]
        self.differing = FlatLayout(found, self._cuts)
        self.differing.write(values)


class RunningStatistics:
    r"""The running statistics of BatchNorm, reduced to the batches since the last round.

    A round moves the weights as far as many local steps do, and the running statistics follow only
    within tens of batches: until then they describe the weights before the round. With momentum m,
    the statistics of the k batches since the round alone are

    .. math:: s = \frac{s_k - (1 - m)^k s_0}{1 - (1 - m)^k}

    where :math:`s_0` are the statistics at the end of the round and :math:`s_k` those of now. It is
    the bias correction of Adam's averages.

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
        """Record the statistics at the end of a round, so many local steps after the last one."""
        for name, module, momentum in self._modules():
            if steps_since_round * momentum >= _MEMORY_LENGTHS:
                values = module.running_mean, module.running_var, module.num_batches_tracked
                self._recorded[name] = ModuleStatistics(*(value.clone() for value in values))  # type: ignore[operator]

    @torch.no_grad()
    def remove_before_round(self) -> None:
        """Reduce the statistics in the modules to those of the batches since the last round."""
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

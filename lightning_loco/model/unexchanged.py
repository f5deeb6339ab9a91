"""Values that rounds do not exchange: buffers, and parameters such as a teacher network."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor, nn

from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.model.fingerprint import crc32, fingerprints, schema_checksum
from lightning_loco.model.flat import Cuts, FlatLayout, local_tensor

_LABEL = "the comparison of buffers and frozen parameters"


class UnexchangedValues:
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
                "dtype between the workers, so the consensus has the values of one worker. Keep "
                "values of one worker only out of the module's parameters and persistent buffers.",
                stacklevel=2,
            )

    def load(self, names: list[str], values: Tensor) -> None:
        """Write flat values of this worker, in the order of ``names``, into the module."""
        named = dict(self._model.named_parameters())
        found = [(name, local_tensor(named[name])) for name in names]
        self.differing = FlatLayout(found, self._cuts)
        self.differing.write(values)

"""What no round moves: buffers, and teachers and targets that a model writes by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor, nn

from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.parameters.fingerprint import crc32, fingerprints
from lightning_loco.parameters.flat import Cuts, FlatLayout
from lightning_loco.parameters.schema import schema_checksum

_PLACE = "the comparison of buffers and frozen parameters"


class UntrackedParameters:
    """The floating-point values of one worker that do not travel in rounds.

    These are buffers, and parameters that are frozen or in no optimizer. Values that are equal on
    all workers (a mask, a frozen backbone) are left unchanged. Values that differ (statistics of
    BatchNorm, a teacher that follows the local parameters) are replaced by their mean over the
    workers in the consensus. The parameters are read from the module at each comparison, because a
    target network may be replaced by a copy of the trained one.

    Args:
        model: The module to train.
        exchanged: Its parameters that rounds move.
        chunk_elements: Longest chunk of a mean.

    Attributes:
        differing: Parameters that differed between the workers when they were compared last.
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

        Costs one read of their memory, and a message of one number when nothing differs. What has
        another shape or dtype than on worker 0 cannot be averaged: it is named in a warning.
        """
        named = [
            (name, p)
            for name, p in self._model.named_parameters()
            if id(p) not in self._exchanged and p.is_floating_point()
        ]
        prints = fingerprints([p for _, p in named])
        named_buffers = list(zip(buffers.names, buffers.tensors, strict=True))
        prints += [crc32(buffer) for buffer in buffers.tensors]
        own = {
            name: [f"{tuple(value.shape)} {value.dtype}", number]
            for (name, value), number in zip([*named, *named_buffers], prints, strict=True)
        }
        differing: set[str] = set()
        if len(set(group.gather_objects(schema_checksum(sorted(own.items())), _PLACE))) > 1:
            everyone = group.gather_objects(own, _PLACE)
            unlike = {
                name
                for name in set().union(*everyone)
                if len({one[name][0] if name in one else None for one in everyone}) > 1
            }
            if group.worker == 0:
                self._warn(unlike)
            differing = {
                name for name in own.keys() - unlike if len({one[name][1] for one in everyone}) > 1
            }
        self.differing, found = (
            FlatLayout([(name, value) for name, value in some if name in differing], self._cuts)
            for some in (named, named_buffers)
        )
        return self.differing, found

    def _warn(self, unlike: set[str]) -> None:
        if unlike and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{', '.join(sorted(unlike))}: these buffers, or parameters that no optimizer has, "
                "have not the same shape and dtype on all workers, so the consensus has those of "
                "one worker. Keep what belongs to a worker alone out of the module's parameters "
                "and persistent buffers.",
                stacklevel=2,
            )

    def load(self, names: list[str], values: Tensor) -> None:
        """Write values of this worker, flat and in the order of ``names``, into the module."""
        named = dict(self._model.named_parameters())
        self.differing = FlatLayout([(name, named[name]) for name in names], self._cuts)
        self.differing.write(values)

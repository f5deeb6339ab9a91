"""Parameters that no round moves: teachers and targets that a model writes by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import Tensor, nn

from lightning_loco.comm.checks import schema_checksum
from lightning_loco.comm.fingerprint import fingerprints
from lightning_loco.comm.flat import Cuts, FlatLayout
from lightning_loco.comm.groups import WorkerGroup

_PLACE = "the comparison of frozen parameters"


class Unexchanged:
    """The floating-point parameters of one worker that do not travel in rounds.

    They are frozen, or in no optimizer. Most are the same on all workers for ever (a frozen
    backbone); a teacher that follows the local parameters is not, and then its mean over the
    workers belongs to the consensus. They are looked up anew each time, so that a target may be
    replaced by a copy of the network.

    Args:
        model: The module to train.
        exchanged: Its parameters that rounds move.
        chunk_elements: Longest chunk of a mean.

    Attributes:
        differing: Those that differed between the workers when they were compared last.
    """

    def __init__(
        self, model: nn.Module, exchanged: Iterable[Tensor], chunk_elements: int | None
    ) -> None:
        self._model = model
        self._exchanged = {id(tensor) for tensor in exchanged}
        self._cuts = Cuts(chunk_elements)
        self._has_warned = False
        self.differing = FlatLayout((), self._cuts)

    def compare(self, group: WorkerGroup) -> FlatLayout:
        """Find those that differ between the workers; all must call it.

        Costs one read of their memory, and a message of one number when nothing differs. A
        parameter of another shape or dtype than on worker 0 cannot be averaged: it is named in a
        warning.
        """
        named = [
            (name, p)
            for name, p in self._model.named_parameters()
            if id(p) not in self._exchanged and p.is_floating_point()
        ]
        prints = fingerprints([p for _, p in named])
        own = {
            name: [f"{tuple(p.shape)} {p.dtype}", number]
            for (name, p), number in zip(named, prints, strict=True)
        }
        differing: list[tuple[str, Tensor]] = []
        if len(set(group.gather_objects(schema_checksum(sorted(own.items())), _PLACE))) > 1:
            everyone = group.gather_objects(own, _PLACE)
            unlike = {
                name
                for name in set().union(*everyone)
                if len({one[name][0] if name in one else None for one in everyone}) > 1
            }
            if group.worker == 0:
                self._warn(unlike)
            differing = [
                (name, p)
                for name, p in named
                if name not in unlike and len({one[name][1] for one in everyone}) > 1
            ]
        self.differing = FlatLayout(differing, self._cuts)
        return self.differing

    def _warn(self, unlike: set[str]) -> None:
        if unlike and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{', '.join(sorted(unlike))}: no optimizer has these parameters, and their shape "
                "or dtype is not the same on all workers, so the consensus has those of one "
                "worker. Keep what belongs to a worker alone out of the module's parameters.",
                stacklevel=2,
            )

    def load(self, names: list[str], values: Tensor) -> None:
        """Write values of this worker, flat and in the order of ``names``, into the module."""
        named = dict(self._model.named_parameters())
        self.differing = FlatLayout([(name, named[name]) for name in names], self._cuts)
        self.differing.write(values)

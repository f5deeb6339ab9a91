"""From the model into the memory that peers read, in a small share of the time."""

from __future__ import annotations

import math
import time

from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers.blending import Blending
from lightning_loco.peers.node import PeerNode
from lightning_loco.peers.norms import norm_of

SHARE = 0.05
"""Of the time, at most, that goes into copying the parameters for others."""


class Posting:
    """Serve the parameters as they are, unless that would take more than 5 % of the time.

    Args:
        node: Serves them; its memory is written into directly.
        blending: Copies the model.

    Attributes:
        was_finite: Whether the parameters were finite when they were last looked at.
        loss: The last loss of :meth:`note_loss`; None if there was none.
    """

    def __init__(self, node: PeerNode, blending: Blending) -> None:
        self.was_finite = True
        self.loss: float | None = None
        self._node = node
        self._blending = blending
        self._next = 0.0

    def note_loss(self, loss: float | Tensor) -> None:
        """Take note of this worker's recent training loss, one number."""
        self.loss = float(loss)

    @property
    def has_loss(self) -> bool:
        """Whether there was any."""
        return self.loss is not None

    @property
    def is_due(self) -> bool:
        """Whether the parameters may be served anew."""
        return time.perf_counter() >= self._next

    def send(self, clock: float) -> None:
        """Copy the parameters as they are now; they are served if they are finite.

        Args:
            clock: That of the parameters. The loss 0.0 travels with them if none is known.
        """
        started = time.perf_counter()
        draft = self._node.draft()
        self._blending.pack(draft)
        norm = norm_of(draft)
        self.was_finite = math.isfinite(norm)
        if self.was_finite:
            self._node.post(Tag(clock, self.loss or 0.0), norm)
        self._next = started + (time.perf_counter() - started) / SHARE

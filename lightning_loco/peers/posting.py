"""From the model into the memory that peers read, in a small share of the time."""

from __future__ import annotations

import math
import time

import torch

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers.blending import Blending
from lightning_loco.peers.node import PeerNode

_SHARE = 0.05


class Posting:
    """Serve the present parameters, unless that would take more than 5 % of the time.

    Args:
        node: Serves them; its memory is written into directly.
        blending: Copies the model.

    Attributes:
        was_finite: Whether the parameters were finite when they were last looked at.
    """

    def __init__(self, node: PeerNode, blending: Blending) -> None:
        self.was_finite = True
        self._node = node
        self._blending = blending
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the parameters may be served anew."""
        return time.perf_counter() >= self._next

    def send(self, tag: Tag) -> None:
        """Copy the parameters as they are now; they are served if they are finite."""
        started = time.perf_counter()
        draft = self._node.draft()
        self._blending.pack(draft)
        norm = float(torch.linalg.vector_norm(draft))
        self.was_finite = math.isfinite(norm)
        if self.was_finite:
            self._node.post(tag, norm)
        self._next = started + (time.perf_counter() - started) / _SHARE

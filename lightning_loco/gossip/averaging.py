"""What of a model travels between peers, and how a peer's parameters are blended into it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise import PairwiseAverage
from lightning_loco.fault_points import reach
from lightning_loco.parameters.flat import Chunk, Cuts, FlatLayout


def served_layout(params: FlatLayout, buffers: FlatLayout, chunk_elements: int) -> FlatLayout:
    """Trainable parameters and floating-point buffers in one flat vector.

    Args:
        params: The trainable parameters.
        buffers: The floating-point buffers.
        chunk_elements: Longest chunk of the vector.
    """
    names = [*params.names, *(f"buffer {name}" for name in buffers.names)]
    return FlatLayout(
        zip(names, [*params.tensors, *buffers.tensors], strict=True), Cuts(chunk_elements)
    )


class Blending:
    """Copy a model for peers, and blend in theirs, chunk by chunk; no gradient may be recorded.

    Args:
        layout: What travels, and where it is in the flat vector ``(P,)``.
        algorithm: How much of a peer's parameters to take; with ``keep_progress`` a second copy of
            the model is held.
    """

    def __init__(self, layout: FlatLayout, algorithm: PairwiseAverage) -> None:
        self.layout = layout
        self._algorithm = algorithm
        longest = max(map(len, layout.chunks()))
        self._scratch = torch.empty(longest, dtype=layout.dtype, device=layout.device)
        self._before_fetch: Tensor | None = None
        if algorithm.keep_progress:
            self._before_fetch = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)

    def pack(self, flat: Tensor) -> None:
        """Copy the model into ``flat``, of shape ``(P,)``."""
        reach("packing")
        for chunk in self.layout.chunks():
            chunk.pack(flat[chunk.start : chunk.stop])

    def note_fetch(self) -> None:
        """A fetch begins: with ``keep_progress``, keep the model as it is now."""
        if self._before_fetch is not None:
            self.pack(self._before_fetch)

    def blend(self, received: Tensor, factor: float, *, was_finite: bool) -> None:
        """Move the model to a peer's.

        Args:
            received: The peer's flat vector ``(P,)``, on the CPU; not changed. From pinned memory
                a GPU reads it later, when it comes to that.
            factor: The peer's share in [0, 1].
            was_finite: Whether this worker's own model was finite; if not, there is no progress
                that could be kept.
        """
        reach("outer step")
        before = self._before_fetch if was_finite else None
        for chunk in self.layout.chunks():
            place = slice(chunk.start, chunk.stop)
            theirs = received[place].to(self.layout.device, non_blocking=True)
            if before is not None:
                self._blend_before_fetch(chunk, before[place], theirs, factor)
            elif chunk.is_rounded(theirs.dtype):
                params = self._scratch[: len(chunk)]
                chunk.pack(params)
                self._algorithm.blend(params, theirs, factor)
                chunk.unpack(params)
            else:
                theirs = theirs.to(self.layout.device)
                for mine, their in chunk.window(theirs).pairs():
                    self._algorithm.blend(mine, their, factor)

    def _blend_before_fetch(
        self, chunk: Chunk, before: Tensor, theirs: Tensor, factor: float
    ) -> None:
        """Blend the parameters from when the fetch began; add what was learned since then."""
        params = self._scratch[: len(chunk)]
        chunk.pack(params)
        params.sub_(before)
        self._algorithm.blend(before, theirs, factor)
        params.add_(before)
        chunk.unpack(params)

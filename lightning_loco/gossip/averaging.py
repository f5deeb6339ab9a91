"""A model as one flat vector, which is copied for peers and averaged with a peer's vector."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_loco._util.fault_points import reach
from lightning_loco.algorithms.pairwise_average import PairwiseAverage
from lightning_loco.distributed.devices import has_streams
from lightning_loco.model.flat import Chunk, Cuts, FlatLayout


def served_layout(params: FlatLayout, buffers: FlatLayout, chunk_elements: int) -> FlatLayout:
    """Lay out trainable parameters and floating-point buffers in one flat vector ``(P,)``."""
    names = [*params.names, *(f"buffer {name}" for name in buffers.names)]
    return FlatLayout(
        zip(names, [*params.tensors, *buffers.tensors], strict=True), Cuts(chunk_elements)
    )


def copy_model(layout: FlatLayout, flat: Tensor) -> None:
    """Copy a model into ``flat``, of shape ``(P,)`` and on any device, chunk by chunk."""
    reach("packing")
    for chunk in layout.chunks():
        chunk.pack(flat[chunk.start : chunk.stop])


class ModelAverager:
    """Averages a model with the parameters of a peer, chunk by chunk, in place.

    Call its methods under ``torch.no_grad()``. With ``keep_progress`` of the algorithm it holds a
    second copy of the model. The first ``num_params`` elements of the layout are parameters; the
    buffers behind them are averaged as they are, because statistics plus the change of others can
    be invalid, such as a negative variance.
    """

    def __init__(self, layout: FlatLayout, algorithm: PairwiseAverage, num_params: int) -> None:
        self.layout = layout
        self._num_params = num_params
        self._algorithm = algorithm
        longest = max(map(len, layout.chunks()))
        self._scratch = torch.empty(longest, dtype=layout.dtype, device=layout.device)
        self._at_fetch_start: Tensor | None = None
        if algorithm.keep_progress:
            self._at_fetch_start = torch.empty(
                layout.numel, dtype=layout.dtype, device=layout.device
            )
        self._upload_done: torch.cuda.Event | None = None
        if has_streams(layout.device):
            self._upload_done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record_fetch_start(self) -> None:
        """Keep a copy of the present model, if the algorithm has ``keep_progress``."""
        if self._at_fetch_start is not None:
            copy_model(self.layout, self._at_fetch_start)

    def blend(self, received: Tensor, factor: float, *, was_finite: bool) -> None:
        """Move the model towards the parameters ``(P,)`` of a peer, which are on the CPU.

        They are not changed, but in pinned memory a GPU may read them after this returns: see
        :attr:`is_upload_done`. ``factor`` is the share of the peer in [0, 1]. If this worker's own
        model was not finite, ``keep_progress`` does not apply, since there is no progress to keep.
        """
        reach("outer step")
        base = self._at_fetch_start if was_finite else None
        for chunk in self.layout.chunks():
            part = slice(chunk.start, chunk.stop)
            # A chunk at a time, so that the device never holds a whole second model.
            theirs = received[part].to(self.layout.device, non_blocking=True)
            if base is not None:
                self._blend_and_keep_progress(chunk, base[part], theirs, factor)
            elif chunk.is_rounded(theirs.dtype):
                params = self._scratch[: len(chunk)]
                chunk.pack(params)
                self._algorithm.blend(params, theirs, factor)
                chunk.unpack(params)
            else:
                theirs = theirs.to(self.layout.device)
                for mine, their in chunk.same_device_packing(theirs).pairs():
                    self._algorithm.blend(mine, their, factor)
        if self._upload_done is not None and received.is_pinned():
            self._upload_done.record(torch.cuda.current_stream(self.layout.device))

    def _blend_and_keep_progress(
        self, chunk: Chunk, base: Tensor, theirs: Tensor, factor: float
    ) -> None:
        """Blend the parameters from the start of the fetch, and add the progress made since."""
        params = self._scratch[: len(chunk)]
        chunk.pack(params)
        buffers = slice(max(self._num_params - chunk.start, 0), None)
        # As if the buffers had not changed since: no progress is added to them.
        base[buffers].copy_(params[buffers])
        params.sub_(base)
        self._algorithm.blend(base, theirs, factor)
        params.add_(base)
        chunk.unpack(params)

    @property
    def is_upload_done(self) -> bool:
        """Whether the memory of the parameters that were blended last may be overwritten.

        Always true if the model is on the CPU. Never waits.
        """
        if self._upload_done is None:
            return True
        return bool(self._upload_done.query())  # type: ignore[no-untyped-call]

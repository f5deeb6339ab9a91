"""This worker's copy of the model, and its exchange against the consensus and back."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn

from lightning_loco.comm.flat import Chunk, Cuts, FlatLayout
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import Sum


class Replica:
    """Trainable parameters and floating-point buffers of one worker.

    Args:
        model: The module to train.
        cuts: How to cut the trainable parameters into chunks.

    Attributes:
        layout: The trainable parameters.
        buffers: The floating-point buffers.
        frozen: Names and parameters that do not require gradients.

    Note:
        Buffers (BatchNorm statistics, say) are local in training and averaged into the consensus.
        Only persistent ones count; integer buffers stay each worker's own.
    """

    def __init__(self, model: nn.Module, cuts: Cuts) -> None:
        persistent = set(model.state_dict(keep_vars=True))
        named = list(model.named_parameters())
        self.layout = FlatLayout(((n, p) for n, p in named if p.requires_grad), cuts)
        self.buffers = FlatLayout(
            ((n, b) for n, b in model.named_buffers() if n in persistent and b.is_floating_point()),
            Cuts(cuts.chunk_elements),
        )
        self.frozen = [(n, p) for n, p in named if not p.requires_grad]
        self._local: tuple[Tensor, Tensor] | None = None

    @property
    def shows_consensus(self) -> bool:
        """Whether the module holds the consensus at present, instead of the local parameters."""
        return self._local is not None

    def local(self) -> tuple[Tensor, Tensor]:
        """This worker's own flat parameters and buffers, whatever the module holds now.

        They are in the host's memory.
        """
        if self._local is not None:
            return self._local
        return self.layout.set_aside(), self.buffers.set_aside()

    def set_local(self, params: Tensor, buffers: Tensor) -> None:
        """Overwrite the local parameters and buffers."""
        self._local = None
        self.layout.write(params)
        self.buffers.write(buffers)

    def keep_local(self) -> None:
        """Set the local values aside, until :meth:`show_local` brings them back."""
        self._local = self.local()

    def show_local(self) -> None:
        """Put the local values back."""
        if self._local is not None:
            self.set_local(*self._local)

    def sample(self, max_elements: int, round_index: int) -> Tensor:
        """About ``max_elements`` trainable elements, as float64; others in every round."""
        stride = max(1, -(-self.layout.numel // max_elements))
        return self.layout.every(stride, (round_index * 7919) % stride).double()


def average(
    layout: FlatLayout, group: WorkerGroup, statistics: Statistics, valid: bool, num_valid: int
) -> None:
    """Replace tensors by their mean over the workers, in place, two chunks at a time.

    ``valid`` says whether this worker's values enter it, and ``num_valid`` how many workers' do.
    """
    chunks = layout.chunks()
    longest = max((len(chunk) for chunk in chunks), default=0)
    slots = [torch.empty(longest, dtype=layout.dtype, device=layout.device) for _ in chunks[:2]]
    under_way: deque[tuple[Chunk, Sum]] = deque()

    def land() -> None:
        chunk, total = under_way.popleft()
        flat = total.wait()
        if num_valid != 1:
            flat.div_(num_valid)
        chunk.unpack(flat)

    for index, chunk in enumerate(chunks):
        if len(under_way) == len(slots):
            land()
        flat = slots[index % 2][: len(chunk)]
        if valid:
            chunk.pack(flat)
        else:
            flat.zero_()
        under_way.append((chunk, Sum(group, statistics, flat, "the average")))
    while under_way:
        land()

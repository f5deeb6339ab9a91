"""This worker's copy of the model, and its exchange against the consensus and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_loco.comm.flat import Chunk, FlatLayout
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.waiting import Explained, Timed


class Replica:
    """Trainable parameters and floating-point buffers of one worker.

    Args:
        model: The module to train.
        chunk_elements: Longest piece that is exchanged at once.

    Note:
        Buffers (BatchNorm statistics, say) are local in training and averaged into the consensus.
        Only persistent ones count; integer buffers stay each worker's own.
    """

    def __init__(self, model: nn.Module, chunk_elements: int) -> None:
        persistent = set(model.state_dict(keep_vars=True))
        named = list(model.named_parameters())
        self.layout = FlatLayout(((n, p) for n, p in named if p.requires_grad), chunk_elements)
        self.buffers = FlatLayout(
            ((n, b) for n, b in model.named_buffers() if n in persistent and b.is_floating_point()),
            chunk_elements,
        )
        self._frozen = [(n, p) for n, p in named if not p.requires_grad]
        self._local: tuple[Tensor, Tensor] | None = None

    @property
    def shows_consensus(self) -> bool:
        """Whether the module holds the consensus at present, instead of the local parameters."""
        return self._local is not None

    def check_trainable(self) -> None:
        """Refuse parameters that became trainable after the start.

        Raises:
            RuntimeError: Naming the first one.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"Parameter {name!r} became trainable during fit, but only parameters that "
                    "require gradients at its start are exchanged. Unfreeze before fit, or call "
                    "fit again after unfreezing."
                )

    def local(self) -> tuple[Tensor, Tensor]:
        """This worker's own flat parameters and buffers, whatever the module holds now."""
        if self._local is not None:
            return self._local
        return self.layout.new_flat(), self.buffers.new_flat()

    def set_local(self, params: Tensor, buffers: Tensor) -> None:
        """Overwrite the local parameters and buffers."""
        self._local = None
        self.layout.write(params)
        self.buffers.write(buffers)

    def show_consensus(
        self,
        group: WorkerGroup,
        statistics: Statistics,
        outer: Tensor | None,
        valid: bool,
        total_weight: float,
    ) -> None:
        """Put the consensus into the module and keep the local values aside.

        Args:
            group: The workers.
            statistics: Where bytes and seconds are counted.
            outer: The consensus parameters if they are known here; None for the mean over workers.
            valid: Whether this worker's values may enter the mean.
            total_weight: Number of workers with valid values.
        """
        self._local = (self.layout.new_flat(), self.buffers.new_flat())
        if outer is not None:
            self.layout.write(outer)
        else:
            average(self.layout, group, statistics, valid, lambda: total_weight)
        average(self.buffers, group, statistics, valid, lambda: total_weight)

    def show_local(self) -> None:
        """Put the local values back."""
        if self._local is not None:
            self.set_local(*self._local)

    def sample(self, max_elements: int, round_index: int) -> Tensor:
        """Every k-th trainable element, as float64; the same ones on every worker.

        Args:
            max_elements: About how many, at most.
            round_index: Shifts the choice from round to round.
        """
        stride = max(1, -(-self.layout.numel // max_elements))
        return self.layout.every(stride, (round_index * 7919) % stride).double()


def average(
    layout: FlatLayout,
    group: WorkerGroup,
    statistics: Statistics,
    valid: bool,
    total_weight: Callable[[], float],
) -> None:
    """Replace tensors by their mean over the workers, in place, two chunks at a time."""
    chunks = layout.chunks()
    longest = max((len(chunk) for chunk in chunks), default=0)
    slots = [torch.empty(longest, dtype=layout.dtype, device=layout.device) for _ in chunks[:2]]
    under_way: deque[tuple[Chunk, Tensor, dist.Work | None]] = deque()

    def land() -> None:
        chunk, flat, work = under_way.popleft()
        if work is not None:
            with Timed(statistics), Explained(group, "the average"):
                work.wait()
        if (total := total_weight()) != 1:
            flat.div_(total)
        chunk.unpack(flat)

    for index, chunk in enumerate(chunks):
        if len(under_way) == len(slots):
            land()
        flat = slots[index % 2][: len(chunk)]
        if valid:
            chunk.pack(flat)
        else:
            flat.zero_()
        under_way.append((chunk, flat, group.start_sum(flat, statistics)))
    while under_way:
        land()

"""What belongs to the consensus beside a worker's own model: averaged copies and pruning masks."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import AllReduceSum
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.parameters.fingerprint import crc32, fingerprints
from lightning_loco.parameters.flat import CHUNK_ELEMENTS, Chunk, Cuts, FlatLayout, are_finite


class AveragedCopies:
    """Averaged copies of the model become their mean over the workers, masks those of worker 0.

    What is equal on all workers stays as it is, bit for bit.

    Both stay so. That changes no later average: the mean of moving averages is the moving average
    of the mean, whether it was taken in between or not. Copies and masks come and go during
    training, so they are looked for whenever the consensus is made.

    Args:
        model: Its pruning masks are those of ``torch.nn.utils.prune``.

    Attributes:
        find_copies: Returns the averaged copies that there are at present, the same on all workers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: list[FlatLayout] = []
        self._masks = FlatLayout([])
        self._is_finite = True
        self.find_copies: Callable[[], Iterable[nn.Module]] = tuple

    def look(self) -> tuple[float, float]:
        """Find all there is.

        Returns:
            A number that is equal on two workers if they have found the same, and whether the
            copies here are finite (1 or 0).
        """
        self._copies = [_layout(_averaged(copy)) for copy in self.find_copies()]
        self._masks = _layout(pruning_masks(self._model))
        self._is_finite = all(are_finite(layout.chunks()) for layout in self._copies)
        schema = [layout.schema() for layout in (*self._copies, self._masks)]
        return float(zlib.crc32(repr(schema).encode())), float(self._is_finite)

    def agree(
        self, statuses: Sequence[WorkerStatus], group: WorkerGroup, statistics: Statistics
    ) -> None:
        """Make copies and masks the same on all workers.

        Args:
            rows: What :meth:`look` has returned on every worker, as ``scalars``.
            group: The workers.
            statistics: Where bytes and seconds are counted.

        Raises:
            RuntimeError: On every worker, if they have not found the same.
        """
        found = [status.scalars[0] for status in statuses]
        if len(set(found)) > 1:
            other = next(worker for worker, number in enumerate(found) if number != found[0])
            raise RuntimeError(
                f"Worker {other} holds other averaged copies of the model (AveragedModel), or "
                "other pruning masks, than worker 0. Use the same callbacks on all workers."
            )
        num_finite = round(sum(status.scalars[1] for status in statuses))
        device = next(self._model.parameters()).device  # copies may be kept somewhere else
        for layout in self._copies if num_finite else ():
            differing = _differing(layout, group)
            average(differing, group, statistics, self._is_finite, num_finite, device)
        average(self._masks, group, statistics, group.worker == 0, 1, device)
        self._copies, self._masks = [], FlatLayout([])


def _averaged(copy: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers of a copy, as far as they can be averaged."""
    persistent = set(copy.state_dict(keep_vars=True))
    named = [*copy.named_parameters(), *copy.named_buffers()]
    return [(n, tensor) for n, tensor in named if n in persistent and tensor.is_floating_point()]


def _differing(layout: FlatLayout, group: WorkerGroup) -> FlatLayout:
    """The tensors that are not equal on all workers."""
    prints = [
        number if isinstance(tensor, nn.Parameter) else crc32(tensor)
        for tensor, number in zip(layout.tensors, fingerprints(layout.tensors), strict=True)
    ]
    everyone = zip(*group.gather_objects(prints, "the comparison of averaged copies"), strict=True)
    named = zip(layout.names, layout.tensors, everyone, strict=True)
    return _layout([(name, tensor) for name, tensor, found in named if len({*found}) > 1])


def _layout(named: list[tuple[str, Tensor]]) -> FlatLayout:
    return FlatLayout(named, Cuts(CHUNK_ELEMENTS))


def pruning_masks(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The masks that ``torch.nn.utils.prune`` has put beside parameters, with their names."""
    parameters = {name for name, _ in model.named_parameters()}
    return [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith("_mask") and f"{name.removesuffix('mask')}orig" in parameters
    ]


def average(
    layout: FlatLayout,
    group: WorkerGroup,
    statistics: Statistics,
    valid: bool,
    num_valid: int,
    device: torch.device | None = None,
) -> None:
    """Replace tensors by their mean over the workers, in place, two chunks at a time.

    ``valid`` says whether this worker's values enter it, and ``num_valid`` how many workers' do.
    Messages are on ``device``; by default where the tensors are. They are scaled by a power of two,
    which changes no bit of the mean, so that the sum of large numbers does not overflow.
    """
    scale = 0.5 ** (num_valid - 1).bit_length()
    device = device or layout.device
    chunks = layout.chunks()
    longest = max((len(chunk) for chunk in chunks), default=0)
    slots = [torch.empty(longest, dtype=layout.dtype, device=device) for _ in chunks[:2]]
    under_way: deque[tuple[Chunk, AllReduceSum]] = deque()

    def land() -> None:
        chunk, total = under_way.popleft()
        flat = total.wait()
        if num_valid != 1:
            flat.div_(num_valid * scale)
        chunk.unpack(flat)

    for index, chunk in enumerate(chunks):
        if len(under_way) == len(slots):
            land()
        flat = slots[index % 2][: len(chunk)]
        if valid:
            chunk.pack(flat)
            if num_valid != 1:
                flat.mul_(scale)
        else:
            flat.zero_()
        under_way.append((chunk, AllReduceSum(group, statistics, flat, "the average")))
    while under_way:
        land()

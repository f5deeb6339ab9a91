"""Making the consensus: means over the workers, averaged copies (EMA, SWA) and pruning masks."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.work import AllReduceSum
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.model.fingerprint import crc32, fingerprints
from lightning_loco.model.flat import CHUNK_ELEMENTS, Chunk, Cuts, FlatLayout, are_finite


def average(
    layout: FlatLayout,
    group: WorkerGroup,
    statistics: Statistics,
    valid: bool,
    num_valid: int,
    device: torch.device | None = None,
) -> None:
    """Replace tensors by their mean over the workers, in place, two chunks at a time.

    Messages are scaled by a power of two, which changes no bit of the mean, so that the sum of
    large numbers does not overflow. They are on ``device``, by default the layout's. The mean is
    over the ``num_valid`` workers, at least 1, whose values are ``valid``.
    """
    scale = 0.5 ** (num_valid - 1).bit_length()
    device = device or layout.device
    chunks = layout.chunks()
    longest = max((len(chunk) for chunk in chunks), default=0)
    memory = [torch.empty(longest, dtype=layout.dtype, device=device) for _ in chunks[:2]]
    pending: deque[tuple[Chunk, AllReduceSum]] = deque()

    def finish_first() -> None:
        chunk, total = pending.popleft()
        flat = total.wait()
        if num_valid != 1:
            flat.div_(num_valid * scale)
        chunk.unpack(flat)

    for index, chunk in enumerate(chunks):
        if len(pending) == len(memory):
            finish_first()
        flat = memory[index % 2][: len(chunk)]
        if valid:
            chunk.pack(flat)
            if num_valid != 1:
                flat.mul_(scale)
        else:
            flat.zero_()
        pending.append((chunk, AllReduceSum(group, statistics, flat, "the average")))
    while pending:
        finish_first()


def consensus_distance(
    sample: Tensor, numel: int, group: WorkerGroup, statistics: Statistics
) -> float:
    r"""Estimate the root mean square distance of the workers' parameters to their mean.

    .. math:: \sqrt{\tfrac{1}{N} \sum_i \lVert \theta_i - \bar\theta \rVert^2}

    All workers must call it, with a sample, float64, of the same of their ``numel`` elements. It
    costs one all-reduce of the sample.
    """
    n = group.num_workers
    sums = torch.cat([sample, sample.square().sum().view(1)])
    AllReduceSum(group, statistics, sums, "the consensus distance").wait()
    variance = (sums[-1] / n - (sums[:-1] / n).square().sum()).clamp_(min=0)
    return math.sqrt(float(variance) * numel / max(sample.numel(), 1))


class AveragedCopies:
    """Averaged copies of the model, and its pruning masks, made equal on all workers.

    In the consensus, averaged copies (``modules``, those that exist now, the same on all workers)
    are replaced by their mean over the workers, and masks of ``torch.nn.utils.prune`` by the masks
    of worker 0. Values that are equal on all workers are not changed, bit for bit.

    The new values stay in training. This changes no later average: the mean of moving averages is
    the moving average of the mean, also if the mean was taken in between. Copies and masks may
    appear and disappear during training, so they are looked up for every consensus.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: list[FlatLayout] = []
        self._masks = FlatLayout([])
        self._is_finite = True
        self.modules: Sequence[nn.Module] = ()

    def prepare(self) -> tuple[float, float]:
        """Look up the copies and masks.

        Returns:
            A checksum of their schema, equal on workers that hold the same copies and masks, and
            whether the copies of this worker are finite (1 or 0).
        """
        self._copies = [_layout(_averaged_tensors(copy)) for copy in self.modules]
        self._masks = _layout(pruning_masks(self._model))
        self._is_finite = all(are_finite(layout.chunks()) for layout in self._copies)
        schema = [layout.schema() for layout in (*self._copies, self._masks)]
        return float(zlib.crc32(repr(schema).encode())), float(self._is_finite)

    def synchronize(
        self, statuses: Sequence[WorkerStatus], group: WorkerGroup, statistics: Statistics
    ) -> None:
        """Make copies and masks equal on all workers.

        The results of :meth:`prepare` are the ``scalars`` of the statuses. RuntimeError on all
        workers if they hold different copies or masks.
        """
        checksums = [status.scalars[0] for status in statuses]
        if len(set(checksums)) > 1:
            other = next(w for w, number in enumerate(checksums) if number != checksums[0])
            raise RuntimeError(
                f"Worker {other} holds other averaged copies of the model (AveragedModel), or "
                "other pruning masks, than worker 0. Use the same callbacks on all workers."
            )
        num_finite = round(sum(status.scalars[1] for status in statuses))
        device = next(self._model.parameters()).device  # copies may be on another device
        for layout in self._copies if num_finite else ():
            differing = _find_differing(layout, group)
            average(differing, group, statistics, self._is_finite, num_finite, device)
        average(self._masks, group, statistics, group.worker == 0, 1, device)
        self._copies, self._masks = [], FlatLayout([])


def pruning_masks(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return names and tensors of the masks that ``torch.nn.utils.prune`` has added to a model."""
    parameters = {name for name, _ in model.named_parameters()}
    return [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith("_mask") and f"{name.removesuffix('mask')}orig" in parameters
    ]


def _averaged_tensors(copy: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the floating-point parameters and persistent buffers of a copy."""
    persistent = set(copy.state_dict(keep_vars=True))
    named = [*copy.named_parameters(), *copy.named_buffers()]
    return [(n, tensor) for n, tensor in named if n in persistent and tensor.is_floating_point()]


def _find_differing(layout: FlatLayout, group: WorkerGroup) -> FlatLayout:
    """Return the tensors that are not equal on all workers."""
    checksums = [
        number if isinstance(tensor, nn.Parameter) else crc32(tensor)
        for tensor, number in zip(layout.tensors, fingerprints(layout.tensors), strict=True)
    ]
    gathered = group.gather_objects(checksums, "the comparison of averaged copies")
    named = zip(layout.names, layout.tensors, zip(*gathered, strict=True), strict=True)
    return _layout([(name, tensor) for name, tensor, found in named if len({*found}) > 1])


def _layout(named: list[tuple[str, Tensor]]) -> FlatLayout:
    return FlatLayout(named, Cuts(CHUNK_ELEMENTS))

"""A codec of a hundredth of the size: only the largest values, in two bits each."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from lightning_loco.compression.codec import Codec, check_block

_GROUP = 8
_LEVEL_BYTES = 8  # two float32
_LARGEST_BLOCK = 4096  # an index takes 12 bits


@dataclasses.dataclass(frozen=True)
class Sparse(Codec):
    r"""The ``k`` values of largest magnitude of each block, as a sign and one of two levels.

    A value belongs to the upper level if its magnitude is above the mean of the kept ones. A level
    is the mean magnitude of its values. All other values become 0, so messages need an error
    feedback and must be pseudo-gradients.

    The mean over N workers divides each sum by N, although most of them have not sent that value.
    With ``mean_over="senders"``, as in the code of the paper's authors, it is divided by the number
    of workers that have sent it, so that a value of one worker moves the parameter by all of it:

    .. math::
        \bar u = \frac{\sum_i Q(u^i)}{\max(1, \#\{i : Q(u^i) \ne 0\})}

    Args:
        k: Values that are kept in each block, a positive multiple of 4; 64 of 4096 are 1.56 %.
        block: Values in a block, a multiple of 4, at most 4096 and at least ``k``.
        mean_over: ``"workers"`` divides each sum by the number of workers, ``"senders"`` by the
            number of those that have sent the value; only for algorithms that average over all
            workers, with an error feedback.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If one is out of range, or ``mean_over`` unknown.

    Source:
        Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706.

    Example:
        >>> import torch
        >>> codec = Sparse(k=4, block=8)
        >>> values = torch.tensor([8.0, 0.1, -2.0, 0.2, 0.0, 6.0, 2.0, 0.3])
        >>> codec.decode(codec.encode(values), torch.empty(8))
        tensor([ 7.,  0., -2.,  0.,  0.,  7.,  2.,  0.])
    """

    k: int = 64
    block: int = _LARGEST_BLOCK
    mean_over: Literal["workers", "senders"] = "workers"

    at_once = 2**18
    is_sparse = True
    is_rough = True

    def __post_init__(self) -> None:
        check_block(self.block, multiple=4)
        if isinstance(self.k, bool) or not isinstance(self.k, int):
            raise TypeError(f"k counts values and must be an integer, got {self.k!r}.")
        if self.block > _LARGEST_BLOCK:
            raise ValueError(f"block must be at most {_LARGEST_BLOCK}, got {self.block}.")
        if not 0 < self.k <= self.block or self.k % 4:
            raise ValueError(
                f"k counts the values that are kept in a block of {self.block} and must be a "
                f"multiple of 4 between 4 and {self.block}, got {self.k}."
            )
        if self.mean_over not in ("workers", "senders"):
            raise ValueError(f"mean_over must be 'workers' or 'senders', got {self.mean_over!r}.")

    @property
    def averages_senders(self) -> bool:
        """Whether a value is averaged over the workers that have sent it."""
        return self.mean_over == "senders"

    @property
    def row_bytes(self) -> int:
        """Two levels, and 12 bits of index and 2 of code per value, padded to a multiple of 4."""
        return -(-(_LEVEL_BYTES + self.k * 3 // 2 + self.k // 4) // 4) * 4

    def encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        """Write the levels, the indices of the largest values, and their codes."""
        indices = _largest(values.abs(), self.k)
        chosen = values.gather(1, indices)
        sizes = chosen.abs().double()
        is_upper = sizes > sizes.mean(1, keepdim=True)
        total, above = sizes.sum(1, keepdim=True), (sizes * is_upper).sum(1, keepdim=True)
        count = is_upper.sum(1, keepdim=True)
        lower = (total - above) / (self.k - count).clamp_min(1)
        upper = above / count.clamp_min(1)
        upper = torch.where(torch.isfinite(total), upper, total)  # NaN times False is NaN anyway
        rows[:, :_LEVEL_BYTES].view(torch.float32).copy_(torch.cat([lower, upper], 1))
        self._write_indices(indices, rows)
        codes = (chosen.signbit().to(torch.uint8) * 2 + is_upper).view(len(rows), -1, 4)
        shifts = torch.tensor([1, 4, 16, 64], dtype=torch.uint8, device=rows.device)
        rows[:, self._codes_at : self._codes_at + self.k // 4] = (codes * shifts).sum(
            2, dtype=torch.uint8
        )
        rows[:, self._codes_at + self.k // 4 :] = 0

    def decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        """Write each level at its index; indices beyond the block wrap around."""
        levels = rows[:, :_LEVEL_BYTES].view(torch.float32)
        packed = rows[:, self._codes_at : self._codes_at + self.k // 4]
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=rows.device)
        codes = ((packed[:, :, None] >> shifts) & 3).view(len(rows), self.k).long()
        signed = torch.cat([levels, -levels], 1).to(values.dtype)
        values.zero_().scatter_(1, self._read_indices(rows), signed.gather(1, codes))

    @property
    def _codes_at(self) -> int:
        return _LEVEL_BYTES + self.k * 3 // 2

    def _write_indices(self, indices: Tensor, rows: Tensor) -> None:
        """Write two indices of 12 bits into three bytes."""
        even, odd = indices[:, 0::2], indices[:, 1::2]
        triples = torch.stack([even & 255, (even >> 8) | ((odd & 15) << 4), odd >> 4], 2)
        rows[:, _LEVEL_BYTES : self._codes_at] = triples.view(len(rows), -1).to(torch.uint8)

    def _read_indices(self, rows: Tensor) -> Tensor:
        packed = rows[:, _LEVEL_BYTES : self._codes_at].reshape(len(rows), -1, 3).long()
        first, middle, last = packed.unbind(2)
        pairs = torch.stack([first | ((middle & 15) << 8), (middle >> 4) | (last << 4)], 2)
        return pairs.view(len(rows), self.k) % self.block


def _largest(sizes: Tensor, k: int) -> Tensor:
    """Return the indices of the ``k`` largest values of each row, in any order.

    They are all in the ``k`` groups of neighbouring values with the largest maxima, because any
    value outside these groups is smaller than ``k`` others. So most of a row need not be sorted.
    """
    rows, length = sizes.shape
    if length % _GROUP or length // _GROUP <= k:
        return torch.topk(sizes, k, dim=1, sorted=False).indices
    groups = sizes.view(rows, -1, _GROUP)
    chosen = torch.topk(groups.amax(2), k, dim=1, sorted=False).indices[:, :, None]
    candidates = groups.gather(1, chosen.expand(-1, -1, _GROUP)).view(rows, -1)
    offsets = torch.arange(_GROUP, device=sizes.device)
    indices = (chosen * _GROUP + offsets).view(rows, -1)
    return indices.gather(1, torch.topk(candidates, k, dim=1, sorted=False).indices)

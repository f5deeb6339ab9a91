"""Cutting tensors, laid end to end, into stretches of a given length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor


def stretches(
    named_tensors: Iterable[tuple[str, Tensor]],
    longest: int,
    granularity: int = 1,
    boundaries: Sequence[int] = (),
) -> Iterator[tuple[int, list[Tensor]]]:
    """Cut tensors at the ends of stretches of one long vector.

    Args:
        named_tensors: In the order of the vector; dense ones are cut to fit. One with gaps in
            memory stays whole, and its stretch may then be longer.
        longest: Elements of a stretch.
        granularity: Stretches begin at multiples of it.
        boundaries: Where stretches must end besides, in ascending order.

    Yields:
        Where a stretch begins, and the views that it is made of.

    Raises:
        ValueError: If a boundary falls into a tensor with gaps in memory.

    Example:
        >>> import torch
        >>> tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(3)}
        >>> [(at, [len(v) for v in views]) for at, views in stretches(tensors.items(), longest=4)]
        [(0, [4]), (4, [2, 2]), (8, [1])]
    """
    length_of_all = max(longest - longest % granularity, granularity)
    views: list[Tensor] = []
    start = position = 0

    def stop(position: int) -> int:
        """Where the stretch that began at ``start`` ends, at ``position`` or later."""
        full = start + length_of_all
        end = full if position <= full else position + -position % granularity
        return min([end, *(b for b in boundaries if b >= position)])

    for name, tensor in named_tensors:
        data = tensor.detach()
        if not data.numel():
            continue
        if not _is_dense(data):
            end = position + data.numel()
            if any(position < boundary < end for boundary in boundaries):
                raise ValueError(f"{name!r} has gaps in memory and cannot be cut.")
            if views and end > start + length_of_all and position % granularity == 0:
                yield start, views
                start, views = position, []
            views.append(data)
            position = end
            if position >= stop(position):
                yield start, views
                start, views = position, []
            continue
        line = data.as_strided((data.numel(),), (1,))
        while line.numel():
            length = min(line.numel(), stop(position + 1) - position)
            views.append(line[:length])
            line = line[length:]
            position += length
            if position == stop(position):
                yield start, views
                start, views = position, []
    if views:
        yield start, views


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True

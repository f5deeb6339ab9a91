"""How parameters are cut into messages: large ones are cut, small ones travel together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.compression import BFloat16, Codec, Float16
from lightning_loco.compression.sums import add_written
from lightning_loco.parameters.schema import schema_checksum

BUCKET_BYTES = 4 * 2**20
NARROW = (BFloat16, Float16)
"""Codecs that need no writing: values travel in a narrower dtype."""


class Span(NamedTuple):
    """The elements ``start`` to ``stop`` of a parameter, seen as one line."""

    param: int
    start: int
    stop: int


class Message(NamedTuple):
    """Parts of some parameters, or of their gradients.

    Attributes:
        spans: Side by side.
        numel: Elements of all spans.
        dtype: Of the values: as they travel, or as the codec takes them.
        codec: Writes the values; None if they travel as they are, in ``dtype``.

    Example:
        >>> from lightning_loco.compression import Int8
        >>> message = Message((Span(0, 0, 300),), 300, torch.float32, Int8())
        >>> message.wire_dtype, message.num_bytes
        (torch.uint8, 520)
    """

    spans: tuple[Span, ...]
    numel: int
    dtype: torch.dtype
    codec: Codec | None = None

    @property
    def wire_dtype(self) -> torch.dtype:
        """Of what travels."""
        return self.dtype if self.codec is None else torch.uint8

    @property
    def wire_numel(self) -> int:
        """Elements of what travels."""
        return self.numel if self.codec is None else self.codec.num_bytes(self.numel)

    @property
    def num_bytes(self) -> int:
        """Bytes of what travels."""
        return self.wire_numel * self.wire_dtype.itemsize

    def write(self, values: Tensor, wire: Tensor) -> Tensor:
        """Put values where they travel from; returns that, or the values if they can travel."""
        return values if self.codec is None else self.codec.encode(values, wire)

    def read(self, wire: Tensor, values: Tensor) -> Tensor:
        """Have in ``values`` what has travelled."""
        return values.copy_(wire) if self.codec is None else self.codec.decode(wire, values)

    def add(self, wire: Tensor, total: Tensor) -> Tensor:
        """Add to ``total`` what has travelled."""
        return total.add_(wire) if self.codec is None else add_written(self.codec, wire, total)


def plan_messages(
    params: Sequence[Tensor], bucket_bytes: int, codec: Codec | None = None
) -> list[Message]:
    """Cut parameters into messages, in the order in which a backward pass ends their gradients.

    Args:
        params: Their shapes and dtypes; the spans of one parameter follow each other.
        bucket_bytes: Longest message as it travels, but at least a block of the codec; a larger
            parameter is cut, unless its memory has gaps or another order.
        codec: Of all messages. Default: the parameters travel as they are.

    Example:
        >>> params = [torch.zeros(2), torch.zeros(3), torch.zeros(10)]
        >>> [message.spans for message in plan_messages(params, bucket_bytes=24)]
        [(Span(param=2, start=0, stop=6),), (Span(param=2, start=6, stop=10),), \
(Span(param=1, start=0, stop=3), Span(param=0, start=0, stop=2))]
    """
    messages: list[Message] = []
    joined: list[Span] = []
    joined_dtype = torch.float32
    writer = None if isinstance(codec, NARROW) else codec

    def close() -> None:
        if joined:
            numel = sum(span.stop - span.start for span in joined)
            messages.append(Message(tuple(joined), numel, joined_dtype, writer))
            joined.clear()

    for index, param in reversed(list(enumerate(params))):
        dtype = _dtype_of_values(param.dtype, codec)
        longest = _longest(bucket_bytes, dtype, writer)
        room = longest - sum(span.stop - span.start for span in joined)
        if dtype != joined_dtype or param.numel() > room:
            close()
        joined_dtype = dtype
        if param.numel() <= longest or not param.is_contiguous():
            joined.append(Span(index, 0, param.numel()))
            continue
        for start in range(0, param.numel(), longest):
            joined.append(Span(index, start, min(start + longest, param.numel())))
            close()
    close()
    return messages


def _dtype_of_values(dtype: torch.dtype, codec: Codec | None) -> torch.dtype:
    """In which dtype values of parameters travel, or get to a codec, which takes float32 or 64."""
    if codec is None:
        return dtype
    return codec.dtype if isinstance(codec, NARROW) else torch.promote_types(dtype, torch.float32)


def _longest(bucket_bytes: int, dtype: torch.dtype, codec: Codec | None) -> int:
    """How many values a message may have, at most."""
    if codec is None:
        return max(bucket_bytes // dtype.itemsize, 1)
    return max(bucket_bytes // codec.row_bytes, 1) * codec.block


def share_parameters(params: Sequence[Tensor], num_servers: int) -> list[list[int]]:
    """Share whole parameters out to servers, as evenly as they fit, the largest first.

    Returns:
        The numbers of the parameters of each server, ascending.

    Raises:
        ValueError: If there are more servers than parameters.
    """
    if num_servers > len(params):
        raise ValueError(
            f"num_servers={num_servers} is more than the model's {len(params)} parameters. "
            f"Use {len(params)} or fewer."
        )
    shares: list[list[int]] = [[] for _ in range(num_servers)]
    loads = [0] * num_servers
    for index in sorted(range(len(params)), key=lambda i: (-params[i].numel(), i)):
        least = min(range(num_servers), key=lambda s: (loads[s], len(shares[s]), s))
        shares[least].append(index)
        loads[least] += params[index].numel()
    return [sorted(share) for share in shares]


def trainable_parameters(
    groups: Iterable[dict[str, Any]],
) -> tuple[list[tuple[int, Tensor]], list[Tensor]]:
    """Parameters that require gradients, with their number in ``state_dict``, and the others."""
    params = [param for group in groups for param in group["params"]]
    trainable = [(number, param) for number, param in enumerate(params) if param.requires_grad]
    return trainable, [param for param in params if not param.requires_grad]


def model_checksum(params: Iterable[Tensor], messages: Sequence[Message]) -> int:
    """63 bits that tell other models, and the same ones cut differently, apart."""
    shapes = [(tuple(param.shape), str(param.dtype)) for param in params]
    cuts = [(m.spans, str(m.dtype), repr(m.codec)) for m in messages]
    return schema_checksum([shapes, cuts]) >> 1


class Accumulator:
    """One number per parameter element, side by side in the order of the messages.

    Args:
        params: The shapes and dtypes.
        messages: How they are cut.

    Attributes:
        dtype: float32, or float64 if any parameter is.
        slices: The memory of each message.
        parts: The memory of each parameter, in its shape.
    """

    def __init__(self, params: Sequence[Tensor], messages: Sequence[Message]) -> None:
        wide = any(param.dtype == torch.float64 for param in params)
        self.dtype = torch.float64 if wide else torch.float32
        self._flat = torch.zeros(sum(param.numel() for param in params), dtype=self.dtype)
        self.slices = torch.split(self._flat, [message.numel for message in messages])
        self.parts: list[Tensor] = [self._flat] * len(params)
        position = 0
        for message in messages:
            for index, start, stop in message.spans:
                if start == 0:
                    shape = params[index].shape
                    self.parts[index] = self._flat[position : position + shape.numel()].view(shape)
                position += stop - start

    def lend(self, index: int, dtype: torch.dtype) -> Tensor:
        """A message's memory, to hold its parameters in their dtype once its sum is not needed."""
        memory: Tensor = self.slices[index]
        return memory.view(dtype)[: memory.numel()]

"""Parameters in shards and buckets: which elements are sent together, and their buffers.

A shard holds the whole parameters of one server. A bucket is sent at a time: several small
parameters of a shard, or a slice of a large one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.compression import BFloat16, Codec, Float16
from lightning_loco.compression.sums import add_written
from lightning_loco.distributed.devices import has_streams
from lightning_loco.model.fingerprint import schema_checksum
from lightning_loco.model.flat import Packing

NARROW = (BFloat16, Float16)
"""Codecs that need no buffer: values are sent in a narrower dtype."""

Tensors = Sequence[Tensor] | Mapping[int, Tensor | None]
"""Tensors by their index; None where there is none."""


def trainable_parameters(
    groups: Iterable[dict[str, Any]],
) -> tuple[list[tuple[int, Tensor]], list[Tensor]]:
    """Return parameters that require gradients, with their index in ``state_dict``, and others."""
    params = [param for group in groups for param in group["params"]]
    trainable = [(index, param) for index, param in enumerate(params) if param.requires_grad]
    return trainable, [param for param in params if not param.requires_grad]


def shard_parameters(params: Sequence[Tensor], num_servers: int) -> list[list[int]]:
    """Assign whole parameters to servers, the largest first, so that shards are of similar size.

    Returns the indices of the parameters of each shard, ascending. ValueError if there are more
    servers than parameters.
    """
    if num_servers > len(params):
        raise ValueError(
            f"num_servers={num_servers} is more than the model's {len(params)} parameters. "
            f"Use {len(params)} or fewer."
        )
    shards: list[list[int]] = [[] for _ in range(num_servers)]
    sizes = [0] * num_servers
    for index in sorted(range(len(params)), key=lambda i: (-params[i].numel(), i)):
        smallest = min(range(num_servers), key=lambda s: (sizes[s], len(shards[s]), s))
        shards[smallest].append(index)
        sizes[smallest] += params[index].numel()
    return [sorted(shard) for shard in shards]


def model_checksum(params: Iterable[Tensor], buckets: Sequence[ParamBucket]) -> int:
    """Return 63 bits that differ for other models, and for other buckets of the same model."""
    shapes = [(tuple(param.shape), str(param.dtype)) for param in params]
    cuts = [
        ([tuple(part) for part in bucket.slices], str(bucket.dtype), repr(bucket.codec))
        for bucket in buckets
    ]
    return schema_checksum([shapes, cuts]) >> 1


class ParamSlice(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened parameter."""

    param: int
    start: int
    stop: int


class ParamBucket(NamedTuple):
    """Slices of some parameters, or of their gradients, that are sent together.

    Attributes:
        slices: Concatenated in this order.
        numel: Elements of all slices.
        dtype: Dtype of the values: as they are sent, or as the codec takes them.
        codec: Encodes the values; None if they are sent in ``dtype``.

    Example:
        >>> from lightning_loco.compression import Int8
        >>> bucket = ParamBucket((ParamSlice(0, 0, 300),), 300, torch.float32, Int8())
        >>> bucket.wire_dtype, bucket.num_bytes
        (torch.uint8, 520)
    """

    slices: tuple[ParamSlice, ...]
    numel: int
    dtype: torch.dtype
    codec: Codec | None = None

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of the encoded values."""
        return self.dtype if self.codec is None else torch.uint8

    @property
    def wire_numel(self) -> int:
        """Elements of the encoded values."""
        return self.numel if self.codec is None else self.codec.num_bytes(self.numel)

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent."""
        return self.wire_numel * self.wire_dtype.itemsize

    def encode(self, values: Tensor, encoded: Tensor) -> Tensor:
        """Encode values into ``encoded`` and return that; without a codec, return the values."""
        return values if self.codec is None else self.codec.encode(values, encoded)

    def as_sent(self, values: Tensor) -> Tensor:
        """Return values of any dtype as they are sent; without a conversion, the values."""
        if self.codec is None:
            return values.to(self.dtype)
        encoded = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")
        return self.codec.encode(values, encoded)

    def decode(self, encoded: Tensor, values: Tensor) -> Tensor:
        """Decode into ``values``."""
        return values.copy_(encoded) if self.codec is None else self.codec.decode(encoded, values)

    def add_decoded(self, encoded: Tensor, total: Tensor) -> Tensor:
        """Decode and add to ``total``."""
        return (
            total.add_(encoded) if self.codec is None else add_written(self.codec, encoded, total)
        )


def plan_buckets(
    params: Sequence[Tensor], bucket_bytes: int, codec: Codec | None = None
) -> list[ParamBucket]:
    """Divide parameters into buckets, in the order in which a backward pass computes gradients.

    Args:
        params: Tensors of the parameters' shapes and dtypes. Slices of one parameter are adjacent.
        bucket_bytes: Most bytes of a bucket as it is sent, but at least one block of the codec. A
            larger parameter is cut, unless its memory is not contiguous.
        codec: Codec of all buckets. Default: not encoded.

    Example:
        >>> params = [torch.zeros(2), torch.zeros(3), torch.zeros(10)]
        >>> for bucket in plan_buckets(params, bucket_bytes=24):
        ...     print([tuple(part) for part in bucket.slices])
        [(2, 0, 6)]
        [(2, 6, 10)]
        [(1, 0, 3), (0, 0, 2)]
    """
    buckets: list[ParamBucket] = []
    slices: list[ParamSlice] = []
    slices_dtype = torch.float32
    encoder = None if isinstance(codec, NARROW) else codec

    def close() -> None:
        if slices:
            numel = sum(part.stop - part.start for part in slices)
            buckets.append(ParamBucket(tuple(slices), numel, slices_dtype, encoder))
            slices.clear()

    for index, param in reversed(list(enumerate(params))):
        dtype = _dtype_of_values(param.dtype, codec)
        max_numel = _max_numel(bucket_bytes, dtype, encoder)
        free = max_numel - sum(part.stop - part.start for part in slices)
        if dtype != slices_dtype or param.numel() > free:
            close()
        slices_dtype = dtype
        if param.numel() <= max_numel or not param.is_contiguous():
            slices.append(ParamSlice(index, 0, param.numel()))
            continue
        for start in range(0, param.numel(), max_numel):
            slices.append(ParamSlice(index, start, min(start + max_numel, param.numel())))
            close()
    close()
    return buckets


def _dtype_of_values(dtype: torch.dtype, codec: Codec | None) -> torch.dtype:
    """Return the dtype in which parameters are sent, or encoded: codecs take float32 or float64."""
    if codec is None:
        return dtype
    return codec.dtype if isinstance(codec, NARROW) else torch.promote_types(dtype, torch.float32)


def _max_numel(bucket_bytes: int, dtype: torch.dtype, codec: Codec | None) -> int:
    """Return how many values fit into a bucket."""
    if codec is None:
        return max(bucket_bytes // dtype.itemsize, 1)
    return max(bucket_bytes // codec.row_bytes, 1) * codec.block


class Accumulator:
    """A server's memory for the sum of gradients, one bucket after another.

    Args:
        params: Tensors of the parameters' shapes and dtypes.
        buckets: Their buckets.

    Attributes:
        dtype: float32, or float64 if any parameter is float64.
        buckets: The memory of each bucket.
        params: The memory of each parameter, in its shape.
    """

    def __init__(self, params: Sequence[Tensor], buckets: Sequence[ParamBucket]) -> None:
        has_float64 = any(param.dtype == torch.float64 for param in params)
        self.dtype = torch.float64 if has_float64 else torch.float32
        self._flat = torch.zeros(
            sum(param.numel() for param in params), dtype=self.dtype, device="cpu"
        )
        self.buckets = torch.split(self._flat, [bucket.numel for bucket in buckets])
        self.params: list[Tensor] = [self._flat] * len(params)
        position = 0
        for bucket in buckets:
            for index, start, stop in bucket.slices:
                if start == 0:
                    shape = params[index].shape
                    self.params[index] = self._flat[position : position + shape.numel()].view(shape)
                position += stop - start

    def memory_for(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return a bucket's memory in another dtype, for parameters once the sum is used."""
        memory: Tensor = self.buckets[index]
        return memory.view(dtype)[: memory.numel()]


class BucketBuffer:
    """The memory in which a rank sends and receives a bucket.

    A bucket that is one contiguous CPU tensor of the bucket's dtype, or a slice of it, is sent from
    and received into that tensor. All other buckets use buffers: several tensors, other dtypes,
    other devices, and encoded values. Values are encoded on the tensors' device.

    Args:
        bucket: The slices.
        params: All tensors, for their shapes and their device.
        memory: Memory for the values of CPU tensors. Default: new memory.
    """

    def __init__(
        self, bucket: ParamBucket, params: Sequence[Tensor], memory: Tensor | None = None
    ) -> None:
        self.bucket = bucket
        self._params = params
        self._memory = memory
        self._device = params[bucket.slices[0].param].device

    @property
    def indices(self) -> list[int]:
        """The indices of the tensors in the bucket."""
        return [part.param for part in self.bucket.slices]

    @functools.cached_property
    def saved_bytes(self) -> int:
        """How many bytes compression saves each time the bucket is sent."""
        return (
            sum((s.stop - s.start) * self._params[s.param].itemsize for s in self.bucket.slices)
            - self.bucket.num_bytes
        )

    @torch.no_grad()
    def pack(self, tensors: Tensors) -> Tensor:
        """Return the bucket as it is sent, in CPU memory; a missing tensor counts as zeros."""
        direct = self._direct_view(tensors)
        if direct is not None:
            return direct
        encoded = self._encode(tensors)
        if self._host_buffer is not encoded:
            self._host_buffer.copy_(encoded)
        return self._host_buffer

    @torch.no_grad()
    def pack_async(
        self, tensors: Tensors, stream: torch.cuda.Stream
    ) -> tuple[Tensor, torch.cuda.Event]:
        """Pack tensors on a GPU, as :meth:`pack`, without waiting for ``stream``, which copies.

        Returns the bucket in CPU memory, and the event after which it is complete.
        """
        encoded = self._encode(tensors)
        stream.wait_stream(torch.cuda.current_stream(encoded.device))
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._host_buffer.copy_(encoded, non_blocking=True)
            copied.record(stream)
        return self._host_buffer, copied

    def receive_buffer(self, tensors: Tensors) -> Tensor:
        """Return the memory to receive the bucket into; call :meth:`unpack` afterwards."""
        direct = self._direct_view(tensors)
        return self._host_buffer if direct is None else direct

    @torch.no_grad()
    def unpack(self, tensors: Tensors) -> None:
        """Write what was received into the tensors."""
        if self._direct_view(tensors) is not None:
            return
        if self._host_buffer is not self._encoded:
            self._encoded.copy_(self._host_buffer)
        self._decode(tensors)

    @torch.no_grad()
    def round_trip(self, tensors: Sequence[Tensor]) -> None:
        """Encode and decode in place: the tensors become what another rank would receive."""
        if self._direct_view(tensors) is None:
            self._encode(tensors)
            self._decode(tensors)

    def _encode(self, tensors: Tensors) -> Tensor:
        """Return the encoded values, on the device."""
        values = self._contiguous_view(tensors) if self.bucket.codec is not None else None
        if values is None:
            self._window(tensors).pack()
            values = self._packed
        return self.bucket.encode(values, self._encoded)

    def _decode(self, tensors: Tensors) -> None:
        """Write the encoded values into the tensors, on the device."""
        if self.bucket.codec is not None:
            values = self._contiguous_view(tensors)
            self.bucket.decode(self._encoded, self._packed if values is None else values)
            if values is not None:
                return
        self._window(tensors).unpack()

    def _window(self, tensors: Tensors) -> Packing:
        """Return the tensors' slices with their packed copies; missing ones are set to zero."""
        if tensors is self._params and self._params_window is not None:
            return self._params_window
        values, copies = [], []
        for (index, start, stop), part in zip(self.bucket.slices, self._parts, strict=True):
            tensor = tensors[index]
            if tensor is None:
                part.zero_()
            else:
                copies.append(part)
                is_whole = part.numel() == tensor.numel()
                values.append(tensor if is_whole else tensor.reshape(-1)[start:stop])
        return Packing.of(values, copies)

    def _direct_view(self, tensors: Tensors) -> Tensor | None:
        """Return the bucket as a view of its only tensor, if it can be sent from there."""
        if self.bucket.codec is not None or self._device.type != "cpu":
            return None
        return self._contiguous_view(tensors)

    def _contiguous_view(self, tensors: Tensors) -> Tensor | None:
        """Return the values as a view of the only tensor, if that is contiguous."""
        if len(self.bucket.slices) > 1:
            return None
        index, start, stop = self.bucket.slices[0]
        tensor = tensors[index]
        if tensor is None or tensor.dtype != self.bucket.dtype or not tensor.is_contiguous():
            return None
        return tensor.detach().view(-1)[start:stop]

    # ------------------------------------------- buffers, allocated on first use

    @functools.cached_property
    def _packed(self) -> Tensor:
        """All values, concatenated on the device."""
        if self._memory is not None and self._device.type == "cpu":
            return self._memory
        return torch.empty(self.bucket.numel, dtype=self.bucket.dtype, device=self._device)

    @functools.cached_property
    def _parts(self) -> list[Tensor]:
        """The packed values of each slice; in the tensor's shape if the slice is all of it."""
        sizes = [part.stop - part.start for part in self.bucket.slices]
        shapes = [self._params[part.param].shape for part in self.bucket.slices]
        return [
            part.view(shape) if part.numel() == shape.numel() else part
            for shape, part in zip(shapes, torch.split(self._packed, sizes), strict=True)
        ]

    @functools.cached_property
    def _params_window(self) -> Packing | None:
        """The window of ``params``, reused; None if one is cut, since its memory may change."""
        tensors = [self._params[index] for index in self.indices]
        is_cut = any(t.numel() != p.numel() for t, p in zip(tensors, self._parts, strict=True))
        return None if is_cut else Packing.of(tensors, self._parts)

    @functools.cached_property
    def _encoded(self) -> Tensor:
        """The bucket as it is sent, on the device."""
        if self.bucket.codec is None:
            return self._packed
        return torch.empty(self.bucket.num_bytes, dtype=torch.uint8, device=self._device)

    @functools.cached_property
    def _host_buffer(self) -> Tensor:
        """The bucket as it is sent, in CPU memory."""
        if self._device.type == "cpu":
            return self._encoded
        size, dtype = self.bucket.wire_numel, self.bucket.wire_dtype
        return torch.empty(size, dtype=dtype, pin_memory=has_streams(self._device), device="cpu")

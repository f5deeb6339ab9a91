"""The memory of a message: that of the tensor itself where it can be, else buffers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_loco.distributed.devices import has_streams
from lightning_loco.parameter_server.buckets import Message
from lightning_loco.parameters.flat import Packing

Tensors = Sequence[Tensor] | Mapping[int, Tensor | None]
"""Tensors by their number; None where there is none."""


class Slot:
    """One message on this rank, for gradients that leave and parameters that come.

    A large dense tensor of the message's dtype in the memory of the processor is sent and received
    as it is. Everything else goes through buffers: small tensors, other dtypes, other devices, and
    what a codec writes, which it does on the tensors' device.

    Args:
        message: Which parts of which tensors.
        params: The shapes and the device of all tensors.
        memory: For the values, if the tensors are in the processor's memory. Default: new memory.
    """

    def __init__(
        self, message: Message, params: Sequence[Tensor], memory: Tensor | None = None
    ) -> None:
        self.message = message
        self._params = params
        self._memory = memory
        self._device = params[message.spans[0].param].device

    @property
    def indices(self) -> list[int]:
        """The numbers of the tensors that the message has parts of."""
        return [span.param for span in self.message.spans]

    @functools.cached_property
    def saved_bytes(self) -> int:
        """By how much fewer bytes travel than the values have here."""
        here = sum((s.stop - s.start) * self._params[s.param].itemsize for s in self.message.spans)
        return here - self.message.num_bytes

    @torch.no_grad()
    def outgoing(self, tensors: Tensors) -> Tensor:
        """The message with what the tensors hold, and zeros where there is none."""
        direct = self._direct(tensors)
        if direct is not None:
            return direct
        written = self._write(tensors)
        if self._host is not written:
            self._host.copy_(written)
        return self._host

    @torch.no_grad()
    def stage(self, tensors: Tensors, stream: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
        """As :meth:`outgoing`, for tensors on a GPU and without waiting for the copy.

        Args:
            tensors: What to send.
            stream: Where to copy.

        Returns:
            The message in the processor's memory, and the event after which it is there.
        """
        written = self._write(tensors)
        stream.wait_stream(torch.cuda.current_stream(written.device))
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._host.copy_(written, non_blocking=True)
            copied.record(stream)
        return self._host, copied

    def incoming(self, tensors: Tensors) -> Tensor:
        """Memory for the message to be received into; then :meth:`unpack`."""
        direct = self._direct(tensors)
        return self._host if direct is None else direct

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Write what was received into the tensors."""
        if self._direct(tensors) is not None:
            return
        if self._host is not self._written:
            self._written.copy_(self._host)
        self._read(tensors)

    @torch.no_grad()
    def round(self, tensors: Sequence[Tensor]) -> None:
        """Make of the tensors what arrives of them on another rank."""
        if self._direct(tensors) is None:
            self._write(tensors)
            self._read(tensors)

    def _write(self, tensors: Tensors) -> Tensor:
        """Fill the message, on the device."""
        values = self._dense(tensors) if self.message.codec is not None else None
        return self.message.write(self._pack(tensors) if values is None else values, self._written)

    def _read(self, tensors: Sequence[Tensor]) -> None:
        """Empty the message, on the device."""
        if self.message.codec is not None:
            values = self._dense(tensors)
            self.message.read(self._written, self._packed if values is None else values)
            if values is not None:
                return
        self._beside(tensors).unpack()

    def _pack(self, tensors: Tensors) -> Tensor:
        """Put the values side by side, on the device."""
        self._beside(tensors).pack()
        return self._packed

    def _beside(self, tensors: Tensors) -> Packing:
        """The values of the tensors and their places side by side; those of none become zero."""
        if tensors is self._params and self._params_beside is not None:
            return self._params_beside
        values, places = [], []
        for (index, start, stop), part in zip(self.message.spans, self._parts, strict=True):
            tensor = tensors[index]
            if tensor is None:
                part.zero_()
            else:
                places.append(part)
                whole = part.numel() == tensor.numel()
                values.append(tensor if whole else tensor.reshape(-1)[start:stop])
        return Packing.of(values, places)

    def _direct(self, tensors: Tensors) -> Tensor | None:
        """The message in the memory of the only tensor that it has parts of, if it can be there."""
        if self.message.codec is not None or self._device.type != "cpu":
            return None
        return self._dense(tensors)

    def _dense(self, tensors: Tensors) -> Tensor | None:
        """The values in the memory of the only tensor, if they are side by side there."""
        if len(self.message.spans) > 1:
            return None
        index, start, stop = self.message.spans[0]
        tensor = tensors[index]
        if tensor is None or tensor.dtype != self.message.dtype or not tensor.is_contiguous():
            return None
        return tensor.detach().view(-1)[start:stop]

    # ----------------------------------------------- buffers, made on first use

    @functools.cached_property
    def _packed(self) -> Tensor:
        """All values side by side, on the device."""
        if self._memory is not None and self._device.type == "cpu":
            return self._memory
        return torch.empty(self.message.numel, dtype=self.message.dtype, device=self._device)

    @functools.cached_property
    def _parts(self) -> list[Tensor]:
        """Those of each tensor; in its shape, if they are all of it."""
        sizes = [span.stop - span.start for span in self.message.spans]
        shapes = [self._params[span.param].shape for span in self.message.spans]
        return [
            part.view(shape) if part.numel() == shape.numel() else part
            for shape, part in zip(shapes, torch.split(self._packed, sizes), strict=True)
        ]

    @functools.cached_property
    def _params_beside(self) -> Packing | None:
        """All tensors beside their places, for good; None if one is cut, as its memory may move."""
        tensors = [self._params[index] for index in self.indices]
        is_cut = any(t.numel() != p.numel() for t, p in zip(tensors, self._parts, strict=True))
        return None if is_cut else Packing.of(tensors, self._parts)

    @functools.cached_property
    def _written(self) -> Tensor:
        """The message as it travels, on the device."""
        if self.message.codec is None:
            return self._packed
        return torch.empty(self.message.num_bytes, dtype=torch.uint8, device=self._device)

    @functools.cached_property
    def _host(self) -> Tensor:
        """The message as it travels, in the processor's memory."""
        if self._device.type == "cpu":
            return self._written
        size, dtype = self.message.wire_numel, self.message.wire_dtype
        return torch.empty(size, dtype=dtype, pin_memory=has_streams(self._device))

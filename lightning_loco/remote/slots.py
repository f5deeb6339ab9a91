"""The memory of a message: that of the tensor itself where it can be, else a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_loco.comm.devices import has_streams
from lightning_loco.remote.plan import Message

Tensors = Sequence[Tensor] | Mapping[int, Tensor | None]
"""Tensors by their number; None where there is none."""


class Slot:
    """One message on this rank, for gradients that leave and parameters that come.

    A large dense tensor of the message's dtype in the memory of the processor is sent and received
    as it is. Everything else goes through a buffer: small tensors, other dtypes, other devices.

    Args:
        message: Which parts of which tensors.
        params: The shapes and the device of all tensors.
        memory: For the buffer, if the tensors are in the processor's memory. Default: new memory.
    """

    def __init__(
        self, message: Message, params: Sequence[Tensor], memory: Tensor | None = None
    ) -> None:
        self.message = message
        self._params = params
        self._memory = memory
        self._buffers: tuple[Tensor, Tensor, list[Tensor]] | None = None

    @property
    def indices(self) -> list[int]:
        """The numbers of the tensors that the message has parts of."""
        return [span.param for span in self.message.spans]

    @torch.no_grad()
    def outgoing(self, tensors: Tensors) -> Tensor:
        """The message with what the tensors hold, and zeros where there is none."""
        direct = self._direct(tensors)
        if direct is not None:
            return direct
        packed, host = self._pack(tensors)
        if host is not packed:
            host.copy_(packed)
        return host

    @torch.no_grad()
    def stage(self, tensors: Tensors, stream: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
        """As :meth:`outgoing`, for tensors on a GPU and without waiting for the copy.

        Args:
            tensors: What to send.
            stream: Where to copy.

        Returns:
            The message in the processor's memory, and the event after which it is there.
        """
        packed, host = self._pack(tensors)
        stream.wait_stream(torch.cuda.current_stream(packed.device))
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            host.copy_(packed, non_blocking=True)
            copied.record(stream)
        return host, copied

    def _pack(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Fill the vector on the device; returns it and the one in the processor's memory."""
        packed, host, parts = self._buffer()
        sources, targets = [], []
        for span, part in zip(self.message.spans, parts, strict=True):
            tensor = tensors[span.param]
            if tensor is None:
                part.zero_()
            else:
                targets.append(part)
                sources.append(self._part(tensor, span.start, span.stop, part))
        if targets:
            torch._foreach_copy_(targets, sources)
        return packed, host

    def incoming(self, tensors: Tensors) -> Tensor:
        """Memory for the message to be received into; then :meth:`unpack`."""
        direct = self._direct(tensors)
        return self._buffer()[1] if direct is None else direct

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Write what was received into the tensors."""
        if self._direct(tensors) is not None:
            return
        packed, host, parts = self._buffer()
        if host is not packed:
            packed.copy_(host)
        targets = [
            self._part(tensors[span.param], span.start, span.stop, part)
            for span, part in zip(self.message.spans, parts, strict=True)
        ]
        torch._foreach_copy_(targets, parts)

    def _direct(self, tensors: Tensors) -> Tensor | None:
        if len(self.message.spans) > 1:
            return None
        index, start, stop = self.message.spans[0]
        tensor = tensors[index]
        if (
            tensor is None
            or tensor.dtype != self.message.dtype
            or tensor.device.type != "cpu"
            or not tensor.is_contiguous()
        ):
            return None
        return tensor.detach().view(-1)[start:stop]

    def _part(self, tensor: Tensor, start: int, stop: int, part: Tensor) -> Tensor:
        if part.numel() == tensor.numel():
            return tensor.detach()
        return tensor.detach().reshape(-1)[start:stop]

    def _buffer(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The vector on the device, the one in the processor's memory, and the parts of the first.

        All are made on first use.
        """
        if self._buffers is None:
            device = self._params[self.message.spans[0].param].device
            numel, dtype = self.message.numel, self.message.dtype
            if device.type != "cpu":
                packed = torch.empty(numel, dtype=dtype, device=device)
                host = torch.empty(numel, dtype=dtype, pin_memory=has_streams(device))
            else:
                packed = torch.empty(numel, dtype=dtype) if self._memory is None else self._memory
                host = packed
            sizes = [span.stop - span.start for span in self.message.spans]
            parts = [
                part.view(self._params[span.param].shape)
                if part.numel() == self._params[span.param].numel()
                else part
                for span, part in zip(self.message.spans, torch.split(packed, sizes), strict=True)
            ]
            self._buffers = (packed, host, parts)
        return self._buffers

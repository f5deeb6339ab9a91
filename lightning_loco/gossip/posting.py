"""From the model into the memory that peers read, in a small share of the time.

Of a model on a GPU neither what leaves it nor what comes to it is waited for.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.distributed.devices import has_streams
from lightning_loco.gossip.averaging import Blending
from lightning_loco.gossip.node import PeerNode
from lightning_loco.gossip.snapshots import norm_of

SHARE = 0.05
"""Of the time, at most, that goes into copying the parameters for others."""


class Posting:
    """Serve the parameters as they are, unless that would take more than 5 % of the time.

    Args:
        node: Serves them; its memory is written into directly.
        blending: Copies the model.

    Attributes:
        was_finite: Whether the parameters were finite when they were last looked at.
        loss: The last loss of :meth:`note_loss`; None if there was none.
    """

    def __init__(self, node: PeerNode, blending: Blending) -> None:
        self.was_finite = True
        self.loss: float | None = None
        self._node = node
        self._blending = blending
        self._next = 0.0

    def note_loss(self, loss: float | Tensor) -> None:
        """Take note of this worker's recent training loss, one number."""
        self.loss = float(loss)

    @property
    def has_loss(self) -> bool:
        """Whether there was any."""
        return self.loss is not None

    @property
    def is_due(self) -> bool:
        """Whether the parameters may be served anew."""
        return time.perf_counter() >= self._next

    def send(self, clock: float) -> None:
        """Copy the parameters as they are now; they are served if they are finite.

        While all memory for them is being read, nothing is done.

        Args:
            clock: That of the parameters. The loss 0.0 travels with them if none is known.
        """
        started = time.perf_counter()
        draft = self._node.draft()
        if draft is None:
            return
        self._blending.pack(draft)
        norm = norm_of(draft)
        self.was_finite = math.isfinite(norm)
        if self.was_finite:
            self._node.post(Tag(clock, self.loss or 0.0), norm)
        self._next = started + (time.perf_counter() - started) / SHARE


class DevicePosting:
    """A :class:`Posting` that reads nothing back in a local step.

    The parameters are packed on the device, together with their norm and the loss, and encoded
    there if they are to be. One copy takes them into the pinned memory from which they are served
    while training goes on. They are served from the first local step on that finds it done, and
    only then norm and loss are known here. Copies take at most 5 % of the time, and memory on the
    device for a vector of P numbers and for what a codec makes of it.

    Args:
        node: Serves them, from pinned memory.
        blending: Packs the model.

    Attributes:
        was_finite: Whether the last parameters that arrived here were finite.
        loss: The last loss that arrived here; None if none has.
    """

    def __init__(self, node: PeerNode, blending: Blending) -> None:
        self.was_finite = True
        self.loss: float | None = None
        self._node = node
        self._blending = blending
        device, model = blending.layout.device, node.model
        self._codec = model.codec
        self._flat = torch.empty(model.numel, dtype=model.dtype, device=device)
        self._wire = self._flat.view(torch.uint8)
        if model.codec is not None:
            self._wire = torch.empty(model.total_bytes, dtype=torch.uint8, device=device)
        self._numbers = torch.zeros(2, dtype=torch.float64, device=device)
        self._arrived = torch.zeros(2, dtype=torch.float64, pin_memory=True)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._clock: float | None = None
        self._latest_loss: float | Tensor | None = None
        self._next = 0.0

    def note_loss(self, loss: float | Tensor) -> None:
        """Take note of this worker's recent training loss, one number on any device."""
        self._latest_loss = loss.detach() if isinstance(loss, Tensor) else loss

    @property
    def has_loss(self) -> bool:
        """Whether there was any."""
        return self._latest_loss is not None

    @property
    def is_due(self) -> bool:
        """Whether the parameters may be served anew; serves what has arrived, and never waits."""
        if self._clock is not None and _has_passed(self._done):
            self._land(self._clock)
        return self._clock is None and time.perf_counter() >= self._next

    def send(self, clock: float) -> None:
        """Begin to copy the parameters as they are now; to be called when :attr:`is_due`.

        While all memory for them is being read, nothing is done.
        """
        draft = self._node.draft_bytes()
        if draft is None:
            return
        pack_with_numbers(self._blending, self._flat, self._numbers, self._latest_loss)
        if self._codec is not None:
            self._codec.encode(self._flat, self._wire)
        self._stream.wait_stream(torch.cuda.current_stream(self._flat.device))
        with torch.cuda.stream(self._stream):
            self._begun.record(self._stream)
            draft.copy_(self._wire, non_blocking=True)
            self._arrived.copy_(self._numbers, non_blocking=True)
            self._done.record(self._stream)
        self._clock = clock

    def _land(self, clock: float) -> None:
        self._clock = None
        norm, loss = self._arrived.tolist()
        if self._latest_loss is not None:
            self.loss = loss
        self.was_finite = math.isfinite(norm)
        if self.was_finite:
            self._node.post_bytes(Tag(clock, loss), norm)
        copy_s = self._begun.elapsed_time(self._done) / 1000
        self._next = time.perf_counter() + copy_s * (1 / SHARE - 1)


def pack_with_numbers(
    blending: Blending, flat: Tensor, numbers: Tensor, loss: float | Tensor | None
) -> None:
    """Copy the model into ``flat`` ``(P,)``, and its norm and the loss into ``numbers`` ``(2,)``.

    All stays on the device, and nothing waits for it; without a loss it is 0.
    """
    blending.pack(flat)
    numbers[0].copy_(torch.linalg.vector_norm(flat))
    if isinstance(loss, Tensor):
        numbers[1].copy_(loss.reshape(()), non_blocking=True)
    else:
        numbers[1].fill_(loss or 0.0)


def _has_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


class Upload:
    """Whether a device has read what was handed to it from the processor's memory.

    Args:
        device: Of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read: torch.cuda.Event | None = None
        if has_streams(device):
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def note(self) -> None:
        """All that was handed over is now in the queue of the device."""
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._device))

    @property
    def is_done(self) -> bool:
        """Whether the memory may be written again; never waits."""
        return self._read is None or _has_passed(self._read)


def make_posting(node: PeerNode, blending: Blending) -> Posting | DevicePosting:
    """The one that fits the model's device."""
    if has_streams(blending.layout.device):
        return DevicePosting(node, blending)
    return Posting(node, blending)

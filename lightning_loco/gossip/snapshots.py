"""Snapshots of a model: memory that peers read while the next snapshot is written.

The training thread writes snapshots and the threads of the server read them. Neither waits for the
other: the lock is held for bookkeeping only. Parameters are written only to memory that no thread
reads, and read only from memory that no thread writes. There is memory for three snapshots: the
latest one, an earlier one that is still being read, and the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.distributed.devices import has_streams
from lightning_loco.gossip.averaging import copy_model
from lightning_loco.gossip.protocol import WireFormat
from lightning_loco.model.flat import FlatLayout

_NUM_SNAPSHOTS = 3
_NORM_BLOCK = 2**17  # sums of blocks are added in double precision


@dataclasses.dataclass(eq=False)
class Snapshot:
    """One snapshot and its memory.

    Attributes:
        wire: The encoded parameters, as uint8.
        data: The same memory, for sockets.
        number: Number of the snapshot, from 1 on. 0 while it is written.
        tag: Clock and loss of the parameters.
        norm: Norm of the parameters.
        readers: Number of threads that are reading it.
    """

    wire: Tensor
    data: memoryview
    number: int = 0
    tag: Tag = Tag(0.0, 0.0)
    norm: float = 0.0
    readers: int = 0


class Snapshots:
    """The latest snapshot, and earlier ones while they are being read.

    While two earlier snapshots are being read there is no memory for the next one. Then
    :meth:`flat_buffer` and :meth:`wire_buffer` return None, and the latest snapshot stays the
    latest until one of the two is no longer read. The server's deadlines limit how long this is.
    For a model on a GPU memory is ``pinned``. ValueError if there are no parameters.
    """

    def __init__(self, wire_format: WireFormat, *, pinned: bool = False) -> None:
        if wire_format.numel < 1:
            raise ValueError("There are no parameters to serve. Give the model some.")
        self.wire_format = wire_format
        self._lock = threading.Lock()
        self._flat: Tensor | None = None
        self._count = 0
        self._latest: Snapshot | None = None
        self._next: Snapshot | None = None
        self._all = []
        for _ in range(_NUM_SNAPSHOTS):
            memory = torch.zeros(
                wire_format.total_bytes, dtype=torch.uint8, pin_memory=pinned, device="cpu"
            )
            self._all.append(Snapshot(memory, memory.numpy().data))

    # --------------------------------------------------------------------------- reading

    @property
    def latest(self) -> Snapshot | None:
        """The latest snapshot, for threads of this worker that read it without the lock.

        If its ``number`` has changed after reading, it was overwritten while it was read.
        """
        return self._latest

    @contextlib.contextmanager
    def reading(self) -> Iterator[Snapshot | None]:
        """Yield the latest snapshot, which is not overwritten within the context, or None."""
        with self._lock:
            snapshot = self._latest
            if snapshot is not None:
                snapshot.readers += 1
        try:
            yield snapshot
        finally:
            if snapshot is not None:
                with self._lock:
                    snapshot.readers -= 1

    # ------------------------------------------------------------- writing, in one thread

    def publish(self, flat: Tensor, tag: Tag) -> bool:
        """Copy parameters and make them the latest snapshot; False if there is no memory for it.

        They are ``(P,)``, on any device and in any floating-point dtype; ValueError for other
        shapes.
        """
        numel = self.wire_format.numel
        if flat.shape != (numel,):
            raise ValueError(
                f"The parameters have shape {tuple(flat.shape)}, but {numel} were announced. "
                "Publish one flat vector of the model's size."
            )
        buffer = self.flat_buffer()
        if buffer is None:
            return False
        with torch.no_grad():
            buffer.copy_(flat)
        self.commit_flat(tag, norm_of(buffer))
        return True

    def flat_buffer(self) -> Tensor | None:
        """Return memory ``(P,)``, in the dtype of the wire format, for the next snapshot.

        No peer reads it before :meth:`commit_flat`. Without a codec it is the memory of the
        snapshot itself, which saves a copy. Until the commit, further calls return the same memory.
        None while peers are reading all of it.
        """
        wire = self.wire_buffer()
        if wire is None or self.wire_format.codec is None:
            return None if wire is None else wire.view(self.wire_format.dtype)
        if self._flat is None:
            self._flat = torch.empty(
                self.wire_format.numel, dtype=self.wire_format.dtype, device="cpu"
            )
        return self._flat

    def commit_flat(self, tag: Tag, norm: float) -> None:
        """Encode what was written to :meth:`flat_buffer` and make it the latest snapshot."""
        if self.wire_format.codec is not None:
            assert self._flat is not None
            self.wire_format.codec.encode(self._flat, self.wire_buffer())
        self.commit_wire(tag, norm)

    def wire_buffer(self) -> Tensor | None:
        """Return memory for the next snapshot in its encoded form, as :meth:`flat_buffer` does."""
        if self._next is None:
            with self._lock:
                # Not the latest one, even without readers: the next request is for it.
                free = [s for s in self._all if s is not self._latest and not s.readers]
                if not free:
                    return None
                self._next = min(free, key=lambda snapshot: snapshot.number)
                # Threads that read it without the lock see that it is no longer the same.
                self._next.number = 0
        return self._next.wire

    def commit_wire(self, tag: Tag, norm: float) -> None:
        """Make what was written to :meth:`wire_buffer` the latest snapshot."""
        assert self._next is not None
        with self._lock:
            self._count += 1  # from 1 on: 0 is for one that is being written
            self._latest, self._next = self._next, None
            self._latest.number = self._count
            self._latest.tag = tag
            self._latest.norm = norm

    def withdraw(self) -> None:
        """Serve nothing until the next snapshot, for which there is memory then."""
        with self._lock:
            self._latest = None


def norm_of(values: Tensor) -> float:
    """Return the norm of ``values`` ``(P,)``. It is not finite if a value or square is not."""
    return math.sqrt(sum(float(torch.dot(b, b)) for b in torch.split(values, _NORM_BLOCK)))


# ------------------------------------------------------------- from the model to a snapshot

MAX_COPY_SHARE = 0.05
"""Largest share of the time that goes into copying parameters for peers."""


class Publisher:
    """Publishes snapshots of a model on the CPU, in at most 5 % of the time.

    ``was_finite`` is whether the parameters were finite at the last copy; ``loss`` is the last
    recorded loss, or None.
    """

    def __init__(self, snapshots: Snapshots, layout: FlatLayout, clock: Clock = REAL_CLOCK) -> None:
        self.was_finite = True
        self.loss: float | None = None
        self._snapshots = snapshots
        self._layout = layout
        self._clock = clock
        self._next_time = 0.0

    def record_loss(self, loss: float | Tensor) -> None:
        """Record this worker's recent training loss, one number."""
        self.loss = float(loss)

    @property
    def has_loss(self) -> bool:
        """Whether a loss has been recorded."""
        return self.loss is not None

    @property
    def is_due(self) -> bool:
        """Whether the parameters may be published again."""
        return self._clock.now() >= self._next_time

    def publish(self, clock: float) -> None:
        """Copy the present parameters, and publish them if they are finite.

        Nothing is done while peers are reading all the memory that a snapshot could be written to.
        Without a loss so far, they are published with 0.0.
        """
        started = self._clock.now()
        flat = self._snapshots.flat_buffer()
        if flat is None:
            return
        copy_model(self._layout, flat)
        norm = norm_of(flat)
        self.was_finite = math.isfinite(norm)
        if self.was_finite:
            self._snapshots.commit_flat(Tag(clock, self.loss or 0.0), norm)
        self._next_time = started + (self._clock.now() - started) / MAX_COPY_SHARE


class DevicePublisher:
    """Publishes snapshots of a model on a GPU, without waiting for the GPU in a local step.

    The parameters are packed on the GPU, together with their norm and the loss, and encoded there
    if there is a codec. One asynchronous copy brings them into the pinned memory of the next
    snapshot while training continues. The first call of :attr:`is_due` that finds the copy complete
    publishes the snapshot. Only then norm and loss are known on the host, so ``was_finite`` and
    ``loss`` describe the last complete copy.

    The copies take at most 5 % of the time. The GPU holds one more vector of P numbers and, with a
    codec, its encoded form.
    """

    def __init__(self, snapshots: Snapshots, layout: FlatLayout, clock: Clock = REAL_CLOCK) -> None:
        self.was_finite = True
        self.loss: float | None = None
        self._snapshots = snapshots
        self._layout = layout
        self._clock = clock
        device, wire_format = layout.device, snapshots.wire_format
        self._codec = wire_format.codec
        self._flat = torch.empty(wire_format.numel, dtype=wire_format.dtype, device=device)
        self._wire = self._flat.view(torch.uint8)
        if self._codec is not None:
            self._wire = torch.empty(wire_format.total_bytes, dtype=torch.uint8, device=device)
        self._norm_and_loss = torch.zeros(2, dtype=torch.float64, device=device)
        self._norm_and_loss_on_host = torch.zeros(
            2, dtype=torch.float64, pin_memory=True, device="cpu"
        )
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copy_started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._copy_done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._pending_clock: float | None = None
        self._latest_loss: float | Tensor | None = None
        self._next_time = 0.0

    def record_loss(self, loss: float | Tensor) -> None:
        """Record this worker's recent training loss, one number on any device."""
        self._latest_loss = loss.detach() if isinstance(loss, Tensor) else loss

    @property
    def has_loss(self) -> bool:
        """Whether a loss has been recorded."""
        return self._latest_loss is not None

    @property
    def is_due(self) -> bool:
        """Whether the parameters may be copied again. Publishes a complete copy; never waits."""
        clock = self._pending_clock
        if clock is not None and self._copy_done.query():  # type: ignore[no-untyped-call]
            self._publish_copy(clock)
        return self._pending_clock is None and self._clock.now() >= self._next_time

    def publish(self, clock: float) -> None:
        """Start to copy the present parameters. Call it only when :attr:`is_due`.

        Nothing is done while peers are reading all the memory that a snapshot could be written to.
        """
        wire = self._snapshots.wire_buffer()
        if wire is None:
            return
        copy_with_norm_and_loss(self._layout, self._flat, self._norm_and_loss, self._latest_loss)
        if self._codec is not None:
            self._codec.encode(self._flat, self._wire)
        self._stream.wait_stream(torch.cuda.current_stream(self._flat.device))
        with torch.cuda.stream(self._stream):
            self._copy_started.record(self._stream)
            wire.copy_(self._wire, non_blocking=True)
            self._norm_and_loss_on_host.copy_(self._norm_and_loss, non_blocking=True)
            self._copy_done.record(self._stream)
        self._pending_clock = clock

    def _publish_copy(self, clock: float) -> None:
        """Publish the copy, which is complete, if its parameters are finite."""
        self._pending_clock = None
        norm, loss = self._norm_and_loss_on_host.tolist()
        if self._latest_loss is not None:
            self.loss = loss
        self.was_finite = math.isfinite(norm)
        if self.was_finite:
            self._snapshots.commit_wire(Tag(clock, loss), norm)
        copy_s = self._copy_started.elapsed_time(self._copy_done) / 1000
        self._next_time = self._clock.now() + copy_s * (1 / MAX_COPY_SHARE - 1)


def copy_with_norm_and_loss(
    layout: FlatLayout, flat: Tensor, norm_and_loss: Tensor, loss: float | Tensor | None
) -> None:
    """Copy a model, its norm and a loss on its device, without waiting for the device.

    To ``flat`` ``(P,)`` and ``norm_and_loss`` ``(2,)``. No loss is written as 0.
    """
    copy_model(layout, flat)
    norm_and_loss[0].copy_(torch.linalg.vector_norm(flat))
    if isinstance(loss, Tensor):
        norm_and_loss[1].copy_(loss.reshape(()), non_blocking=True)
    else:
        norm_and_loss[1].fill_(loss or 0.0)


def make_publisher(
    snapshots: Snapshots, layout: FlatLayout, clock: Clock = REAL_CLOCK
) -> Publisher | DevicePublisher:
    """Return the publisher for the device of a model."""
    if has_streams(layout.device):
        return DevicePublisher(snapshots, layout, clock)
    return Publisher(snapshots, layout, clock)

"""Sending what is on a GPU, without making the training thread wait for the copy."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.remote.calls import Call
from lightning_loco.remote.changes import ChangeWatch
from lightning_loco.remote.slots import Slot, Tensors
from lightning_loco.remote.wire import Kind, Lane, Note, Wire


class Courier:
    """Copies messages into the processor's memory on a stream of its own, and sends them in order.

    Nothing is waited for on the caller's thread: a thread sends each message when its copy is done.

    Args:
        wire: To the receiver.
        device: Where the messages are.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire = wire
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loco-courier")

    def send(self, slot: Slot, tensors: Tensors, lane: Lane) -> Future[dist.Work]:
        """Begin to send what the tensors hold; its buffer must not be used before that is done.

        Returns:
            The sending, once it has begun.
        """
        host, copied = slot.stage(tensors, self._stream)
        return self._thread.submit(self._send, host, copied, lane)

    def ask(self, kind: Kind, call: Call, watch: ChangeWatch) -> Future[Call]:
        """Send a request, in its turn, with what is known by then of changes by hand.

        Returns:
            The wishes that were sent, once they are.
        """
        digest = watch.begin_digest(self._stream)

        def send() -> Call:
            complete = call._replace(changed=digest())
            self._wire.ask(Note(kind, complete.content()))
            return complete

        return self._thread.submit(send)

    def end(self) -> None:
        """End the thread when all has been sent."""
        self._thread.shutdown(wait=False)

    def _send(self, host: Tensor, copied: torch.cuda.Event, lane: Lane) -> dist.Work:
        copied.synchronize()
        return self._wire.send(host, lane)

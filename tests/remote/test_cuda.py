"""Parameters and gradients of a GPU, which travel through the processor's memory."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from lightning_loco.remote.courier import Courier
from lightning_loco.remote.plan import plan_messages
from lightning_loco.remote.slots import Slot
from lightning_loco.remote.wire import Lane, Wire

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [16, 1000])
def test_what_is_on_a_gpu_arrives_on_another_rank(
    wire_dtype: torch.dtype | None, bucket_bytes: int
) -> None:
    here = [torch.randn(size, device="cuda") for size in (3, 50, 2)]
    there = [torch.zeros(size) for size in (3, 50, 2)]
    back = [torch.zeros(size, device="cuda") for size in (3, 50, 2)]
    for message in plan_messages(here, bucket_bytes, wire_dtype):
        sender, receiver, again = (Slot(message, side) for side in (here, there, back))
        sent = sender.outgoing(here)
        assert sent.device.type == "cpu"
        receiver.incoming(there).copy_(sent)
        receiver.unpack(there)
        again.incoming(back).copy_(receiver.outgoing(there))
        again.unpack(back)
    for own, other, returned in zip(here, there, back, strict=True):
        expected = own if wire_dtype is None else own.bfloat16().float()
        assert torch.equal(other, expected.cpu())
        assert torch.equal(returned, expected)


def send_and_receive(groups: dict[int, ProcessGroupGloo], size: int) -> None:
    here = [torch.randn(size, device="cuda") for _ in range(2)]
    there = [torch.zeros(size) for _ in range(2)]
    sender, receiver = (Wire(other, f"rank {other}", groups[1 - other]) for other in (1, 0))
    courier = Courier(sender, here[0].device)
    messages = plan_messages(here, 4 * size)
    slots = [Slot(message, here) for message in messages]
    for slot in slots:
        slot.outgoing(here)  # makes the buffers
    torch.cuda.synchronize()
    before = [values.clone() for values in here]
    torch.cuda.set_sync_debug_mode("error")  # from here on nothing may wait for the device
    try:
        sending = [courier.send(slot, here, Lane.GRADIENTS) for slot in slots]
        for values in here:
            values.zero_()  # what was sent is as it was then
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for message in messages:
        slot = Slot(message, there)
        receiver.wait(receiver.receive(slot.incoming(there), Lane.GRADIENTS), "gradients")
        slot.unpack(there)
    for one in sending:
        sender.wait(one.result(), "gradients")
    courier.end()
    for values, expected in zip(there, before, strict=True):
        assert torch.equal(values, expected.cpu())


def test_a_courier_does_not_wait_for_the_device() -> None:
    store = HashStore()
    groups: dict[int, ProcessGroupGloo] = {}

    def connect(rank: int) -> None:
        groups[rank] = ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for size in (10, 1_000_000):
        send_and_receive(groups, size)

"""Parameters and gradients of a GPU, which travel through the processor's memory."""

from __future__ import annotations

import pytest
import torch

from lightning_loco.remote.plan import plan_messages
from lightning_loco.remote.slots import Slot

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

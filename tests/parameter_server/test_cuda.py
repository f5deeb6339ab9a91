"""Parameters and gradients of a GPU, which are sent through CPU memory."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed import HashStore, ProcessGroupGloo

from lightning_loco.compression import BFloat16, Codec, Int8
from lightning_loco.parameter_server import RemoteOptimizer, Tiers, Transport, serve
from lightning_loco.parameter_server.buckets import BucketBuffer, plan_buckets
from lightning_loco.parameter_server.protocol import MessageTag
from lightning_loco.parameter_server.server_client import AsyncSender
from tests.harness.gpu import DEVICE, no_waits_for_the_gpu, with_streams
from tests.harness.pool import Pool


@pytest.mark.parametrize("compression", [None, "bf16", "int8"])
def test_a_worker_never_waits_for_the_gpu(pool: Pool, compression: str | None) -> None:
    """Gradients are copied and sent without blocking."""
    for overlap in (False, True):
        pool.run(train, overlap, compression, world=3)


def train(rank: int, world: int, overlap: bool, compression: str | None) -> None:
    transport = Transport(bucket_bytes=100, compression=compression)
    if rank == world - 1:
        tiers, params = Tiers.detect(world, world - 1), make_model("cpu").parameters()
        serve(params, lambda p: torch.optim.SGD(p, lr=0.1), tiers, rank, transport=transport)
        return
    with with_streams():
        model = make_model("meta")
        remote = RemoteOptimizer(model.parameters(), world - 1, transport=transport)
        remote.receive_weights()
        for _ in range(5):
            remote.zero_grad()
            if overlap:
                remote.expect_backward()
            model(torch.ones(2, 3, device=DEVICE)).sum().backward()
            remote.step()
        remote.leave()


def make_model(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).to(device)


@pytest.mark.gpu
def test_gpu_tensors_are_received_on_another_rank(subtests: pytest.Subtests) -> None:
    for codec, bucket_bytes in itertools.product((None, BFloat16(), Int8(4)), (16, 1000)):
        with subtests.test(codec=codec, bucket_bytes=bucket_bytes):
            send_there_and_back(codec, bucket_bytes)


def send_there_and_back(codec: Codec | None, bucket_bytes: int) -> None:
    here = [torch.randn(size, device="cuda") for size in (3, 50, 2)]
    there = [torch.zeros(size) for size in (3, 50, 2)]
    back = [torch.zeros(size, device="cuda") for size in (3, 50, 2)]
    for bucket in plan_buckets(here, bucket_bytes, codec):
        sender, receiver, again = (BucketBuffer(bucket, side) for side in (here, there, back))
        sent = sender.pack(here)
        assert sent.device.type == "cpu"
        receiver.receive_buffer(there).copy_(sent)
        receiver.unpack(there)
        again.receive_buffer(back).copy_(receiver.pack(there))
        again.unpack(back)
    expected = [values.cpu() for values in here]
    for bucket in plan_buckets(expected, bucket_bytes, codec):
        BucketBuffer(bucket, expected).round_trip(expected)
    for own, other, returned in zip(expected, there, back, strict=True):
        assert torch.equal(other, own)
        torch.testing.assert_close(returned.cpu(), own, rtol=1e-6, atol=0)  # encoded again


def send_and_receive(groups: dict[int, ProcessGroupGloo], size: int) -> None:
    here = [torch.randn(size, device="cuda") for _ in range(2)]
    there = [torch.zeros(size) for _ in range(2)]
    sender, receiver = (
        Transport(groups[1 - other]).connect(other, f"rank {other}") for other in (1, 0)
    )
    async_sender = AsyncSender(sender, here[0].device)
    buckets = plan_buckets(here, 4 * size)
    buffers = [BucketBuffer(bucket, here) for bucket in buckets]
    for buffer in buffers:
        buffer.pack(here)  # allocates the buffers
    torch.cuda.synchronize()
    before = [values.clone() for values in here]
    with no_waits_for_the_gpu():
        sending = [async_sender.send(buffer, here) for buffer in buffers]
        for values in here:
            values.zero_()  # must not change the sent values
    for bucket in buckets:
        buffer = BucketBuffer(bucket, there)
        receiver.wait(
            receiver.receive(buffer.receive_buffer(there), MessageTag.GRADIENTS), "gradients"
        )
        buffer.unpack(there)
    for one in sending:
        sender.wait(one.result(), "gradients")
    async_sender.close()
    for values, expected in zip(there, before, strict=True):
        assert torch.equal(values, expected.cpu())


@pytest.mark.gpu
def test_an_async_sender_does_not_wait_for_the_device() -> None:
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


@pytest.mark.parametrize("codec", [BFloat16(), Int8()])
def test_each_foreach_copy_has_tensors_of_one_dtype(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch 2.5 to 2.10 copy wrong values on a GPU if a list has several dtypes."""
    seen: list[tuple[set[torch.dtype], set[torch.dtype]]] = []
    original = torch._foreach_copy_

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        seen.append(({t.dtype for t in targets}, {s.dtype for s in sources}))
        original(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    params = [torch.full((i + 1,), float(i), dtype=d) for i, d in enumerate(dtypes)]
    (bucket,) = plan_buckets(params, 10_000, codec)
    BucketBuffer(bucket, params).round_trip(params)
    for i, param in enumerate(params):
        assert param.tolist() == pytest.approx([i] * (i + 1), abs=0.02)
    assert len(seen) == 4
    assert all(len(targets) == len(sources) == 1 for targets, sources in seen)

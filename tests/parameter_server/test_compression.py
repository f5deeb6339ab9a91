"""Encoded gradients and parameters: results equal a plain loop that decodes them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_loco.compression import E3M0, BFloat16, Codec, ErrorFeedback, Float16, Int8, Sparse
from lightning_loco.parameter_server import RemoteOptimizer, Transport, run_role
from lightning_loco.parameter_server.buckets import BucketBuffer, ParamBucket, plan_buckets
from lightning_loco.parameter_server.protocol import as_codec
from tests.harness.cover import cover
from tests.harness.pool import Pool, PoolError

CODEC = Int8(block=8)
STEPS = 30
WORKERS = 2


class Net(nn.Module):
    """Has a parameter that only one worker uses, and one that no worker uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 2))
        self.sometimes = nn.Parameter(torch.randn(1))
        self.never = nn.Parameter(torch.randn(5))

    def forward(self, inputs: Tensor, use_all: bool) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs * self.sometimes if use_all else outputs


def backward(net: Net, worker: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    net(torch.randn(4, 3, generator=generator), use_all=worker == 0).square().mean().backward()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in net.parameters()])


def train(rank: int, world: int, bucket_bytes: int, clip: bool) -> Tensor:
    """Run the role of a rank; return its parameters at the end."""
    net = Net(seed=0)

    def work(remote: RemoteOptimizer) -> None:
        for step in range(STEPS):
            remote.zero_grad()
            if step % 3:
                remote.expect_backward()
            backward(net, rank, step)
            if clip:
                remote.clip_grad_norm_(0.1)
            remote.step()

    transport = Transport(bucket_bytes=bucket_bytes, compression=CODEC)
    run_role(work, net.parameters(), make_optimizer, WORKERS, transport=transport)
    return flat(net)


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def encode_and_decode(values: list[Tensor], buckets: list[ParamBucket]) -> list[Tensor]:
    """Return the decoded values of tensors that are encoded bucket by bucket."""
    read = [torch.empty_like(one) for one in values]
    for bucket in buckets:
        slices = [values[part.param].reshape(-1)[part.start : part.stop] for part in bucket.slices]
        whole = torch.cat(slices)
        decoded = CODEC.decode(CODEC.encode(whole), torch.empty_like(whole))
        sizes = [len(one) for one in slices]
        for part, found in zip(bucket.slices, decoded.split(sizes), strict=True):
            read[part.param].view(-1)[part.start : part.stop] = found
    return read


def in_one_process(
    rank: int, world: int, num_tiers: int, bucket_bytes: int, clip: bool
) -> tuple[Tensor, Tensor]:
    """Return the reference: the optimizer's parameters, and the parameters that workers decode."""
    full, decoded = Net(seed=0), Net(seed=1)
    inner = make_optimizer(full.parameters())
    buckets = plan_buckets(list(full.parameters()), bucket_bytes, CODEC)

    def decode() -> None:
        arrived = encode_and_decode([param.detach() for param in full.parameters()], buckets)
        for param, value in zip(decoded.parameters(), arrived, strict=True):
            param.data.copy_(value)

    decode()
    for step in range(STEPS):
        missing = [True for _ in full.parameters()]
        total = [torch.zeros_like(param) for param in full.parameters()]
        for worker in range(WORKERS):
            decoded.zero_grad()
            backward(decoded, worker, step)
            grads = [param.grad for param in decoded.parameters()]
            missing = [m and g is None for m, g in zip(missing, grads, strict=True)]
            pairs = zip(total, grads, strict=True)
            sent = [torch.zeros_like(one) if grad is None else grad for one, grad in pairs]
            for one, arrived in zip(total, encode_and_decode(sent, buckets), strict=True):
                one.add_(arrived)
        mean = [one / WORKERS for one in total]
        if num_tiers == 3:  # the aggregator encodes it again
            mean = encode_and_decode(mean, buckets)
        for param, value, is_missing in zip(full.parameters(), mean, missing, strict=True):
            param.grad = None if is_missing else value
        if clip:
            nn.utils.clip_grad_norm_([p for p in full.parameters() if p.grad is not None], 0.1)
        inner.step()
        decode()
    return flat(full), flat(decoded)


@pytest.mark.parametrize(
    ("num_tiers", "bucket_bytes", "clip"),
    cover(
        [2, 3],
        [
            pytest.param(1, False),  # a block is a bucket
            pytest.param(24, True),  # some blocks
            pytest.param(10_000, False),  # all blocks
        ],
        strength=1,
    ),
)
def test_results_are_those_of_a_plain_loop(
    pool: Pool, num_tiers: int, bucket_bytes: int, clip: bool
) -> None:
    found = pool.run(train, bucket_bytes, clip, world=WORKERS + num_tiers - 1)
    full, decoded = pool.run(in_one_process, num_tiers, bucket_bytes, clip, world=1)[0]
    assert torch.equal(found[-1], full)
    assert all(torch.equal(weights, decoded) for weights in found[:WORKERS])
    assert not torch.equal(decoded, full)
    assert not torch.equal(full, flat(Net(seed=0)))


DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def make_params() -> list[nn.Parameter]:
    """Return parameters of all dtypes, with odd sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = [7, 1, 13, 3, 0, 5, 11, 1, 2]
    return [
        nn.Parameter(torch.randn(size, generator=generator).to(DTYPES[number % 3]))
        for number, size in enumerate(sizes)
    ]


def train_mixed(rank: int, world: int, codec: Codec | None, bucket_bytes: int) -> list[Tensor]:
    params = make_params()

    def work(remote: RemoteOptimizer) -> None:
        for step in range(5):
            remote.zero_grad()
            remote.expect_backward()
            weight = 1 + rank + step
            sum((weight * param.double()).square().sum() for param in params).backward()
            remote.step()

    transport = Transport(bucket_bytes=bucket_bytes, compression=codec)
    run_role(work, params, lambda p: torch.optim.SGD(p, lr=0.003), WORKERS, transport=transport)
    return [param.detach() for param in params]


@pytest.mark.parametrize("num_tiers", [2, 3])
def test_mixed_dtypes_and_odd_sizes(pool: Pool, num_tiers: int, subtests: pytest.Subtests) -> None:
    world = WORKERS + num_tiers - 1
    for codec, bucket_bytes in itertools.product((None, BFloat16(), Int8(block=4)), (16, 1000)):
        with subtests.test(codec=codec, bucket_bytes=bucket_bytes):
            found = pool.run(train_mixed, codec, bucket_bytes, world=world)
            arrived = [param.clone() for param in found[-1]]
            for bucket in plan_buckets(arrived, bucket_bytes, codec):
                BucketBuffer(bucket, arrived).round_trip(arrived)
            for worker in found[:WORKERS]:
                assert all(map(torch.equal, worker, arrived))
            for start, end, param in zip(make_params(), found[-1], arrived, strict=True):
                assert start.dtype == end.dtype == param.dtype
                assert (end.double().norm() < start.double().norm()) == (start.numel() > 0)


def train_with_other_compression(rank: int, world: int) -> None:
    compression = "int8" if rank == 0 else "bf16"
    net, transport = nn.Linear(3, 2), Transport(compression=compression)
    run_role(lambda _: None, net.parameters(), torch.optim.SGD, 1, transport=transport)


def test_another_compression_on_another_rank_is_refused(pool: Pool) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(train_with_other_compression, world=2)
    assert "and give all ranks the same Transport" in caught.value.failures[0].message
    assert "Another model on: Worker 0" in caught.value.failures[1].message


def train_with_nan(rank: int, world: int) -> None:
    net = nn.Linear(300, 2)

    def work(remote: RemoteOptimizer) -> None:
        for step in range(3):
            remote.zero_grad()
            is_broken = step == 1 and rank == 1
            net(torch.ones(1, 300)).sum().mul(float("nan") if is_broken else 1.0).backward()
            remote.step()

    transport = Transport(compression="int8")
    run_role(work, net.parameters(), make_optimizer, WORKERS, transport=transport)


def test_the_worker_with_a_nan_gradient_is_named(pool: Pool) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(train_with_nan, world=3)
    for failure in caught.value.failures.values():
        assert "Worker 1: a gradient is not finite" in failure.message


def count_bytes(rank: int, world: int, compression: str | None) -> tuple[float, float, float]:
    """Return bytes sent, saved and received in a step, relative to 4 per element."""
    net = nn.Linear(300, 300)

    def work(remote: RemoteOptimizer) -> tuple[float, float, float]:
        before = remote.bytes_sent, remote.bytes_saved, remote.bytes_received
        assert remote.bytes_saved == 0
        net(torch.ones(1, 300)).sum().backward()
        remote.step()
        after = remote.bytes_sent, remote.bytes_saved, remote.bytes_received
        sent, saved, received = (b - a for a, b in zip(before, after, strict=True))
        size = 4 * len(flat(net))
        return sent / size, saved / size, received / size

    transport = Transport(compression=compression, bucket_bytes=100_000)
    found = run_role(work, net.parameters(), make_optimizer, 1, transport=transport)
    return found or (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("compression", "part"), [(None, 1.0), ("bf16", 0.5), ("int8", 0.254)])
def test_bytes_of_a_step(pool: Pool, compression: str | None, part: float) -> None:
    sent, saved, received = pool.run(count_bytes, compression, world=2)[0]
    assert part <= sent <= part + 0.01
    assert part <= received <= part + 0.01
    assert saved == pytest.approx(1 - part, abs=0.001)


def test_codecs_by_name(subtests: pytest.Subtests) -> None:
    for given, expected in (
        (None, None),
        ("none", None),
        ("bf16", BFloat16()),
        ("fp16", Float16()),
        ("int8", Int8()),
        (Int8(64), Int8(64)),
    ):
        with subtests.test(given=given):
            assert as_codec(given) == expected


def test_unsupported_codecs_are_refused(subtests: pytest.Subtests) -> None:
    rows: list[tuple[Any, type[Exception], str]] = [
        ("zip", ValueError, "one of none, bf16, fp16, int8, int4, e3m0, sparse"),
        (8, TypeError, "a codec such as Int8"),
        ("int4", ValueError, r"Int4\(block=128\) writes too roughly for a remote optimizer"),
        (E3M0(8), ValueError, r'Use compression="int8", "bf16" or "fp16"'),
        (ErrorFeedback(Sparse()), ValueError, "Sparse.* writes too roughly for a remote"),
        (ErrorFeedback(Int8()), ValueError, r"codec alone: compression=Int8\(block=256\)\."),
    ]
    for given, error, words in rows:
        with subtests.test(given=given):
            with pytest.raises(error, match=words):
                as_codec(given)
            with pytest.raises(error, match=words):
                Transport(compression=given)

"""Parts of a remote optimizer: buckets, buffers, step requests and optimizer states."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data._utils import signal_handling

from lightning_loco.compression import BFloat16, Codec, Float16, Int8
from lightning_loco.parameter_server import RemoteOptimizer, Serving, Tiers, Transport, run_role
from lightning_loco.parameter_server.backends import can_step_per_parameter, check_optimizer
from lightning_loco.parameter_server.buckets import (
    Accumulator,
    BucketBuffer,
    ParamBucket,
    plan_buckets,
    shard_parameters,
)
from lightning_loco.parameter_server.optimizer_state import HyperparameterSync, OptimizerState
from lightning_loco.parameter_server.protocol import (
    ClippingSettings,
    StepRequest,
    Unreachable,
    explain_unreachable,
)
from tests.harness.manual_clock import SkippingClock
from tests.harness.pool import Pool, PoolError
from tests.harness.watchdogs import make_watchdogs, start


@pytest.mark.parametrize("codec", [None, BFloat16(), Float16(), Int8(4)], ids=str)
def test_every_element_is_sent_once(codec: Codec | None, subtests: pytest.Subtests) -> None:
    for sizes in (*itertools.product([1, 3, 11], repeat=3), (0, 5, 0), (7,), (0,)):
        for bucket_bytes in (4, 12, 40, 1000):
            with subtests.test(sizes=sizes, bucket_bytes=bucket_bytes):
                params = [torch.randn(size) for size in sizes]
                buckets = plan_buckets(params, bucket_bytes, codec)
                assert_each_element_is_in_one_bucket(params, buckets)
                assert_received_values_equal_a_round_trip(params, buckets, codec)


def assert_each_element_is_in_one_bucket(params: list[Tensor], buckets: list[ParamBucket]) -> None:
    covered = [torch.zeros_like(param) for param in params]
    for bucket in buckets:
        assert bucket.numel == sum(stop - start for _, start, stop in bucket.slices)
        for index, first, stop in bucket.slices:
            covered[index][first:stop] += 1
    assert all((count == 1).all() for count in covered)


def assert_received_values_equal_a_round_trip(
    params: list[Tensor], buckets: list[ParamBucket], codec: Codec | None
) -> None:
    buffers = [BucketBuffer(bucket, params) for bucket in buckets]
    copies = [torch.zeros_like(param) for param in params]
    received = [BucketBuffer(bucket, copies) for bucket in buckets]
    for buffer, other in zip(buffers, received, strict=True):
        sent = buffer.pack(params)
        assert (
            sent.nbytes == buffer.bucket.num_bytes == 4 * buffer.bucket.numel - buffer.saved_bytes
        )
        other.receive_buffer(copies).copy_(sent)
        other.unpack(copies)
    rounded = [param.clone() for param in params]
    for bucket in buckets:
        BucketBuffer(bucket, rounded).round_trip(rounded)
    for param, copy, expected in zip(params, copies, rounded, strict=True):
        assert torch.equal(copy, expected)
        if isinstance(codec, Int8):
            torch.testing.assert_close(copy, param, rtol=0, atol=5 / 254)
        else:
            assert torch.equal(copy, param if codec is None else encode_and_decode(codec, param))


def encode_and_decode(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), torch.empty_like(values))


def test_non_contiguous_memory_is_sent_whole() -> None:
    param = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    (bucket,) = plan_buckets([param], bucket_bytes=8)
    other = torch.zeros(2, 3, 4, 4)
    BucketBuffer(bucket, [other]).receive_buffer([other]).copy_(
        BucketBuffer(bucket, [param]).pack([param])
    )
    assert torch.equal(other.view(-1), torch.zeros(96)) or torch.equal(other, param)
    again = torch.zeros_like(param)
    buffer = BucketBuffer(bucket, [again])
    buffer.receive_buffer([again]).copy_(BucketBuffer(bucket, [param]).pack([param]))
    buffer.unpack([again])
    assert torch.equal(again, param)


def test_the_accumulator_has_contiguous_parameters() -> None:
    params = [torch.zeros(2, 3), torch.zeros(7), torch.zeros(1), torch.zeros(20)]
    buckets = plan_buckets(params, bucket_bytes=32)
    accumulator = Accumulator(params, buckets)
    for number, part in enumerate(accumulator.params):
        assert part.shape == params[number].shape
        part.fill_(number)
    for bucket, memory in zip(buckets, accumulator.buckets, strict=True):
        expected = [[index] * (stop - start) for index, start, stop in bucket.slices]
        assert memory.tolist() == list(itertools.chain(*expected))


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_shards_are_even_and_complete(num_servers: int) -> None:
    params = [torch.zeros(size) for size in (5, 1, 4, 4, 3, 1)]
    shards = shard_parameters(params, num_servers)
    assert sorted(itertools.chain(*shards)) == list(range(6))
    sizes = [sum(params[i].numel() for i in shard) for shard in shards]
    assert max(sizes) <= 4 / 3 * sum(sizes) / num_servers


def test_more_servers_than_parameters() -> None:
    with pytest.raises(ValueError, match="num_servers=2 is more than the model's 1 parameters"):
        shard_parameters([torch.zeros(3)], 2)


def test_requests_of_several_workers_are_merged() -> None:
    first = StepRequest((0, 2), [{"lr": 0.1}], ClippingSettings("norm", 1.0))
    second = StepRequest((2, 3), [{"lr": 0.2}], None, "SIGTERM")
    merged = StepRequest.merge([first, second])
    assert merged == StepRequest((2,), [{"lr": 0.1}], ClippingSettings("norm", 1.0), "SIGTERM")
    assert StepRequest.from_dict(merged.to_dict()) == merged
    assert StepRequest.from_dict(StepRequest().to_dict()) == StepRequest()


def test_changed_hyperparameters_are_sent() -> None:
    here = [{"params": [], "lr": 0.1, "betas": (0.9, 0.99), "fused": None}]
    there: list[dict[str, Any]] = [{"params": [], "lr": torch.tensor(0.0)}]
    sender, receiver = HyperparameterSync(here), HyperparameterSync(there)
    receiver.update(sender.changes())
    assert there[0]["lr"].item() == pytest.approx(0.1)
    assert there[0]["betas"] == (0.9, 0.99)
    assert sender.changes() is None
    here[0]["lr"] = 0.2
    assert sender.changes() == [{"lr": 0.2, "betas": [0.9, 0.99]}]


def test_stepping_parameters_one_by_one_gives_equal_results(subtests: pytest.Subtests) -> None:
    for kind in ("Adam", "SGD", "Adagrad", "RMSprop", "Adadelta", "NAdam"):
        with subtests.test(kind):
            torch.manual_seed(0)
            here, there = (
                [nn.Parameter(torch.arange(1.0, 1 + size)) for size in (3, 5, 2)] for _ in range(2)
            )
            all_at_once, one_by_one = (
                getattr(torch.optim, kind)(params, lr=0.1) for params in (here, there)
            )
            for _ in range(5):
                for param, other in zip(here, there, strict=True):
                    param.grad = torch.randn_like(param)
                    other.grad = param.grad.clone()
                    one_by_one.step()
                    other.grad = None
                all_at_once.step()
            assert can_step_per_parameter(all_at_once)
            assert all(map(torch.equal, here, there))


def test_an_unknown_optimizer_steps_all_parameters_at_once() -> None:
    class Own(torch.optim.SGD):
        pass

    assert not can_step_per_parameter(Own([torch.zeros(1)], lr=0.1))


def test_a_state_with_other_values_than_tensors_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"history": [1, 2]}
    with pytest.raises(TypeError, match="keeps a list as 'history' of parameter 0"):
        OptimizerState.of(optimizer)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    class Needs(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return closure()

    with pytest.raises(ValueError, match="Needs needs a closure"):
        check_optimizer(Needs([torch.zeros(1)], lr=0.1))


def test_ranks_with_servers_and_replicas() -> None:
    tiers = Tiers.detect(10, 3, num_servers=2, replica_size=2)
    assert tiers.num_tiers == 3
    assert tiers.leaders == [0, 2, 4]
    assert (tiers.aggregators, tiers.optimizers) == ([6, 7], [8, 9])
    assert [tiers.shard(rank) for rank in range(6, 10)] == [0, 1, 0, 1]
    assert tiers.name(3) == "worker 1 (rank 3)"
    assert tiers.name(7) == "the aggregator (rank 7)"
    assert tiers.world_size == 10
    with pytest.raises(ValueError, match=r"need 8 ranks .* or 10 .* num_workers=2 or 1\."):
        Tiers.detect(6, 3, num_servers=2, replica_size=2)


def exchange_settings(rank: int, world: int, num_servers: int) -> Any:
    """Use a scheduler on the worker and one on the server, and send the state both ways."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)

    def work(remote: RemoteOptimizer) -> Any:
        assert remote.param_groups[0]["lr"] == 0.5
        schedule = torch.optim.lr_scheduler.ExponentialLR(remote, 0.5)
        rates = []
        for _ in range(3):
            net(torch.ones(1, 3)).sum().backward()
            remote.step()
            schedule.step()
            rates.append((remote.param_groups[0]["lr"], remote.param_groups[0]["weight_decay"]))
            remote.zero_grad()
        state = remote.state_dict()
        local = torch.optim.Adam(net.parameters(), lr=0.1)
        local.load_state_dict(state)
        state["state"][0]["exp_avg"].fill_(7.0)
        remote.load_state_dict(state)
        again = remote.state_dict()
        with pytest.raises(ValueError, match="max_norm must be positive"):
            remote.clip_grad_norm_(0.0)
        return rates, local.state_dict(), again

    def make(params: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(params, lr=0.5))
        return made[0]

    def decay() -> None:
        made[0].param_groups[0]["weight_decay"] += 0.25

    made: list[Any] = []
    return run_role(
        work, net.parameters(), make, 1, num_servers=num_servers, serving=Serving(after_step=decay)
    )


@pytest.mark.parametrize(("world", "num_servers"), [(2, 1), (3, 1), (3, 2)])
def test_settings_and_state_are_sent_both_ways(pool: Pool, world: int, num_servers: int) -> None:
    rates, local, again = pool.run(exchange_settings, num_servers, world=world)[0]
    assert [decay for _, decay in rates] == [0.25, 0.5, 0.75]
    assert [rate for rate, _ in rates] == [0.25, 0.125, 0.0625]
    assert local["param_groups"][0]["lr"] == 0.0625
    assert local["param_groups"][0]["betas"] == (0.9, 0.999)
    assert local["state"][0]["step"] == 3
    assert set(again["state"]) == {0, 1}
    assert (again["state"][0]["exp_avg"] == 7.0).all()
    assert torch.equal(again["state"][1]["exp_avg"], local["state"][1]["exp_avg"])


def step_with(rank: int, world: int, what: str) -> None:
    params = [nn.Parameter(torch.zeros(4, 2))]
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def work(remote: RemoteOptimizer) -> None:
        if what == "sparse":
            nn.functional.embedding(torch.tensor([1]), params[0], sparse=True).sum().backward()
        elif what == "frozen":
            frozen.requires_grad_(True)
        else:
            remote.expect_backward()
            for _ in range(2):
                params[0].sum().backward()
        remote.step()

    run_role(work, [*params, frozen], lambda p: torch.optim.SGD(p, lr=1.0), 1)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("sparse", "sparse gradient"),
        ("frozen", "became trainable"),
        ("twice", "got its gradient twice"),
    ],
)
def test_gradients_that_cannot_be_sent(pool: Pool, what: str, text: str) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(step_with, what, world=2)
    assert text in caught.value.failures[0].message
    if what != "twice":  # the server waits for the other gradients, and is stopped
        assert "Worker 0 failed: " in caught.value.failures[1].message


def train_rounded(rank: int, world: int, compression: str | None) -> Tensor:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)

    def work(remote: RemoteOptimizer) -> None:
        before = remote.bytes_sent, remote.bytes_received
        for step in range(4):
            remote.zero_grad()
            inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * rank + step))
            net(inputs).square().mean().backward()
            remote.step()
        assert remote.bytes_sent - before[0] < 4 * (8 * 4 + 600)
        assert remote.bytes_received - before[1] < 4 * (8 * 4 + 600)

    transport = Transport(compression=compression, bucket_bytes=8)
    run_role(work, net.parameters(), lambda p: torch.optim.SGD(p, lr=0.1), 2, transport=transport)
    return torch.cat([param.detach().reshape(-1) for param in net.parameters()])


def test_compression_gives_equal_results_with_2_and_3_tiers(pool: Pool) -> None:
    two, three = (pool.run(train_rounded, "bf16", world=world) for world in (3, 4))
    exact = pool.run(train_rounded, None, world=3)
    assert torch.equal(two[2], three[3])
    for weights in (*two[:2], *three[:2]):
        assert torch.equal(weights, two[2].bfloat16().float())
    torch.testing.assert_close(two[2], exact[2], rtol=0.02, atol=0.02)


def train_in_buckets(rank: int, world: int, bucket_bytes: int) -> Tensor:
    """Train a parameter that spans many buckets, which are sent after the backward pass."""
    torch.manual_seed(0)
    net = nn.Linear(5, 7)

    def work(remote: RemoteOptimizer) -> None:
        for step in range(3):
            remote.zero_grad()
            net(torch.full((1, 5), 1.0 + rank + step)).square().sum().backward()
            remote.step()

    transport = Transport(bucket_bytes=bucket_bytes)
    run_role(work, net.parameters(), lambda p: torch.optim.SGD(p, lr=1e-3), 1, transport=transport)
    return torch.cat([param.detach().reshape(-1) for param in net.parameters()])


@pytest.mark.parametrize("num_tiers", [2, 3])
def test_a_parameter_in_many_buckets(pool: Pool, num_tiers: int) -> None:
    found = pool.run(train_in_buckets, 8, world=num_tiers)
    expected = pool.run(train_in_buckets, 10_000, world=2)
    assert all(torch.equal(weights, expected[0]) for weights in (found[0], found[-1]))


def test_after_a_timeout_reports_are_not_waited_for() -> None:
    clock = SkippingClock()
    with make_watchdogs(2, clock=clock) as watchdogs:
        start(watchdogs[0])
        for timeout_s, waits in ((0.0, False), (60.0, True)):
            before_s = clock.now()
            explained = explain_unreachable("Worker 1", "the gradients", watchdogs[0], timeout_s)
            with pytest.raises(Unreachable, match="Worker 1: the gradients could not"), explained:
                raise RuntimeError("the backend's error")
            assert (clock.now() > before_s) == waits


def test_an_error_of_a_signal_handler_is_not_explained() -> None:
    """PyTorch raises it in any wait of this process if a data loader's process is killed."""
    handler: dict[str, Any] = {"__name__": signal_handling.__name__}
    exec("def handle():\n    raise RuntimeError('killed by signal')", handler)
    explained = explain_unreachable("Worker 1", "the gradients", None)
    with pytest.raises(RuntimeError, match="^killed by signal$"), explained:
        handler["handle"]()

"""The roles in a plain loop: 2 and 3 tiers give the results of DDP."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_loco.parameter_server import (
    RemoteOptimizer,
    RemoteParticipant,
    Role,
    Serving,
    Tiers,
    Transport,
    run_role,
    serve,
)
from tests.harness.pool import Pool, PoolError

STEPS = 200
TRANSPORT = Transport(bucket_bytes=100)  # several buckets, which split parameters
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}


class Net(nn.Module):
    """Has a parameter that only some workers use, and one that no worker uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.sometimes = nn.Parameter(torch.randn(2))
        self.never = nn.Parameter(torch.randn(5))

    def forward(self, inputs: Tensor, use_all: bool) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs * self.sometimes if use_all else outputs


def backward(net: Any, rank: int, step: int, use_all: bool) -> None:
    """Compute the gradient of one batch of a worker."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(4, 3, generator=generator)
    net(inputs, use_all).square().mean().backward()


def train(
    rank: int, world: int, num_workers: int, name: str, clip: bool
) -> tuple[Tensor, list[Tensor]]:
    """Run the role of a rank; return the last parameters and the parameters after each step."""
    net = Net(seed=rank)
    history: list[Tensor] = []

    def record() -> None:
        history.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))

    def work(remote: RemoteOptimizer) -> None:
        for step in range(STEPS):
            remote.zero_grad()
            if step % 3:
                remote.expect_backward()
            backward(net, rank, step, use_all=rank == 0)
            if clip:
                remote.clip_grad_norm_(0.1)
            remote.step()
            record()

    def make(params: Any) -> torch.optim.Optimizer:
        inner = OPTIMIZERS[name](params)
        schedules.append(torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS))
        return inner

    def after_step() -> None:
        schedules[0].step()
        record()

    schedules: list[Any] = []
    run_role(
        work,
        net.parameters(),
        make,
        num_workers,
        transport=TRANSPORT,
        serving=Serving(after_step=after_step),
    )
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]), history


def train_ddp(rank: int, world: int, server_rank: int, name: str, clip: bool) -> Tensor:
    """Train with DDP, from the initial parameters of the optimizer's rank."""
    net = Net(seed=server_rank)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    inner = OPTIMIZERS[name](net.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS)
    for step in range(STEPS):
        inner.zero_grad()
        backward(model, rank, step, use_all=rank == 0)
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        inner.step()
        schedule.step()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize(
    ("num_workers", "num_tiers", "name", "clip"),
    [
        pytest.param(
            *tiers, *kind, marks=[] if (tiers, kind[0]) == ((2, 3), "AdamW") else pytest.mark.soak
        )
        for tiers in [(2, 2), (2, 3), (3, 2)]
        for kind in [("AdamW", True), ("SGD", False), ("Adagrad", False)]
    ],
)
def test_all_tiers_give_the_results_of_ddp(
    pool: Pool, num_workers: int, num_tiers: int, name: str, clip: bool
) -> None:
    world = num_workers + num_tiers - 1
    results = pool.run(train, num_workers, name, clip, world=world)
    server, history = results[-1]
    assert len(history) == STEPS
    for final, own_history in results[:num_workers]:
        assert torch.equal(final, server)
        assert all(map(torch.equal, own_history, history))
    expected = pool.run(train_ddp, world - 1, name, clip, world=num_workers)[0]
    if num_workers == 2:
        assert torch.equal(server, expected)
    else:  # DDP divides before it sums
        torch.testing.assert_close(server, expected, rtol=1e-4, atol=1e-6)


def train_with_uneven_data(rank: int, world: int, num_workers: int) -> Tensor:
    """Train from the same initial parameters for any number of tiers."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)

    def work(remote: RemoteOptimizer) -> None:
        for step in range(20 + 5 * rank):  # workers may have different numbers of batches
            generator = torch.Generator().manual_seed(1000 * rank + step)
            remote.zero_grad()
            net(torch.randn(2, 4, generator=generator)).square().mean().backward()
            remote.step()

    run_role(work, net.parameters(), lambda p: torch.optim.Adam(p, lr=0.1), num_workers)
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def test_2_and_3_tiers_are_equal_bit_for_bit_with_uneven_data(pool: Pool) -> None:
    two = pool.run(train_with_uneven_data, 2, world=3)
    three = pool.run(train_with_uneven_data, 2, world=4)
    assert torch.equal(two[-1], three[-1])
    for results in (two, three):
        assert torch.equal(results[1], results[-1])  # the worker with the most data
        assert not torch.equal(results[0], results[-1])


def train_as_participants(rank: int, world: int) -> tuple[Tensor, int, int] | None:
    """Take more steps on worker 1; return the parameters, rounds and bytes of each worker."""
    net, tiers = Net(seed=rank), Tiers.detect(world, 2)
    if tiers.role(rank) is not Role.WORKER:
        serve(net.parameters(), OPTIMIZERS["SGD"], tiers, rank, transport=TRANSPORT)
        return None
    optimizer = RemoteOptimizer(net.parameters(), tiers.aggregators, transport=TRANSPORT)
    with closing(RemoteParticipant(optimizer)) as participant:
        participant.start()
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            with participant.counting_bytes():
                backward(net, rank, step, use_all=True)
                optimizer.step()
            assert not participant.step()
        participant.finish()
    counts = participant.statistics
    return (
        torch.cat([p.detach().reshape(-1) for p in net.parameters()]),
        counts.rounds,
        counts.bytes_sent,
    )


def test_participants_in_a_plain_loop_end_with_the_same_parameters(pool: Pool) -> None:
    """Worker 0 has no more data, and takes part in nothing until it finishes with worker 1."""
    (first, short, few), (second, long, many) = pool.run(train_as_participants, world=3)[:2]
    assert torch.equal(first, second)
    assert (short, long) == (3, 5)
    assert few * 5 == many * 3 > 0


def train_one_after_another(rank: int, world: int, seeds: tuple[int, ...]) -> list[Tensor]:
    """Train several models in one process group."""
    found = []
    for seed in seeds:
        net = Net(seed)

        def work(remote: RemoteOptimizer, net: Net = net) -> None:
            for step in range(4):
                remote.zero_grad()
                if step % 2:
                    remote.expect_backward()
                backward(net, rank, step, use_all=True)
                remote.step()

        run_role(work, net.parameters(), OPTIMIZERS["SGD"], 2, transport=TRANSPORT)
        found.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    return found


@pytest.mark.parametrize("world", [3, 4])
def test_a_group_can_train_several_models_one_after_another(pool: Pool, world: int) -> None:
    together = pool.run(train_one_after_another, (0, 1, 2), world=world)
    alone = pool.run(train_one_after_another, (2,), world=world)
    for found, expected in zip(together[:2], alone[:2], strict=True):
        assert torch.equal(found[2], expected[0])


def use_after_leaving(rank: int, world: int) -> None:
    left: list[RemoteOptimizer] = []
    run_role(left.append, nn.Linear(2, 2).parameters(), OPTIMIZERS["SGD"], 1)
    if rank == 0:
        left[0].state_dict()


def test_requests_after_leaving_raise(pool: Pool) -> None:
    with pytest.raises(PoolError, match="this rank has closed its connection"):
        pool.run(use_after_leaving, world=2)


def serve_another_model(rank: int, world: int) -> None:
    net = nn.Linear(4, 3 if rank == 0 else 2)
    run_role(lambda remote: None, net.parameters(), torch.optim.SGD, 1)


def test_another_model_is_refused_on_both_sides(pool: Pool) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(serve_another_model, world=2)
    assert "has a model with other parameters" in str(caught.value)
    assert "Another model on: Worker 0" in str(caught.value)


def reach_different_sync_points(rank: int, world: int) -> None:
    def work(remote: RemoteOptimizer) -> None:
        remote.sync_point("validation" if rank == 0 else "checkpoint")

    run_role(work, nn.Linear(2, 2).parameters(), OPTIMIZERS["SGD"], 2)


def test_different_sync_points_are_an_error_on_every_rank(pool: Pool) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(reach_different_sync_points, world=3)
    messages = {rank: failure.message for rank, failure in caught.value.failures.items()}
    assert sorted(messages) == [0, 1, 2]
    for message in messages.values():
        assert "Workers wait for each other at different sync points: " in message
        assert "worker 0 at validation" in message.lower()
        assert "worker 1 at checkpoint" in message.lower()


def end_within_a_step(rank: int, world: int, has_failed: bool) -> None:
    """Worker 0 ends after it has sent the first of two buckets."""
    net = nn.Linear(2, 2), nn.Linear(2, 2)
    params = [param for layer in net for param in layer.parameters()]

    def work(remote: RemoteOptimizer) -> None:
        remote.expect_backward()
        net[1](torch.ones(1, 2)).sum().backward()
        if rank == 1:
            net[0](torch.ones(1, 2)).sum().backward()
            dist.send(torch.zeros(1), 0, tag=10**6)
            remote.step()
            return
        dist.recv(torch.zeros(1), 1, tag=10**6)
        time.sleep(0.1)  # now the server waits for the second bucket of worker 0
        if has_failed:
            raise ValueError("the first layer is wrong")

    run_role(work, params, OPTIMIZERS["SGD"], 2, transport=Transport(bucket_bytes=24))


@pytest.mark.parametrize(
    ("has_failed", "reason"),
    [
        (False, "Worker 0 has left before the end of its step"),
        (True, "Worker 0 failed: ValueError: the first layer is wrong"),
    ],
)
def test_a_worker_that_ends_within_a_step_is_named(
    pool: Pool, has_failed: bool, reason: str
) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(end_within_a_step, has_failed, world=3)
    assert set(caught.value.failures) == {0, 1, 2} - ({0} if not has_failed else set())
    for rank in (1, 2):
        assert reason in caught.value.failures[rank].message


def lose_worker(rank: int, world: int, victim: int) -> str:
    net = nn.Linear(4, 3)
    tiers = Tiers.detect(world, 2)
    try:
        if rank == world - 1:
            serve(net.parameters(), lambda p: torch.optim.SGD(p, lr=1.0), tiers, rank)
        else:
            remote = RemoteOptimizer(net.parameters(), world - 1)
            remote.receive_weights()
            for _ in range(20):
                net(torch.ones(1, 4)).sum().backward()
                remote.step()
                if rank == victim:
                    remote.remove_hooks()
                    del remote  # the last reference to the group
                    gc.collect()
                    dist.destroy_process_group()
                    return "gone"
    except RuntimeError as error:
        return str(error)
    return "all steps"


def test_a_lost_worker_is_named(pool: Pool) -> None:
    waiting, gone, server = pool.run(lose_worker, 1, world=3)
    assert gone == "gone"
    assert server.startswith("Worker 1: ")
    assert waiting.startswith("The aggregator (rank 2): Worker 1: ")


@pytest.mark.parametrize(("world", "num_workers"), [(3, 3), (6, 3), (1, 1)])
def test_wrong_numbers_of_ranks_are_refused(world: int, num_workers: int) -> None:
    with pytest.raises(ValueError, match=rf"{num_workers + 1} ranks .* or {num_workers + 2} "):
        Tiers.detect(world, num_workers)


@pytest.mark.parametrize("num_workers", [0, -1])
def test_zero_workers_are_refused(num_workers: int) -> None:
    with pytest.raises(ValueError, match="num_workers must be at least 1"):
        Tiers.detect(2, num_workers)


def test_num_workers_must_be_an_integer() -> None:
    with pytest.raises(TypeError, match="num_workers"):
        Tiers.detect(2, 1.0)  # type: ignore[arg-type]


def test_ranks_of_two_and_three_tiers() -> None:
    two, three = Tiers.detect(3, 2), Tiers.detect(4, 2)
    assert [two.role(rank) for rank in range(3)] == [
        Role.WORKER, Role.WORKER, Role.AGGREGATOR_OPTIMIZER
    ]  # fmt: skip
    assert [three.role(rank) for rank in range(4)] == [
        Role.WORKER, Role.WORKER, Role.AGGREGATOR, Role.OPTIMIZER
    ]  # fmt: skip
    assert (two.aggregators, two.optimizers) == ([2], [2])
    assert (three.aggregators, three.optimizers) == ([2], [3])


def average_while_streaming(rank: int, world: int) -> Tensor:
    net = nn.Linear(2, 1)

    def work(remote: RemoteOptimizer) -> None:
        (net(torch.ones(2)) * (rank + 1)).sum().backward()
        remote.average_gradients()
        mean.append(net.bias.grad.clone())  # type: ignore[union-attr]
        remote.step()
        remote.zero_grad()
        remote.expect_backward()
        net(torch.ones(2)).sum().backward()
        with pytest.raises(RuntimeError, match="after expect_backward, which sends the gradients"):
            remote.average_gradients()
        remote.step()

    mean: list[Tensor] = []
    run_role(work, net.parameters(), lambda params: torch.optim.SGD(params, lr=0.1), 2)
    return mean[0] if mean else torch.zeros(1)


def test_gradients_are_averaged_in_a_plain_loop(pool: Pool) -> None:
    first, second, _ = pool.run(average_while_streaming, world=3)
    assert first.item() == second.item() == 1.5

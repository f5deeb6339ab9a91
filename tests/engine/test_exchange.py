"""Exchanges: processes receive what `simulate` returns, for every topology."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco import StepEngine
from lightning_loco.algorithms import DiLoCo, GASLoC, LocalSGD
from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.engine.exchanges.all_reduce import AllReduce
from lightning_loco.engine.exchanges.neighbor import NeighborExchange
from lightning_loco.topology import TOPOLOGIES, Ring, get_topology
from tests.harness.cover import cover
from tests.harness.pool import Pool

ROUNDS = 4
SIZES = (5, 3, 7, 5, 1)
"""Messages of different lengths in one round, like the chunks of a model."""


def message_of(worker: int, round_index: int, index: int, dtype: torch.dtype) -> Tensor:
    seed = 100 * worker + 10 * round_index + index
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZES[index], generator=generator, dtype=dtype)


def start(exchange: Any, message: Tensor, round_index: int) -> Any:
    """Send a message that is not part of a model."""
    return exchange.start(Bucket(message, []), round_index)


def received_from(exchange: Any, handle: Any, total_weight: float) -> Tensor:
    """Return the received message, divided as in a round; its memory is released."""
    received = handle.wait().clone()
    handle.release()
    return received / total_weight if exchange.is_weighted else received


def fitting(num_workers: int) -> list[str]:
    """Return the names of the topologies that support this number of workers."""
    names = []
    for name in TOPOLOGIES:
        try:
            get_topology(name).check(num_workers)
        except ValueError:
            continue
        names.append(name)
    return names


def exchange_all(
    rank: int, world: int, names: list[str | None], dtype: torch.dtype, num_pending: int
) -> dict[str | None, tuple[list[Tensor], int]]:
    """Run several rounds of several messages, several pending at once, for each topology.

    Returns:
        For each topology (None for the mean): all received messages in order, and the bytes sent.
    """
    group = WorkerGroup.create(timeout_s=20)
    answers: dict[str | None, tuple[list[Tensor], int]] = {}
    for name in names:
        statistics = Statistics()
        exchange: Any = (
            AllReduce(group, statistics)
            if name is None
            else NeighborExchange(group, statistics, get_topology(name))
        )
        received = []
        for t in range(ROUNDS):
            handles: list[Any] = []
            for index in range(len(SIZES)):
                if len(handles) == num_pending:
                    received.append(received_from(exchange, handles.pop(0), world))
                handles.append(start(exchange, message_of(rank, t, index, dtype), t))
            received += [received_from(exchange, handle, world) for handle in handles]
        answers[name] = (received, statistics.bytes_sent)
    group.close()
    return answers


def simulate_all(exchange: Any, num_workers: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return what each worker should receive, in order."""
    received: list[list[Tensor]] = [[] for _ in range(num_workers)]
    for t in range(ROUNDS):
        for index in range(len(SIZES)):
            messages = [message_of(worker, t, index, dtype) for worker in range(num_workers)]
            for worker, tensor in enumerate(exchange.simulate(messages, t)):
                received[worker].append(tensor / num_workers if exchange.is_weighted else tensor)
    return received


def alone(name: str | None) -> Any:
    group, statistics = WorkerGroup(0, 1), Statistics()
    if name is None:
        return AllReduce(group, statistics)
    return NeighborExchange(group, statistics, get_topology(name))


@pytest.mark.parametrize(
    ("world", "dtype", "num_pending"),
    cover((2, 3, 4), (torch.float32, torch.float64), (1, 3, 5), strength=1),
)
def test_processes_receive_what_simulate_says_and_count_bytes(
    pool: Pool, world: int, dtype: torch.dtype, num_pending: int
) -> None:
    """Neighbours match bit for bit, because the order of sums is fixed; the mean up to rounding.

    A mean sends 2 (N - 1) / N of the message, neighbours one message per receiver.
    """
    names = fitting(world)
    assert len(names) >= 8
    results = pool.run(exchange_all, [None, *names], dtype, num_pending, world=world)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for name in [None, *names]:
        expected = simulate_all(alone(name), world, dtype)
        for worker, answers in enumerate(results):
            received, _ = answers[name]
            for a, b in zip(received, expected[worker], strict=True):
                if name is None:
                    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
                else:
                    assert torch.equal(a, b), (name, worker)
    for worker, answers in enumerate(results):
        sizes = [dtype.itemsize * size for size in SIZES]
        assert answers[None][1] == ROUNDS * sum(2 * (world - 1) * size // world for size in sizes)
        for name in names:
            topology = get_topology(name)
            messages = sum(len(topology.receivers(worker, world, t)) for t in range(ROUNDS))
            assert answers[name][1] == messages * sum(sizes), name
        assert answers["ring"][1] == min(2, world - 1) * ROUNDS * sum(sizes)


def test_neighbours_receive_the_row_of_the_mixing_matrix(subtests: pytest.Subtests) -> None:
    for num_workers in range(1, 10):
        with subtests.test(num_workers=num_workers):
            for name in fitting(num_workers):
                topology = get_topology(name)
                exchange = alone(name)
                messages = [message_of(w, 0, 0, torch.float64) for w in range(num_workers)]
                for t in range(5):
                    expected = topology.mixing_matrix(num_workers, t) @ torch.stack(messages)
                    received = torch.stack(exchange.simulate(messages, t))
                    torch.testing.assert_close(received, expected, rtol=0, atol=1e-14)


def test_simulate_leaves_the_messages_alone_and_gives_everyone_memory_of_his_own(
    subtests: pytest.Subtests,
) -> None:
    names = (None, "ring", "complete", "random_matching", "exponential")
    for name, num_workers in itertools.product(names, (1, 2, 3, 5)):
        with subtests.test(name or "mean", num_workers=num_workers):
            messages = [message_of(worker, 0, 0, torch.float64) for worker in range(num_workers)]
            before = [message.clone() for message in messages]
            received = alone(name).simulate(messages, 0)
            again = [tensor.clone() for tensor in alone(name).simulate(messages, 0)]
            for tensor in received:
                tensor.zero_()
            assert all(torch.equal(a, b) for a, b in zip(messages, before, strict=True))
            assert len({tensor.data_ptr() for tensor in [*messages, *received]}) == 2 * num_workers
            unchanged = alone(name).simulate(messages, 0)
            assert all(torch.equal(a, b) for a, b in zip(unchanged, again, strict=True))


def test_a_single_worker_receives_its_own_message(subtests: pytest.Subtests) -> None:
    for name in (None, *fitting(1)):
        with subtests.test(name or "mean"):
            exchange = alone(name)
            message = torch.tensor([1.0, 2.0])
            assert start(exchange, message, 0).wait().tolist() == [1.0, 2.0]
            assert exchange._statistics.bytes_sent == 0


def mean_of_some(rank: int, world: int, valid: list[bool]) -> Tensor:
    """Workers without progress send zeros; the sum is divided by the weight of the others."""
    group = WorkerGroup.create(timeout_s=20)
    message = torch.full((3,), float(rank + 1)) if valid[rank] else torch.zeros(3)
    exchange = AllReduce(group, Statistics())
    received = received_from(exchange, start(exchange, message, 0), sum(valid))
    group.close()
    return received


def test_a_mean_may_leave_workers_out(pool: Pool) -> None:
    for received in pool.run(mean_of_some, [True, False, True, False], world=4):
        assert received.tolist() == [2.0, 2.0, 2.0]


def keep_the_message(rank: int, world: int, name: str) -> list[list[float]]:
    """Return a worker's message and result; it must not overwrite what its neighbours read."""
    group = WorkerGroup.create(timeout_s=20)
    exchange = NeighborExchange(group, Statistics(), get_topology(name))
    message = torch.full((4,), float(rank))
    received = start(exchange, message, 0).wait()
    group.close()
    return [message.tolist(), received.tolist()]


def test_neighbours_mix_in_memory_of_their_own(pool: Pool) -> None:
    for rank, (message, received) in enumerate(pool.run(keep_the_message, "complete", world=4)):
        assert message == [float(rank)] * 4
        assert received == [1.5] * 4


def count_buffers(rank: int, world: int) -> int:
    """Memory for received messages is reused from round to round."""
    group = WorkerGroup.create(timeout_s=20)
    exchange = NeighborExchange(group, Statistics(), get_topology("complete"))
    for t in range(5):
        handles = [start(exchange, torch.ones(size), t) for size in (6, 4, 6)]
        for handle in handles:
            handle.wait()
            handle.release()
    group.close()
    return len(exchange._spare)


def test_memory_for_received_messages_is_used_again(pool: Pool) -> None:
    assert pool.run(count_buffers, world=3) == [6, 6, 6]


def test_algorithms_get_the_exchange_they_name() -> None:
    group, statistics = WorkerGroup(0, 1), Statistics()
    for algorithm in (LocalSGD(), DiLoCo()):
        assert isinstance(make_exchange(algorithm, group, statistics, None), AllReduce)
    exchange = make_exchange(GASLoC(), group, statistics, Ring())
    assert isinstance(exchange, NeighborExchange)


def sync_and_count(rank: int, world: int) -> tuple[list[float], int]:
    """Return the losses of all workers, and the number of all-gathers at the sync point."""
    model = torch.nn.Linear(1, 1)
    engine = StepEngine(model, LocalSGD(), sync_every=5)
    engine.worker.last_loss = 0.1 * rank
    sent = 0

    def count(*args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        return all_gather(*args, **options)

    all_gather, dist.all_gather = dist.all_gather, count
    try:
        statuses = engine.sync_point("validation")
    finally:
        dist.all_gather = all_gather
    engine.close()
    return [status.loss for status in statuses], sent


def test_statuses_at_a_sync_point_go_through_the_store_barrier(pool: Pool) -> None:
    assert pool.run(sync_and_count, world=3) == [([0.0, 0.1, 0.2], 0)] * 3


def test_neighbours_without_a_topology_are_refused_and_not_a_mean() -> None:
    with pytest.raises(ValueError, match="GASLoC needs a topology to know its neighbours"):
        make_exchange(GASLoC(), WorkerGroup(0, 1), Statistics(), None)

"""Results depend neither on torch's default dtype nor on its default device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_loco.algorithms import DiLoCo, PairwiseAverage
from lightning_loco.compression import CODECS, E3M0, Int4
from lightning_loco.elastic.data_shard import DataShard
from lightning_loco.elastic.data_stream import MembersSampler
from lightning_loco.elastic.exchanges import SumExchange
from lightning_loco.elastic.group import MemberGroup
from lightning_loco.elastic.recovery import RunState
from lightning_loco.elastic.state_transfer import receive_state, send_state
from lightning_loco.engine import StepEngine
from lightning_loco.gossip import PairwiseSettings
from lightning_loco.parameter_server import RemoteOptimizer, Transport, run_role
from lightning_loco.simulation import Simulation
from lightning_loco.topology import TOPOLOGIES, get_topology, optimal_gossip
from tests.cases import CASES, Case, rows
from tests.elastic.test_group import plan_of
from tests.elastic.test_state_transfer import STATE
from tests.gossip.test_engine import close, pair
from tests.harness.pool import Pool
from tests.harness.small_model import flat, loss_of, make_model, train_step, worker_batch
from tests.harness.toys import SGD

OTHERS = (torch.float64, torch.bfloat16)
STEPS = 6


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str = "meta") -> Iterator[None]:
    """Set other defaults; on the default device no value can be computed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def result(run: Callable[..., Any], *args: Any, device: str = "meta") -> list[Any]:
    """Return the result of a function with torch's own defaults, and with others."""
    found = [run(*args)]
    for dtype in OTHERS:
        with defaults(dtype, device):
            found.append(run(*args))
    return found


def on_cpu(function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """Run code outside the package, which needs the model's device as the default."""
    with defaults(torch.float32, "cpu"):
        return function(*args, **settings)


class OtherInt4(Int4):
    """A codec whose levels no earlier test has decoded."""

    levels = tuple(-level for level in Int4.levels)


class OtherE3M0(E3M0):
    """A codec whose levels no earlier test has decoded."""

    levels = tuple(2 * level for level in E3M0.levels)


def test_codecs_decode_the_same_values(subtests: pytest.Subtests) -> None:
    for dtype in (torch.float32, torch.float64):
        values = torch.randn(700, dtype=dtype, generator=torch.Generator().manual_seed(0))
        for name, kind in CODECS.items():
            with subtests.test(name, dtype=dtype):
                codec = kind()
                usual, *others = result(
                    lambda c, v: c.decode(c.encode(v), v.clone()), codec, values
                )
                assert all(torch.equal(other, usual) for other in others)
    with defaults(torch.float64), subtests.test("the first message"):
        values = values.float()
        for other, codec, factor in ((OtherInt4(), Int4(), -1), (OtherE3M0(), E3M0(), 2)):
            wire = codec.encode(values)
            decoded = other.decode(wire, torch.empty_like(values))
            assert torch.equal(decoded, factor * codec.decode(wire, torch.empty_like(values)))


def local_step(model: Any, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    on_cpu(train_step, model, optimizer, on_cpu(worker_batch, worker, step))


def train_simulated(make: Callable[[list[Any]], Any]) -> Tensor:
    """Train three workers in the simulation that ``make`` creates for their models."""
    models = [on_cpu(make_model) for _ in range(3)]
    optimizers = [SGD(model.parameters()) for model in models]
    steps, simulation = [0] * 3, make(models)

    def step(worker: int) -> None:
        local_step(models[worker], optimizers[worker], worker, steps[worker])
        steps[worker] += 1

    if simulation.sync_every is None:
        simulation.run(step, seconds=STEPS)
    else:
        simulation.run(step, STEPS // 2)
    return torch.stack(list(map(flat, models)))


@rows("laws")
def test_simulated_rounds_have_the_same_numbers(case: Case) -> None:
    # torch's optimizers keep their step counts on the default device.
    has_optimizer = getattr(case.algorithm, "outer_optimizer", None) is not None
    usual, *others = result(
        train_simulated,
        lambda models: Simulation(models, case.algorithm, **case.settings(sync_every=2)),
        device="cpu" if has_optimizer else "meta",
    )
    assert all(torch.equal(other, usual) for other in others)


def run_engine(rank: int, world: int, names: list[str]) -> list[list[Tensor]]:
    """Train with each method, with torch's own defaults and with others."""

    def train(name: str) -> Tensor:
        model = on_cpu(make_model, rank)
        optimizer = SGD(model.parameters())
        engine = StepEngine(model, CASES[name].algorithm, **CASES[name].settings(sync_every=2))
        for step in range(STEPS):
            local_step(model, optimizer, rank, step)
            engine.step()
        engine.finish()
        engine.close()
        return flat(model)

    return [result(train, name) for name in names]


def test_rounds_of_ranks_have_the_same_numbers(pool: Pool) -> None:
    names = ["diloco", "async_diloco_compressed", "gasloc", "sparta", "diloco_compressed"]
    for found in pool.run(run_engine, names, world=2):
        for name, (usual, *others) in zip(names, found, strict=True):
            assert all(torch.equal(other, usual) for other in others), name


def run_remote_optimizer(rank: int, world: int) -> list[Tensor]:
    """Train with two workers; the forward and backward passes are not part of the package."""

    def train() -> Tensor:
        model = on_cpu(make_model, rank)

        def work(remote: RemoteOptimizer) -> None:
            for step in range(STEPS):
                remote.zero_grad()
                loss_of(model, on_cpu(worker_batch, rank, step)).backward()
                remote.clip_grad_norm_(0.1)
                remote.step()

        transport = Transport(bucket_bytes=100, compression="int8")
        run_role(work, SGD(model.parameters()).param_groups, SGD, 2, transport=transport)
        return flat(model)

    return result(train)


def test_the_remote_optimizer_has_the_same_numbers(pool: Pool) -> None:
    usual, *others = pool.run(run_remote_optimizer, world=3)[0]
    assert all(torch.equal(other, usual) for other in others)


def test_simulated_gossip_without_rounds_has_the_same_numbers() -> None:
    settings, speeds = PairwiseSettings(PairwiseAverage()), [1.0, 1.1, 1.2]
    usual, *others = result(
        train_simulated, lambda models: Simulation.from_settings(models, settings, speeds=speeds)
    )
    assert all(torch.equal(other, usual) for other in others)


def blend() -> Tensor:
    """Let a worker fetch the parameters of another one, and blend them with its own."""
    (here, reader), (_, served) = workers = on_cpu(pair, 0.0, 4.0, factor=0.25)
    served.update_send(1.0)
    reader.update_send(1.0)
    reader.update_wait(1.0)
    on_cpu(close, workers)
    return here.values.detach().clone()


def test_pulls_have_the_same_numbers() -> None:
    usual, *others = result(blend)
    assert usual.tolist() == [1.0] * 5
    assert all(torch.equal(other, usual) for other in others)


def exchange_as_members(rank: int, world: int) -> tuple[Tensor, RunState | None]:
    """Sum over two members, of which the second joins, and transfer the state to it."""
    engine = StepEngine(nn.Linear(1000, 1, bias=False), DiLoCo())
    group = MemberGroup("127.0.0.1", timeout_s=60.0)
    stores: list[str] = [""] * world
    dist.all_gather_object(stores, group.address)
    plan = plan_of(rank, tuple(stores))._replace(joining=(1,))
    message, state = torch.ones(1000) if rank == 0 else None, None
    with defaults(torch.float64):
        group.open(plan)
        received = SumExchange(group, engine).exchange(message, 1.0, plan).received
        if rank == 0:
            send_state(STATE, group, 1)
        else:
            state = receive_state(group, 0, 1000)

    dist.barrier()
    group.close()
    engine.close()
    return received, state


def test_members_exchange_messages_and_states(pool: Pool) -> None:
    (first, _), (second, state) = pool.run(exchange_as_members, world=2)
    for received in (first, second):
        assert torch.equal(received, torch.ones(1000))
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in STATE.tensors.items())


def samples() -> list[int]:
    shard = DataShard()
    shard.reassign(0, 0, 2)
    return list(MembersSampler(range(20), shard, seed=1))


def test_members_draw_the_same_samples() -> None:
    usual, *others = result(samples)
    assert others == [usual] * len(others)


def test_topologies_have_the_same_matrices(subtests: pytest.Subtests) -> None:
    for name in TOPOLOGIES:
        with subtests.test(name):
            usual, *others = result(get_topology(name).mixing_matrix, 4)
            assert all(torch.equal(other, usual) for other in others)
    usual, *others = result(lambda: optimal_gossip(get_topology("ring"), 8))
    assert others == [usual] * len(others)

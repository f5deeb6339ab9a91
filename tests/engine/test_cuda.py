"""Engines on a GPU: host reads and memory are tested without one, the numbers with one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lightning_loco import ClockEngine, DiLoCo, GASLoC, PairwiseEngine, StepEngine
from lightning_loco.algorithms.algorithm import State
from lightning_loco.algorithms.outer_optimizer import step_outer_optimizer
from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.distributed.work import AllReduceSum
from lightning_loco.engine import Engine
from lightning_loco.engine.buckets import Bucket
from lightning_loco.engine.exchanges.neighbor import NeighborExchange
from lightning_loco.model.flat import Cuts, FlatLayout
from lightning_loco.model.replica import Replica
from lightning_loco.topology import Ring
from tests.cases import CASES, Case, rows, without_variants
from tests.harness.gpu import DEVICE, copies_to_the_host, no_checksum, no_waits_for_the_gpu
from tests.harness.pool import Pool
from tests.harness.rounds import approach, zeros
from tests.harness.small_model import flat
from tests.harness.toys import assert_close

__all__ = ["no_checksum"]

# ---------------------------------------------------------------- no reads by the host


def test_a_read_is_noticed(subtests: pytest.Subtests) -> None:
    reads = {
        "item": lambda value: value.sum().item(),
        "float": lambda value: float(value[0]),
        "bool": lambda value: bool(value.isfinite().all()),
        "tolist": lambda value: value.tolist(),
        "cpu": lambda value: value.cpu(),
        "copy": lambda value: torch.empty(3).copy_(value),
    }
    for name, read in reads.items():
        with (
            subtests.test(name),
            pytest.raises((NotImplementedError, RuntimeError), match="meta tensor"),
        ):
            read(torch.ones(3, device=DEVICE))


def make_engine(case: Case, model: nn.Module) -> Engine:
    if case.by_clock:
        return ClockEngine(model, interval_s=1000.0, topology=case.topology)
    if case.fragments is not None:
        return Engine.from_settings(model, case.strategy(sync_every=100).settings)
    return StepEngine(model, case.algorithm, **case.settings(sync_every=100))


@pytest.mark.usefixtures("no_checksum")
@pytest.mark.parametrize("are_variants", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_local_step_reads_nothing_back(are_variants: bool, subtests: pytest.Subtests) -> None:
    for name, case in CASES.items():
        if (case.variant_of is not None) != are_variants:
            continue
        with subtests.test(name):
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(DEVICE)
            engine = make_engine(case, model)
            assert engine.worker.replica.layout.device == DEVICE
            assert len(engine.fragments) == (case.fragments or 1)
            if case.by_clock:
                engine.fragments[
                    0
                ].applied_at = time.monotonic()  # the first round would be due at once
            loss = model(torch.ones(2, 3, device=DEVICE)).sum()
            for _ in range(49):  # the first round of two fragments is due after 50
                engine.worker.last_loss = loss
                assert not engine.step()
            engine.close()


# --------------------------------------------------------------------- memory and devices


@pytest.mark.usefixtures("no_checksum")
@pytest.mark.parametrize("make", [StepEngine, ClockEngine, PairwiseEngine])
def test_a_plain_loop_gets_groups_for_the_models_device(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo would not support a GPU's parameters."""
    devices: list[torch.device] = []
    create = WorkerGroup.create

    def note(*, device: torch.device) -> WorkerGroup:
        devices.append(device)
        return create(device=device)

    monkeypatch.setattr(WorkerGroup, "create", note)
    model = nn.Linear(3, 4).to(DEVICE)
    engine = make(model, DiLoCo(), sync_every=2) if make is StepEngine else make(model)
    engine.close()
    assert devices == [DEVICE]


def test_what_is_set_aside_is_in_the_hosts_memory() -> None:
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40)).to(DEVICE)
    replica = Replica(model, Cuts(100))
    with copies_to_the_host():
        replica.keep_local()
        assert [values.device.type for values in replica.local()] == ["cpu", "cpu"]
        replica.show_local()
        assert [values.device.type for values in replica.local()] == ["cpu", "cpu"]
    assert {p.device for p in model.parameters()} == {DEVICE}


@pytest.mark.usefixtures("no_checksum")
def test_a_pending_round_is_saved_in_the_hosts_memory() -> None:
    case = CASES["async_diloco"]
    model = nn.Linear(3, 4).to(DEVICE)
    engine = StepEngine(model, case.algorithm, **case.settings(sync_every=1))
    memory = engine.fragments[0].memory
    with copies_to_the_host():
        found = memory.gather([bucket.message for bucket in memory.buckets])
    assert found.device.type == "cpu"
    engine.close()


def adamw(**settings: Any) -> Any:
    return partial(torch.optim.AdamW, lr=0.1, **settings)


@pytest.mark.parametrize(
    ("make_optimizer", "step_on"),
    [(adamw(), "cpu"), (adamw(capturable=True), "cuda"), (torch.optim.Adagrad, "cpu")],
)
def test_a_loaded_outer_optimizer_steps_on_the_device(make_optimizer: Any, step_on: str) -> None:
    """A checkpoint is loaded into the host's memory."""
    with FakeTensorMode():
        outer, gradient = torch.ones(5, device="cuda"), torch.ones(5, device="cuda")
        state = State()
        step_outer_optimizer(make_optimizer, outer, gradient, state)
        fresh = {key: value.device.type for key, value in state.items()}
        loaded = State({key: value.cpu() for key, value in state.items()})
        step_outer_optimizer(make_optimizer, outer, gradient, loaded)
    assert {key: value.device.type for key, value in loaded.items()} == fresh
    assert fresh["optimizer.step"] == step_on


@pytest.mark.usefixtures("no_checksum")
@pytest.mark.parametrize("name", ["gasloc_overlap", "async_diloco"])
def test_a_pending_round_that_was_loaded_is_on_the_device(name: str) -> None:
    """Saved with a pending round, for exchanges with neighbours and with all workers."""
    case = CASES[name]
    engine = StepEngine(nn.Linear(3, 4).to(DEVICE), case.algorithm, **case.settings(sync_every=1))
    (fragment,) = engine.fragments
    received = torch.ones(fragment.memory.layout.numel)
    pending: dict[str, Any] = {"index": 0, "weight": 1.0, "began_at": 1, "statuses": []}
    pending["finite"] = True
    if not fragment._exchange.is_weighted:
        pending["messages"] = received.clone()
    shared = {"state": dict(fragment.memory.state), "received": received}
    fragment.load_state_dict(shared, {"pending": pending, **fragment.memory.state_dict()})
    assert fragment.pending is not None
    assert {part.device for part in fragment.pending.received} == {DEVICE}
    engine.close()


# ------------------------------------------------------- one dtype per call, and pinned memory


def test_tensors_of_one_dtype_are_copied_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[set[torch.dtype], set[torch.dtype]]] = []
    original = torch._foreach_copy_

    def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        seen.append(({t.dtype for t in targets}, {s.dtype for s in sources}))
        original(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    tensors = [torch.full((i + 1,), float(i), dtype=d) for i, d in enumerate(dtypes)]
    layout = FlatLayout([(str(i), t) for i, t in enumerate(tensors)])
    values = layout.new_flat()
    layout.write(values + 1)
    assert values.tolist() == [float(i) for i in range(5) for _ in range(i + 1)]
    assert [t.tolist() for t in tensors] == [[i + 1.0] * (i + 1) for i in range(5)]
    assert len(seen) == 6
    assert all(len(targets) == len(sources) == 1 for targets, sources in seen)


def test_between_two_gpus_gloo_sends_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, str]] = []
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, peer, group: (op, tensor.device.type))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda batch: sent.extend(batch) or [])
    for wait_blocks_host, device in ((True, "cpu"), (False, "meta")):
        sent.clear()
        group = dataclasses.replace(WorkerGroup(1, 3), wait_blocks_host=wait_blocks_host)
        exchange = NeighborExchange(group, Statistics(), Ring())
        with copies_to_the_host():
            handle = exchange.start(Bucket(torch.ones(4, device=DEVICE), []), 0)
        assert sent == [(dist.irecv, device)] * 2 + [(dist.isend, device)] * 2
        assert handle.wait().device == DEVICE
        handle.release()


# -------------------------------------------------------------------------- with a real GPU


def alone_on_nccl(rank: int, world: int, fails: bool) -> tuple[float, float, bool]:
    torch.cuda.set_device(0)
    data = dist.new_group(backend="nccl")
    group = WorkerGroup(0, 1, data=data, timeout_s=30, wait_blocks_host=False)
    values, statistics = torch.ones(2**20, device="cuda"), Statistics()
    total = AllReduceSum(group, statistics, values, "a sum")
    result = float(total.wait().sum())
    group.failed = fails
    group.close()
    return result, statistics.wait_s, group.data is None


@pytest.mark.gpu
@pytest.mark.parametrize("fails", [False, True])
def test_a_sum_on_nccl_is_looked_after(pool: Pool, fails: bool) -> None:
    ((result, wait_s, is_closed),) = pool.run(alone_on_nccl, fails, world=1)
    assert result == 2**20
    assert wait_s > 0
    assert is_closed


def train(rank: int, world: int, case: Case, device: str) -> list[Tensor]:
    model = zeros().to(device)
    settings = case.settings(sync_every=2, bucket_bytes=4096)
    engine = StepEngine(model, case.algorithm, **settings)
    history = []
    for _ in range(8):
        cpu = zeros()
        cpu.load_state_dict(model.state_dict())
        approach(rank, cpu)
        model.load_state_dict(cpu.state_dict())
        engine.step()
        history.append(flat(model).cpu())
    engine.finish()
    history.append(flat(model).cpu())
    engine.close()
    return history


@pytest.mark.gpu
@rows("same numbers", without_variants())
def test_gloo_ranks_on_one_gpu_give_the_numbers_of_the_cpu(
    pool: Pool, case: Case, subtests: pytest.Subtests
) -> None:
    for world in (2, 4):
        with subtests.test(world=world):
            expected = pool.run(train, case, "cpu", world=world)
            found = pool.run(train, case, "cuda", world=world)
            for on_cpu, on_gpu in zip(expected, found, strict=True):
                assert_close(torch.stack(on_gpu), torch.stack(on_cpu))


@pytest.mark.gpu
def test_local_steps_do_not_wait_for_the_gpu() -> None:
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 64, device="cuda")
    for algorithm in (DiLoCo(), GASLoC()):
        topology = "ring" if isinstance(algorithm, GASLoC) else None
        engine = StepEngine(model, algorithm, sync_every=100, topology=topology)
        model(batch).square().mean().backward()
        with no_waits_for_the_gpu():
            for _ in range(20):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                engine.worker.last_loss = loss
                assert not engine.step()
        engine.close()


@pytest.mark.gpu
def test_local_values_that_are_set_aside_take_no_memory_of_the_gpu() -> None:
    model = nn.Linear(1000, 1000).cuda()
    replica = Replica(model, Cuts(10_000))
    before = torch.cuda.memory_allocated()
    replica.keep_local()
    assert torch.cuda.memory_allocated() == before
    replica.show_local()


@pytest.mark.gpu
def test_mixed_dtypes_are_copied_right_on_a_gpu() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float16]
    tensors = [torch.full((1000,), i + 1.0, dtype=d, device="cuda") for i, d in enumerate(dtypes)]
    layout = FlatLayout([(str(i), t) for i, t in enumerate(tensors)])
    values = layout.new_flat()
    assert values.view(4, -1).unique(dim=1).flatten().tolist() == [1.0, 2.0, 3.0, 4.0]
    layout.write(values * 2)
    assert [float(t.double().mean()) for t in tensors] == [2.0, 4.0, 6.0, 8.0]

"""Devices: the backend for a device, and errors if workers are on different kinds of devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_loco import DiLoCoStrategy
from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.devices import CPU, backend_on, check_same_kind, device_of
from lightning_loco.model.flat import CHUNK_ELEMENTS, longest_chunk
from tests.harness.limits import LONG_S, SOON_S
from tests.harness.pool import Pool, PoolEnvironment, PoolError
from tests.harness.small_model import TinyModule, quiet_trainer

CUDA = torch.device("cuda:1")


def test_backend_for_a_device(subtests: pytest.Subtests) -> None:
    rows = [
        (CPU, "gloo", "gloo"),
        (CUDA, "gloo", "gloo"),
        (CUDA, "nccl", "nccl"),
        (CPU, "cpu:gloo,cuda:nccl", "gloo"),
        (CUDA, "cpu:gloo,cuda:nccl", "nccl"),
        (torch.device("xpu"), "cpu:gloo,cuda:nccl", ""),
    ]
    for device, backend, name in rows:
        with subtests.test(device=str(device), backend=backend):
            assert backend_on(device, backend) == name


def default_backend(rank: int, world: int) -> tuple[str, str]:
    return backend_on(CPU), backend_on(CUDA)


def test_the_default_backend_is_that_of_the_default_group(pool: Pool) -> None:
    assert pool.run(default_backend, world=1) == [("gloo", "gloo")]


def test_device_of_a_model() -> None:
    assert device_of(nn.Linear(2, 2, device="meta")).type == "meta"
    assert device_of(nn.ReLU()) == CPU


def test_chunks_are_longer_on_a_gpu() -> None:
    assert longest_chunk(CPU) == CHUNK_ELEMENTS
    assert longest_chunk(CUDA) > 4 * CHUNK_ELEMENTS


def test_different_kinds_of_devices_are_an_error() -> None:
    names = ["worker 0", "worker 1", "worker 2"]
    check_same_kind(names[:2], ["cuda", "cuda"])
    with pytest.raises(ValueError, match="Worker 2 is on a device of kind 'cpu' and worker 0 on"):
        check_same_kind(names, ["cuda", "cuda", "cpu"])


def make_group(rank: int, world: int) -> None:
    device = CUDA if rank == 1 else CPU
    WorkerGroup.create(timeout_s=LONG_S, device=device)


def set_up(rank: int, world: int) -> None:
    """Set up the same job several times: values of earlier attempts must have no effect."""
    strategy = DiLoCoStrategy(timeout_s=LONG_S)
    module = TinyModule()
    module.trainer = quiet_trainer(strategy=strategy, devices=world, plugins=[PoolEnvironment()])
    strategy.connect(module)
    strategy.setup_environment()
    strategy.setup_environment()
    if rank == 1:
        strategy.parallel_devices = [CUDA] * world
        strategy.setup_distributed()
    else:
        strategy.setup_environment()


@pytest.mark.parametrize("start", [make_group, set_up])
def test_different_kinds_of_devices_are_an_error_on_all_workers(pool: Pool, start: str) -> None:
    with pytest.raises(PoolError) as raised:
        pool.run(start, world=3, timeout_s=SOON_S)
    assert sorted(raised.value.failures) == [0, 1, 2]
    for failure in raised.value.failures.values():
        assert failure.type_name == "ValueError", failure.message
        assert "Worker 1 is on a device of kind 'cuda' and worker 0 on 'cpu'" in failure.message

"""``outer_device="cpu"``: the state and messages of rounds are in the host's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_loco import DiLoCo, StepEngine
from lightning_loco.distributed import WorkerGroup
from lightning_loco.model.flat import Chunk, CrossDevicePacking
from lightning_loco.strategies import METHODS
from tests.cases import CASES, Case, without_variants
from tests.harness.gpu import DEVICE, copies_to_the_host, no_checksum
from tests.harness.pool import Pool, make_trainer, run_each
from tests.harness.small_model import TinyModule, flat, make_loader
from tests.harness.toys import assert_close, run_engine

__all__ = ["no_checksum"]

BY_STEPS = [n for n in without_variants() if not CASES[n].by_clock and not CASES[n].fragments]
FIRST = [name for name in BY_STEPS if name in METHODS]
ROUNDS, SYNC_EVERY = 3, 2


def distant(chunk: Chunk, flat: Tensor) -> CrossDevicePacking:
    return CrossDevicePacking(chunk, flat)


def from_afar(rank: int, world: int, case: Case, is_far: bool) -> Tensor:
    """Run rounds of a model whose parameters are copied as if they were on another device."""
    settings = case.settings(sync_every=SYNC_EVERY, bucket_bytes=4096)
    with pytest.MonkeyPatch.context() as patch:
        if is_far:
            settings["outer_device"] = "cpu"
            patch.setattr(Chunk, "packing", distant)
        return run_engine(rank, world, case.algorithm, ROUNDS, settings)


@pytest.mark.parametrize(
    "names",
    [
        [*FIRST, "diloco_adamw", "gasloc_overlap", "diloco_compressed"],
        pytest.param([n for n in BY_STEPS if n not in FIRST], marks=pytest.mark.soak),
    ],
    ids=["methods", "others"],
)
def test_numbers_do_not_depend_on_where_parameters_are(
    pool: Pool, names: list[str], subtests: pytest.Subtests
) -> None:
    rows = {(name, is_far): (CASES[name], is_far) for name in names for is_far in (False, True)}
    results = run_each(pool, from_afar, rows, world=2)
    for name in names:
        with subtests.test(name):
            for one, other in zip(results[name, False], results[name, True], strict=True):
                assert torch.equal(one, other)


def fit(rank: int, world: int, name: str, outer_device: Any) -> Tensor:
    strategy = CASES[name].strategy(SYNC_EVERY, outer_device=outer_device)
    trainer = make_trainer(strategy, max_steps=7, use_distributed_sampler=False)
    module = TinyModule(lr=0.05)
    with pytest.MonkeyPatch.context() as patch:
        if outer_device is not None:
            patch.setattr(Chunk, "packing", distant)
        trainer.fit(module, make_loader(rank, 7))
    return flat(module)


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "gasloc_overlap"])
def test_a_trainer_takes_it(pool: Pool, name: str) -> None:
    results = run_each(pool, fit, {device: (name, device) for device in (None, "cpu")}, world=2)
    assert torch.equal(*map(torch.stack, results.values()))


@pytest.mark.usefixtures("no_checksum")
@pytest.mark.parametrize("name", ["diloco", "async_diloco", "gasloc"])
def test_all_memory_of_rounds_is_the_hosts(name: str) -> None:
    case = CASES[name]
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(DEVICE)
    with copies_to_the_host():
        settings = case.settings(sync_every=2, outer_device="cpu")
        engine = StepEngine(model, case.algorithm, **settings)
    memory = engine.fragments[0].memory
    assert not engine.step()  # a local step copies nothing
    kept = [*(bucket.message for bucket in memory.buckets), *memory.state.values()]
    assert {value.device.type for value in kept if isinstance(value, Tensor)} == {"cpu"}
    assert engine.worker.replica.buffers.device == DEVICE
    assert {parameter.device for parameter in model.parameters()} == {DEVICE}
    engine.close()


def test_other_devices_are_refused(subtests: pytest.Subtests) -> None:
    for given in ("cuda", "gpu", torch.device("cpu"), 0):
        with subtests.test(repr(given)), pytest.raises(ValueError, match="must be 'cpu' for the"):
            StepEngine(nn.Linear(1, 1), DiLoCo(), outer_device=given)


def test_a_group_that_cannot_send_the_hosts_memory_is_refused() -> None:
    group = WorkerGroup(0, 1, wait_blocks_host=False)
    with pytest.raises(ValueError, match=r"WorkerGroup\.create\(backend='gloo'\)"):
        StepEngine(nn.Linear(1, 1), DiLoCo(), outer_device="cpu", group=group)


def disagree(rank: int, world: int) -> str:
    with pytest.raises(ValueError, match="outer_device") as caught:
        StepEngine(nn.Linear(1, 1), DiLoCo(), outer_device="cpu" if rank else None)
    return str(caught.value)


def test_workers_must_agree(pool: Pool) -> None:
    for message in pool.run(disagree, world=2):
        assert "worker 1" in message.lower()


def on_gpu(rank: int, world: int, name: str, outer_device: Any) -> tuple[Tensor, int]:
    torch.cuda.set_device(0)
    case = CASES[name]
    model = nn.Linear(500, 500).cuda()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    settings = case.settings(sync_every=2, outer_device=outer_device)
    before = torch.cuda.memory_allocated()
    engine = StepEngine(model, case.algorithm, **settings)
    for _ in range(8):
        for parameter in model.parameters():
            parameter.data.add_(0.1 * (rank + 1))
        engine.step()
    taken = torch.cuda.memory_allocated() - before
    engine.finish()
    engine.close()
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()]), taken


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["diloco", "async_diloco", "gasloc"])
def test_a_gpu_keeps_its_memory(pool: Pool, name: str) -> None:
    near, far = (pool.run(on_gpu, name, device, world=2) for device in (None, "cpu"))
    for (expected, _), (found, taken) in zip(near, far, strict=True):
        assert_close(found, expected)
        assert taken < 1024

"""The consensus: means over workers, equal averaged copies, and pruning masks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.model.consensus import AveragedCopies, average, pruning_masks
from lightning_loco.model.flat import Cuts
from lightning_loco.model.replica import Replica
from tests.harness.pool import Pool, PoolError
from tests.harness.small_model import flat, norm_model


def synchronize(averaged_copies: AveragedCopies) -> None:
    group = WorkerGroup.create(timeout_s=20)
    found = group.gather_objects(averaged_copies.prepare())
    statuses = [WorkerStatus(1.0, 0.0, 0.0, scalars=numbers) for numbers in found]
    try:
        averaged_copies.synchronize(statuses, group, Statistics())
    finally:
        group.close()


def average_copies(rank: int, world: int, broken: int) -> tuple[Tensor, Tensor, int]:
    model = norm_model()
    copy = AveragedModel(model, use_buffers=True)
    for _ in range(1 + rank):
        copy.update_parameters(model)
    for tensor in [*copy.parameters(), copy.module[1].running_mean]:
        tensor.data.fill_(math.nan if rank == broken else 1.0 + rank)
    averaged_copies = AveragedCopies(model)
    averaged_copies.modules = [copy]
    before = flat(model)
    synchronize(averaged_copies)
    assert torch.equal(flat(model), before)
    return flat(copy), copy.module[1].running_mean, int(copy.n_averaged)


@pytest.mark.parametrize(("broken", "mean"), [(-1, 2.0), (1, 2.0), (2, 1.5)])
def test_copies_become_the_mean_of_finite_ones(pool: Pool, broken: int, mean: float) -> None:
    for rank, (copy, running, updates) in enumerate(pool.run(average_copies, broken, world=3)):
        assert torch.equal(copy, torch.full_like(copy, mean))
        assert torch.equal(running, torch.full_like(running, mean))
        assert updates == 1 + rank  # integers are not averaged


LARGEST = torch.finfo(torch.float64).max


def average_large_values(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight and buffer of a copy, equal on all workers, and its bias, which differs."""
    model = nn.Linear(2, 2).double()
    model.register_buffer("mask", torch.tensor([-LARGEST, 0.1], dtype=torch.float64))
    copy = AveragedModel(model, use_buffers=True)
    copy.module.weight.data.copy_(
        torch.tensor([[LARGEST, 0.1], [1e-300, 0.7]], dtype=torch.float64)
    )
    copy.module.bias.data.copy_(torch.tensor([LARGEST, 1.0 + rank], dtype=torch.float64))
    averaged_copies = AveragedCopies(model)
    averaged_copies.modules = [copy]
    synchronize(averaged_copies)
    return copy.module.weight.detach(), copy.module.mask, copy.module.bias.detach()


def test_large_values_do_not_overflow_and_equal_ones_are_unchanged(pool: Pool) -> None:
    weight = torch.tensor([[LARGEST, 0.1], [1e-300, 0.7]], dtype=torch.float64)
    mask = torch.tensor([-LARGEST, 0.1], dtype=torch.float64)
    for found in pool.run(average_large_values, world=4):
        assert torch.equal(found[0], weight)
        assert torch.equal(found[1], mask)
        assert torch.equal(found[2], torch.tensor([LARGEST, 2.5], dtype=torch.float64))


def share_masks(rank: int, world: int) -> list[Tensor]:
    model = norm_model()
    torch.manual_seed(rank)
    prune.random_unstructured(model[0], "weight", amount=0.5)
    prune.random_unstructured(model[3], "bias", amount=1)
    own = [mask.clone() for _, mask in pruning_masks(model)]
    synchronize(AveragedCopies(model))
    return [*own, *(mask for _, mask in pruning_masks(model))]


def test_masks_become_those_of_worker_0(pool: Pool) -> None:
    first, second = pool.run(share_masks, world=2)
    assert len(first) == 4
    assert not torch.equal(first[0], second[0])
    for own, mask, mask_1 in zip(first[:2], first[2:], second[2:], strict=True):
        assert torch.equal(own, mask)
        assert torch.equal(own, mask_1)


def make_different_copies(rank: int, world: int) -> None:
    model = norm_model()
    averaged_copies = AveragedCopies(model)
    if rank == 1:
        averaged_copies.modules = [AveragedModel(model)]
    synchronize(averaged_copies)


def test_different_copies_are_an_error_on_all_workers(pool: Pool) -> None:
    with pytest.raises(PoolError, match="Worker 1 holds other averaged copies") as error:
        pool.run(make_different_copies, world=2)
    assert sorted(error.value.failures) == [0, 1]


def test_a_buffer_named_like_a_mask_is_not_a_pruning_mask() -> None:
    model = nn.Module()
    model.register_buffer("attention_mask", torch.ones(2))
    assert pruning_masks(model) == []


def mean(rank: int, world: int, valid: list[bool]) -> tuple[Tensor, int]:
    model = norm_model(seed=0)
    for value in model.parameters():
        value.data.fill_(float(rank) if valid[rank] else torch.nan)
    group, statistics = WorkerGroup.create(timeout_s=20), Statistics()
    layout = Replica(model, Cuts(4)).layout
    assert len(layout.chunks()) > 2
    average(layout, group, statistics, valid[rank], sum(valid))
    group.close()
    return layout.new_flat(), statistics.bytes_sent


@pytest.mark.parametrize("valid", [[True] * 3, [True, False, True], [False, False, True]], ids=str)
def test_average_over_the_valid_workers(pool: Pool, valid: list[bool]) -> None:
    own = [rank for rank in range(3) if valid[rank]]
    for values, sent in pool.run(mean, valid, world=3):
        assert values.tolist() == [sum(own) / len(own)] * values.numel()
        assert sent > 0

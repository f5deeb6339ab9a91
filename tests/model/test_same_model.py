"""Checks before training: a supported model, equal on all workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.model.fingerprint import schema_checksum
from lightning_loco.model.flat import FlatLayout
from lightning_loco.model.same_model import (
    broadcast_model,
    check_model,
    check_same_schema,
    check_same_settings,
)
from tests.harness.pool import Pool, PoolError

# ------------------------------------------------------------------------------ one model


def frozen() -> nn.Module:
    return nn.Linear(2, 1).requires_grad_(False)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_unsupported_models_are_an_error(subtests: pytest.Subtests) -> None:
    sparse = "Module '0' makes sparse gradients"
    rows = {
        "lazy": (nn.Sequential(nn.LazyLinear(2)), "Parameter '0.weight' is not initialised yet"),
        "embedding": (nn.Sequential(nn.Embedding(4, 2, sparse=True)), sparse),
        "bag": (nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True)), sparse),
        "frozen": (frozen(), "no trainable parameters"),
        "empty": (nn.Tanh(), "no trainable parameters"),
    }
    for name, (model, text) in rows.items():
        with subtests.test(name), pytest.raises(ValueError, match=text):
            check_model(model)


def test_supported_models(subtests: pytest.Subtests) -> None:
    rows = {
        "linear": nn.Linear(2, 1),
        "embedding": nn.Embedding(4, 2),
        "partly frozen": nn.Sequential(frozen(), nn.Linear(1, 1)),
        "with buffers": nn.BatchNorm1d(3),
    }
    for name, model in rows.items():
        with subtests.test(name):
            check_model(model)


def test_checksums_of_different_schemas_differ() -> None:
    schema = [("weight", (2, 3), "torch.float32", (3, 1)), ("bias", (2,), "torch.float32", (1,))]
    others = [schema[:1], schema[::-1], [("weight", (3, 2), *schema[0][2:]), schema[1]]]
    checksums = {schema_checksum(one) for one in (schema, *others)}
    assert len(checksums) == 4
    assert schema_checksum(list(schema)) in checksums
    assert all(0 <= checksum < 2**64 for checksum in checksums)


# ------------------------------------------------------------------------- several workers

Tensors = dict[str, torch.Tensor]


def compare_schemas(rank: int, world: int, of_worker: list[Tensors]) -> str:
    group = WorkerGroup.create(timeout_s=20)
    try:
        check_same_schema(FlatLayout(of_worker[rank].items()), group)
    finally:
        group.close()
    return "equal"


SAME = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}


def test_equal_schemas_with_other_values(pool: Pool) -> None:
    other = {name: tensor + 1 for name, tensor in SAME.items()}
    assert pool.run(compare_schemas, [SAME, other], world=2) == ["equal"] * 2


def test_the_first_difference_is_named_on_all_workers(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    rows = {
        "shape": (
            {**SAME, "bias": torch.zeros(3)},
            r"'bias' has shape \(3,\) there and \(2,\) on worker 0",
        ),
        "dtype": (
            {**SAME, "bias": torch.zeros(2, dtype=torch.float64)},
            "'bias' has dtype .*float64 there and .*float32 on worker 0",
        ),
        "strides": (
            {**SAME, "weight": torch.zeros(3, 2).T},
            r"'weight' has strides \(1, 2\) there and \(3, 1\) on worker 0",
        ),
        "name": (
            {"kernel": SAME["weight"], "bias": SAME["bias"]},
            "it has parameter 'kernel' where worker 0 has 'weight'",
        ),
        "one more": (
            {**SAME, "scale": torch.zeros(1)},
            "3 trainable parameters there and 2 on worker 0; .* 'scale' on that worker",
        ),
        "one less": (
            {"weight": SAME["weight"]},
            "1 trainable parameters there and 2 on worker 0; .* 'bias' on worker 0",
        ),
    }
    for name, (other, text) in rows.items():
        with subtests.test(name):
            message = f"Worker 2 holds a different model than worker 0: {text}"
            with pytest.raises(PoolError, match=message) as caught:
                pool.run(compare_schemas, [SAME, SAME, other], world=3)
            assert sorted(caught.value.failures) == [0, 1, 2]
            assert len({failure.message for failure in caught.value.failures.values()}) == 1


def compare_settings(rank: int, world: int, of_worker: list[dict[str, Any]]) -> str:
    group = WorkerGroup.create(timeout_s=20)
    try:
        check_same_settings(of_worker[rank], group)
    finally:
        group.close()
    return "equal"


def test_different_settings_are_an_error(pool: Pool) -> None:
    settings = {"sync_every": 10, "topology": "Ring()"}
    assert pool.run(compare_settings, [settings, dict(settings)], world=2) == ["equal"] * 2
    with pytest.raises(PoolError, match="Worker 1 has sync_every=20 and worker 0 has") as caught:
        pool.run(compare_settings, [settings, {**settings, "sync_every": 20}], world=2)
    assert sorted(caught.value.failures) == [0, 1]


class ManyKinds(nn.Module):
    """Parameters and buffers of many kinds, with different values on every worker."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.plain = nn.Parameter(random(3, 2))
        self.narrow = nn.Parameter(random(5).bfloat16())
        self.transposed = nn.Parameter(random(4, 3).T)
        self.frozen = nn.Parameter(random(2), requires_grad=False)
        self.empty = nn.Parameter(random(0))
        self.register_buffer("mean", random(2))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("scratch", random(2), persistent=False)


def broadcast(rank: int, world: int) -> tuple[int, Tensors]:
    model = ManyKinds(seed=rank)
    strides = [p.stride() for p in model.parameters()]
    group = WorkerGroup.create(timeout_s=20)
    checksum = broadcast_model(model, group)
    group.close()
    assert [p.stride() for p in model.parameters()] == strides
    named = [*model.named_parameters(), *model.named_buffers()]
    return checksum, {name: tensor.detach() for name, tensor in named}


def test_all_start_from_the_values_of_worker_0(pool: Pool) -> None:
    expected = ManyKinds(seed=0)
    named = dict([*expected.named_parameters(), *expected.named_buffers()])
    alone = broadcast_model(expected, WorkerGroup(0, 1))
    for checksum, tensors in pool.run(broadcast, world=3):
        assert checksum == alone
        assert tensors.keys() == named.keys()
        assert all(torch.equal(tensors[name], named[name]) for name in named)
    assert broadcast_model(ManyKinds(seed=1), WorkerGroup(0, 1)) != alone

"""Runs with more workers, or more ranks per worker, than a pool of four processes has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tests.harness.pool import Pool
from tests.strategies.families import METHODS, HybridModule, Run, SequenceModule, ShardedModule
from tests.strategies.test_workers_of_ranks import TRAINING, VALIDATED

pytestmark = [
    pytest.mark.soak,
    # From a layer that both shard: PyTorch warns about in-place operations, but there are none.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]
ROUNDS = 50


@pytest.fixture(scope="module")
def six_ranks() -> Iterator[Pool]:
    pool = Pool(6)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "layout", ["ddp", "ddp of 3", "fsdp", "fsdp of 3", "tensor", "tensor of 3"]
)
@pytest.mark.parametrize("method", list(METHODS))
def test_three_workers_of_two_ranks_and_two_of_three(
    six_ranks: Pool, method: str, layout: str
) -> None:
    Run(method, {"finalize": "keep"}, {"gradient_clip_val": 0.5}).compare(six_ranks, layout)


@pytest.mark.parametrize("module", [ShardedModule, SequenceModule])
@pytest.mark.parametrize("method", ["diloco", "async_diloco of fragments", "gasloc"])
def test_two_workers_with_fsdp_and_tensor_parallelism(
    eight_ranks: Pool, method: str, module: type[ShardedModule]
) -> None:
    trainer = {"gradient_clip_val": 0.5}
    Run(method, {"finalize": "keep"}, trainer, module).compare(eight_ranks, "both")


@pytest.mark.parametrize("name", [*TRAINING, *VALIDATED])
def test_features_with_fsdp_and_tensor_parallelism(eight_ranks: Pool, name: str) -> None:
    run = TRAINING.get(name) or dataclasses.replace(VALIDATED[name], validates=True)
    run.compare(eight_ranks, "both")


@pytest.mark.parametrize("method", ["diloco", "streaming_diloco", "gasloc"])
def test_two_workers_with_copies_of_shards(eight_ranks: Pool, method: str) -> None:
    trainer = {"gradient_clip_val": 0.5}
    run = Run(method, {"finalize": "keep"}, trainer, HybridModule, validates=True)
    run.compare(eight_ranks, "fsdp of 4")


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("diloco", "ddp"),
        ("diloco", "fsdp of 3"),
        ("gasloc", "tensor"),
        ("streaming_diloco", "ddp of 3"),
        ("noloco", "fsdp"),
    ],
)
def test_fifty_rounds(six_ranks: Pool, method: str, layout: str) -> None:
    run = Run(method, {"finalize": "keep"}, steps=3 * ROUNDS + 1)
    for result in run.compare(six_ranks, layout):
        assert result["rounds"] >= ROUNDS


def test_fifty_rounds_with_fsdp_and_tensor_parallelism(eight_ranks: Pool) -> None:
    run = Run("diloco", {"finalize": "keep"}, steps=3 * ROUNDS + 1)
    for result in run.compare(eight_ranks, "both"):
        assert result["rounds"] >= ROUNDS

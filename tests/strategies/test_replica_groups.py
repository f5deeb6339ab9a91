"""Workers of several ranks: DDP inside, rounds between them, and what goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_loco import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    GASLoCStrategy,
    LocalSGDStrategy,
    NoLoCoStrategy,
    StreamingDiLoCoStrategy,
)
from tests.pool import Pool, make_trainer
from tests.small_model import TinyModule, flat, worker_batch

SIZE = 2  # ranks of a worker
STEPS = 12
TOLERANCE = 1e-9


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The batches of a worker: those of all its ranks, or the part of one."""

    def __init__(self, worker: int, places: list[int], num_steps: int) -> None:
        self.worker = worker
        self.places = places
        self.num_steps = num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        parts = [worker_batch(SIZE * self.worker + place, step) for place in self.places]
        inputs, targets = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(targets)


def loader(rank: int, replica_size: int, num_steps: int = STEPS) -> DataLoader[Any]:
    """What a rank reads; one rank that is a worker reads what the ranks of a larger one read."""
    worker, place = divmod(rank, replica_size)
    places = list(range(SIZE)) if replica_size == 1 else [place]
    return DataLoader(Batches(worker, places, num_steps), batch_size=None)


METHODS: dict[str, Any] = {
    "local_sgd": (LocalSGDStrategy, {}),
    "diloco": (DiLoCoStrategy, {"outer_momentum": 0.5}),
    "async_diloco": (AsyncDiLoCoStrategy, {"fragments": None}),
    "async_diloco of fragments": (AsyncDiLoCoStrategy, {"fragments": 2}),
    "streaming_diloco": (StreamingDiLoCoStrategy, {"fragments": 2, "delay": 1}),
    "gasloc": (GASLoCStrategy, {}),
    "noloco": (NoLoCoStrategy, {}),
}


def fit(
    rank: int,
    world: int,
    method: str,
    replica_size: int,
    arguments: dict[str, Any],
    settings: dict[str, Any],
    make_module: Any = TinyModule,
) -> dict[str, Any]:
    kind, own = METHODS[method]
    strategy = kind(**{"sync_every": 3, **own, "replica_size": replica_size, **arguments})
    trainer = make_trainer(
        strategy, **{"max_epochs": 1, "use_distributed_sampler": False, **settings}
    )
    module = make_module()
    trainer.fit(module, loader(rank, replica_size))
    return {"params": flat(module), "steps": trainer.global_step}


def compare(
    pool: Pool,
    method: str,
    arguments: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    make_module: Any = TinyModule,
) -> list[dict[str, Any]]:
    """Check that 2 workers of 2 ranks end as 2 workers of 1 rank that read the same rows."""
    given = arguments or {}, settings or {}, make_module
    whole = pool.run(fit, method, 1, *given, world=2)
    results = pool.run(fit, method, SIZE, *given, world=4)
    for rank, result in enumerate(results):
        expected = whole[rank // SIZE]
        assert result["steps"] == expected["steps"]
        torch.testing.assert_close(
            result["params"], expected["params"], rtol=0, atol=TOLERANCE, msg=f"rank {rank}"
        )
    for first in range(0, 4, SIZE):
        assert torch.equal(results[first]["params"], results[first + 1]["params"])
    return results


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_are_one_worker_that_reads_the_rows_of_both(pool: Pool, method: str) -> None:
    results = compare(pool, method, {"finalize": "keep"})
    assert (results[0]["params"] - flat(TinyModule())).abs().max() > 1e-2

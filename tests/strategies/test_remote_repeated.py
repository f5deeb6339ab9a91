"""Repeated fits with a remote optimizer in the same processes."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_loco import RemoteOptimizerStrategy
from tests.harness.pool import Pool
from tests.harness.small_model import TinyModule, make_loader
from tests.strategies.families import all_ranks, remote_trainer

FITS = 4


def count() -> tuple[int, int]:
    """Return the number of gloo threads, and of open files and connections."""
    time.sleep(0.2)  # until ended threads and closed files are no longer listed
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return threads.count("pt_gloo_runloop\n"), len(os.listdir("/proc/self/fd"))


def fit_again_and_again(
    rank: int, world: int, num_workers: int, options: dict[str, Any]
) -> list[tuple[int, int]]:
    """Return what is left after each fit, without a garbage collection."""
    gc.collect()
    gc.disable()
    found = []
    try:
        with all_ranks() as environment:
            for _ in range(FITS):
                strategy = RemoteOptimizerStrategy(num_workers, timeout_s=20, **options)
                settings: Any = {"max_epochs": 1, "use_distributed_sampler": False}
                trainer = remote_trainer(environment, strategy, **settings)
                trainer.fit(TinyModule(), make_loader(rank, 3))
                del trainer, strategy
                found.append(count())
    finally:
        gc.enable()
    return found


@pytest.mark.parametrize(
    ("world", "num_workers", "options"),
    [(4, 2, {}), (3, 1, {"replica_size": 2}), (4, 2, {"num_servers": 2})],
    ids=str,
)
def test_fits_leave_no_threads_and_connections(
    pool: Pool, world: int, num_workers: int, options: dict[str, Any]
) -> None:
    for found in pool.run(fit_again_and_again, num_workers, options, world=world):
        threads, files = zip(*found, strict=True)
        assert len(set(threads)) == 1, found
        assert files[-1] - files[0] < FITS, found  # other ranks may still close theirs to the store

"""A run with constant members equals a run with as many ranks, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_loco.engine import StepEngine
from tests.elastic.cluster import cluster
from tests.elastic.worker import PULL, algorithm_of, checksum, compression_of
from tests.harness.pool import Pool

pytestmark = pytest.mark.process

ROUNDS = 12


def run_of_ranks(
    rank: int, world: int, algorithm: str, overlap: bool, compression: str | None
) -> list[int]:
    """Train ranks of one job; return the outer states of tests/elastic/worker.py."""
    torch.manual_seed(rank)
    model = nn.Linear(1000, 1, bias=False)
    engine = StepEngine(
        model,
        algorithm_of(algorithm, overlap),
        sync_every=4,
        overlap=overlap,
        warm_start=False,
        compression=compression_of(compression),
    )
    found = [checksum(engine)]
    while engine.worker.round_index < ROUNDS:
        with torch.no_grad():
            model.weight.lerp_(torch.full((1, 1000), float(rank + 1)), PULL)
        if engine.step():
            found.append(checksum(engine))
    engine.close()
    return found


@pytest.mark.parametrize(
    ("algorithm", "num_workers", "overlap", "compression"),
    [
        ("diloco", 2, False, None),
        pytest.param("diloco", 2, True, None, marks=pytest.mark.soak),
        pytest.param("diloco", 3, True, "e3m0", marks=pytest.mark.soak),
        pytest.param("diloco", 3, False, "sparse", marks=pytest.mark.soak),
        pytest.param("diloco", 3, True, "senders", marks=pytest.mark.soak),
        pytest.param("delayed_nesterov", 2, False, None, marks=pytest.mark.soak),
        pytest.param("local_sgd", 3, False, "int8", marks=pytest.mark.soak),
    ],
)
def test_it_equals_a_run_of_ranks(
    pool: Pool,
    tmp_path: Path,
    algorithm: str,
    num_workers: int,
    overlap: bool,
    compression: str | None,
) -> None:
    expected = pool.run(run_of_ranks, algorithm, overlap, compression, world=num_workers)
    settings = (f"--rounds={ROUNDS}", "--step-s=0", f"--algorithm={algorithm}")
    schedule = ("--overlap",) if overlap else ()
    codec = (f"--compression={compression}",) if compression else ()
    with cluster(tmp_path, *settings, *schedule, *codec, min_workers=num_workers) as workers:
        workers.run_to_completion(num_workers)
        for index in range(num_workers):
            assert [line["checksum"] for line in workers.lines(index)] == expected[index]

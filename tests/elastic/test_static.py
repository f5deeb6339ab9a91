"""A run in which nobody comes or goes is the run of as many ranks, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_loco.algorithms import DiLoCo
from lightning_loco.rounds import StepEngine
from tests.elastic.cluster import cluster
from tests.elastic.worker import checksum
from tests.pool import Pool

pytestmark = pytest.mark.slow

ROUNDS = 12


def run_of_ranks(rank: int, world: int, overlap: bool) -> list[int]:
    """What tests/elastic/worker.py does, on ranks of one job."""
    torch.manual_seed(rank)
    model = nn.Linear(1000, 1, bias=False)
    algorithm = DiLoCo(outer_momentum=0.0 if overlap else 0.9)
    engine = StepEngine(model, algorithm, sync_every=4, overlap=overlap, warm_start=False)
    found = [checksum(engine)]
    while engine.worker.round_index < ROUNDS:
        with torch.no_grad():
            model.weight.lerp_(torch.full((1, 1000), float(rank + 1)), 0.05)
        if engine.step():
            found.append(checksum(engine))
    engine.close()
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_it_equals_a_run_of_ranks(pool: Pool, tmp_path: Path, overlap: bool) -> None:
    expected, _ = pool.run(run_of_ranks, overlap, world=2)
    schedule = ("--overlap",) if overlap else ()
    with cluster(tmp_path, f"--rounds={ROUNDS}", "--step-s=0", *schedule) as made:
        made.start(0)
        time.sleep(0.5)
        made.start(1)
        made.ends(0, 1)
        assert [line["checksum"] for line in made.lines(0)] == expected
        assert [line["checksum"] for line in made.lines(1)] == expected

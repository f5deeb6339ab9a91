"""The engine that docs/plain_pytorch.md puts together makes rounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.docs.pages import doc

PAGE = doc("plain_pytorch.md")


def distances(rank: int, world: int, code: str) -> tuple[float, float]:
    """Consensus distance after a few rounds without local progress, and at the end."""
    names: dict[str, Any] = {}
    exec(code, names)
    model = nn.Linear(3, 1)
    engine = names["make_engine"](model, local_steps=2)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    for _ in range(2 * 20):
        engine.step()
    worker = engine.worker
    worker.sync_point("the last step")
    distance = worker.measure_consensus(max_elements=100)
    engine.finish()
    spread = worker.measure_consensus(max_elements=100)
    engine.close()
    return distance, spread


def test_the_composed_engine_brings_workers_together(pool: Any) -> None:
    (code,) = [block for block in PAGE.blocks("python") if "from_settings" in block]
    for distance, spread in pool.run(distances, code, world=3):
        assert distance < 1e-3
        assert spread == 0

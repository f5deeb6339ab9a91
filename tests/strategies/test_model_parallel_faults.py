"""A rank of a worker that shards the model fails: the others name it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from torch import Tensor

from lightning_loco import DiLoCoStrategy, LocoModelParallelStrategy
from tests.harness.failing import KINDS
from tests.harness.limits import HARNESS_S
from tests.harness.pool import make_trainer
from tests.strategies.replica_runs import (
    SHARDED,
    HybridModule,
    Run,
    ShardedModule,
    check_fault,
    loaders,
)

TIMEOUT_S = 5.0


class Failing(ShardedModule):
    """Fails in a step: before the forward pass of FSDP2 or tensor parallelism."""

    def __init__(self, kind: str | None, folder: Path) -> None:
        super().__init__()
        self.kind, self.folder = kind, folder

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 4 and self.kind is not None:
            (self.folder / "failed_at").write_text(str(time.time()))
            KINDS[self.kind]()
        return super().training_step(batch, batch_idx)


class FailingHybrid(Failing, HybridModule):
    """With groups that ``configure_model`` has made."""


MODULES = {"fsdp": Failing, "tensor": Failing, "hybrid": FailingHybrid}


def fit_with_fault(
    rank: int, world: int, kind: str, layout: str, victim: int, folder: Path
) -> None:
    sizes = SHARDED["tensor" if layout == "tensor" else "fsdp"]
    method = DiLoCoStrategy(sync_every=3, timeout_s=TIMEOUT_S)
    trainer = make_trainer(
        LocoModelParallelStrategy(method, *sizes),
        max_epochs=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    module = MODULES[layout](kind if rank == victim else None, folder)
    trainer.fit(module, *loaders(rank, Run(steps=20), sizes))


FAULTS = [("killed", "fsdp", 2), ("raises", "fsdp", 3), ("killed", "tensor", 2)]
MORE_FAULTS = [
    ("frozen", "fsdp", 1),
    ("frozen", "hybrid", 1),
    ("raises", "tensor", 0),
    ("killed", "fsdp", 0),
]


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "layout", "victim"),
    [*FAULTS, *(pytest.param(*fault, marks=pytest.mark.soak) for fault in MORE_FAULTS)],
)
def test_the_others_name_the_rank_that_fails(
    kind: str, layout: str, victim: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_in_soak = request.node.get_closest_marker("soak") is not None
    longest_s = TIMEOUT_S + 6 if is_in_soak else HARNESS_S
    outcomes = check_fault(
        fit_with_fault,
        kind,
        layout,
        victim,
        tmp_path,
        kind=kind,
        victim=victim,
        timeout_s=TIMEOUT_S,
    )
    failed_at = float((tmp_path / "failed_at").read_text())
    for outcome in outcomes:
        assert outcome.ended_at - failed_at < longest_s, outcome.error

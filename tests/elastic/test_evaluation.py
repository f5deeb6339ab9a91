"""Warnings about validation at the start of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_loco import DiLoCoStrategy, Elastic, LocalSGDStrategy
from tests.elastic import cluster
from tests.harness.messages import RANK_ZERO, messages_of
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import ValidatedModule, make_loader

pytestmark = pytest.mark.recovery


def warnings_of(rank: int, world: int, lighthouse: str, folder: Path) -> list[list[str]]:
    found = []
    for kind in (DiLoCoStrategy, LocalSGDStrategy):
        membership = Elastic(lighthouse, min_workers=1, host="127.0.0.1")
        with messages_of(RANK_ZERO) as texts:
            trainer = make_trainer(
                kind(sync_every=4, membership=membership),
                max_steps=8,
                val_check_interval=2,
                callbacks=[ModelCheckpoint(folder / kind.__name__, monitor="val_loss")],
                enable_checkpointing=True,
            )
            trainer.fit(ValidatedModule(), make_loader(rank, 8), make_loader(rank, 1))
        found.append([text for text in texts if "only rounds change" in text])
    return found


def test_monitoring_what_only_rounds_change_causes_a_warning(pool: Pool, tmp_path: Path) -> None:
    """Only rounds change outer parameters; a member of Local SGD validates its local model."""
    lighthouse = cluster.Lighthouse(1)
    try:
        ((outer, own),) = pool.run(warnings_of, lighthouse.address, tmp_path, world=1)
    finally:
        lighthouse.stop()
    assert own == []
    (line,) = outer
    assert "ModelCheckpoint(monitor='val_loss') may see the same value again and again" in line
    assert "Validate every 4 local steps or less often" in line

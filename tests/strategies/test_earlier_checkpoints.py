"""Checkpoints that earlier versions wrote are resumed exactly, pending rounds included.

The archive holds what the version of 27 November 2026, before states and settings got new names,
wrote after local step 14 of these runs with two workers.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch

from lightning_loco.earlier_run import with_present_names
from tests.cases import CASES
from tests.pool import Pool
from tests.strategies.save_and_resume import Run, fit

ARCHIVE = Path(__file__).with_name("earlier_checkpoints") / "november_2026.tar.xz"
METHODS = (
    "eager_diloco_momentum",
    "streaming_diloco",
    "gasloc_overlap",
    "async_diloco_compressed",
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.recovery
@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_an_earlier_version_is_resumed(pool: Pool, saved: Path, method: str) -> None:
    """It ends where an unbroken run ends, up to the rounding of another processor."""
    run = Run(CASES[method], str(saved / method), validates=True)
    states = [
        torch.load(path, weights_only=True)["engine"]
        for path in (saved / method).glob("at_14.ckpt.loco/*/worker_*.pt")
    ]
    pending = [fragment["flight"] for state in states for fragment in state["lanes"]]
    assert any(round is not None for round in pending)
    whole = pool.run(fit, run, world=2)
    resumed = pool.run(fit, run, str(saved / method / "at_14.ckpt"), world=2)
    for one, other in zip(whole, resumed, strict=True):
        assert min(other.losses) == 14
        torch.testing.assert_close(other.state, one.state, rtol=1e-4, atol=1e-5)
        assert not other.warned  # no warning: the settings are found to be the same


def test_a_present_state_stays_as_it_is() -> None:
    state = {"fragments": [{"pending": None}], "steps": 3}
    assert with_present_names(state) == state

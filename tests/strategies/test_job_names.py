"""Names of jobs, which detect jobs that share a store by mistake."""

from __future__ import annotations

import pytest
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightning_loco.strategies.worker_strategy import job_name


def test_launchers_name_their_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert job_name(SLURMEnvironment()) == "SLURM job 17"
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    assert job_name(SLURMEnvironment()) == "SLURM job 17, step 2"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert job_name(TorchElasticEnvironment()) == "torchrun's run 'mine'"


def test_a_job_started_by_hand_ignores_the_name_in_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert job_name(LightningEnvironment()) == ""

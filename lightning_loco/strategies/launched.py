"""Who has started a job, and under which name: jobs that meet by mistake have other ones."""

from __future__ import annotations

import os

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment


def launched_as(environment: ClusterEnvironment) -> str:
    """A name that is the same on all ranks of a job; empty where nobody gives it one."""
    if isinstance(environment, SLURMEnvironment) and "SLURM_JOB_ID" in os.environ:
        step = os.environ.get("SLURM_STEP_ID")
        return f"SLURM job {os.environ['SLURM_JOB_ID']}" + (f", step {step}" if step else "")
    if isinstance(environment, TorchElasticEnvironment):
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # what torchrun calls all without one
        return "" if name == "none" else f"torchrun's run {name!r}"
    return ""

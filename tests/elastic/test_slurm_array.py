"""Jobs of a SLURM array as elastic workers: one is preempted and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.elastic.cluster import Lighthouse
from tests.harness.programs import Program
from tests.test_examples import ROOT, TINY, cluster, remote_job, run

__all__ = ["cluster"]

SCRIPT = ROOT / "examples" / "slurm" / "elastic_array.sbatch"


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_is_preempted_and_returns(tmp_path: Path, cluster: dict[str, str], ranks: int) -> None:
    lighthouse = Lighthouse(1)
    batch = ["bash", str(SCRIPT)]
    job = remote_job(cluster, tasks=ranks)
    del job["MASTER_PORT"]  # Lightning's depends on the job
    environ = {
        "TORCHFT_LIGHTHOUSE": lighthouse.address,
        # The one that remains waits, however long the other one takes to start again.
        "CHANGES": f"{TINY} trainer.max_steps=200 trainer.log_every_n_steps=10 "
        "membership.min_workers=2",
    }
    first, second = ({**job, **environ, "SLURM_JOB_ID": number} for number in ("101", "102"))
    remaining = Program(batch, tmp_path, **second)
    try:
        with remaining:
            when = "outputs/slurm-101-0/checkpoints/last.ckpt"
            run(batch, tmp_path, **first, SIGNAL_WHEN_THERE_IS=when)
            assert (tmp_path / "scontrol.log").read_text() == "requeue 101\n"
            saved = tmp_path / "outputs/slurm-101-0/hpc_ckpt_1.ckpt"
            output = run(batch, tmp_path, **first)
            assert f"Restored all states from the checkpoint at {saved}" in output
            code, theirs = remaining.finish()
            assert code == 0, theirs
    finally:
        lighthouse.stop()
    reports = [tmp_path / f"outputs/slurm-{number}-0/report.json" for number in ("101", "102")]
    losses = [json.loads(report.read_text())["val_loss"] for report in reports]
    assert losses[0] == losses[1]

"""Jobs that must stop while they wait for a lighthouse or for other members."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.elastic import trainer_worker
from tests.elastic.cluster import cluster, until

pytestmark = pytest.mark.process

UNREACHABLE = "Cannot reach the lighthouse at"


def test_jobs_started_before_the_lighthouse_wait_and_can_be_stopped(tmp_path: Path) -> None:
    with cluster(tmp_path, "--max-steps=12", program=trainer_worker.main) as workers:
        workers.lighthouse.stop()
        for index in range(3):
            workers.start(index)
        for index in range(3):
            until(
                lambda index=index: UNREACHABLE in workers.output(index), "line of the one waiting"
            )
        address = workers.lighthouse.address
        assert f"{UNREACHABLE} {address} (" in workers.output(0)
        assert "start one there with `lightning-loco lighthouse`" in workers.output(0)
        workers.kill(0, signal.SIGTERM)
        workers.kill(1, signal.SIGINT)
        assert workers.exit_status(0) == 0, workers.output(0)
        assert workers.exit_status(1) == 1
        assert "Detected KeyboardInterrupt" in workers.output(1)
        saved = tmp_path / "0" / "interrupted.ckpt"
        assert f"saved {saved}" in workers.output(0)
        workers.lighthouse.start()
        workers.start(0, f"--resume={saved}")
        workers.wait_for_success(0, 2)
        workers.check_rounds()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("lighthouse_min", "line"),
    [
        (1, "waits for more workers. 1 of at least 2 are there (w0"),
        (2, "New quorum not ready, only have 1 participants"),
    ],
    ids=["too few members", "too few for the lighthouse"],
)
def test_sigterm_ends_the_wait_for_members(tmp_path: Path, lighthouse_min: int, line: str) -> None:
    settings = ("--max-steps=4000", "--timeout-s=300")
    with cluster(
        tmp_path, *settings, lighthouse_min=lighthouse_min, program=trainer_worker.main
    ) as workers:
        workers.start_all(2)
        workers.kill(1)
        until(lambda: line in workers.output(0), "line of the one that is left")
        workers.kill(0, signal.SIGTERM)
        workers.wait_for_success(0)
        saved = tmp_path / "0" / "interrupted.ckpt"
        assert f"saved {saved}" in workers.output(0)
        workers.start(0, f"--resume={saved}", "--max-steps=80")
        workers.start(2, "--max-steps=80")
        workers.wait_for_success(0, 2)
        workers.check_rounds()

"""Jobs that wait for a lighthouse, or for other members, and are asked to stop meanwhile."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.elastic import trainer_worker
from tests.elastic.cluster import cluster, until

pytestmark = pytest.mark.process

UNREACHABLE = "Cannot reach the lighthouse at"


def test_jobs_that_come_before_the_lighthouse_wait_and_can_be_stopped(tmp_path: Path) -> None:
    with cluster(tmp_path, "--max-steps=12", program=trainer_worker.main) as made:
        made.lighthouse.stop()
        for index in range(3):
            made.start(index)
        for index in range(3):
            until(lambda index=index: UNREACHABLE in made.errors(index), "line of the one waiting")
        place = made.lighthouse.address
        assert f"{UNREACHABLE} {place} (" in made.errors(0)
        assert "start one there with `lightning-loco lighthouse`" in made.errors(0)
        made.kill(0, signal.SIGTERM)
        made.kill(1, signal.SIGINT)
        assert made.exit_status(0) == 0, made.errors(0)
        assert made.exit_status(1) == 1
        assert "Detected KeyboardInterrupt" in made.errors(1)
        saved = tmp_path / "0" / "interrupted.ckpt"
        assert f"saved {saved}" in made.errors(0)
        made.lighthouse.start()
        made.start(0, f"--resume={saved}")
        made.ends(0, 2)
        made.agree()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("least", "line"),
    [
        (1, "waits for more workers. 1 of at least 2 are there (w0"),
        (2, "New quorum not ready, only have 1 participants"),
    ],
    ids=["too few members", "too few for the lighthouse"],
)
def test_sigterm_ends_the_wait_for_members(tmp_path: Path, least: int, line: str) -> None:
    settings = ("--max-steps=4000", "--timeout-s=300")
    with cluster(tmp_path, *settings, least=least, program=trainer_worker.main) as made:
        made.begin(2)
        made.kill(1)
        until(lambda: line in made.errors(0), "line of the one that is left")
        made.kill(0, signal.SIGTERM)
        made.ends(0)
        saved = tmp_path / "0" / "interrupted.ckpt"
        assert f"saved {saved}" in made.errors(0)
        made.start(0, f"--resume={saved}", "--max-steps=80")
        made.start(2, "--max-steps=80")
        made.ends(0, 2)
        made.agree()

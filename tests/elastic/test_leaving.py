"""Workers that leave: asked to, or because they have finished before the others."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.elastic import trainer_worker
from tests.elastic.cluster import cluster, until

pytestmark = pytest.mark.process


@pytest.mark.soak
@pytest.mark.parametrize("schedule", [("--overlap",), ()], ids=["overlap", "blocking"])
def test_sigterm_leaves_after_the_flight(tmp_path: Path, schedule: tuple[str, ...]) -> None:
    """The first worker is fast: it has begun a round that the others come to a phase later."""
    settings = ("--max-steps=100", "--step-s=0.1", *schedule)
    with cluster(tmp_path, *settings, least=1, program=trainer_worker.main) as made:
        made.start(0, "--step-s=0.01")
        made.start(1)
        made.start(2)
        made.reaches(0, 3)
        made.meets(1, 3)
        made.kill(0, signal.SIGTERM)
        assert made.exit_status(0) == 0
        left_at = made.lines(0)[-1]["round"]
        saved = tmp_path / "0" / "interrupted.ckpt"
        assert f"saved {saved}" in made.errors(0)
        made.reaches(1, left_at + 2)
        made.start(0, f"--resume={saved}")
        made.ends(0, 1, 2)
        made.agree()
        for index in (1, 2):
            assert "a member was lost" not in made.errors(index)
            assert {len(line["members"]) for line in made.lines(index)} >= {2, 3}
        assert len(made.lines(0)[-1]["members"]) == 3
        assert made.lines(0)[-1]["round"] == made.lines(1)[-1]["round"]
        rates = {line["round"]: line["lr"] for line in made.lines(1)}
        shared = [line for line in made.lines(0) if line["round"] in rates]
        assert len(shared) > 2  # on a busy machine the others come after its first rounds
        assert all(line["steps"] == 4 * line["round"] for line in made.lines(0))
        assert all(line["lr"] == rates[line["round"]] for line in shared)


@pytest.mark.soak
def test_sigterm_leaves_after_the_flight_also_where_nothing_is_saved(tmp_path: Path) -> None:
    settings = ("--max-steps=20", "--step-s=0.7", "--overlap", "--dev-run")
    with cluster(tmp_path, *settings, least=1, program=trainer_worker.main) as made:
        made.start(0, "--step-s=0.01")
        made.start(1)
        made.start(2)
        made.reaches(0, 2)
        made.kill(0, signal.SIGTERM)
        made.ends(0, 1, 2)
        made.agree()
        assert "This worker leaves when its round under way is over" in made.errors(0)
        last = made.lines(0)[-1]["round"]
        for index in (1, 2):
            assert "a member was lost" not in made.errors(index)
            members = {line["round"]: line["members"] for line in made.lines(index)}
            assert [len(members[last + i]) for i in (1, 2)] == [3, 2]


@pytest.mark.soak
@pytest.mark.parametrize(
    "schedule", [pytest.param((), id="blocking"), pytest.param(("--overlap",), id="overlap")]
)
def test_who_has_finished_is_not_waited_for(tmp_path: Path, schedule: tuple[str, ...]) -> None:
    """The second worker needs half as many rounds as the first one."""
    with cluster(tmp_path, "--steps=34", "--step-s=0.02", *schedule, least=1) as made:
        made.start(0, "--sync-every=4")
        made.start(1, "--sync-every=8")
        made.ends(0, 1)
        assert made.lines(0)[-1]["round"] == 9
        assert made.lines(1)[-1]["round"] == 5
        landed = {line["round"]: line["checksum"] for line in made.lines(0)}
        assert made.lines(1)[-1]["checksum"] == landed[5 + bool(schedule)]
        alone = [line["round"] for line in made.lines(0) if len(line["members"]) == 1]
        assert alone == [*range(6 + bool(schedule), 10)]
        assert "Fewer than" not in made.errors(0)


@pytest.mark.soak
def test_the_last_round_waits_for_nobody(tmp_path: Path) -> None:
    with cluster(tmp_path, "--steps=60", "--sync-every=40", "--step-s=0.05", least=1) as made:
        made.start(0)
        made.start(1)
        made.reaches(0, 1)
        made.kill(1)
        made.ends(0)
        assert [len(line["members"]) for line in made.lines(0)][-2:] == [2, 1]


@pytest.mark.soak
def test_ctrl_c_in_the_last_round_ends_at_once(tmp_path: Path) -> None:
    with cluster(tmp_path, "--max-steps=2", program=trainer_worker.main) as made:
        made.start(0, "--step-s=0")
        made.start(1, "--step-s=8")
        until(lambda: "One of 2 members" in made.errors(0), "two members")
        time.sleep(1)
        interrupted_at = made.kill(0, signal.SIGINT)
        assert made.exit_status(0) == 1
        assert time.time() - interrupted_at < 8
        assert "Detected KeyboardInterrupt" in made.errors(0)

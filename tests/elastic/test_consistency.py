"""Members whose outer parameters differ from those of others are detected and repaired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_loco.elastic.consistency import ConsistencyCheck, fingerprint
from lightning_loco.elastic.quorum import NO_STATE, QuorumPlan
from tests.elastic import trainer_worker
from tests.elastic.cluster import Cluster, cluster

STATE = {"outer": torch.arange(6.0), "momentum": torch.ones(6, dtype=torch.bfloat16), "count": 3}


def plan(round_index: int = 10, joining: tuple[int, ...] = (), rank: int = 0) -> QuorumPlan:
    names = ("a", "b", "c", "d", "e")
    return QuorumPlan("1.0/5", names, rank, names, False, 0, joining, round_index, 0)


def test_equal_states_have_equal_fingerprints() -> None:
    first = fingerprint(STATE)
    assert first == fingerprint(dict(reversed(STATE.items())))
    assert -(2**63) <= first < 2**63


def test_a_flipped_bit_changes_the_fingerprint(subtests: pytest.Subtests) -> None:
    for name, value in STATE.items():
        with subtests.test(name):
            other = value.clone() if isinstance(value, Tensor) else 4
            if isinstance(other, Tensor):
                other.view(torch.uint8)[-1] ^= 1
            assert fingerprint({**STATE, name: other}) != fingerprint(STATE)


def test_an_additional_value_changes_the_fingerprint() -> None:
    assert fingerprint({**STATE, "more": torch.zeros(0)}) != fingerprint(STATE)


def test_when_it_is_due(subtests: pytest.Subtests) -> None:
    for every, round_index, joining, is_due in [
        (10, 10, (), True),
        (10, 20, (), True),
        (10, 15, (), False),
        (10, 0, (), False),
        (1, NO_STATE, (), False),
        (0, 10, (), False),
        (10, 10, (0, 1, 2), True),
        (10, 10, (0, 1, 2, 3), False),
    ]:
        with subtests.test(every=every, round_index=round_index, joining=joining):
            assert ConsistencyCheck(every, lambda: 0).is_due(plan(round_index, joining)) == is_due


def compared(own: int, prints: tuple[int, ...], joining: tuple[int, ...]) -> QuorumPlan:
    """Return the plan of a member after a comparison of these fingerprints."""
    sent: list[int] = []

    def all_gather(row: Tensor) -> Tensor:
        sent.append(int(row))
        return torch.tensor(prints)[:, None]

    found = ConsistencyCheck(1, lambda: prints[own]).compare(
        plan(joining=joining, rank=own), all_gather
    )
    assert sent == [prints[own]]
    return found


def test_drifted_members_are_detected(subtests: pytest.Subtests) -> None:
    for name, joining, prints, drifted, donor in [
        ("none", (), (7, 7, 7, 7, 7), (), 0),
        ("one", (), (7, 7, -8, 7, 7), (2,), 0),
        ("the donor", (), (-8, 7, 7, 7, 7), (0,), 1),
        ("as many", (), (-8, 7, 9, 7, -8), (1, 2, 3), 0),
        ("with joining members", (0, 4), (0, 7, 7, -8, 0), (3,), 1),
        ("two with state", (2, 3, 4), (-8, 7, 0, 0, 0), (1,), 0),
    ]:
        with subtests.test(name):
            for own in range(len(prints)):
                found = compared(own, prints, joining)
                assert found.drifted == drifted
                assert found.donor == donor
                assert found.joining == tuple(sorted((*joining, *drifted)))


def states(workers: Cluster, round_index: int) -> list[int]:
    """Return the checksums of all members after a round."""
    return [
        line["checksum"]
        for index in workers.processes
        for line in workers.lines(index)
        if line["round"] == round_index
    ]


def column(workers: Cluster, index: int, name: str) -> dict[int, Any]:
    return {line["round"]: line[name] for line in workers.lines(index)}


@pytest.mark.process
@pytest.mark.parametrize(
    ("schedule", "applied"),
    [
        pytest.param((), 6, id="blocking", marks=pytest.mark.soak),
        pytest.param(("--overlap",), 7, id="overlap"),
        pytest.param(("--overlap", "--save-at=6"), 7, id="saved", marks=pytest.mark.soak),
    ],
)
def test_a_worker_that_drifts_is_named_and_repaired(
    tmp_path: Path, schedule: tuple[str, ...], applied: int
) -> None:
    """The comparison is in round 5; ``applied`` is the round index when its result was applied.

    With overlap, the local steps of that round started at wrong parameters, so the next message
    has no weight either, unless a checkpoint in between restarted those steps.
    """
    settings = ("--rounds=14", "--check-every=5", "--step-s=0.02", *schedule)
    with cluster(tmp_path, *settings, min_workers=3) as workers:
        for index in range(3):
            workers.start(index, *(("--flip-at=4",) if index == 1 else ()))
        workers.wait_for_success(0, 1, 2)
        for round_index in range(15):
            differ = 1 if round_index <= 4 or round_index >= applied else 2
            assert len(set(states(workers, round_index))) == differ, round_index
        for index in range(3):
            assert column(workers, index, "repaired")[14] == 1
            output = workers.output(index)
            assert "Round 5: the outer parameters or the outer state of w1-" in output
            assert output.count("differ from the other members") == 1
        steps = [column(workers, index, "steps") for index in range(3)]
        assert steps[0] == steps[1] == steps[2]
        lost = [column(workers, index, "lost")[14] for index in range(3)]
        assert lost == [0, 4 * (2 if schedule == ("--overlap",) else 1), 0]
        lines = [line for line in workers.lines(1) if line["weights"]]
        without = {line["round"] for line in lines if sum(line["weights"]) < 3}
        assert without == ({applied, applied + 1} if schedule == ("--overlap",) else {applied})


@pytest.mark.process
def test_a_worker_that_made_the_last_round_alone_resumes_from_the_others(
    tmp_path: Path,
) -> None:
    settings = ("--rounds=8", "--check-every=0", "--step-s=0.02")
    with cluster(tmp_path, *settings, min_workers=3) as workers:
        for index in range(3):
            workers.start(index, *(("--flip-at=4", "--other-past") if index == 1 else ()))
        workers.wait_for_success(0, 1, 2)
        assert workers.check_rounds() == 9
        lines = [line for line in workers.lines(0) if line["weights"]]
        assert {line["round"] for line in lines if sum(line["weights"]) < 3} == {5}


@pytest.mark.process
@pytest.mark.parametrize(
    "settings", [("--check-every=2",), ("--check-every=0",), ("--algorithm=local_sgd",)]
)
def test_without_drift_nothing_is_repaired(tmp_path: Path, settings: tuple[str, ...]) -> None:
    with cluster(tmp_path, "--rounds=8", "--step-s=0", *settings) as workers:
        workers.start(0)
        workers.start(1)
        workers.wait_for_success(0, 1)
        workers.check_rounds()
        assert set(column(workers, 0, "repaired").values()) == {0}


@pytest.mark.process
@pytest.mark.soak
def test_weights_written_by_a_hook_on_one_member_only_are_repaired(tmp_path: Path) -> None:
    settings = ("--max-steps=80", "--check-every=4")
    with cluster(tmp_path, *settings, min_workers=3, program=trainer_worker.main) as workers:
        for index in range(3):
            workers.start(index, "--epoch-steps=24", *(("--writes-at=1",) if index == 2 else ()))
        workers.wait_for_success(0, 1, 2)
        counts = [len(set(states(workers, round_index))) for round_index in range(1, 21)]
        assert counts == [1] * 5 + [2, 2, 2] + [1] * 12
        assert "Round 8: the outer parameters or the outer state of w2-" in workers.output(0)

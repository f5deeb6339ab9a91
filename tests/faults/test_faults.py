"""A rank fails at any point: the others end with an error that names it, or continue."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
import torch

from tests.elastic.cluster import HEARTBEAT_TIMEOUT_S, cluster
from tests.faults.table import REMOTE, WORLDS, Fault, rows
from tests.faults.worker import failure_file, fit
from tests.harness.forked_jobs import Job
from tests.harness.limits import HARNESS_S

TIMEOUT_S = 5.0
PROMPT_S = TIMEOUT_S + 6
ENDS = {"killed": -signal.SIGKILL, "raises": 1, "leaves": 0}


@pytest.mark.process
@pytest.mark.parametrize(Fault._fields, rows())
def test_the_others_name_the_victim_or_continue(
    kind: str, phase: str, method: str, victim: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fault = Fault(kind, phase, method, victim)
    is_in_soak = request.node.get_closest_marker("soak") is not None
    if method == "elastic":
        check_others_continue(fault, tmp_path, is_in_soak)
    else:
        check_others_name_it(fault, tmp_path, PROMPT_S if is_in_soak else HARNESS_S)


def check_others_name_it(fault: Fault, folder: Path, longest_s: float) -> None:
    world = WORLDS[fault.method]
    others = [rank for rank in range(world) if rank != fault.victim]
    with Job(fit, fault, folder, TIMEOUT_S, world=world, group_timeout_s=TIMEOUT_S) as job:
        outcomes = job.outcomes(others, HARNESS_S)
    assert failure_file(folder).exists(), [outcome.error for outcome in outcomes]
    for outcome in outcomes:
        assert outcome.error is not None, "it has not failed"
        assert fault.named.search(outcome.error), f"{fault.named.pattern}\n{outcome.error}"
        assert outcome.ended_at - float(failure_file(folder).read_text()) < longest_s, outcome.error
    paths = list(folder.glob("*.ckpt"))
    assert paths or fault.phase != "validation"
    for path in paths:
        saved = torch.load(path, weights_only=True)
        assert fault.method not in REMOTE or saved["optimizer_states"][0]["state"]


def check_others_continue(fault: Fault, folder: Path, is_in_soak: bool) -> None:
    """Check that their states are equal after each round, and that no round is lost."""
    size = "--numel=2000000" if fault.phase == "exchange" else "--numel=1000"
    with cluster(folder, "--rounds=24", "--step-s=0.02", size) as workers:
        for index in range(3):
            failing = f"--fail={fault.kind}", f"--fail-at={fault.point}", "--fail-in=8"
            workers.start(index, *(failing if index == fault.victim else ()))
        others = [index for index in range(3) if index != fault.victim]
        assert workers.exit_status(fault.victim) == ENDS[fault.kind]
        workers.wait_for_success(*others)
        assert workers.check_rounds() == 25
        for index in others:
            lines = workers.lines(index)
            assert len(lines[-1]["members"]) == 2
            times = [line["time"] for line in lines]
            longest = max(after - before for before, after in itertools.pairwise(times))
            assert longest < (HEARTBEAT_TIMEOUT_S + 6 if is_in_soak else HARNESS_S)

"""How a worker finishes a round that counts although its own exchange failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_loco.algorithms import DiLoCo
from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.worker_status import IN_ROUND, WorkerStatus
from lightning_loco.elastic.consistency import ConsistencyCheck
from lightning_loco.elastic.data_shard import DataShard
from lightning_loco.elastic.exchanges import SumExchange
from lightning_loco.elastic.group import MemberGroup
from lightning_loco.elastic.lighthouse import Lighthouse
from lightning_loco.elastic.places import Places
from lightning_loco.elastic.quorum import Commit, QuorumPlan
from lightning_loco.elastic.rounds import RoundRequest, RoundThread
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import EverySteps
from tests.harness.programs import free_ports

TIMEOUT_S = 5.0
NAMES = ("a", "b", "c")
pytestmark = pytest.mark.usefixtures("wait_for_threads")


@pytest.fixture
def rounds() -> Iterator[RoundThread]:
    """Return the rounds of a worker that has not asked the lighthouse yet."""
    (port,) = free_ports()
    engine = Engine.from_settings(nn.Linear(2, 1), RoundSettings(DiLoCo(), EverySteps(2)))
    group = MemberGroup("127.0.0.1", TIMEOUT_S)
    yield RoundThread(
        Lighthouse(f"127.0.0.1:{port}", "a"),
        Places(WorkerGroup(0, 1), TIMEOUT_S),
        lambda: False,
        group,
        SumExchange(group, engine),
        {},
        data_shard=DataShard(),
        min_workers=1,
        timeout_s=TIMEOUT_S,
        consistency=ConsistencyCheck(0, lambda: 0),
    )
    group.close()
    engine.close()


def committed(joining: tuple[int, ...] = ()) -> Commit:
    """Return what was received in round 3 before the others were lost."""
    plan = QuorumPlan("7.5/3", NAMES, 0, ("h:1", "h:2", "h:3"), False, 1, joining, 3, 0)
    return Commit(plan, torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, 4))


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_what_was_received_is_the_result(
    rounds: RoundThread, caplog: pytest.LogCaptureFixture, is_overlapped: bool
) -> None:
    request = RoundRequest(3, WorkerStatus(IN_ROUND, 3, 2))
    request.message = message = torch.zeros(3)
    request.is_overlapped = is_overlapped
    request.commit = commit = committed()
    rounds._finish_committed(request, commit)
    assert request.is_done()
    assert request.received is not None
    assert request.received.tolist() == [1.0, 2.0, 3.0]
    assert (request.received is message) == is_overlapped, "written where it is applied"
    assert request.statuses is commit.statuses
    assert request.plan is commit.plan
    assert request.commit is None
    assert rounds.last_group == "7.5/3"
    assert "Round 3 counts: all members that are left have received it." in caplog.text


def test_a_worker_that_also_needs_the_state_asks_again(rounds: RoundThread) -> None:
    request = RoundRequest(3, WorkerStatus(IN_ROUND, 3, 2))
    rounds._finish_committed(request, committed(joining=(0,)))
    assert not request.is_done()
    assert request.plan is None
    assert rounds.last_group == ""

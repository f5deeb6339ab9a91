"""Quorum requests to a lighthouse: warnings while they wait, and how a stopping worker leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_loco._util.clock import REAL_CLOCK
from lightning_loco.distributed.worker_status import IN_ROUND, WorkerStatus
from lightning_loco.elastic import round_decisions as module
from lightning_loco.elastic.lighthouse import Lighthouse
from lightning_loco.elastic.quorum import NO_STATE, MemberInfo, Quorum, make_plan
from lightning_loco.elastic.round_decisions import RoundDecisions
from lightning_loco.elastic.round_request import PendingRound, RoundRequest
from lightning_loco.elastic.rounds import QuorumRequester
from tests.elastic import cluster
from tests.harness.programs import free_ports

pytestmark = [pytest.mark.recovery, pytest.mark.usefixtures("wait_for_threads")]

INFO = MemberInfo(3, "", ["127.0.0.1:1"], 0, "run", 2, "", [], [])
WAIT_S = 2.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WARN_EVERY_S", "WARN_UNREACHABLE_S", "STOP_WAIT_S"):
        monkeypatch.setattr(module, name, 0.3)


def request_quorums(
    address: str,
    is_stopping: Callable[[], bool] = lambda: False,
    round_index: int = 3,
    times: int = 1,
) -> list[Quorum]:
    lighthouse = Lighthouse(address, "w0")
    decisions = RoundDecisions(
        "w0",
        0,
        lighthouse.address,
        REAL_CLOCK,
        is_stopping,
        lambda: 0,
        lambda plan: False,
        min_workers=2,
        timeout_s=WAIT_S,
    )
    requester = QuorumRequester(lighthouse, list)
    status = WorkerStatus(IN_ROUND, round_index, 0)
    pending = PendingRound(RoundRequest(round_index, status, {}))
    pending.waited_since = REAL_CLOCK.now()
    try:
        return [requester.run(decisions.ask(pending, INFO, REAL_CLOCK.now())) for _ in range(times)]
    finally:
        lighthouse.close()


def test_a_warning_names_a_lighthouse_that_does_not_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (port,) = free_ports()
    with pytest.raises(RuntimeError, match=f"The lighthouse at 127.0.0.1:{port} does not answer"):
        request_quorums(f"127.0.0.1:{port}")
    lines = [text for text in caplog.messages if "Cannot reach" in text]
    assert len(lines) > 1
    assert f"the lighthouse at 127.0.0.1:{port} ([Errno 111] Connection refused); start" in lines[0]


def test_a_warning_reports_what_the_lighthouse_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    lighthouse = cluster.Lighthouse(2)
    try:
        with pytest.raises(RuntimeError, match="Fewer than 2 workers were there"):
            request_quorums(lighthouse.address, round_index=NO_STATE)
    finally:
        lighthouse.stop()
    *_, line = caplog.messages
    assert line.startswith(
        "This worker, which joins the run, waits for other workers. The lighthouse at 127."
    )
    assert "New quorum not ready, only have 1 participants, need min_replicas 2" in line
    assert "last heartbeats: w0 0" in line


@pytest.mark.parametrize("is_there", [True, False])
def test_a_worker_that_is_asked_to_stop_completes_its_round_alone(
    is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lighthouse = cluster.Lighthouse(2)
    if not is_there:
        lighthouse.stop()
    try:
        quorums = request_quorums(lighthouse.address, is_stopping=lambda: True, times=2)
    finally:
        lighthouse.stop()
    assert caplog.text.count("no longer waits for the others") == 1
    for quorum in quorums:
        plan = make_plan(quorum, "w0")
        assert (plan.names, plan.joining, plan.round_index, plan.min_members) == (("w0",), (), 3, 1)

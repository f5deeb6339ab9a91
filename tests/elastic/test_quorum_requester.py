"""Quorum requests to a lighthouse: warnings while they wait, and how a stopping worker leaves."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from lightning_loco.distributed.worker_status import IN_ROUND, WorkerStatus
from lightning_loco.elastic import rounds as module
from lightning_loco.elastic.lighthouse import Lighthouse
from lightning_loco.elastic.quorum import NO_STATE, MemberInfo, make_plan
from lightning_loco.elastic.rounds import QuorumRequester, RoundRequest
from tests.elastic import cluster
from tests.harness.programs import free_ports

pytestmark = [pytest.mark.recovery, pytest.mark.usefixtures("wait_for_threads")]

INFO = MemberInfo(3, "", ["127.0.0.1:1"], 0, "run", 2, "", [], [])
WAIT_S = 2.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WARN_EVERY_S", "WARN_UNREACHABLE_S", "STOP_WAIT_S"):
        monkeypatch.setattr(module, name, 0.3)


def request_quorum(
    address: str, is_stopping: Callable[[], bool] = lambda: False, round_index: int = 3
) -> tuple[object, QuorumRequester, RoundRequest]:
    request = RoundRequest(round_index, WorkerStatus(IN_ROUND, round_index, 0))
    request.waited_since = time.monotonic()
    lighthouse = Lighthouse(address, "w0")
    requester = QuorumRequester(lighthouse, list, is_stopping, WAIT_S)
    try:
        return requester.quorum(request, INFO, True, WAIT_S), requester, request
    finally:
        lighthouse.close()


def test_a_warning_names_a_lighthouse_that_does_not_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (port,) = free_ports()
    with pytest.raises(RuntimeError, match=f"The lighthouse at 127.0.0.1:{port} does not answer"):
        request_quorum(f"127.0.0.1:{port}")
    lines = [text for text in caplog.messages if "Cannot reach" in text]
    assert len(lines) > 1
    assert f"the lighthouse at 127.0.0.1:{port} ([Errno 111] Connection refused); start" in lines[0]


def test_a_warning_reports_what_the_lighthouse_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    lighthouse = cluster.Lighthouse(2)
    try:
        found, requester, request = request_quorum(lighthouse.address, round_index=NO_STATE)
    finally:
        lighthouse.stop()
    assert found is None
    *_, line = caplog.messages
    assert line.startswith(
        "This worker, which joins the run, waits for other workers. The lighthouse at 127."
    )
    assert "New quorum not ready, only have 1 participants, need min_replicas 2" in line
    assert "last heartbeats: w0 0" in line


def test_a_warning_names_the_present_members_if_they_are_too_few(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lighthouse = cluster.Lighthouse(1)
    try:
        found, requester, request = request_quorum(lighthouse.address)
    finally:
        lighthouse.stop()
    plan = make_plan(found, "w0")
    time.sleep(module.WARN_EVERY_S)
    requester.warn_incomplete(request, plan)
    assert "Round 3 waits for more workers. 1 of at least 2 are there (w0)" in caplog.text
    request.waited_since = None
    caplog.clear()
    requester.warn_incomplete(RoundRequest(4, request.status), plan)
    assert not caplog.messages


@pytest.mark.parametrize("is_there", [True, False])
def test_a_worker_that_is_asked_to_stop_completes_its_round_alone(
    is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lighthouse = cluster.Lighthouse(2)
    if not is_there:
        lighthouse.stop()
    try:
        found, requester, request = request_quorum(lighthouse.address, is_stopping=lambda: True)
        assert "no longer waits for the others" in caplog.text
        again = requester.quorum(request, INFO, True, WAIT_S)
    finally:
        lighthouse.stop()
    for quorum in (found, again):
        plan = make_plan(quorum, "w0")
        assert (plan.names, plan.joining, plan.round_index, plan.min_members) == (("w0",), (), 3, 1)

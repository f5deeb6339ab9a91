"""A malformed request in a quorum of a real lighthouse."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_loco import Elastic, StepEngine
from lightning_loco._util.background import run_in_thread
from lightning_loco.algorithms import DiLoCo
from lightning_loco.elastic.lighthouse import Lighthouse
from tests.elastic import cluster
from tests.elastic.test_quorum import info

pytestmark = [pytest.mark.recovery, pytest.mark.usefixtures("wait_for_threads")]

TIMEOUT_S = 20.0


def test_a_worker_with_an_invalid_address_is_named_and_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = cluster.Lighthouse(2)
    address = server.address
    request = {**info(7), "stores": ["somewhere"]}
    try:
        other = Lighthouse(address, "mallory")
        requesting = run_in_thread(lambda: other.quorum(lambda: request, TIMEOUT_S))
        membership = Elastic(
            address, min_workers=1, name="w0", host="127.0.0.1", timeout_s=TIMEOUT_S
        )
        engine = StepEngine(nn.Linear(2, 1), DiLoCo(), membership=membership)
        engine.start()
        assert engine.statistics.members == 1
        assert len(requesting.result().members) == 2
        engine.close()
        other.close()
    finally:
        server.stop()
    (warning,) = [text for text in caplog.messages if "mallory" in text]
    assert "its request is malformed, or of another version of lightning_loco" in warning

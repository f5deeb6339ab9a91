"""A member that cannot be used, in a quorum of a real lighthouse."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_loco import Elastic, StepEngine
from lightning_loco.algorithms import DiLoCo
from lightning_loco.background import begin
from lightning_loco.elastic.lighthouse import Lighthouse
from tests.elastic import cluster
from tests.elastic.test_quorum import told

pytestmark = [pytest.mark.recovery, pytest.mark.usefixtures("wait_for_threads")]

LONGEST_S = 20.0


def test_an_address_that_is_none_is_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    lighthouse = cluster.Lighthouse(2)
    here = lighthouse.address
    words = {**told(7), "store": "somewhere"}
    try:
        stranger = Lighthouse(here, "mallory")
        asking = begin(lambda: stranger.quorum(lambda: words, LONGEST_S))
        membership = Elastic(here, min_workers=1, name="w0", host="127.0.0.1", timeout_s=LONGEST_S)
        engine = StepEngine(nn.Linear(2, 1), DiLoCo(), membership=membership)
        engine.join()
        assert engine.statistics.members == 1
        assert len(asking.result().members) == 2
        engine.close()
        stranger.close()
    finally:
        lighthouse.stop()
    (warning,) = [text for text in caplog.messages if "mallory" in text]
    assert "its request is malformed, or of another version of lightning_loco" in warning

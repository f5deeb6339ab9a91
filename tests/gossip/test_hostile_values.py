"""Peers that follow the protocol and send implausible values: nothing is blended in."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator

import pytest
import torch

from lightning_loco import PairwiseAverage, PairwiseEngine
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip.protocol import ModelId
from tests.gossip.test_engine import Numbers
from tests.harness.gossip_nodes import DPWA, peers, replying, valid_reply

pytestmark = pytest.mark.recovery

TOTAL_BYTES = 8 * 8
NAN, INF = math.nan, math.inf


@contextlib.contextmanager
def against(value: float, tag: Tag, **settings: object) -> Iterator[tuple[Numbers, PairwiseEngine]]:
    """Open an engine of ones; its only peer always sends the same value and tag."""

    def make_reply(requested: ModelId) -> tuple[bytes, bytes]:
        return valid_reply(requested, TOTAL_BYTES, value, tag, torch.float64)

    nodes = peers(2, "w")
    model = Numbers(1.0)
    with replying(nodes[1].port, make_reply):
        engine = PairwiseEngine(
            model, PairwiseAverage(**DPWA | settings), nodes=nodes, name="w0", fetch_timeout_s=5
        )
        try:
            yield model, engine
        finally:
            engine.close()


@pytest.mark.parametrize("interpolation", ["constant", "clock", "loss"])
def test_implausible_clock_or_loss_changes_nothing(
    interpolation: str, subtests: pytest.Subtests
) -> None:
    for tag in (
        *(Tag(value, 1.0) for value in (NAN, INF, -INF, 1e300, -1e300, -1.0, 1e15)),
        *(Tag(5.0, value) for value in (NAN, INF, -INF, 1e300, -1e300)),
    ):
        with (
            subtests.test(clock=tag.clock, loss=tag.loss),
            against(2.0, tag, interpolation=interpolation) as (model, engine),
        ):
            for step in range(1, 4):
                engine.update_send(1.0)
                assert engine.update_wait(1.0) == 0.0
                assert engine.state_dict()["clock"] == step
            assert model.values.tolist() == [1.0] * 5
            assert engine.node.statistics.not_finite == 3
            assert engine.statistics.rounds == 0


def test_parameters_that_are_too_large_are_not_blended_in(subtests: pytest.Subtests) -> None:
    for value, was_finite in itertools.product((3e38, -3e38, 1e12, 1e3), (True, False)):
        with (
            subtests.test(value=value, was_finite=was_finite),
            against(value, Tag(5, 1)) as (model, engine),
        ):
            engine.update_send(1.0)
            assert engine.update_wait(1.0) == 0.0
            if not was_finite:
                model.values.data.fill_(NAN)
                engine._exchange.publisher._next_time = 0.0
            for _ in range(30):
                engine.update_send(1.0)
                assert engine.update_wait(1.0) == 0.0
            assert engine.node.statistics.too_large == 31
            assert model.mean.tolist() == [1.0] * 3

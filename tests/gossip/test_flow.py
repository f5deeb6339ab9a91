"""Flow control: the numbers of the scores, and that nobody is forgotten."""

from __future__ import annotations

from collections import Counter

import pytest

from lightning_loco.gossip.flow import FlowControl

NAMES = ["a", "b", "c"]


def test_scores_move_and_stay_within_their_bounds() -> None:
    flow = FlowControl(NAMES, seed=0)
    assert flow.scores == dict.fromkeys(NAMES, 1000)
    flow.succeeded("a")
    flow.failed("b")
    assert flow.scores == {"a": 1000, "b": 900, "c": 1000}
    flow.succeeded("b")
    assert flow.scores["b"] == 910
    for _ in range(20):
        flow.failed("b")
    assert flow.scores["b"] == 10


def test_equal_peers_are_chosen_equally_often() -> None:
    flow = FlowControl(NAMES, seed=1)
    counts = Counter(flow.choose() for _ in range(6000))
    assert set(counts) == set(NAMES)
    assert all(1800 < count < 2200 for count in counts.values())


def test_peers_that_failed_are_chosen_less_often() -> None:
    flow = FlowControl(NAMES, seed=2)
    for _ in range(3):
        flow.failed("a")
    assert Counter(flow.choose() for _ in range(200))["a"] < 50


def test_a_dead_peer_is_tried_now_and_then_and_comes_back() -> None:
    flow = FlowControl(NAMES, seed=3)
    tries = []
    for number in range(4000):
        name = flow.choose()
        assert name is not None
        if name == "a":
            tries.append(number)
            flow.failed("a")
        else:
            flow.succeeded(name)
    late = [number for number in tries if number >= 1000]
    assert 10 <= len(late) <= 100
    assert max(b - a for a, b in zip(late, late[1:], strict=False)) <= 990
    # It is alive again.
    for _ in range(1000):
        name = flow.choose()
        assert name is not None
        flow.succeeded(name)
    assert flow.scores["a"] == 1000
    assert Counter(flow.choose() for _ in range(3000))["a"] > 800


def test_draws_depend_on_the_seed_alone() -> None:
    def draws(seed: int) -> list[str | None]:
        flow = FlowControl(NAMES, seed)
        return [flow.choose() for _ in range(50)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)


@pytest.mark.parametrize("without", [["a"], ["a", "b"]])
def test_peers_can_be_left_out(without: list[str]) -> None:
    flow = FlowControl(NAMES, seed=0)
    chosen = {flow.choose(without=without) for _ in range(100)}
    assert chosen == set(NAMES) - set(without)


def test_nobody_is_left_to_choose() -> None:
    assert FlowControl([], seed=0).choose() is None
    assert FlowControl(NAMES, seed=0).choose(without=NAMES) is None

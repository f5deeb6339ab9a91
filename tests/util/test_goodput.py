"""The definition of goodput, and when a worker is a straggler."""

from __future__ import annotations

import pytest

from lightning_loco._util.goodput import Counted, Goodput, SpentTime, find_straggler


def test_shares_add_up_and_what_is_not_counted_is_lost() -> None:
    spent = SpentTime(100, 400.0, compute_s=200.0, wait_s=80.0, join_s=40.0, away_s=80.0)
    found = Goodput.of(spent, Counted(merged=60.0, pending=10.0))
    assert found == pytest.approx((0.3, 0.05, 0.15, 0.2, 0.1, 0.2))
    expected = {"goodput": 0.35, "waiting": 0.2, "joining": 0.1, "lost": 0.15, "restarting": 0.2}
    assert found.parts == pytest.approx(expected)
    with pytest.raises(ValueError, match="no time yet"):
        Goodput.of(spent._replace(time_s=0.0), Counted(0.0, 0.0))


def test_a_straggler_is_slower_than_the_median_in_most_rounds() -> None:
    usual, busy = [1.0, 1.1, 0.9, 1.9], [9.0, 1.0, 1.0, 1.9]  # worker 0 has saved a checkpoint
    found = find_straggler([*[usual] * 10, busy, busy])
    assert found is not None
    assert found == (3, pytest.approx(1.9), 12)
    assert str(found) == "worker 3 took 1.9x the median step in the last 12 rounds"


def test_of_two_workers_the_faster_one_is_the_median() -> None:
    assert find_straggler([[3.0, 1.0]] * 10) == (0, 3.0, 10)


@pytest.mark.parametrize(
    "rounds",
    [
        [],
        [[1.0, 5.0]] * 9,  # too few
        [[5.0]] * 20,  # no other one to compare with
        [[1.0, 1.2, 1.0]] * 20,
        [*[[1.0, 0.0, 1.0]] * 9, *[[1.0, 5.0, 1.0]] * 9],
        [[0.0, 0.0]] * 20,
    ],
)
def test_no_worker_is_called_a_straggler_without_a_reason(rounds: list[list[float]]) -> None:
    assert find_straggler(rounds) is None

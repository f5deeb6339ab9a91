"""`cover`: some rows of a product, and the remaining ones with --full."""

from __future__ import annotations

import itertools

import pytest

from tests.harness import cover as module
from tests.harness.cover import cover

AXES = (range(5), "abcd", (True, False))


def test_all_pairs_occur_in_fewer_rows() -> None:
    rows = [row.values for row in cover(*AXES)]
    for one, other in itertools.combinations(range(3), 2):
        pairs = set(itertools.product(AXES[one], AXES[other]))
        assert {(row[one], row[other]) for row in rows} == pairs
    assert len(rows) == 20


def test_with_strength_1_every_value_occurs_and_those_of_short_axes_in_turn() -> None:
    rows = [row.values for row in cover(*AXES, strength=1)]
    assert sorted(row[0] for row in rows) == [0, 1, 2, 3, 4]
    assert {row[1] for row in rows} == set("abcd")
    assert sum(row[2] for row in rows) in (2, 3)


def test_rows_that_are_not_possible_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_full in (False, True):
        monkeypatch.setattr(module, "_full", is_full)
        one = [pytest.param(number, -number, id=str(number)) for number in range(5)]
        rows = cover(one, range(5), possible=lambda n, minus, other: n != other and minus == -n)
        assert {row.values for row in rows} == {
            (n, -n, other) for n in range(5) for other in range(5) if n != other
        }


def test_the_rest_comes_with_full_and_is_marked_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {row.values for row in cover(*AXES)}
    monkeypatch.setattr(module, "_full", True)
    rows = cover(*AXES)
    assert {row.values for row in rows} == set(itertools.product(*AXES))
    for row in rows:
        is_soak = [mark.name for mark in row.marks] == ["soak"]
        assert is_soak == (row.values not in few)


def test_ids_and_marks_of_values_are_kept() -> None:
    one = pytest.param(1, 2, id="one", marks=pytest.mark.alone)
    (row,) = cover([one], ["a"])
    assert (row.values, row.id) == ((1, 2, "a"), "one-a")
    assert [mark.name for mark in row.marks] == ["alone"]

"""The table of test cases is complete, and every common test runs on all rows."""

from __future__ import annotations

import importlib
from types import FunctionType
from typing import Any

import pytest

import lightning_loco.algorithms
from lightning_loco import LocoStrategy
from lightning_loco.algorithms import Algorithm
from lightning_loco.schedules import EveryInterval
from lightning_loco.strategies import METHODS
from tests.cases import BY_CLOCK, BY_FRAGMENTS, CASES, LEFT_OUT, params

# Methods without rounds, which have separate tests.
WITHOUT_ROUNDS = {"pairwise_gossip", "decoupled_diloco", "remote_optimizer"}
# The module of each common test, by its name in `rows(...)` and in the field `not_in`.
TESTS = {
    "laws": "tests.algorithms.test_common",
    "same numbers": "tests.strategies.test_same_numbers",
    "resume": "tests.strategies.test_checkpoint",
    "uneven": "tests.strategies.test_uneven",
    "nan": "tests.strategies.test_nan",
    "nan by hand": "tests.strategies.test_nan",
}
NAMES = {id(case): name for name, case in CASES.items()}
# Common tests that run on some rows only.
OF_SOME = {
    "alone",
    "chunks",
    "without progress",
    "external updates",
    "nan ends",
}


def test_every_algorithm_with_rounds_has_a_row() -> None:
    public = {
        getattr(lightning_loco.algorithms, name) for name in lightning_loco.algorithms.__all__
    }
    algorithms = {
        kind
        for kind in public
        if isinstance(kind, type) and issubclass(kind, Algorithm) and kind is not Algorithm
        if kind.exchange != "pull"  # pulls have no rounds
    }
    assert algorithms == {type(case.algorithm) for case in CASES.values()}


def test_every_method_with_rounds_has_a_row() -> None:
    assert set(METHODS) <= {*CASES, *WITHOUT_ROUNDS}


def test_the_row_of_a_method_has_the_settings_of_its_strategy(subtests: pytest.Subtests) -> None:
    for name in sorted(set(METHODS) - WITHOUT_ROUNDS):
        with subtests.test(name):
            case, strategy = CASES[name], METHODS[name]
            settings: dict[str, Any] = {"interval_s": 0.0} if case.by_clock else {"sync_every": 7}
            if case.fragments is not None:
                settings["fragments"] = 2  # test models have two layers
            if name == "sparta":
                settings["fraction"] = 0.25  # test models have few parameters
            if name == "streaming_diloco":
                settings["delay"] = 5  # its default for a larger sync_every
            if name == "async_diloco":
                settings["fragments"] = None  # fragments: see test_streaming.py
            assert strategy(**settings).settings == case.strategy(7).settings


@pytest.mark.parametrize("name", sorted(WITHOUT_ROUNDS))
def test_methods_without_rounds_have_none(name: str) -> None:
    strategy = METHODS[name]
    if issubclass(strategy, LocoStrategy):
        assert strategy().settings.algorithm.exchange == "pull"
    assert name not in CASES


def rows_of(module: str) -> list[set[str]]:
    """Return the rows on which each test of a module runs."""
    found = []
    for function in vars(importlib.import_module(module)).values():
        if isinstance(function, FunctionType) and function.__name__.startswith("test_"):
            for mark in getattr(function, "pytestmark", []):
                names = mark.args[0] if mark.name == "parametrize" else ()
                names = [names] if isinstance(names, str) else list(names)
                if "case" in names:
                    cases = [param.values[names.index("case")] for param in mark.args[1]]
                    found.append({NAMES[id(case)] for case in cases})
    return found


@pytest.mark.parametrize("test", TESTS)
def test_every_row_is_run_or_has_a_reason(test: str) -> None:
    left_out = {name for name, case in CASES.items() if case.not_in.get(test) in LEFT_OUT}
    assert set(CASES) - left_out in rows_of(TESTS[test])


def test_the_reasons_of_a_row_are_true(subtests: pytest.Subtests) -> None:
    for name, case in CASES.items():
        with subtests.test(name):
            assert set(case.not_in) <= {*TESTS, *OF_SOME}
            assert (BY_CLOCK in case.not_in.values()) == case.by_clock
            assert (BY_FRAGMENTS in case.not_in.values()) == (case.fragments is not None)
            assert isinstance(case.strategy(7).schedule, EveryInterval) == case.by_clock
            if case.variant_of is not None:
                other = CASES[case.variant_of]
                assert other.variant_of is None
                assert type(other.algorithm) is type(case.algorithm)
                assert (other.topology is None) == (case.topology is None)
                assert (other.overlap, other.by_clock) == (case.overlap, case.by_clock)


def test_a_row_that_is_not_in_a_test_is_left_out_or_must_fail() -> None:
    assert not any(param.values[0].by_clock for param in params("same numbers"))
    for test in OF_SOME:
        marks = {
            param.id: [mark.name for mark in param.marks if mark.name != "soak"]
            for param in params(test)
        }
        failing = {name for name, case in CASES.items() if test in case.not_in}
        assert marks == {name: ["xfail"] if name in failing else [] for name in CASES}

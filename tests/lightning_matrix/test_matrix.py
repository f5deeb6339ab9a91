"""Every cell of the matrix has the expected outcome, and its page is up to date."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.harness.pool import Pool
from tests.lightning_matrix.compare import Runs, problem
from tests.lightning_matrix.render import page
from tests.lightning_matrix.row_run import REMOTE, Outcome
from tests.lightning_matrix.table import (
    AS_DDP,
    FEATURES_OF_TWO_RANKS,
    OF_TWO_RANKS,
    ROWS,
    STRATEGIES,
    TABLE,
    Better,
    NotTested,
    Refused,
    Row,
)

# Warnings of Lightning's features are not tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

OUTER = ("diloco", "streaming_diloco", "gasloc")
"""Used in turn: rounds of all parameters, of fragments, and with neighbours."""

WITHOUT_ROUNDS = ("async_model_average", "pairwise_gossip")
"""Used in turn: averages by the clock, and pulls from one peer."""


def chosen(feature: str) -> list[str]:
    """Return the strategies that are tested for every change; the others run in the soak.

    One of each kind, and each with a separate expected outcome.
    """
    turn = list(ROWS).index(feature)
    some = {OUTER[turn % 3], WITHOUT_ROUNDS[turn % 2], REMOTE, *ROWS[feature].but}
    return [name for name in STRATEGIES if name in some]


@pytest.fixture(scope="module")
def runs(pool: Pool) -> Iterator[Runs]:
    memory = Path("/dev/shm")  # checkpoints are synced to disk, which may take long
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Runs(pool, Path(folder))


@pytest.mark.parametrize("feature", ROWS)
def test_feature_with_a_strategy_of_each_kind(
    runs: Runs, feature: str, subtests: pytest.Subtests
) -> None:
    check(runs, ROWS[feature], chosen(feature), subtests)


@pytest.mark.soak
@pytest.mark.parametrize("feature", ROWS)
def test_feature_with_the_other_strategies(
    runs: Runs, feature: str, subtests: pytest.Subtests
) -> None:
    others = [name for name in STRATEGIES if name not in chosen(feature)]
    check(runs, ROWS[feature], others, subtests)


QUICK = ("fit with validation", "resume with ckpt_path", "gradient_clip_val by norm")
"""Features that are tested with workers of two ranks for every change; others are in the soak."""


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(feature, marks=[] if feature in QUICK else pytest.mark.soak)
        for feature in FEATURES_OF_TWO_RANKS
    ],
)
def test_feature_with_workers_of_two_ranks(
    runs: Runs, feature: str, subtests: pytest.Subtests
) -> None:
    row = skip_without_package(ROWS[feature])
    verdicts = {name: row.of(name) for name in OF_TWO_RANKS}
    compares = AS_DDP in verdicts.values()
    ddp = runs.outcomes_of_ranks(row, "ddp") if compares else []
    for name, verdict in verdicts.items():
        if not isinstance(verdict, NotTested):
            with subtests.test(name):
                outcomes = runs.outcomes_of_ranks(row, name)
                wrong = problem(verdict, outcomes, ddp if verdict is AS_DDP else [])
                assert not wrong, wrong


def skip_without_package(row: Row) -> Row:
    """Skip the test if a package is missing; return the row otherwise."""
    if row.needs and importlib.util.find_spec(row.needs) is None:
        pytest.skip(f"needs {row.needs}")
    return row


def check(runs: Runs, row: Row, strategies: list[str], subtests: pytest.Subtests) -> None:
    """Run a row with some strategies, and compare each with its expected outcome."""
    outcomes = runs.outcomes(skip_without_package(row), strategies)
    for name in strategies:
        verdict = row.of(name)
        with subtests.test(name):
            reference = outcomes["ddp"] if verdict is AS_DDP else []
            wrong = problem(verdict, outcomes[name], reference)
            assert not wrong, wrong


def test_no_feature_is_listed_twice() -> None:
    assert len(ROWS) == sum(map(len, TABLE.values()))


def test_the_page_has_every_row() -> None:
    lines = page().splitlines()
    for feature in ROWS:
        assert any(line.startswith(f"| {feature} |") for line in lines), feature


# ------------------------------------------------------------------------ the comparison itself


def done(*models: float, error: str = "", **facts: object) -> Outcome:
    return Outcome(facts, [torch.tensor([model]) for model in models], [], error)


RIGHT = [done(1.0, steps=8), done(1.0, steps=8)]


def test_the_comparison_accepts_expected_outcomes() -> None:
    assert problem(AS_DDP, RIGHT, RIGHT) == ""
    assert problem(Better("", {"steps": 8}), RIGHT, []) == ""
    refused = [done(error="ValueError: it is not there")] * 3
    assert problem(Refused("is not there"), refused, []) == ""
    assert problem(AS_DDP, refused, [done(error="RuntimeError: it is not there\nat all")]) == ""


@pytest.mark.parametrize(
    ("verdict", "outcomes", "text"),
    [
        (AS_DDP, [done(1.0, steps=7), done(1.0, steps=8)], "on worker 0 steps is 7 instead of 8"),
        (AS_DDP, [done(1.0, steps=8), done(1.5, steps=8)], "different weights, 0.5 apart"),
        (AS_DDP, [done(float("nan"), steps=8)] * 2, "not finite"),
        (AS_DDP, [done(1.0, steps=8), done(error="OSError: late")], "OSError: late"),
        (Better("", {"steps": 9}), RIGHT, "steps is 8 instead of 9"),
        (Refused("there"), RIGHT, "no error on ranks [0, 1]"),
        (Refused("there"), [done(error="ValueError: here")] * 2, "not the error 'there', but Val"),
        (Better("", error="there"), [done(error="there"), done()], "no error on ranks [1]"),
    ],
)
def test_the_comparison_finds_differences(
    verdict: object, outcomes: list[Outcome], text: str
) -> None:
    assert text in problem(verdict, outcomes, RIGHT if verdict is AS_DDP else [])  # type: ignore[arg-type]


def test_the_comparison_uses_the_mean_of_what_was_written() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    right = [Outcome({}, [], [(1.5 * one, one)]), Outcome({}, [], [(1.5 * one, two)])]
    wrong = [Outcome({}, [], [(one, one)]), Outcome({}, [], [(one, two)])]
    assert problem(Better(""), right, []) == ""
    assert "0.5 away from the mean" in problem(Better(""), wrong, [])

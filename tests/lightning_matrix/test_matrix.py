"""Every cell of the matrix comes true, and the page that shows it is up to date."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.lightning_matrix.judging import Runs, problem
from tests.lightning_matrix.kit import Outcome
from tests.lightning_matrix.render import PAGE, page
from tests.lightning_matrix.table import AS_DDP, ROWS, STRATEGIES, TABLE, Better, Refused
from tests.pool import Pool

# What features of Lightning warn of is theirs; here it is told what comes of them.
pytestmark = pytest.mark.filterwarnings("ignore")

NOT_YET: dict[str, tuple[str, ...]] = {}
"""By feature: strategies with which it does not come true yet. One that does fails the test."""

SHORT = {
    "fit with validation",
    "validate",
    "fit twice with one Trainer",
    "resume with ckpt_path",
    "fast_dev_run",
    "should_stop on one worker",
    "IterableDataset",
    "different numbers of batches, and torchmetrics",
    "accumulate_grad_batches",
    "GAN with two optimizers",
    "trainer.model.no_sync()",
    "freezing in mid-fit",
    "complex parameters",
    "EarlyStopping",
    "ModelCheckpoint by a metric",
    "EMAWeightAveraging",
    "weights set in on_train_start",
}
"""Features that stand for the others in the short suite."""

KIN = ("async_diloco", "eager_diloco", "delayed_nesterov", "noloco")
"""Strategies that differ from others there by their defaults or their formula alone."""

CELLS = [
    pytest.param(
        feature,
        strategy,
        id=f"{feature} - {strategy}",
        marks=[] if feature in SHORT and strategy not in KIN else [pytest.mark.soak],
    )
    for feature in ROWS
    for strategy in STRATEGIES
]


@pytest.fixture(scope="module")
def runs(pool: Pool) -> Iterator[Runs]:
    memory = Path("/dev/shm")  # checkpoints are synced to disk, which may take long
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Runs(pool, Path(folder))


@pytest.mark.parametrize(("feature", "strategy"), CELLS)
def test_cell(runs: Runs, feature: str, strategy: str) -> None:
    row = ROWS[feature]
    if row.needs and importlib.util.find_spec(row.needs) is None:
        pytest.skip(f"needs {row.needs}")
    verdict = row.of(strategy)
    outcomes = runs.outcomes(row, strategy)
    reference = runs.outcomes(row, "ddp") if verdict is AS_DDP else []
    wrong = problem(verdict, outcomes, reference)
    if strategy in NOT_YET.get(feature, ()):
        assert wrong, f"{feature} works with {strategy}: take it out of NOT_YET"
        pytest.xfail(wrong)
    assert not wrong, wrong


def test_the_table_is_large_and_no_feature_is_there_twice() -> None:
    assert len(ROWS) == sum(map(len, TABLE.values())) >= 80
    assert set(NOT_YET) <= set(ROWS)
    assert set(ROWS) >= SHORT


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.lightning_matrix.render"


# ------------------------------------------------------------------------ the judge itself


def done(*models: float, error: str = "", **facts: object) -> Outcome:
    return Outcome(facts, [torch.tensor([model]) for model in models], [], error)


RIGHT = [done(1.0, steps=8), done(1.0, steps=8)]


def test_the_judge_accepts_what_is_right() -> None:
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
def test_the_judge_finds_what_is_wrong(verdict: object, outcomes: list[Outcome], text: str) -> None:
    assert text in problem(verdict, outcomes, RIGHT if verdict is AS_DDP else [])  # type: ignore[arg-type]


def test_the_judge_compares_with_the_mean_of_what_was_written() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    right = [Outcome({}, [], [(1.5 * one, one)]), Outcome({}, [], [(1.5 * one, two)])]
    wrong = [Outcome({}, [], [(one, one)]), Outcome({}, [], [(one, two)])]
    assert problem(Better(""), right, []) == ""
    assert "0.5 away from the mean" in problem(Better(""), wrong, [])

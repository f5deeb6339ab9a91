"""The benchmark of outer momentum: its page has the results that are kept, of five seeds."""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

import pytest

from tests.harness.pages import doc
from tests.harness.sources import ROOT


@pytest.fixture(scope="module")
def benchmark() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module("momentum")


@pytest.fixture(scope="module")
def results(benchmark: Any) -> Any:
    options = argparse.Namespace(quick=False, seeds=[0, 1, 2, 3, 4])
    return benchmark.Results(json.loads(benchmark.KEPT.read_text()), options)


def test_the_page_has_the_results(benchmark: Any, results: Any) -> None:
    page = doc("results/momentum.md").text
    assert benchmark.harness.with_tables(page, results.tables(benchmark.GROUPS)) == page


def test_cells_that_decide_have_five_seeds(
    benchmark: Any, results: Any, subtests: pytest.Subtests
) -> None:
    first = argparse.Namespace(quick=False, seeds=[0, 1])
    for group in benchmark.GROUPS:
        deciding = benchmark.Results(results.found, first).close(group)
        for cell in benchmark.GROUPS[group]:
            with subtests.test(f"{group} {cell.row} {cell.column}"):
                assert len(results.of(cell)) >= (5 if cell in deciding else 2)

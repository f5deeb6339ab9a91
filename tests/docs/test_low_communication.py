"""The benchmark of low-communication training: rows, their results and the page agree."""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pages import doc
from tests.harness.sources import ROOT

PAGE = doc("results/low_communication.md")
FOLDER = ROOT / "benchmarks" / "low_communication"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER.parent)
        yield importlib.import_module("low_communication")


FULL, QUICK = argparse.Namespace(quick=False), argparse.Namespace(quick=True)


@pytest.fixture
def results(benchmark: Any) -> Any:
    return benchmark.Results(FOLDER / "results", FULL)


def test_results_belong_to_the_settings_of_their_rows(
    benchmark: Any, results: Any, subtests: pytest.Subtests
) -> None:
    files = sorted((FOLDER / "results").glob("*.json"))
    assert files
    for file in files:
        with subtests.test(file.stem):
            for table in results.found[file.stem]:
                found = results.of(file.stem, table)
                assert found, f"Train {file.stem} again: its settings have changed"
                assert all(1 < one["loss"] < math.log(256) for one in found.values())
                assert all(one["rounds"] > 0 for one in found.values())


def test_the_page_has_the_results(benchmark: Any, results: Any) -> None:
    assert benchmark.with_tables(PAGE.text, results) == PAGE.text


def test_rows_send_as_many_bytes(benchmark: Any, results: Any, subtests: pytest.Subtests) -> None:
    ((_, base), *_) = results.of("diloco", "bytes").items()
    for name, row in benchmark.ROWS.items():
        if row.method is None or name in ("diloco_sparse", "sparseloco"):
            continue
        sent = [found["sent_mb"] for found in results.of(name, "bytes").values()]
        if name == "pairwise_gossip":  # chance decides in which steps it fetches
            sent = [statistics.fmean(sent)]
        for megabytes in sent:
            with subtests.test(name):
                assert megabytes == pytest.approx(base["sent_mb"], rel=0.08)


def test_slowmo_knows_the_learning_rate(benchmark: Any, results: Any) -> None:
    for table in ("bytes", "time"):
        settings = benchmark.make_settings(benchmark.ROWS["slowmo"].settings(table))
        for found in results.of("slowmo", table).values():
            assert abs(found["rounds"] - settings.algorithm.fast_lr.rounds) <= 2


def test_each_row_has_settings_for_its_tables(benchmark: Any, subtests: pytest.Subtests) -> None:
    for name, row in benchmark.ROWS.items():
        for table, (_, cluster) in benchmark.TABLES.items():
            if row.method is None or row.changes(table) is None:
                continue
            with subtests.test(f"{name} {table}"):
                settings = benchmark.make_settings(row.settings(table))
                assert settings.prepare(len(cluster["speeds"])).algorithm is not None


def test_results_of_other_settings_are_not_used(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = benchmark.Results(tmp_path, FULL)
    for seed in (1, 0):
        results.add(benchmark.Training("diloco", "time", seed), {"loss": 2.0 + seed})
    assert benchmark.Results(tmp_path, FULL).losses("diloco", "time") == [2.0, 3.0]
    assert benchmark.Results(tmp_path, QUICK).losses("diloco", "time") == []
    row = benchmark.ROWS["diloco"]
    changed = row._replace(equal_time={"sync_every": 9})
    monkeypatch.setitem(benchmark.ROWS, "diloco", changed)
    assert benchmark.Results(tmp_path, FULL).losses("diloco", "time") == []
    monkeypatch.setitem(benchmark.ROWS, "diloco", row._replace(title="of no consequence"))
    assert benchmark.Results(tmp_path, FULL).losses("diloco", "time") == [2.0, 3.0]

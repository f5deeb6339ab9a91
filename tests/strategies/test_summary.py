"""The summary at the end of a run."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import (
    ConsensusMonitor,
    GASLoC,
    LocalSGDStrategy,
    ReportCallback,
    StepEngine,
)
from lightning_loco._util.text import format_bytes
from lightning_loco.app.result_table import measure
from lightning_loco.report.page import tiles
from lightning_loco.report.record import RunRecord
from lightning_loco.strategies.arguments import argument_names
from lightning_loco.strategies.registry import METHODS
from lightning_loco.strategies.summary import describe
from tests.harness.messages import RANK_ZERO, messages_of
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, WorkerData, flat, make_loader
from tests.strategies.families import BY_TIME, fit_part, fit_with

STEPS = 9
PAUSE_S = 0.5
OPTIONS = {"sync_every": 4, "fragments": 2, "num_workers": 2}


def test_the_first_line_says_which_momentum_gasloc_has() -> None:
    for momentum_on, momentum in (("gossiped", 0.7), ("local", 0.5)):
        algorithm = GASLoC(momentum_on=momentum_on)  # type: ignore[arg-type]
        engine = StepEngine(TinyModule(), algorithm, sync_every=5, topology="ring")
        line = describe(engine, engine.settings.schedule)
        engine.close()
        assert f"momentum={momentum}, momentum_on='{momentum_on}'" in line


def fit(rank: int, world: int, name: str, summary: bool) -> list[str]:
    kind = METHODS[name]
    shown = argument_names(kind)
    options = {key: value for key, value in OPTIONS.items() if key in shown}
    strategy = kind(summary=summary, **options)
    with messages_of(RANK_ZERO) as texts:
        fit_with(strategy, TinyModule(), make_loader(rank, STEPS))
    return [text for text in texts if "Training is over" in text]


def test_every_fit_ends_with_its_summary(pool: Pool, subtests: pytest.Subtests) -> None:
    of_ddp = format_bytes(STEPS * flat(TinyModule()).nbytes)  # two workers
    for name in METHODS:
        with subtests.test(name):
            world = 3 if name == "remote_optimizer" else 2
            first, *others = pool.run(fit, name, True, world=world)
            assert others == [[]] * (world - 1)
            (text,) = first
            rows = dict(re.split(r"\s{2,}", line.strip()) for line in text.splitlines()[1:])
            assert rows["local steps"] == str(STEPS)
            assert rows["sent"].endswith(f" (DDP: {of_ddp})")
            assert re.fullmatch(r"[\d.]+ m?s", rows["waited"])
            assert re.fullmatch(r"\d+%( \([a-z]+ \d+%(, [a-z]+ \d+%)*\))?", rows["goodput"])
            if name == "remote_optimizer":
                assert rows["rounds"] == str(STEPS)
            else:
                assert float(rows["consensus distance"]) > 0
            if "sync_every" in argument_names(METHODS[name]) and name not in BY_TIME:
                assert rows["rounds"] == {"async_diloco": "4", "streaming_diloco": "4"}.get(
                    name, "2"
                )


def fit_with_reports(rank: int, world: int, folder: Path) -> tuple[list[str], str]:
    """Return the summary, and the table of ``train.py``."""
    module = TinyModule()
    with messages_of(RANK_ZERO) as texts:
        trainer = make_trainer(
            LocalSGDStrategy(sync_every=4),
            callbacks=[ConsensusMonitor(), ReportCallback(folder)],
            max_epochs=1,
            use_distributed_sampler=False,
        )
        trainer.fit(module, make_loader(rank, STEPS))
    summary = next((text for text in texts if "Training is over" in text), "")
    return summary.splitlines(), measure(trainer, module, LightningDataModule(), 1.0).table()


def test_summary_table_and_page_show_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    (summary, table), (none, _) = pool.run(fit_with_reports, tmp_path, world=2)
    assert none == []
    assert summary[0] == "Training is over. Mean of 2 workers:"
    rows, in_table = (
        dict(re.split(r"\s{2,}", line.strip()) for line in lines)
        for lines in (summary[1:], table.splitlines())
    )
    record = RunRecord.load(tmp_path)
    on_page = {name: value for name, value, _ in tiles(record)}
    (consensus,) = record.of_kind("consensus")
    assert rows["rounds"] == in_table["rounds"] == on_page["rounds"] == "2"
    assert rows["waited"] == in_table["waited per worker"] == on_page["waited per worker"]
    sent = rows["sent"].partition(" (")[0]
    assert sent == in_table["sent per worker"] == on_page["sent per worker"]
    assert rows["consensus distance"] == in_table["consensus distance"]
    assert rows["consensus distance"] == f"{consensus.points[-1][3]:.3g}"


def train_and_resume(rank: int, world: int, folder: str) -> list[Any]:
    """Return steps, seconds and seconds away before and after a resumption, and the tables."""
    found: list[Any] = []
    loader = StatefulDataLoader(WorkerData(rank, 6), batch_size=None)
    for part in ("first", "second"):
        strategy = LocalSGDStrategy(sync_every=2)
        with messages_of(RANK_ZERO) as texts:
            fit_part(strategy, TinyModule(), part, folder, loader)
        statistics = strategy.statistics
        table = "".join(text for text in texts if "Training is over" in text)
        found.append((statistics.steps, statistics.time_s, statistics.away_s, table))
        time.sleep(PAUSE_S)
    return found


def test_the_time_until_a_resumption_is_that_of_a_restart(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(train_and_resume, str(tmp_path), world=2)
    for rank, ((steps, _, away_s, table), resumed) in enumerate(found):
        assert (steps, away_s) == (5, 0.0)
        assert "restarting" not in table
        steps, time_s, away_s, table = resumed
        assert steps == 12
        assert PAUSE_S < away_s < time_s
        assert ("restarting" in table) == (rank == 0)


def test_the_summary_can_be_disabled(pool: Pool) -> None:
    assert pool.run(fit, "diloco", False, world=2) == [[], []]


def test_bytes_have_decimal_units() -> None:
    rows = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 12_345_678: "12.3 MB", 4.2e15: "4,200.0 TB"}
    assert {number: format_bytes(number) for number in rows} == rows

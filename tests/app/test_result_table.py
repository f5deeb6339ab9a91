"""The report of a finished run: the table, the metrics."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from lightning_loco.app.result_table import RunReport

REPORT = RunReport(
    algorithm="GASLoC",
    topology="ring",
    num_workers=4,
    val_loss=1.7,
    is_per_byte=True,
    tokens=2_457_600,
    rounds=60,
    bytes_sent=402_186_240,
    wait_s=1.25,
    train_s=43_200.0,
    consensus_distance=0.0123,
)


def test_the_table_is_aligned() -> None:
    lines = REPORT.table().splitlines()
    assert lines[0] == "algorithm           GASLoC"
    assert {line[18:20] for line in lines} == {"  "}
    assert "validation loss     1.7000 nats per byte (2.453 bits)" in lines
    assert "sent per worker     402.2 MB" in lines
    assert "waited per worker   1.25 s" in lines
    assert "training time       12.0 h" in lines
    assert "consensus distance  0.0123" in lines


def test_only_the_loss_of_bytes_has_a_unit() -> None:
    other = dataclasses.replace(REPORT, is_per_byte=False)
    assert "validation loss     1.7000" in other.table().splitlines()


def test_missing_values_are_dashes() -> None:
    lines = RunReport(algorithm="DDP", topology=None, num_workers=1).table().splitlines()
    assert [line.split()[-1] for line in lines] == ["DDP", "-", "1", *"-------"]


def test_files(tmp_path: Path) -> None:
    REPORT.write(tmp_path / "run")
    assert (tmp_path / "run/report.txt").read_text() == REPORT.table() + "\n"
    values = json.loads((tmp_path / "run/report.json").read_text())
    assert RunReport(**values) == REPORT

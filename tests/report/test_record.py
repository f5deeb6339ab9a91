"""The record of a run: curves of bounded size, and its file."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest

from lightning_loco.report.record import Curve, RunRecord, replace_file
from lightning_loco.report.trace import write_trace
from tests.report.records import made_up


def test_a_long_curve_keeps_its_mean_its_range_and_its_end() -> None:
    draw = random.Random(0)
    values = [draw.gauss(0, 1) for _ in range(1000 * 64)]
    curve = Curve("train_loss", "training", max_points=100)
    for step, value in enumerate(values, start=1):
        curve.add(step, step / 8, 2 * step, value)
        assert len(curve.points) < 100
    assert curve.values_per_point == 1024
    means = [point[3] for point in curve.points]
    whole = values[: 1024 * len(means)]
    assert sum(means) / len(means) == pytest.approx(sum(whole) / len(whole))
    for number, (step, seconds, num_bytes, _, low, high) in enumerate(curve.points):
        part = values[1024 * number : 1024 * (number + 1)]
        assert (step, seconds, num_bytes) == (
            1024 * (number + 1),
            128 * (number + 1),
            2048 * (number + 1),
        )
        assert (low, high) == (min(part), max(part))
    # The file contains the values of the last, incomplete point.
    rest = curve.to_json()["points"][len(curve.points) :]
    assert [point[0] for point in rest] == ([64_000] if 64_000 % 1024 else [])


def test_a_short_curve_is_exact() -> None:
    curve = Curve("train_loss", "training")
    for step in range(10):
        curve.add(step, step, None, step**2)
    assert [point[3] for point in curve.points] == [step**2 for step in range(10)]


def test_values_that_are_not_finite_are_counted() -> None:
    curve = Curve("train_loss", "training")
    for value in (1.0, math.nan, math.inf, 2.0):
        curve.add(1, 1.0, None, value)
    assert curve.not_finite == 2
    assert [point[3] for point in curve.points] == [1.0, 2.0]


def test_losses_that_have_diverged_have_a_mean() -> None:
    curve = Curve("train_loss", "training", max_points=2)
    for step in range(4):
        curve.add(step, step, None, 1.7e308)
    assert [point[3] for point in curve.points] == [pytest.approx(1.7e308)]


def test_a_file_returns_the_record(tmp_path: Path) -> None:
    record = made_up()
    record.save(tmp_path)
    found = RunRecord.load(tmp_path)
    assert [curve.to_json() for curve in found.curves] == [c.to_json() for c in record.curves]
    for field in dataclasses.fields(RunRecord):
        if field.name not in ("curves", "events"):
            assert getattr(found, field.name) == getattr(record, field.name), field.name
    for one, other in zip(found.events, record.events, strict=True):
        assert one[:2] == other[:2]
        assert one[2:] == pytest.approx(other[2:], abs=1e-6)


def test_settings_may_be_infinite(tmp_path: Path) -> None:
    """An iterable dataset has infinitely many batches."""
    record = made_up()
    record.settings = {"trainer": {"batches": math.inf, "rates": [1.0, math.nan]}}
    record.save(tmp_path)
    expected = {"trainer": {"batches": "inf", "rates": [1.0, "nan"]}}
    assert RunRecord.load(tmp_path).settings == expected


CURVE = {"kind": "train_loss", "name": "x"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, '"format": 1'),
        ({"events": [[9, "wait", 0, 1]]}, "an event is of no lane"),
        ({"events": [[0, "wait", 0]]}, "not enough values"),
        ({"curves": [{**CURVE, "points": [[1, "a", 0, 1, 1, 1]]}]}, "'a'"),
        ({"topology": {"name": "x", "num_workers": 1, "edges": [[0, 1]]}}, "none of the 1 workers"),
        ({"seconds": math.nan}, "nan, not a finite number"),
        ({"seconds": 10**400}, "too large"),
        ({"events_left_out": "1e400"}, "infinity"),
        ({"warnings": {"text": "1e400"}}, "infinity"),
        ({"curves": [{**CURVE, "points": [[-1, 0, 0, 1, 1, 1]]}]}, "a local step is -1"),
        ({"curves": [{**CURVE, "points": [[10**400, 0, 0, 1, 1, 1]]}]}, "too large"),
        ({"lanes": 3}, "not iterable"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    made_up().save(tmp_path)
    file = tmp_path / "run.json"
    text = json.dumps({**json.loads(file.read_text()), **changes})
    file.write_text(text.replace('"1e400"', "1e400"))  # too large for a float
    with pytest.raises(ValueError, match="no record of a run that can be read") as raised:
        RunRecord.load(tmp_path)
    assert message in str(raised.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="can be read: it has no 'lanes'"):
        RunRecord.load(tmp_path)


def test_text_is_no_record(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for text in ("", "[]", "{", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ValueError, match="no record of a run that can be read"):
            RunRecord.load(file)
    with pytest.raises(FileNotFoundError, match="Name the folder of a run"):
        RunRecord.load(tmp_path / "elsewhere")


def test_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.html"
    replace_file(file, "old")

    def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="disk full"):
        replace_file(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_the_trace_has_counters(tmp_path: Path) -> None:
    record = made_up()
    write_trace(record, tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "C":
            ((name, value),) = event["args"].items()
            assert name == event["name"]
            found.setdefault((event["pid"], name), []).append((event["ts"], value))
    first, second = record.of_kind("train_loss")
    (distance,) = record.of_kind("consensus")
    expected = {
        (0, distance.name): [(1e6 * point[1], point[3]) for point in distance.points],
        (0, "loss"): [(1e6 * point[1], point[3]) for point in first.points],
        (1, "bytes sent"): [(1e6 * point[1], point[2]) for point in second.points],
    }
    assert found.keys() == {*expected, (1, "loss"), (0, "bytes sent")}
    for key, points in expected.items():
        assert [ts for ts, _ in found[key]] == pytest.approx([ts for ts, _ in points], abs=0.1)
        assert [value for _, value in found[key]] == [value for _, value in points]


def test_the_trace_has_all_events(tmp_path: Path) -> None:
    record = made_up()
    write_trace(record, tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == record.lanes
    whole = [(e["pid"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    starts = {e["id"]: e for e in events if e["ph"] == "b"}
    ends = {e["id"]: e for e in events if e["ph"] == "e"}
    assert starts.keys() == ends.keys()
    whole += [(e["pid"], e["name"], e["ts"], ends[key]["ts"]) for key, e in starts.items()]
    expected = [(lane, kind, 1e6 * start, 1e6 * end) for lane, kind, start, end in record.events]
    for one, other in zip(sorted(whole), sorted(expected), strict=True):
        assert one[:2] == other[:2]
        assert one[2:] == pytest.approx(other[2:], abs=0.2)

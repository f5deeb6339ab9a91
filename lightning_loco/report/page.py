"""Pages of HTML: one run, or several beside each other.

A page is one file without links to others: it works offline, from a mail or a cluster's file
server. Its drawings are SVG elements that :mod:`~lightning_loco.report.charts` computes, and some
lines of JavaScript show the values under the pointer. That takes 0.05 to 0.2 megabytes for a
run, where plotly's library alone has more than four, and follows the reader's light or dark colors
and the width of the screen, which pictures of matplotlib do not; so neither has to be installed.

All text of a run is escaped by the templates, and the page allows no other script than its own.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from lightning_loco._util.goodput import PARTS
from lightning_loco._util.text import format_bytes, format_seconds
from lightning_loco.report.charts import (
    BELOW,
    NUM_COLORS,
    Chart,
    Series,
    TimelineChart,
    XAxis,
    draw,
    draw_graph,
    draw_timeline,
    mean_of,
    some_rounds,
)
from lightning_loco.report.record import Curve, Point, RunRecord, replace_file
from lightning_loco.report.trace import TRACE_FILE, write_trace

PAGE_FILE = "report.html"
"""Name of the page in the folder of a run."""

KINDS = ("compute", "validation", "checkpoint", "sync point", "wait", "round", "send")
"""Kinds of events in the order in which they are drawn, the last one on top."""

PART_KINDS = dict(
    zip(PARTS, ("compute", "wait", "sync point", "checkpoint", "validation"), strict=True)
)
"""Kinds of events whose colors the parts of a worker's time have."""

MAX_LANES = 64
"""Lanes of a timeline."""

MAX_METRICS = 8
"""Charts of metrics that a validation has logged."""

MAX_COMPARED = 2 * NUM_COLORS
"""Runs in the charts of a comparison: the second half has dashed lines."""

AXES: dict[str, XAxis] = {"local steps": "step", "time": "time", "bytes": "bytes"}
"""The horizontal axes of losses, by their names in titles of charts."""

MAX_GRAPH = 64
"""Workers of a topology that is drawn."""


def format_value(value: float) -> str:
    """Format a value of a curve with four significant digits."""
    return f"{value:.4g}"


_FOLDER = Path(__file__).parent / "templates"
_SCRIPT = (_FOLDER / "hover.js").read_text(encoding="utf-8")
_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters["value"] = format_value
_ENVIRONMENT.globals |= {
    "style": (_FOLDER / "style.css").read_text(encoding="utf-8"),
    "script": _SCRIPT,
    "script_hash": base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode(),
}


def write_report(record: RunRecord, folder: Path) -> Path:
    """Write ``report.html``, ``run.json`` and ``trace.json`` into a folder, and return the page."""
    folder.mkdir(parents=True, exist_ok=True)
    record.save(folder)
    write_trace(record, folder)
    page = folder / PAGE_FILE
    replace_file(page, render_run(record))
    return page


# ---------------------------------------------------------------------------- one run


def render_run(record: RunRecord) -> str:
    """Return the page of a run."""
    start_s, end_s = span(record)
    rounds = some_rounds(record.events)
    lanes = record.lanes[:MAX_LANES]
    events = [event for event in record.events if event[0] < len(lanes)]
    kinds = [kind for kind in known_kinds(record) if any(kind == event[1] for event in events)]
    timelines = [draw_timeline(lanes, events, kinds, start_s, end_s)] if events else []
    if rounds is not None:
        timelines.append(draw_timeline(lanes, events, kinds, *rounds))
    topology = record.topology
    return _ENVIRONMENT.get_template("run.html").render(
        title=record.title,
        record=record,
        tiles=list(tiles(record)),
        loss_charts=loss_charts(record),
        other_charts=other_charts(record),
        timelines=[timeline for timeline in timelines if isinstance(timeline, TimelineChart)],
        lanes_left_out=len(record.lanes) - len(lanes),
        kinds=kinds,
        below=BELOW,
        kind_class=kind_class,
        goodput=goodput_chart(record),
        parts=PARTS,
        shares=[(name, share_row(own)) for name, own in zip(lanes, record.shares, strict=False)],
        num_training=len(record.of_kind("train_loss")),
        num_colors=NUM_COLORS,
        graph=None
        if topology is None or topology.num_workers > MAX_GRAPH
        else draw_graph(topology),
        settings=list(flat(record.settings)),
        values_per_point=max((curve.values_per_point for curve in record.curves), default=1),
        not_finite=[(curve.name, curve.not_finite) for curve in record.curves if curve.not_finite],
        trace_file=TRACE_FILE,
    )


def goodput_chart(record: RunRecord) -> TimelineChart | None:
    """Draw what the time of all workers and of each was for; None if that is not known."""
    found = list(zip(record.lanes[:MAX_LANES], record.goodput, strict=False))
    if not found:
        return None
    events = []
    for lane, (_, parts) in enumerate([("all", mean_parts(record)), *found]):
        ends = [*itertools.accumulate((parts.get(part, 0.0) for part in PARTS), initial=0.0)]
        events += [
            (lane, part, *pair) for part, pair in zip(PARTS, itertools.pairwise(ends), strict=True)
        ]
    names = ["all", *(name for name, _ in found)]
    chart = draw_timeline(names, events, PARTS, 0.0, 1.0)
    return chart and dataclasses.replace(chart, label="share of the time")


def mean_parts(record: RunRecord) -> dict[str, float]:
    """Return what the time of all workers was for."""
    count = len(record.goodput)
    return {part: sum(one.get(part, 0.0) for one in record.goodput) / count for part in PARTS}


def span(record: RunRecord) -> tuple[float, float]:
    """Return the start and the end of the timeline, in seconds."""
    ends = [end_s for *_, end_s in record.events]
    return min((start_s for *_, start_s, _ in record.events), default=0.0), max(ends, default=0.0)


def known_kinds(record: RunRecord) -> list[str]:
    """Return the kinds of events: first the ones with their own color."""
    found = {event[1] for event in record.events} | {kind for own in record.shares for kind in own}
    return [kind for kind in KINDS if kind in found] + sorted(found - set(KINDS))


def kind_class(kind: str) -> str:
    """Return the class of an element that shows a kind of event, or a part of the time."""
    kind = PART_KINDS.get(kind, kind)
    return f"k-{KINDS.index(kind)}" if kind in KINDS else "k-other"


def share_row(shares: Mapping[str, float]) -> dict[str, str]:
    """Format the seconds of each kind, and percentages that add up to 100.

    Rounds and messages have none: a worker does something else meanwhile.
    """
    seconds = {kind: own for kind, own in shares.items() if kind not in BELOW}
    total = math.fsum(seconds.values()) or 1.0
    parts = {kind: 100 * own / total for kind, own in seconds.items()}
    percent = {kind: math.floor(part) for kind, part in parts.items()}
    missing = round(math.fsum(parts.values())) - sum(percent.values())
    for kind in sorted(parts, key=lambda kind: percent[kind] - parts[kind])[:missing]:
        percent[kind] += 1
    return {
        kind: format_seconds(own) + (f" ({percent[kind]}%)" if kind in percent else "")
        for kind, own in shares.items()
    }


def tiles(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers at the top of the page: name, value, remark."""
    for curve in record.of_kind("validation")[:2]:
        yield curve.name, format_value(curve.points[-1][3]), f"after step {curve.points[-1][0]:,}"
    if train := record.of_kind("train_loss"):
        last = mean_of(train)[-1]
        yield "training loss", format_value(last[3]), f"at step {last[0]:,}"
    for curve in record.of_kind("consensus")[:1]:
        yield curve.name, format_value(curve.points[-1][3]), f"at step {curve.points[-1][0]:,}"
    if record.bytes_sent is not None:
        remark = ""
        if record.ddp_bytes:
            remark = f"DDP: {format_bytes(record.ddp_bytes)}"
            if record.bytes_sent:
                remark += f", {format_value(record.ddp_bytes / record.bytes_sent)} times as much"
        yield "sent per worker", format_bytes(record.bytes_sent), remark
    waited_s = mean_share(record, "wait") if record.wait_s is None else record.wait_s
    if record.goodput:
        yield "goodput", f"{mean_parts(record)[PARTS[0]]:.1%}", "of the time"
    if waited_s is not None:
        part = f"{waited_s / record.seconds:.1%} of the time" if record.seconds else ""
        yield "waited per worker", format_seconds(waited_s), part
    yield "time", format_seconds(record.seconds), ""
    for name, value in record.numbers.items():
        yield name, f"{value:,}" if isinstance(value, (int, float)) else str(value), ""


def mean_share(record: RunRecord, kind: str) -> float | None:
    """Return the mean seconds of a kind of event over the lanes; None if nothing was recorded."""
    if not any(kind in own for own in record.shares):
        return None
    return sum(own.get(kind, 0.0) for own in record.shares) / len(record.shares)


def loss_charts(record: RunRecord) -> list[Chart]:
    """Draw the losses against steps, time and bytes: the mean of the workers, and each of them.

    Each has a color: with more workers than there are colors, only their mean and range are drawn.
    """
    train = record.of_kind("train_loss")
    single = train if 1 < len(train) < NUM_COLORS else []  # the mean has the first color
    workers = [Series(c.name, c.points, n, is_worker=True) for n, c in enumerate(single, start=1)]
    validations = [
        Series(curve.name, curve.points, -1 - number, is_strong=True)
        for number, curve in enumerate(record.of_kind("validation")[:2])
    ]
    of_ddp = ddp_curve(record, mean_of(train))
    name = f"training, mean of {len(train)} workers" if len(train) > 1 else "training"
    charts = []
    for what, x in AXES.items():
        mean = Series(name, mean_of(train, x))
        series = [*workers, mean, *validations, *(of_ddp if x == "bytes" else [])]
        charts.append(draw(f"Loss against {what}", series, x, "loss"))
    return [chart for chart in charts if chart is not None]


def ddp_curve(record: RunRecord, points: Sequence[Point]) -> list[Series]:
    """Return the training losses at the bytes that DDP would have sent for as many steps."""
    if not record.ddp_bytes or not record.bytes_sent or not points or not points[-1][0]:
        return []
    per_step = record.ddp_bytes / points[-1][0]
    moved = [(step, s, step * per_step, *values) for step, s, _, *values in points]
    name = "training, if every step had sent what DDP sends"
    return [Series(name, moved, -1, is_dashed=True)]  # type: ignore[arg-type]


def other_charts(record: RunRecord) -> list[Chart]:
    """Draw learning rates, the consensus distance and other metrics against steps."""
    consensus, rates = record.of_kind("consensus"), record.of_kind("learning_rate")
    charts = [
        draw("Learning rate", series_of(rates), "step", "learning rate"),
        draw(
            "Consensus distance",
            series_of(consensus),
            "step",
            "distance (root mean square)",
            may_start_log=True,
        ),
        *(
            draw(curve.name, series_of([curve]), "step", curve.name)
            for curve in record.of_kind("metric")[:MAX_METRICS]
        ),
    ]
    return [chart for chart in charts if chart is not None]


def series_of(curves: Sequence[Curve]) -> list[Series]:
    """Return the curves, at most one per color."""
    return [Series(c.name, c.points, number) for number, c in enumerate(curves[:NUM_COLORS])]


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names of settings that have a value, with their groups, and the values as text."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif value is not None and name != "_convert_":
            yield f"{prefix}{name}", str(value)


# ----------------------------------------------------------------------- several runs


def render_comparison(records: Mapping[str, RunRecord]) -> str:
    """Return the page that compares runs."""
    trained = {name: record.of_kind("train_loss") for name, record in records.items()}
    validated = {name: record.of_kind("validation")[:1] for name, record in records.items()}
    charts = []
    for kind, found in (("Validation loss", validated), ("Training loss", trained)):
        for what, x in AXES.items():
            series = [
                Series(
                    name,
                    mean_of(curves, x),
                    number % NUM_COLORS,
                    is_strong=kind == "Validation loss",
                    is_dashed=number >= NUM_COLORS,
                )
                for number, (name, curves) in enumerate(list(found.items())[:MAX_COMPARED])
            ]
            charts.append(draw(f"{kind} against {what}", series, x, "loss"))
    rows = {name: {label: value for label, value, _ in compared(r)} for name, r in records.items()}
    return _ENVIRONMENT.get_template("comparison.html").render(
        title="Runs compared",
        charts=[chart for chart in charts if chart is not None],
        rows=rows,
        columns=list(dict.fromkeys(label for row in rows.values() for label in row)),
        records=records,
        num_colors=NUM_COLORS,
        max_compared=MAX_COMPARED,
        differing=differing_settings(records),
    )


def compared(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield the cells of a run in the table of runs."""
    yield "run", record.title, ""
    for label, value, remark in tiles(record):
        yield label, value, remark
        if label == "sent per worker" and record.ddp_bytes:
            yield "DDP would send", format_bytes(record.ddp_bytes), ""
    if record.ended:
        yield "ended", record.ended.splitlines()[0], ""


def differing_settings(records: Mapping[str, RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the settings that are not equal in all runs, with the value in each."""
    settings = [dict(flat(record.settings)) for record in records.values()]
    names = dict.fromkeys(name for own in settings for name in own)
    found = [(name, [own.get(name, "") for own in settings]) for name in names]
    return [(name, values) for name, values in found if len(set(values)) > 1]

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
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from lightning_loco.report.charts import (
    BELOW,
    NUM_COLORS,
    Chart,
    Series,
    Timeline,
    draw,
    draw_graph,
    draw_timeline,
    mean_of,
    some_rounds,
)
from lightning_loco.report.record import Curve, Point, RunRecord
from lightning_loco.report.trace import TRACE_FILE, write_trace
from lightning_loco.values import format_bytes, format_seconds

PAGE_FILE = "report.html"
"""Name of the page in the folder of a run."""

KINDS = ("compute", "validation", "checkpoint", "sync point", "wait", "round", "send")
"""Kinds of events in the order in which they are drawn, the last one on top."""

MAX_LANES = 64
"""Lanes of a timeline."""

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
_ENVIRONMENT.filters |= {"bytes": format_bytes, "seconds": format_seconds, "value": format_value}
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
    page.write_text(render_run(record), encoding="utf-8")
    return page


def write_comparison(records: Mapping[str, RunRecord], page: Path) -> None:
    """Write a page that compares runs, which have names."""
    page.write_text(render_comparison(records), encoding="utf-8")


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
        timelines=[timeline for timeline in timelines if isinstance(timeline, Timeline)],
        lanes_left_out=len(record.lanes) - len(lanes),
        kinds=kinds,
        below=BELOW,
        kind_class=kind_class,
        shares=[(name, share_row(own, record.seconds)) for name, own in named_shares(record)],
        graph=None
        if topology is None or topology.num_workers > MAX_GRAPH
        else draw_graph(topology),
        settings=list(flat(record.settings)),
        values_per_point=max((curve.values_per_point for curve in record.curves), default=1),
        not_finite=[(curve.name, curve.not_finite) for curve in record.curves if curve.not_finite],
        trace_file=TRACE_FILE,
    )


def span(record: RunRecord) -> tuple[float, float]:
    """Return the start and the end of the timeline, in seconds."""
    ends = [end_s for *_, end_s in record.events]
    return min((start_s for *_, start_s, _ in record.events), default=0.0), max(ends, default=0.0)


def known_kinds(record: RunRecord) -> list[str]:
    """Return the kinds of events: those that have a color of their own, then the others."""
    found = {event[1] for event in record.events} | {kind for own in record.shares for kind in own}
    return [kind for kind in KINDS if kind in found] + sorted(found - set(KINDS))


def kind_class(kind: str) -> str:
    """Return the class of an element that shows a kind of event."""
    return f"k-{KINDS.index(kind)}" if kind in KINDS else "k-other"


def named_shares(record: RunRecord) -> list[tuple[str, dict[str, float]]]:
    """Return the seconds of each kind of event, by lane."""
    return list(zip(record.lanes, record.shares, strict=False))[:MAX_LANES]


def share_row(shares: Mapping[str, float], seconds: float) -> dict[str, str]:
    """Format the seconds of each kind, and their share of all."""
    return {
        kind: f"{format_seconds(own)} ({own / seconds:.0%})" if seconds else format_seconds(own)
        for kind, own in shares.items()
    }


def tiles(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers at the top of the page: name, value, remark."""
    for curve in record.of_kind("validation")[:2]:
        yield curve.name, format_value(curve.points[-1][3]), f"after step {curve.points[-1][0]:,}"
    if train := record.of_kind("train_loss"):
        last = mean_of(train)[-1]
        yield "training loss", format_value(last[3]), f"at step {last[0]:,}"
    if record.bytes_sent is not None:
        remark = ""
        if record.ddp_bytes:
            remark = f"DDP: {format_bytes(record.ddp_bytes)}"
            if record.bytes_sent:
                remark += f", {format_value(record.ddp_bytes / record.bytes_sent)} times as much"
        yield "sent per worker", format_bytes(record.bytes_sent), remark
    waited_s = mean_share(record, "wait") if record.wait_s is None else record.wait_s
    if waited_s is not None:
        part = f"{waited_s / record.seconds:.1%} of the time" if record.seconds else ""
        yield "waited per worker", format_seconds(waited_s), part
    if record.link_s is not None:
        ddp_s = record.ddp_link_s
        remark = "" if ddp_s is None else f"DDP: {format_seconds(ddp_s)}"
        yield "messages on the emulated link", format_seconds(record.link_s), remark
    yield "time", format_seconds(record.seconds), ""
    for name, value in record.numbers.items():
        yield name, f"{value:,}" if isinstance(value, (int, float)) else str(value), ""


def mean_share(record: RunRecord, kind: str) -> float | None:
    """Return the mean seconds of a kind of event over the lanes; None if nothing was recorded."""
    if not any(kind in own for own in record.shares):
        return None
    return sum(own.get(kind, 0.0) for own in record.shares) / len(record.shares)


def loss_charts(record: RunRecord) -> list[Chart]:
    """Draw the losses against steps, time and bytes."""
    train = record.of_kind("train_loss")
    if len(train) > NUM_COLORS:
        name = f"training, mean of {len(train)} workers, in the range of their values"
        shown = [Series(name, mean_of(train))]
    else:
        shown = [Series(curve.name, curve.points, n) for n, curve in enumerate(train)]
    validations = record.of_kind("validation")
    shown += [
        Series(curve.name, curve.points, -1 - number, is_strong=True)
        for number, curve in enumerate(validations[:2])
    ]
    of_ddp = ddp_curve(record, mean_of(train))
    charts = [
        draw("Loss against local steps", shown, "step"),
        draw("Loss against time", shown, "time"),
        draw("Loss against bytes", [*shown, *of_ddp], "bytes"),
    ]
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
        draw("Learning rate", series_of(rates), "step"),
        draw("Consensus distance", series_of(consensus), "step", is_log=spreads(consensus)),
        *(draw(curve.name, series_of([curve]), "step") for curve in record.of_kind("metric")[:8]),
    ]
    return [chart for chart in charts if chart is not None]


def series_of(curves: Sequence[Curve]) -> list[Series]:
    """Return at most so many curves as there are colors."""
    return [Series(c.name, c.points, number) for number, c in enumerate(curves[:NUM_COLORS])]


def spreads(curves: Iterable[Curve]) -> bool:
    """Return whether the values are positive and differ by more than a factor of 30."""
    values = [point[3] for curve in curves for point in curve.points]
    return bool(values) and 0 < 30 * min(values) < max(values)


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names of settings, with those of their groups, and their values as text."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "" if value is None else str(value)


# ----------------------------------------------------------------------- several runs


def render_comparison(records: Mapping[str, RunRecord]) -> str:
    """Return the page that compares runs."""
    trained = {name: mean_of(record.of_kind("train_loss")) for name, record in records.items()}
    validated = {
        name: curves[0].points if (curves := record.of_kind("validation")) else []
        for name, record in records.items()
    }
    charts = []
    axes = (("step", "local steps"), ("time", "time"), ("bytes", "bytes"))
    for kind, found in (("Validation loss", validated), ("Training loss", trained)):
        series = [
            Series(name, points, number % NUM_COLORS, kind == "Validation loss", number >= 8)
            for number, (name, points) in enumerate(found.items())
        ]
        charts += [draw(f"{kind} against {what}", series, x) for x, what in axes]  # type: ignore[arg-type]
    rows = {name: {label: value for label, value, _ in compared(r)} for name, r in records.items()}
    return _ENVIRONMENT.get_template("comparison.html").render(
        title="Runs compared",
        charts=[chart for chart in charts if chart is not None],
        rows=rows,
        columns=list(dict.fromkeys(label for row in rows.values() for label in row)),
        records=records,
        differing=differing_settings(records),
    )


def compared(record: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield what the table of runs shows of one."""
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

"""The timeline as a trace, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_loco.report.charts import BELOW
from lightning_loco.report.record import Curve, RunRecord, replace_file

TRACE_FILE = "trace.json"
"""Name of the file in the folder of a run."""


def write_trace(record: RunRecord, folder: Path) -> None:
    """Write the events of a run as a JSON object of Chrome's Trace Event Format.

    Each worker is a process with one thread; its rounds and messages, which may overlap, are
    asynchronous events, which the viewers draw on separate tracks. The loss and the bytes sent of
    each worker, and the consensus distance beside the first one, are counters.
    """
    events: list[dict[str, Any]] = []
    for lane, name in enumerate(record.lanes):
        own = {"ph": "M", "pid": lane, "tid": 0}
        events.append({**own, "name": "process_name", "args": {"name": name}})
        events.append({**own, "name": "process_sort_index", "args": {"sort_index": lane}})
        events.append({**own, "name": "thread_name", "args": {"name": "training"}})
    for number, (lane, kind, start_s, end_s) in enumerate(record.events):
        start, end = (round(1e6 * seconds, 1) for seconds in (start_s, end_s))
        own = {"name": kind, "cat": kind, "pid": lane, "tid": 0}
        if kind in BELOW:
            events.append({**own, "ph": "b", "id": number, "ts": start})
            events.append({**own, "ph": "e", "id": number, "ts": end})
        else:
            events.append({**own, "ph": "X", "ts": start, "dur": round(end - start, 1)})
    for curve in record.of_kind("train_loss"):
        events += counter("loss", curve, 3)
        events += counter("bytes sent", curve, 2)
    for curve in record.of_kind("consensus"):
        events += counter(curve.name, curve, 3)
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    replace_file(folder / TRACE_FILE, json.dumps(trace) + "\n")


def counter(name: str, curve: Curve, field: int) -> list[dict[str, Any]]:
    """Return one field of the points of a curve as events of a counter."""
    own = {"ph": "C", "pid": curve.lane or 0, "tid": 0, "name": name}
    return [
        {**own, "ts": round(1e6 * point[1], 1), "args": {name: point[field]}}
        for point in curve.points
        if point[field] is not None
    ]

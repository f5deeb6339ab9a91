"""The timeline as a trace, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_loco.report.charts import BELOW
from lightning_loco.report.record import RunRecord

TRACE_FILE = "trace.json"
"""Name of the file in the folder of a run."""


def write_trace(record: RunRecord, folder: Path) -> None:
    """Write the events of a run as a JSON object of Chrome's Trace Event Format.

    Each worker is a process with one thread; its rounds and messages, which may overlap, are
    asynchronous events, which the viewers draw on tracks of their own.
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
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    (folder / TRACE_FILE).write_text(json.dumps(trace) + "\n", encoding="utf-8")

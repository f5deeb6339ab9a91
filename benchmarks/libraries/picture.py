"""The tables of all links as one picture."""

from __future__ import annotations

import statistics
from pathlib import Path

from libraries.summary import MB, Run, Runs
from libraries.table import ALONE, ENTRIES


def draw(tables: dict[str, Runs], path: Path) -> None:
    """Bars of the blocking time and of the bytes of a round, for each library and link."""
    from matplotlib.figure import Figure

    ran = {key for runs in tables.values() for key in runs if _done(runs, key)}
    keys = [key for key in ENTRIES if key in ran - {ALONE}]
    figure = Figure(figsize=(10, 1.5 + 0.35 * len(keys) * len(tables)), layout="constrained")
    time, size = figure.subplots(1, 2, sharey=True)
    thickness = 0.8 / len(tables)
    for index, (name, runs) in enumerate(tables.items()):
        shown = [(row, _done(runs, key)) for row, key in enumerate(keys)]
        shown = [(row, done) for row, done in shown if done]
        at = [row + (index - (len(tables) - 1) / 2) * thickness for row, _ in shown]
        blocking = [
            statistics.median(ms for run in done for ms in run.blocking_ms) for _, done in shown
        ]
        sent = [statistics.median(run.sent / MB for run in done) for _, done in shown]
        for axes, values in ((time, blocking), (size, sent)):
            bars = axes.barh(at, [max(value, 1e-3) for value in values], thickness, label=name)
            labels = [f"{value:,.3g}" if value < 100 else f"{value:,.0f}" for value in values]
            axes.bar_label(bars, labels, padding=2, fontsize=8)
    time.set(xscale="log", xlabel="blocking ms a round", yticks=range(len(keys)))
    time.set_yticklabels([ENTRIES[key].title for key in keys])
    time.invert_yaxis()
    size.set(xlabel="MB sent by a worker a round")
    for axes in (time, size):
        axes.margins(x=0.15)
    time.set_xlim(left=1)
    figure.legend(*size.get_legend_handles_labels(), loc="outside upper center", ncols=len(tables))
    figure.savefig(path, dpi=120)


def _done(runs: Runs, key: str) -> list[Run]:
    return [run for run in runs.get(key, []) if run is not None]

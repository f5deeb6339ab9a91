"""Draw the pictures of these pages: what travels when, the tiers of a remote optimizer, and places.

Run it: python docs/draw_pictures.py            (or with another folder, and a suffix such as png)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

STEP, WAIT, MESSAGE, TEXT = "#4a7fb5", "#dcdcdc", "#c8511b", "#222222"
WORKERS = 4
END = 12.3  # of the time axis, in local steps
HEIGHT = 0.62
PACE = (0.93, 1.0, 0.88, 0.96)  # time of a local step of each worker
SLOW_PACE = 3.0


def lane(worker: int) -> float:
    """Vertical middle of a worker's line; worker 0 is on top."""
    return WORKERS - 1 - worker


def steps(axes: Axes, worker: int, start: float, count: int, pace: float) -> float:
    """Draw local steps one after the other; returns when the last one ends."""
    for index in range(count):
        left = start + index * pace
        if left + pace > END:
            return END
        axes.add_patch(
            Rectangle((left + 0.03, lane(worker) - HEIGHT / 2), pace - 0.06, HEIGHT, color=STEP)
        )
    return start + count * pace


def wait(axes: Axes, worker: int, start: float, end: float) -> None:
    """Draw a worker that has nothing to do."""
    axes.add_patch(
        Rectangle(
            (start + 0.03, lane(worker) - HEIGHT / 2), end - start - 0.06, HEIGHT,
            facecolor=WAIT, edgecolor="white", hatch="////", linewidth=0,
        )
    )  # fmt: skip


def arrow(
    axes: Axes,
    tail: tuple[float, float],
    head: tuple[float, float],
    style: str = "-|>",
    line: str = "-",
) -> None:
    axes.annotate(
        "", xy=head, xytext=tail,
        arrowprops={"arrowstyle": style, "color": MESSAGE, "linewidth": 1.6, "linestyle": line,
                    "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11},
    )  # fmt: skip


def all_to_all(axes: Axes, time: float) -> None:
    """An all-reduce: one line through all workers."""
    arrow(axes, (time, lane(WORKERS - 1) - 0.42), (time, lane(0) + 0.42), "<|-|>")
    axes.plot([time] * WORKERS, range(WORKERS), "o", color=MESSAGE, markersize=4)


def draw_every_step(axes: Axes, exchange: float = 0.45) -> None:
    time = 0.0
    while time + max(PACE) + exchange < END:
        for worker, pace in enumerate(PACE):
            end = steps(axes, worker, time, 1, pace)
            wait(axes, worker, end, time + max(PACE) + exchange)
        time += max(PACE) + exchange
        all_to_all(axes, time - exchange / 2)


def draw_diloco(axes: Axes) -> None:
    time = 0.0
    for _ in range(2):
        latest = time + 4 * max(PACE)
        for worker, pace in enumerate(PACE):
            wait(axes, worker, steps(axes, worker, time, 4, pace), latest + 1)
        all_to_all(axes, latest + 0.5)
        time = latest + 1
    for worker, pace in enumerate(PACE):
        steps(axes, worker, time, 4, pace)


def draw_delayed_nesterov(axes: Axes) -> None:
    draw_diloco(axes)
    for number, what in ((1, "plain step"), (2, "step with momentum")):
        middle = number * (4 * max(PACE) + 1) - 0.5
        axes.text(middle, lane(WORKERS - 1) - 0.68, what, ha="center", va="center", fontsize=9,
                  color=MESSAGE)  # fmt: skip


def draw_fragments(axes: Axes, fragments: int, every: int, delay: int) -> None:
    """Rounds of fragments in turn, one after each number of local steps, each late by a delay."""
    pace, below = 0.96, -0.85
    for worker in range(WORKERS):
        steps(axes, worker, 0.0, 12, pace)
    for index in range(12 // every):
        sent = (index + 1) * every * pace
        applied = sent + delay * pace
        if applied > END:
            break
        axes.plot([sent] * WORKERS, range(WORKERS), "o", color=MESSAGE, markersize=4)
        arrow(axes, (sent, lane(0) + 0.42), (sent, below))
        arrived = applied - 0.25
        axes.add_patch(Rectangle((sent, below - 0.22), arrived - sent, 0.44, color=MESSAGE))
        axes.text(
            (sent + arrived) / 2, below - 0.02, f"part {index % fragments + 1}",
            color="white", ha="center", va="center", fontsize=8,
        )  # fmt: skip
        arrow(axes, (applied - 0.08, below), (applied - 0.08, lane(0) + 0.42))


def draw_a_phase_late(axes: Axes) -> None:
    pace, gap, below = 0.96, 0.3, -0.85
    phase = 4 * pace + gap
    for worker in range(WORKERS):
        for index in range(3):
            steps(axes, worker, index * phase, 4, pace)
    for index in (1, 2):
        sent = index * phase - 0.7 * gap
        arrived, applied = sent + 2.7, (index + 1) * phase - 0.3 * gap
        axes.plot([sent] * WORKERS, range(WORKERS), "o", color=MESSAGE, markersize=4)
        arrow(axes, (sent, lane(0) + 0.42), (sent, below))
        axes.add_patch(Rectangle((sent, below - 0.22), arrived - sent, 0.44, color=MESSAGE))
        axes.text(
            (sent + arrived) / 2, below - 0.02, f"mean of round {index}",
            color="white", ha="center", va="center", fontsize=8,
        )  # fmt: skip
        if applied < END:
            axes.plot([arrived, applied], [below, below], ":", color=MESSAGE, linewidth=1.6)
            arrow(axes, (applied, below), (applied, lane(0) + 0.42))


def draw_gasloc(axes: Axes) -> None:
    start = [0.0] * WORKERS
    paces = ((0.98, 0.86, 0.84, 0.95), (0.9, 0.9, 0.99, 0.86), PACE)
    for round_paces in paces:
        end = [steps(axes, w, start[w], 4, pace) for w, pace in enumerate(round_paces)]
        for worker in range(WORKERS):
            around = [end[worker], end[worker - 1], end[(worker + 1) % WORKERS]]
            start[worker] = max(around) + 0.62
            if max(around) < END - 0.7:
                wait(axes, worker, end[worker], start[worker])
        for worker in range(WORKERS):
            for peer in (worker - 1, worker + 1):
                # The ring closes behind the picture: over the upper and the lower edge.
                last = lane(peer) if 0 <= peer < WORKERS else lane(worker) + 0.8 * (worker - peer)
                if end[worker] < END - 0.7:
                    arrow(axes, (end[worker] + 0.06, lane(worker)), (end[worker] + 0.6, last))
    axes.text(END, lane(WORKERS - 1) - 0.72, "workers 0 and 3 are neighbours, too",
              ha="right", va="center", fontsize=9, color=TEXT)  # fmt: skip


def draw_pairs(axes: Axes) -> None:
    """Rounds of random pairs: two workers wait for each other only."""
    start = [0.0] * WORKERS
    for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))):
        end = [steps(axes, w, start[w], 4, PACE[w]) for w in range(WORKERS)]
        for pair in pairs:
            latest = max(end[worker] for worker in pair)
            if latest > END - 0.7:
                continue
            for worker in pair:
                start[worker] = latest + 0.5
                wait(axes, worker, end[worker], start[worker])
            arrow(axes, (latest + 0.25, lane(pair[0])), (latest + 0.25, lane(pair[1])), "<|-|>")


def ends_of_steps(worker: int) -> list[float]:
    """When the local steps end of a worker that never waits; worker 3 is slow."""
    pace = SLOW_PACE if worker == WORKERS - 1 else PACE[worker]
    return [pace * (index + 1) for index in range(int(END / pace))]


def next_end(worker: int, time: float) -> float:
    """When the local step ends in which a worker is."""
    return next((end for end in ends_of_steps(worker) if end >= time), END)


def draw_async_model_average(axes: Axes) -> None:
    below, added = -0.85, [0.0] * WORKERS
    for worker in range(WORKERS):
        steps(axes, worker, 0, len(ends_of_steps(worker)), ends_of_steps(worker)[0])
    for index in (1, 2):
        left = [next_end(worker, added[worker] + 0.5) for worker in range(WORKERS)]
        arrived = max(left) + 0.9
        added = [next_end(worker, arrived) for worker in range(WORKERS)]
        axes.plot(left, [lane(w) for w in range(WORKERS)], "o", color=MESSAGE, markersize=5)
        axes.plot(added, [lane(w) for w in range(WORKERS)], "o", color=MESSAGE, markersize=6,
                  markerfacecolor="white", markeredgewidth=1.6)  # fmt: skip
        axes.add_patch(Rectangle((min(left), below - 0.22), arrived - min(left), 0.44,
                                 color=MESSAGE))  # fmt: skip
        axes.text((min(left) + arrived) / 2, below - 0.02, f"mean of snapshots {index}",
                  color="white", ha="center", va="center", fontsize=8)  # fmt: skip


def draw_pairwise_gossip(axes: Axes) -> None:
    killed, again = 4.4, 7.6
    victim = 2
    for worker in range(WORKERS):
        for end in ends_of_steps(worker):
            start = end - ends_of_steps(worker)[0]
            if worker != victim or end < killed or start > again:
                steps(axes, worker, start, 1, end - start)
    axes.plot([killed], [lane(victim)], "x", color=TEXT, markersize=9, markeredgewidth=2)
    axes.text((killed + again) / 2 + 0.1, lane(victim), "killed, started again", ha="center",
              va="center", fontsize=9, color=TEXT)  # fmt: skip
    pulls = ((0, 1, 1), (1, 2, 2), (2, 0, 3), (3, 1, 0), (0, 3, 4), (1, 0, 5), (0, 1, 7),
             (3, 0, 2), (1, 3, 8), (2, 1, 10), (0, 2, 11))  # fmt: skip
    for reader, peer, index in pulls:
        end = ends_of_steps(reader)[index]
        arrow(axes, (end - 0.75, lane(peer)), (end, lane(reader)))


def numbered(axes: Axes, x: float, y: float, part: int, is_open: bool) -> None:
    """A part of the model: filled if it leaves a worker, open if it is written into one."""
    axes.plot([x], [y], "o", color=MESSAGE, markersize=10, markeredgewidth=1.4,
              markerfacecolor="white" if is_open else MESSAGE)  # fmt: skip
    axes.text(x, y - 0.015, str(part), ha="center", va="center", fontsize=7.5,
              color=MESSAGE if is_open else "white")  # fmt: skip


def draw_decoupled_diloco(axes: Axes) -> None:
    """Three parts in turn; what is asked for leaves at the end of a local step, at times late."""
    below, parts, merge_s = -0.95, 3, 1.25
    paces, victim, killed, again = (0.93, 0.88, 1.7, 2.9), 1, 4.1, 7.6
    ends: list[list[float]] = [[] for _ in paces]
    for worker, pace in enumerate(paces):
        begin = 0.0
        while begin + pace < END:
            if worker == victim and begin + pace > killed and begin < again:
                begin = again
            steps(axes, worker, begin, 1, pace)
            begin += pace
            ends[worker].append(begin)
    marks: dict[tuple[int, float], list[tuple[int, bool]]] = {}
    for index in range(6):
        asked, part = 0.7 + 1.95 * index, index % parts + 1
        merged = asked + merge_s
        axes.add_patch(Rectangle((asked, below - 0.22), merge_s, 0.44, color=MESSAGE))
        axes.text(asked + merge_s / 2, below - 0.02, f"merge {part}", ha="center", va="center",
                  fontsize=8, color="white")  # fmt: skip
        for worker, own in enumerate(ends):
            if worker == victim and killed - 1 < merged < again + paces[victim]:
                continue
            sent = next((end for end in own if end >= asked), None)
            taken = next((end for end in own if end >= merged), None)
            if sent is not None:
                marks.setdefault((worker, sent), []).append((part, False))
            if taken is not None:
                marks.setdefault((worker, taken), []).append((part, True))
    for part in range(1, parts + 1):
        marks.setdefault((victim, again), []).append((part, True))
    for (worker, time), found in marks.items():
        for place, (part, is_open) in enumerate(found):
            x = time + 0.25 * (place - (len(found) - 1) / 2)
            numbered(axes, x, lane(worker), part, is_open)
    axes.plot([killed], [lane(victim)], "x", color=TEXT, markersize=9, markeredgewidth=2)
    axes.text((killed + again) / 2, lane(victim), "killed, started again", ha="center",
              va="center", fontsize=9, color=TEXT)  # fmt: skip
    axes.text(-0.12, below, "syncer", ha="right", va="center", fontsize=9, color=TEXT)


Timeline = Callable[[Axes], None]

PANELS = (
    ("DDP", "gradients, among all workers, after every step", draw_every_step, 0.6, 0.6),
    (
        "Local SGD, DiLoCo",
        "parameters or their change, among all workers, every sync_every steps (here 4)",
        draw_diloco, 0.6, 0.6,
    ),
    (
        "Async DiLoCo",
        "the same, a quarter at a time, while local steps go on; no worker waits",
        partial(draw_fragments, fragments=4, every=2, delay=2), 1.2, 0.6,
    ),
    (
        "GASLoC on a ring",
        "parameters, to the neighbours only; within a round no worker waits for the others",
        draw_gasloc, 0.95, 0.95,
    ),
    (
        "Asynchronous model average",
        "parameters, by the clock; no worker waits (filled: snapshot leaves, open: mean comes)",
        draw_async_model_average, 1.2, 0.6,
    ),
    (
        "Pairwise gossip",
        "parameters, from a random peer, on request; peers may come and go",
        draw_pairwise_gossip, 0.6, 0.6,
    ),
)  # fmt: skip


def card(width: float, height: float, salt: str) -> Figure:
    """A figure with its own background, for light and dark pages."""
    matplotlib.rcParams["svg.hashsalt"] = salt
    matplotlib.rcParams["hatch.linewidth"] = 0.8
    figure = Figure(figsize=(width, height))
    figure.patch.set_alpha(0)
    figure.add_artist(
        FancyBboxPatch(
            (0.012, 0.012), 0.976, 0.976, boxstyle="round,pad=0,rounding_size=0.015",
            facecolor="white", edgecolor="#bbbbbb", transform=figure.transFigure, zorder=-1,
        )
    )  # fmt: skip
    return figure


def save(figure: Figure, file: Path) -> None:
    """Write a picture, always with the same bytes."""
    metadata = {"Date": None} if file.suffix == ".svg" else {}
    figure.savefig(file, dpi=100, metadata=metadata)


def add_timeline(axes: Axes, timeline: Timeline, below: float, above: float) -> None:
    """Draw a timeline with the names of the workers."""
    axes.set(xlim=(0, END), ylim=(-below, WORKERS - 1 + above))
    axes.set_axis_off()
    timeline(axes)
    for worker in range(WORKERS):
        axes.text(-0.12, lane(worker), f"worker {worker}", ha="right", va="center",
                  fontsize=9, color=TEXT)  # fmt: skip


def add_legend(figure: Figure, axes: Axes, bottom: float, arrow_at: float) -> None:
    """Say what the colours mean, and where time goes."""
    figure.legend(
        handles=[
            Patch(color=STEP, label="one local step"),
            Patch(facecolor=WAIT, hatch="////", edgecolor="white", label="waiting"),
            Patch(color=MESSAGE, label="what travels"),
        ],
        loc="lower center", ncols=3, frameon=False, fontsize=10, bbox_to_anchor=(0.5, bottom),
        labelcolor=TEXT,
    )  # fmt: skip
    figure.text(0.9, arrow_at, "time", ha="right", va="center", fontsize=10, color=TEXT)
    axes.annotate(
        "", (0.97, arrow_at), (0.91, arrow_at), "figure fraction", "figure fraction",
        arrowprops={"arrowstyle": "-|>", "color": TEXT},
    )  # fmt: skip


def draw(file: Path) -> None:
    """Draw all timelines."""
    figure = card(10, 13.5, "what travels when")
    heights = [WORKERS - 1 + below + above for *_, below, above in PANELS]
    grid = figure.add_gridspec(
        len(PANELS), 1, height_ratios=heights, hspace=0.3, left=0.1, right=0.97, top=0.96,
        bottom=0.045,
    )  # fmt: skip
    for cell, (name, what, timeline, below, above) in zip(grid, PANELS, strict=True):
        axes = figure.add_subplot(cell)
        add_timeline(axes, timeline, below, above)
        title = axes.annotate(f"{name}:", (0, 1), (0, 5), "axes fraction", "offset points",
                              fontsize=11, fontweight="bold", color=TEXT)  # fmt: skip
        axes.annotate(what, (1, 0), (6, 0), title, "offset points", fontsize=10, color=TEXT,
                      va="bottom")  # fmt: skip
    add_legend(figure, axes, 0.012, 0.024)
    save(figure, file)


def draw_method(file: Path, timeline: Timeline, below: float = 0.6, above: float = 0.6) -> None:
    """Draw the timeline of one method."""
    height = 0.5 * (WORKERS - 1 + below + above) + 0.6
    figure = card(10, height, file.stem)
    axes = figure.add_axes((0.1, 0.45 / height, 0.87, 1 - 0.6 / height))
    add_timeline(axes, timeline, below, above)
    add_legend(figure, axes, 0.08 / height, 0.24 / height)
    save(figure, file)


BOX = 0.42  # half the height of a rank's box
SENDERS = {"worker 0": "rank 0", "worker 1": "rank 1", "worker N-1": "rank N-1"}
COLUMNS = (0.0, 1.6, 4.0)  # of the workers that are drawn
MIDDLE = 2.0
TOP, GAP, SIDE = 4.0, 0.3, 0.32  # row of the workers; between two arrows; from box to label


def box(axes: Axes, center: tuple[float, float], half_width: float, name: str, rank: str) -> None:
    """A rank: filled if it trains, open if it serves."""
    trains = name in SENDERS
    axes.add_patch(
        FancyBboxPatch(
            (center[0] - half_width, center[1] - BOX), 2 * half_width, 2 * BOX,
            boxstyle="round,pad=0,rounding_size=0.12", facecolor=STEP if trains else "white",
            edgecolor=STEP, linewidth=1.8,
        )
    )  # fmt: skip
    colour = "white" if trains else TEXT
    axes.text(center[0], center[1] + 0.16, name, ha="center", va="center", fontsize=10,
              fontweight="bold", color=colour)  # fmt: skip
    axes.text(center[0], center[1] - 0.19, rank, ha="center", va="center", fontsize=9, color=colour)


def there_and_back(axes: Axes, sender: tuple[float, float], server: tuple[float, float]) -> None:
    """Gradients go down, parameters come back up."""
    for shift, tail, head, line in (
        (-GAP / 2, sender, server, "-"),
        (GAP / 2, server, sender, "--"),
    ):
        away = BOX if tail is sender else -BOX
        arrow(axes, (tail[0] + shift, tail[1] - away), (head[0] + shift, head[1] + away), line=line)


def label(axes: Axes, x: float, y: float, text: str, side: str) -> None:
    axes.text(x, y, text, ha=side, va="center", fontsize=9, color=MESSAGE)


def draw_workers(axes: Axes, server: float) -> None:
    """The workers, and what travels between them and the server in a row below."""
    for column, (name, rank) in zip(COLUMNS, SENDERS.items(), strict=True):
        box(axes, (column, TOP), 0.72, name, rank)
        foot = MIDDLE + 0.55 * (column - MIDDLE)
        there_and_back(axes, (column, TOP), (foot, server))
    axes.text((COLUMNS[1] + COLUMNS[2]) / 2, TOP, ". . .", ha="center", va="center", fontsize=16,
              color=STEP)  # fmt: skip
    middle = (TOP + server) / 2
    label(axes, -0.05, middle, "gradients", "right")
    label(axes, 4.05, middle, "parameters", "left")


def draw_two_tiers(axes: Axes) -> None:
    server = 1.2
    draw_workers(axes, server)
    box(axes, (MIDDLE, server), 1.75, "aggregator-optimizer", "rank N: mean gradient and step")


def draw_three_tiers(axes: Axes) -> None:
    server, stepper = 2.0, 0.0
    draw_workers(axes, server)
    box(axes, (MIDDLE, server), 1.75, "aggregator", "rank N: mean gradient")
    there_and_back(axes, (MIDDLE, server), (MIDDLE, stepper))
    label(axes, MIDDLE - SIDE, (server + stepper) / 2, "mean gradient", "right")
    label(axes, MIDDLE + SIDE, (server + stepper) / 2, "parameters", "left")
    box(axes, (MIDDLE, stepper), 1.75, "optimizer", "rank N+1: step")


def draw_remote_optimizer(file: Path) -> None:
    """Draw the two ways to have the optimizer on other ranks, side by side."""
    figure = card(10, 4.6, "remote optimizer")
    panels = (
        ("2 tiers", "N workers and one more rank", draw_two_tiers),
        ("3 tiers", "N workers and two more ranks", draw_three_tiers),
    )
    grid = figure.add_gridspec(1, 2, left=0.03, right=0.97, top=0.88, bottom=0.06, wspace=0.06)
    for cell, (name, what, tiers) in zip(grid, panels, strict=True):
        axes = figure.add_subplot(cell)
        axes.set(xlim=(-1.25, 5.25), ylim=(-BOX - 0.05, TOP + BOX + 0.05))
        axes.set_axis_off()
        tiers(axes)
        title = axes.annotate(f"{name}:", (0, 1), (0, 8), "axes fraction", "offset points",
                              fontsize=11, fontweight="bold", color=TEXT)  # fmt: skip
        axes.annotate(what, (1, 0), (6, 0), title, "offset points", fontsize=10, color=TEXT,
                      va="bottom")  # fmt: skip
    save(figure, file)


CELL = 0.55  # half the height of a rank with its parameters
WIDE = 1.15  # half its width
PLACES, WORKER_ROWS = (0.0, 4.4), (3.0, 0.0)


def rank_with_parameters(axes: Axes, worker: int, place: int, holds_all: bool) -> None:
    """A rank, and a bar of all parameters: filled what it owns, hatched what it also holds."""
    x, y = PLACES[place], WORKER_ROWS[worker]
    axes.add_patch(
        FancyBboxPatch(
            (x - WIDE, y - CELL), 2 * WIDE, 2 * CELL, boxstyle="round,pad=0,rounding_size=0.12",
            facecolor="white", edgecolor=STEP, linewidth=1.8,
        )
    )  # fmt: skip
    axes.text(x, y + 0.26, f"rank {2 * worker + place}", ha="center", va="center", fontsize=10,
              fontweight="bold", color=TEXT)  # fmt: skip
    for half in (0, 1):
        corner = (x - 0.9 + 0.9 * half, y - 0.36)
        if half == place:
            axes.add_patch(Rectangle(corner, 0.9, 0.34, facecolor=STEP, edgecolor=STEP))
        elif holds_all:
            axes.add_patch(Rectangle(corner, 0.9, 0.34, facecolor=WAIT, edgecolor="white",
                                     hatch="////", linewidth=0))  # fmt: skip
    axes.add_patch(Rectangle((x - 0.9, y - 0.36), 1.8, 0.34, fill=False, edgecolor=STEP,
                             linestyle="-" if holds_all else ":"))  # fmt: skip


def draw_places(axes: Axes, holds_all: bool, in_steps: str) -> None:
    """Two workers of two ranks, and what travels inside them and between them."""
    middle = sum(PLACES) / 2
    for worker, y in enumerate(WORKER_ROWS):
        axes.add_patch(
            Rectangle((PLACES[0] - 1.45, y - 0.95), PLACES[1] - PLACES[0] + 2.9, 1.9, fill=False,
                      edgecolor="#999999", linestyle="--")
        )  # fmt: skip
        axes.text(PLACES[0] - 1.35, y + 0.75, f"worker {worker}", ha="left", va="center",
                  fontsize=10, color=TEXT)  # fmt: skip
        for place in (0, 1):
            rank_with_parameters(axes, worker, place, holds_all)
        axes.annotate(
            "", (PLACES[1] - WIDE, y), (PLACES[0] + WIDE, y),
            arrowprops={"arrowstyle": "<|-|>", "color": STEP, "linewidth": 1.6, "shrinkA": 0,
                        "shrinkB": 0},
        )  # fmt: skip
        axes.text(middle, y + 0.12, "every step:", ha="center", va="bottom", fontsize=9, color=STEP)
        axes.text(middle, y - 0.12, in_steps, ha="center", va="top", fontsize=9, color=STEP)
    for place, x in enumerate(PLACES):
        arrow(axes, (x, WORKER_ROWS[0] - CELL), (x, WORKER_ROWS[1] + CELL), "<|-|>")
        axes.text(x, WORKER_ROWS[0] + 1.2, f"place {place}", ha="center", va="center", fontsize=10,
                  color=TEXT)  # fmt: skip
        label(axes, x + 0.12, 1.5, f"every round:\nhalf {place}", "left")
    if holds_all:
        axes.text(middle, -1.15, "after a round, the ranks of a worker send each other the result",
                  ha="center", va="center", fontsize=9, color=STEP)  # fmt: skip


def draw_columns_and_places(file: Path) -> None:
    """Draw workers of two ranks, with DDP and with FSDP2 inside, side by side."""
    figure = card(11, 4.9, "columns and places")
    panels = (
        ("DDP inside", "each rank holds the model", True, "gradients"),
        ("FSDP2 inside", "each rank holds a half", False, "layers, gradients"),
    )
    grid = figure.add_gridspec(1, 2, left=0.025, right=0.975, top=0.89, bottom=0.1, wspace=0.05)
    for cell, (name, what, holds_all, in_steps) in zip(grid, panels, strict=True):
        axes = figure.add_subplot(cell)
        axes.set(xlim=(-1.6, 6.0), ylim=(-1.3, 4.4))
        axes.set_axis_off()
        draw_places(axes, holds_all, in_steps)
        title = axes.annotate(f"{name}:", (0, 1), (0, 8), "axes fraction", "offset points",
                              fontsize=11, fontweight="bold", color=TEXT)  # fmt: skip
        axes.annotate(what, (1, 0), (6, 0), title, "offset points", fontsize=10, color=TEXT,
                      va="bottom")  # fmt: skip
    figure.legend(
        handles=[
            Patch(color=STEP, label="parameters that a rank owns"),
            Patch(facecolor=WAIT, hatch="////", edgecolor="white", label="others that it holds"),
            Patch(color=MESSAGE, label="what travels between workers"),
        ],
        loc="lower center", ncols=3, frameon=False, fontsize=10, bbox_to_anchor=(0.5, 0.015),
        labelcolor=TEXT,
    )  # fmt: skip
    save(figure, file)


METHODS: dict[str, Callable[[Path], None]] = {
    "diloco": partial(draw_method, timeline=draw_diloco),
    "async_diloco": partial(
        draw_method, timeline=partial(draw_fragments, fragments=4, every=2, delay=2), below=1.2
    ),
    "streaming_diloco": partial(
        draw_method, timeline=partial(draw_fragments, fragments=2, every=4, delay=2), below=1.2
    ),
    "eager_diloco": partial(draw_method, timeline=draw_a_phase_late, below=1.2),
    "delayed_nesterov": partial(draw_method, timeline=draw_delayed_nesterov, below=0.9),
    "gasloc": partial(draw_method, timeline=draw_gasloc, below=0.95, above=0.95),
    "noloco": partial(draw_method, timeline=draw_pairs),
    "sparta": partial(draw_method, timeline=partial(draw_every_step, exchange=0.25)),
    "async_model_average": partial(draw_method, timeline=draw_async_model_average, below=1.2),
    "pairwise_gossip": partial(draw_method, timeline=draw_pairwise_gossip),
    "decoupled_diloco": partial(draw_method, timeline=draw_decoupled_diloco, below=1.3),
}
PICTURES: dict[str, Callable[[Path], None]] = {
    "what_travels_when": draw,
    "remote_optimizer": draw_remote_optimizer,
    "columns_and_places": draw_columns_and_places,
    **{f"methods/{name}": function for name, function in METHODS.items()},
}

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    suffix = sys.argv[2] if len(sys.argv) > 2 else "svg"
    (folder / "methods").mkdir(exist_ok=True)
    for picture, function in PICTURES.items():
        function(folder / f"{picture}.{suffix}")

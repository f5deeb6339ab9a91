"""Charts as geometry: axes with ticks, lines, bands, lanes of a timeline, and graphs.

Everything is in the units of an SVG's ``viewBox``; the templates write it as elements. Long curves
are drawn with at most 250 points, each the mean of its neighbours, in a band from their smallest to
their largest value.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from lightning_loco._util.text import format_bytes
from lightning_loco.report.record import Curve, Drawing, Event, Point, merged

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 78, 26, 10, 42
MAX_DRAWN = 250
"""Points of a line."""

SPREAD = 4
"""Factor between the bytes of two curves from which on logarithms are drawn."""

NUM_COLORS = 6
"""Colors of lines, which color-blind readers can tell apart, too."""

LARGEST = 1e307
"""End of the largest axis: the difference of two values below it does not overflow."""

LANE_WIDTH, LANE_HEIGHT, LANE_LEFT = 1000, 22, 130
MAX_BARS = 40_000
"""Events of a timeline that are drawn one by one."""

BELOW = ("round", "send")
"""Kinds of events that are drawn below a lane, because a worker does something else meanwhile."""

XAxis = Literal["step", "time", "bytes"]

# ----------------------------------------------------------------------------- axes


@dataclasses.dataclass(frozen=True)
class Axis:
    """Maps values of a range to positions.

    Attributes:
        low: Smallest value.
        high: Largest value, larger than that.
        start: Position of the smallest value.
        end: Position of the largest.
        is_log: Whether the logarithm is drawn.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    @classmethod
    def around(
        cls, values: Iterable[float], start: float, end: float, is_log: bool = False
    ) -> Axis:
        """Return an axis for all values; a logarithmic one is for the positive values."""
        kept = [value for value in values if value > 0 or not is_log]
        ends = min(kept, default=1.0), max(kept, default=1.0)
        low, high = (min(max(end, -LARGEST), LARGEST) for end in ends)
        if low == high:
            low, high = (low / 2, high * 2) if is_log else (low - (abs(low) or 1) / 2, high)
            high = high if is_log else high + (abs(high) or 1) / 2
        return cls(low, high, start, end, is_log)

    def at(self, value: float) -> float:
        """Return the position of a value."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.is_log:
            value, low, high = (math.log(number) for number in (value, low, high))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return round values within the range, about ``most`` of them at most."""
        if self.is_log and self.high >= 10 * self.low:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for parts in ((1, 2, 5), (1,)):
                values = [part * 10.0**power for power in powers for part in parts]
                values = [value for value in values if self.low <= value <= self.high]
                if len(values) <= most:
                    return values
            return values[:: math.ceil(len(values) / most)]
        step = round_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [number * step for number in range(first, last + 1)]
        return [value for value in values if value > 0 or not self.is_log]


def round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least * (1 - 1e-9))


def time_unit(seconds: float) -> tuple[float, str]:
    """Return how many seconds the unit of a duration has, and its name."""
    return next(
        (unit, name)
        for unit, name, most in ((1.0, "s", 180), (60.0, "min", 10_800), (3600.0, "h", math.inf))
        if seconds <= most
    )


def bytes_unit(num_bytes: float) -> tuple[float, str]:
    """Return how many bytes the unit of :func:`format_bytes` has, and its name."""
    name = format_bytes(num_bytes).rpartition(" ")[2]
    return {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[name], name


# --------------------------------------------------------------------------- charts


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve to draw.

    Attributes:
        name: In the legend.
        points: Its points.
        color: Number of the color; -1 for the color of the text.
        is_strong: Whether it has points, and a thick line, and is never smoothed.
        is_dashed: Whether it is dashed.
        is_worker: Whether it is of one worker, and hidden until the reader shows workers.
    """

    name: str
    points: Sequence[Point]
    color: int = 0
    is_strong: bool = False
    is_dashed: bool = False
    is_worker: bool = False


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        series: The curve that it shows.
        points: Positions, as the attribute of a ``<polyline>``.
        band: Positions of a ``<polygon>`` from the smallest to the largest values; may be empty.
    """

    series: Series
    points: str
    band: str = ""

    @property
    def dots(self) -> list[list[str]]:
        """The positions of points to be marked: a line of one point cannot be seen otherwise."""
        positions = [pair.split(",") for pair in self.points.split()]
        return positions if len(positions) <= (60 if self.series.is_strong else 1) else []


@dataclasses.dataclass(frozen=True)
class Face:
    """The lines of a chart on one of its vertical axes, with the ticks of that axis."""

    axis: Axis
    ticks: tuple[tuple[float, str], ...]
    lines: tuple[Line, ...]


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart; the axes are in the units of the ticks.

    Attributes:
        title: Its caption.
        x_label: Label of the horizontal axis, with its unit.
        y_label: Label of the vertical axis.
        x_axis: The horizontal axis.
        x_ticks: Its ticks.
        faces: With a linear vertical axis; if all values are positive, also with a logarithmic one.
        starts_log: Whether the second face is the one to show at first.
    """

    title: str
    x_label: str
    y_label: str
    x_axis: Axis
    x_ticks: tuple[tuple[float, str], ...]
    faces: tuple[Face, ...]
    starts_log: bool = False


def draw(
    title: str, all_series: Sequence[Series], x: XAxis, y_label: str, *, may_start_log: bool = False
) -> Chart | None:
    """Draw curves against local steps, seconds or bytes; None if nothing can be drawn.

    With ``may_start_log`` values that differ by more than a factor of 30 are shown as logarithms at
    first. Bytes are drawn as logarithms if some curve has four times as many as another one.
    """
    drawn = [(series, placed(series.points, x)) for series in all_series]
    drawn = [(series, points) for series, points in drawn if points]
    ends = [points[-1][0] for _, points in drawn]
    if not drawn or (x == "bytes" and max(ends) <= 0):
        return None
    label, scale = _x_label(x, max(ends))
    sent = [end for end in ends if end > 0]
    x_is_log = x == "bytes" and max(sent) >= SPREAD * min(sent)
    values = [point[0] / scale for _, points in drawn for point in points]
    x_axis = Axis.around(values, LEFT, WIDTH - RIGHT, x_is_log)
    bounds = [bound for _, points in drawn for point in points for bound in point[2:]]

    def face(is_log: bool) -> Face:
        axis = Axis.around(bounds, HEIGHT - BOTTOM, TOP, is_log)
        lines = []
        for series, points in drawn:
            shown = [point for point in points if point[0] > 0 or not x_is_log]
            across = [x_axis.at(point[0] / scale) for point in shown]
            mean, low, high = ([axis.at(point[i]) for point in shown] for i in (1, 2, 3))
            has_band = any(low < high for *_, low, high in shown) and not series.is_dashed
            band = positions([*across, *across[::-1]], [*low, *high[::-1]]) if has_band else ""
            lines.append(Line(series, positions(across, mean), band))
        ticks = tuple((axis.at(tick), tick_text(tick)) for tick in axis.ticks(6))
        return Face(axis, ticks, tuple(lines))

    return Chart(
        title,
        label,
        y_label,
        x_axis,
        tuple((x_axis.at(tick), tick_text(tick)) for tick in x_axis.ticks(5)),
        (face(False), face(True)) if min(bounds) > 0 else (face(False),),
        may_start_log and 0 < 30 * min(bounds) < max(bounds),
    )


def _x_label(x: XAxis, most: float) -> tuple[str, float]:
    if x == "step":
        return "local step", 1.0
    scale, unit = time_unit(most) if x == "time" else bytes_unit(most)
    return (f"time ({unit})" if x == "time" else f"sent per worker ({unit})"), scale


def tick_text(value: float) -> str:
    """Format the value of a tick."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return f"{round(value, 6):,.10g}"
    return f"{value:.3g}"


def positions(across: Iterable[float], up: Iterable[float]) -> str:
    """Format positions as the attribute ``points`` of an SVG element."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, up, strict=True))


def placed(points: Sequence[Point], x: XAxis) -> list[tuple[float, float, float, float]]:
    """Return at most 250 points to draw: x, and the mean, smallest and largest of the values.

    Between two rounds a worker sends nothing: values of equal bytes are merged.
    """
    if x != "bytes":
        return [(p[0] if x == "step" else p[1], *p[3:]) for p in reduced(points)]
    groups = itertools.groupby((p for p in points if p[2] is not None), lambda point: point[2])
    found = reduced([merged(list(group)) for _, group in groups])
    return [(point[2] or 0.0, *point[3:]) for point in found]


def reduced(points: Sequence[Point], most: int = MAX_DRAWN) -> list[Point]:
    """Merge neighbours until there are at most ``most`` points."""
    size = max(1, math.ceil(len(points) / most))
    return [merged(points[start : start + size]) for start in range(0, len(points), size)]


def mean_of(curves: Sequence[Curve], x: XAxis = "step") -> list[Point]:
    """Return the mean of several workers' curves, with the smallest and largest of their values.

    The range of the steps, seconds or bytes is cut into parts; the values that fall into one are
    merged.
    """
    if len(curves) == 1:
        return curves[0].points
    number = ("step", "time", "bytes").index(x)
    points = [
        (at, point)
        for curve in curves
        for point in curve.points
        if (at := point[number]) is not None
    ]
    if not points:
        return []
    points.sort(key=lambda pair: pair[0])
    first, last = points[0][0], points[-1][0]
    parts = min(max(len(curve.points) for curve in curves), MAX_DRAWN)
    width = (last - first) / parts or 1
    found: dict[int, list[Point]] = {}
    for at, point in points:
        found.setdefault(min(parts - 1, int((at - first) / width)), []).append(point)
    return [merged(group) for _, group in sorted(found.items())]


# ------------------------------------------------------------------------- timeline


@dataclasses.dataclass(frozen=True)
class Lane:
    """The events of a worker: for each kind the ``d`` of a ``<path>`` of horizontal lines."""

    name: str
    y: float
    paths: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class TimelineChart:
    """Lanes of workers above a time axis."""

    height: float
    lanes: tuple[Lane, ...]
    ticks: tuple[tuple[float, str], ...]
    label: str


def draw_timeline(
    names: Sequence[str],
    events: Iterable[Event],
    kinds: Sequence[str],
    start_s: float,
    end_s: float,
) -> TimelineChart | None:
    """Draw the events between two times, in the order of ``kinds``; None if there are none."""
    if not names or end_s <= start_s:
        return None
    scale, unit = time_unit(end_s)
    axis = Axis(start_s / scale, end_s / scale, LANE_LEFT, LANE_WIDTH - 15)
    drawn: list[dict[str, list[tuple[float, float]]]] = [{} for _ in names]
    for lane, kind, start, end in events:
        start, end = max(start, start_s), min(end, end_s)
        if start < end:
            ends = axis.at(start / scale), axis.at(end / scale)
            drawn[lane].setdefault(kind, []).append(ends)
    most = min(2000, MAX_BARS // (len(names) * len(kinds)))
    lanes = tuple(
        Lane(
            name,
            10.0 + LANE_HEIGHT * number,
            tuple((kind, bars(own[kind], axis, most)) for kind in kinds if kind in own),
        )
        for number, (name, own) in enumerate(zip(names, drawn, strict=True))
    )
    ticks = tuple((axis.at(tick), tick_text(tick)) for tick in axis.ticks(8))
    return TimelineChart(LANE_HEIGHT * len(lanes) + 45, lanes, ticks, f"time ({unit})")


def bars(spans: list[tuple[float, float]], axis: Axis, most: int) -> str:
    """Return the ``d`` of a ``<path>`` with a horizontal line for each of the spans.

    If they are more than ``most``, the axis is cut into as many parts, narrower than a pixel, and
    each gets one line, as long as all in it.
    """
    if len(spans) > most:
        width = (axis.end - axis.start) / most
        covered = [0.0] * most
        for left, right in spans:
            first, last = (int((x - axis.start) / width) for x in (left, right))
            for part in range(first, min(last, most - 1) + 1):
                begin = axis.start + part * width
                covered[part] += min(right, begin + width) - max(left, begin)
        starts = ((axis.start + part * width, length) for part, length in enumerate(covered))
        spans = [(left, left + min(length, width)) for left, length in starts if length > 0]
    return "".join(f"M{left:.2f} 0h{right - left:.2f}" for left, right in spans)


def some_rounds(events: Sequence[Event], count: int = 4) -> tuple[float, float] | None:
    """Return the start and end of a few rounds in the middle of the first lane that has them.

    None if there are too few for a separate drawing.
    """
    for lane in sorted({event[0] for event in events}):
        starts = sorted(
            start for number, kind, start, _ in events if (number, kind) == (lane, "round")
        )
        if len(starts) >= 3 * count:
            # Of rounds that follow each other: events in the middle of a long run are left out.
            first = min(len(starts) // 4, len(starts) - count - 1)
            return starts[first], starts[first + count]
    return None


# ------------------------------------------------------------------------- topology


@dataclasses.dataclass(frozen=True)
class Graph:
    """Workers on a circle, or around one that exchanges with all, and lines between them."""

    nodes: tuple[tuple[float, float, int], ...]
    edges: tuple[tuple[float, float, float, float], ...]
    radius: float


def draw_graph(drawing: Drawing, size: float = 320) -> Graph:
    """Place the workers of a topology on a circle; the hub of a star is in its middle."""
    count = drawing.num_workers
    degrees = [0] * count
    for first, second in drawing.edges:
        degrees[first] += 1
        degrees[second] += 1
    is_star = count > 3 and sorted(degrees)[-2:] == [1, count - 1]
    hub = degrees.index(count - 1) if is_star else None
    around = [worker for worker in range(count) if worker != hub]
    radius = max(5.0, min(15.0, 2.2 * size / max(1, len(around))))
    places: dict[int, tuple[float, float]] = {}
    middle, reach = size / 2, size / 2 - radius - 4
    for number, worker in enumerate(around):
        angle = 2 * math.pi * number / len(around) - math.pi / 2
        places[worker] = (middle + reach * math.cos(angle), middle + reach * math.sin(angle))
    if hub is not None or count == 1:
        places[hub or 0] = (middle, middle)
    return Graph(
        tuple((round(x, 1), round(y, 1), worker) for worker, (x, y) in sorted(places.items())),
        tuple(
            (*(round(number, 1) for number in (*places[a], *places[b])),)  # type: ignore[misc]
            for a, b in drawing.edges
        ),
        radius,
    )

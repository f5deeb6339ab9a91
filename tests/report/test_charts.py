"""Axes, lines and lanes: positions of drawn elements."""

from __future__ import annotations

import pytest

from lightning_loco._util.text import format_bytes, format_seconds
from lightning_loco.report.charts import (
    MAX_DRAWN,
    Axis,
    Series,
    bars,
    draw,
    draw_graph,
    draw_timeline,
    mean_of,
    placed,
    some_rounds,
    tick_text,
)
from lightning_loco.report.record import Curve, Drawing, Point


def points(count: int, num_bytes: int = 1000) -> list[Point]:
    return [(n, 0.5 * n, num_bytes * (n // 2), n, n, n) for n in range(1, count + 1)]


HUGE = (-1.7e308, 1.7e308)
"""Diverged losses, whose difference is infinite."""


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("values", [(1.0, 7.0), (0.001, 300.0), (5.0, 5.0), (12.0, 13.0), HUGE])
def test_ticks_are_within_the_axis(values: tuple[float, float], is_log: bool) -> None:
    axis = Axis.around(values, 0, 100, is_log)
    ticks = axis.ticks(5)
    assert 1 <= len(ticks) <= 12
    places = [axis.at(tick) for tick in ticks]
    assert places == sorted(places)
    assert min(places) >= -1e-6
    assert max(places) <= 100 + 1e-6
    assert len({tick_text(tick) for tick in ticks}) == len(ticks)
    assert all(0 <= axis.at(value) <= 100 for value in values)


def test_an_axis_of_one_negative_value() -> None:
    axis = Axis.around([-3.0], 0, 100)
    assert 0 < axis.at(-3.0) < 100
    assert Axis.around([0.0], 0, 100).at(0.0) == pytest.approx(50, abs=30)


def test_a_line_goes_through_its_points() -> None:
    chart = draw("Loss", [Series("a", points(10))], "step", "y")
    assert chart is not None
    drawn = [tuple(map(float, pair.split(","))) for pair in chart.faces[0].lines[0].points.split()]
    for (x, y), (step, *_, mean, _, _) in zip(drawn, points(10), strict=True):
        assert x == pytest.approx(chart.x_axis.at(step), abs=0.06)
        assert y == pytest.approx(chart.faces[0].axis.at(mean), abs=0.06)


def test_a_long_line_keeps_its_extremes() -> None:
    spiky = [(n, n, n, 0.0, 0.0, 99.0 if n == 777 else 0.0) for n in range(10_000)]
    drawn = placed(spiky, "step")
    assert len(drawn) <= MAX_DRAWN
    assert max(high for *_, high in drawn) == 99
    chart = draw("Loss", [Series("a", spiky)], "step", "y")
    assert chart is not None
    assert chart.faces[0].lines[0].band


def test_values_of_equal_bytes_are_merged() -> None:
    found = placed(points(5), "bytes")
    assert found == [(0, 1, 1, 1), (1000, 2.5, 2, 3), (2000, 4.5, 4, 5)]


def test_bytes_of_curves_that_differ_much_are_logarithms() -> None:
    small, large = Series("a", points(8)), Series("b", points(8, 100_000))
    chart = draw("Loss", [small, large], "bytes", "y")
    assert chart is not None
    assert chart.x_axis.is_log
    alike = draw("Loss", [small, Series("b", points(8, 2000))], "bytes", "y")
    assert alike is not None
    assert not alike.x_axis.is_log


def test_what_cannot_be_drawn_is_left_out() -> None:
    unknown: list[Point] = [(1, 1.0, None, 1, 1, 1)]
    assert draw("Loss", [], "step", "y") is None
    assert draw("Loss", [Series("a", [])], "time", "y") is None
    assert draw("Loss", [Series("a", unknown)], "bytes", "y") is None
    assert draw("Loss", [Series("a", points(1))], "bytes", "y") is None  # nothing sent
    assert draw("Loss", [Series("a", unknown)], "step", "y") is not None


def test_the_mean_of_workers() -> None:
    curves = [Curve("train_loss", "a"), Curve("train_loss", "b")]
    for step in range(1, 101):
        for number, curve in enumerate(curves):
            curve.add(step, step, step, 10 * step + number)
    found = mean_of(curves)
    assert [point[0] for point in found] == list(range(1, 101))
    assert [point[3:] for point in found] == [
        (10 * step + 0.5, 10 * step, 10 * step + 1) for step in range(1, 101)
    ]


def test_the_mean_over_time_is_of_values_at_one_time() -> None:
    """A worker at half speed takes half as many steps in that time."""
    fast, slow = Curve("train_loss", "a"), Curve("train_loss", "b")
    for second in range(1, 101):
        fast.add(2 * second, second, None, 1.0)
        slow.add(second, second, None, 3.0)
    for x, at in (("time", 1), ("step", 0)):
        places = [point[at] for point in mean_of([fast, slow], x)]  # type: ignore[arg-type]
        assert places == sorted(places)  # type: ignore[type-var]
    assert {point[3] for point in mean_of([fast, slow], "time")} == {2.0}
    assert mean_of([fast, slow], "bytes") == []


def test_logarithms_are_offered_for_positive_values() -> None:
    for values, faces, starts in (((1, 9), 2, False), ((1, 99), 2, True), ((0, 9), 1, False)):
        series = Series("a", [(n, n, None, y, y, y) for n, y in enumerate(values)])
        chart = draw("Distance", [series], "step", "y", may_start_log=True)
        assert chart is not None
        assert [face.axis.is_log for face in chart.faces] == [False, True][:faces]
        assert chart.starts_log is starts


def test_events_outside_of_a_timeline_are_cut_off() -> None:
    events = [(0, "wait", 1.0, 3.0), (1, "wait", 0.0, 1.5), (1, "compute", 1.5, 2.0)]
    timeline = draw_timeline(["a", "b"], events, ["compute", "wait"], 0.0, 2.0)
    assert timeline is not None
    first, second = timeline.lanes
    assert [kind for kind, _ in first.paths] == ["wait"]
    assert [kind for kind, _ in second.paths] == ["compute", "wait"]
    middle, width = (130 + 985) / 2, 985 - 130
    assert dict(first.paths)["wait"] == f"M{middle:.2f} 0h{width / 2:.2f}"
    assert dict(second.paths)["wait"] == f"M130.00 0h{0.75 * width:.2f}"
    assert draw_timeline([], events, [], 0.0, 2.0) is None


def test_many_events_keep_their_share_of_each_part() -> None:
    axis = Axis(0, 100, 0, 1000)
    waits = [(float(n), n + 0.25) for n in range(0, 500)]  # a quarter of the first half
    path = bars(waits, axis, 40)
    lines = [tuple(map(float, line.split(" 0h"))) for line in path.split("M")[1:]]
    assert len(lines) == 20
    assert [left for left, _ in lines] == [25.0 * n for n in range(20)]
    assert [length for _, length in lines] == [pytest.approx(25 / 4, abs=0.3)] * 20
    assert bars(waits[:2], axis, 40) == "M0.00 0h0.25M1.00 0h0.25"


def test_some_rounds_are_neighbours() -> None:
    events = [(0, "round", float(n), n + 0.1) for n in range(40)]
    start, end = some_rounds(events) or (0, 0)
    assert end - start == 4
    assert some_rounds(events[:5]) is None


def test_graphs() -> None:
    ring = draw_graph(Drawing("ring", 4, ((0, 1), (1, 2), (2, 3), (0, 3))))
    assert len(ring.nodes) == len(ring.edges) == 4
    assert len({(x, y) for x, y, _ in ring.nodes}) == 4
    star = draw_graph(Drawing("star", 5, ((0, 1), (0, 2), (0, 3), (0, 4))), size=100)
    assert (50, 50, 0) in star.nodes
    assert draw_graph(Drawing("alone", 1, ())).nodes[0][2] == 0
    assert len(draw_graph(Drawing("none", 2, ())).nodes) == 2


def test_numbers_as_text() -> None:
    assert [format_bytes(n) for n in (0, 999, 12_300_000)] == ["0 B", "999 B", "12.3 MB"]
    seconds = [format_seconds(s) for s in (0, 0.0123, 12.34, 245.0, 9000.0, 90_000.0)]
    assert seconds == ["0 s", "12.3 ms", "12.3 s", "4.1 min", "150.0 min", "25.0 h"]
    assert [tick_text(t) for t in (0, 0.3, 8000, 1e8, 5e-5)] == [
        "0",
        "0.3",
        "8,000",
        "1e+08",
        "5e-05",
    ]

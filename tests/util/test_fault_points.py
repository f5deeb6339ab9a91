"""Fault points: all are listed and reached, and have no effect outside tests."""

from __future__ import annotations

import re

from lightning_loco._util.fault_points import POINTS, on_reach, reach
from tests.harness.sources import sources


def test_every_point_is_listed_and_reached_somewhere() -> None:
    texts = (
        text for name, text in sources().items() if name != "lightning_loco._util.fault_points"
    )
    found = {call for text in texts for call in re.findall(r"(?<!def )\breach\((.*)\)", text)}
    assert found == {f'"{point}"' for point in POINTS}


def test_a_function_is_called_at_each_point_until_the_context_ends() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with on_reach(outer.append):
        reach("packing")
        with on_reach(inner.append):
            reach("statuses")
        reach("exchange")
    reach("confirming")
    assert (outer, inner) == (["packing", "exchange"], ["statuses"])

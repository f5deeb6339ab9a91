"""One link: what it can be, how long bytes take, what two of them are together."""

from __future__ import annotations

import math

import pytest

from lightning_loco import Link
from lightning_loco.links.links import LINKS

NAN = math.nan


def test_bytes_take_as_long_as_their_bits() -> None:
    assert Link(1).seconds(125_000) == pytest.approx(1.0)
    assert Link(100, 5.0, 5.0).seconds(12_500_000) == pytest.approx(1.0)  # the latency is apart
    assert Link(math.inf).seconds(10**12) == 0.0
    assert Link(7).seconds(0) == 0.0


def test_the_slower_of_two_is_the_worse_in_each_respect() -> None:
    assert Link(10, 0.1, 0.0).slower(Link(20, 0.05, 0.01)) == Link(10, 0.1, 0.01)
    for link in LINKS.values():
        assert link.slower(link) == link


def test_links_by_name_are_ordered_as_their_names_say() -> None:
    by_speed = sorted(LINKS, key=lambda name: LINKS[name].mbit_per_s)
    assert by_speed == ["dsl", "wan", "lan", "datacentre"]


def test_what_no_link_can_be_is_refused(subtests: pytest.Subtests) -> None:
    rows = [
        ({"mbit_per_s": 0}, ValueError, r"mbit_per_s of a link must be positive .*, got 0"),
        ({"mbit_per_s": -1.0}, ValueError, "must be positive .*, got -1.0"),
        ({"mbit_per_s": NAN}, ValueError, "must be positive .*, got nan"),
        ({"mbit_per_s": "100"}, TypeError, "mbit_per_s of a link must be a number, got '100'"),
        ({"mbit_per_s": True}, TypeError, "mbit_per_s of a link must be a number, got True"),
        ({"latency_s": -0.1}, ValueError, "latency_s of a link is in seconds, at least 0 .* -0.1"),
        ({"latency_s": math.inf}, ValueError, "latency_s of a link .* finite, got inf"),
        ({"latency_s": None}, TypeError, "latency_s of a link must be a number, got None"),
        ({"jitter_s": -1}, ValueError, "jitter_s of a link is in seconds, at least 0 .* got -1"),
        ({"jitter_s": NAN}, ValueError, "jitter_s of a link .* got nan"),
    ]
    for values, error, text in rows:
        with subtests.test(str(values)), pytest.raises(error, match=text):
            Link(**{"mbit_per_s": 100, **values})

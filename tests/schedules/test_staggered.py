"""The staggered schedule: when the rounds of each fragment begin and end."""

from __future__ import annotations

import math

import pytest

from lightning_loco.schedules import EverySteps, Now, Schedule, Staggered


class Flying:
    """A pending round of which only the begin matters."""

    def __init__(self, began_at: int) -> None:
        self.began_at = began_at

    def has_arrived(self) -> bool:
        return False


def played(schedule: Schedule, steps: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(step, fragment) of each begin and of each end, as an engine asks for them."""
    begun: list[tuple[int, int]] = []
    ended: list[tuple[int, int]] = []
    pending_rounds: dict[int, Flying] = {}
    round_index = since = 0
    for step in range(1, steps + 1):
        since += 1
        for fragment in range(schedule.num_fragments):
            now = Now(step, since, round_index, fragment, math.inf, pending_rounds.get(fragment))
            begins, ends = schedule.due(now)
            if ends:
                del pending_rounds[fragment]
                ended.append((step, fragment))
            if begins:
                begun.append((step, fragment))
                if schedule.is_overlapped(round_index):
                    pending_rounds[fragment] = Flying(step)
                else:
                    ended.append((step, fragment))
        if begun and begun[-1][0] == step:
            round_index, since = round_index + 1, 0
    return begun, ended


def test_the_order_of_two_fragments() -> None:
    begun, ended = played(Staggered(6, 2), 15)
    assert begun == ended == [(3, 0), (6, 1), (9, 0), (12, 1), (15, 0)]


def test_results_land_after_the_delay_also_beyond_the_next_begin() -> None:
    begun, ended = played(Staggered(6, 2, delay=4), 16)
    assert begun == [(3, 0), (6, 1), (9, 0), (12, 1), (15, 0)]
    assert ended == [(step + 4, fragment) for step, fragment in begun if step + 4 <= 16]


def test_a_whole_phase_late_a_flight_ends_when_the_next_one_begins() -> None:
    for fragments in (1, 2, 3):
        begun, ended = played(Staggered(6, fragments, delay=6), 30)
        assert ended == [(step + 6, fragment) for step, fragment in begun if step + 6 <= 30]
    expected = played(EverySteps(6, overlap=True, warm_start=False), 30)
    assert played(Staggered(6, 1, delay=6), 30) == expected
    late = Staggered(6, 1, delay=6)
    assert late.due(Now(7, 5, 1, 0, 1.0, Flying(0))) == (False, False)  # however long ago


def test_warm_starts_end_at_once() -> None:
    begun, ended = played(Staggered(4, 2, delay=3, warm_start=True), 9)
    assert begun == [(2, 0), (4, 1), (6, 0), (8, 1)]
    assert ended == [(2, 0), (4, 1), (9, 0)]


def test_begins_are_distinct_and_every_fragment_has_one_in_a_phase(
    subtests: pytest.Subtests,
) -> None:
    for every in range(1, 12):
        for fragments in range(1, every + 1):
            with subtests.test(every=every, fragments=fragments):
                begun, _ = played(Staggered(every, fragments), 3 * every)
                steps = [step for step, _ in begun]
                assert [fragment for _, fragment in begun] == list(range(fragments)) * 3
                assert len(set(steps)) == 3 * fragments
                assert steps[fragments - 1 :: fragments] == [every, 2 * every, 3 * every]
                assert steps[fragments:] == [step + every for step in steps[:-fragments]]
                gaps = {after - before for before, after in zip([0, *steps], steps, strict=False)}
                assert max(gaps) - min(gaps) <= 1


def test_each_worker_has_its_pace() -> None:
    schedule = Staggered([4, 8], 2, delay=4)
    schedule.check(2)
    assert [schedule.of_worker(w) for w in (0, 1)] == [
        Staggered(4, 2, delay=4),
        Staggered(8, 2, delay=4),
    ]
    assert schedule.shares(2) == [1, 2]
    assert [schedule.staleness_of(w) for w in (0, 1)] == [1.0, 0.5]
    assert [schedule.shortest_run(w) for w in (0, 1)] == [8, 0]
    assert not schedule.is_whole_phase
    with pytest.raises(ValueError, match="lists 2 numbers for 3 workers"):
        schedule.check(3)


def test_how_late_results_are() -> None:
    assert (Staggered(10, delay=2).staleness_of(0), Staggered(10).staleness_of(0)) == (0.2, 0.0)
    assert Staggered(10, delay=10).is_whole_phase
    assert not Staggered(10, delay=9).is_whole_phase
    assert EverySteps(3, True).staleness_of(0) == 1.0
    assert EverySteps(3, True).is_whole_phase


def test_settings_are_plain_values() -> None:
    assert Staggered((4, 8), 2, 1, ("a", "b")).describe() == {
        "sync_every": [4, 8],
        "fragments": 2,
        "delay": 1,
        "pattern": ["a", "b"],
        "warm_start": False,
    }
    assert Staggered(4).describe()["pattern"] == "strided"
    assert str(Staggered(6, 2, 1)) == (
        "a round of each of 2 fragments every 6 local steps, which lands 1 steps later"
    )
    assert str(Staggered(6)) == "a round every 6 local steps"


def test_bad_input(subtests: pytest.Subtests) -> None:
    for arguments, error, text in (
        ({"sync_every": 0}, ValueError, "must be at least 1, got 0"),
        ({"sync_every": "10"}, TypeError, "must be an integer"),
        ({"sync_every": 2, "fragments": 3}, ValueError, "from 1 to sync_every=2, got 3"),
        ({"sync_every": [9, 2], "fragments": 3}, ValueError, "from 1 to sync_every=2, got 3"),
        ({"fragments": 0}, ValueError, "from 1 to sync_every=100, got 0"),
        ({"fragments": 2.0}, TypeError, "fragments counts the parts .* must be an integer"),
        ({"fragments": True}, TypeError, "must be an integer, got True"),
        ({"sync_every": 5, "delay": 6}, ValueError, "from 0 to sync_every=5, got 6"),
        ({"delay": -1}, ValueError, "from 0 to sync_every=100, got -1"),
        ({"delay": 0.5}, TypeError, "delay counts the local steps .* must be an integer"),
        (
            {"pattern": "stripes"},
            ValueError,
            "strided, contiguous, even, or a list .* got 'stripes'",
        ),
        ({"pattern": 3}, ValueError, "strided, contiguous, even, or a list .* got 3"),
        ({"pattern": ["a", "b"]}, ValueError, "lists 2 regular expressions for fragments=1"),
        ({"pattern": ["a("]}, ValueError, r"'a\(' is no regular expression"),
        ({"pattern": [3]}, ValueError, "3 is no regular expression"),
    ):
        with subtests.test(arguments=arguments), pytest.raises(error, match=text):
            Staggered(**arguments)

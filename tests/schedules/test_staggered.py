"""The schedule Staggered: when the rounds of each fragment begin and end."""

from __future__ import annotations

import math

import pytest

from lightning_loco.schedules import EverySteps, Schedule, Staggered, StepInfo


class Pending:
    """A pending round, of which only the start matters."""

    def __init__(self, began_at: int) -> None:
        self.began_at = began_at

    def has_arrived(self) -> bool:
        return False


def play(schedule: Schedule, steps: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(step, fragment) of each start and of each end, with ``due`` called as by an engine."""
    begun: list[tuple[int, int]] = []
    ended: list[tuple[int, int]] = []
    pending_rounds: dict[int, Pending] = {}
    round_index = since = 0
    for step in range(1, steps + 1):
        since += 1
        for fragment in range(schedule.num_fragments):
            info = StepInfo(
                step, since, round_index, fragment, math.inf, pending_rounds.get(fragment)
            )
            begins, ends = schedule.due(info)
            if ends:
                del pending_rounds[fragment]
                ended.append((step, fragment))
            if begins:
                begun.append((step, fragment))
                if schedule.is_overlapped(round_index):
                    pending_rounds[fragment] = Pending(step)
                else:
                    ended.append((step, fragment))
        if begun and begun[-1][0] == step:
            round_index, since = round_index + 1, 0
    return begun, ended


def test_the_order_of_two_fragments() -> None:
    begun, ended = play(Staggered(6, 2), 15)
    assert begun == ended == [(3, 0), (6, 1), (9, 0), (12, 1), (15, 0)]


def test_results_are_applied_after_the_delay_even_if_another_round_has_begun() -> None:
    begun, ended = play(Staggered(6, 2, delay=4), 16)
    assert begun == [(3, 0), (6, 1), (9, 0), (12, 1), (15, 0)]
    assert ended == [(step + 4, fragment) for step, fragment in begun if step + 4 <= 16]


def test_with_delay_sync_every_a_round_ends_when_the_next_one_begins() -> None:
    for fragments in (1, 2, 3):
        begun, ended = play(Staggered(6, fragments, delay=6), 30)
        assert ended == [(step + 6, fragment) for step, fragment in begun if step + 6 <= 30]
    expected = play(EverySteps(6, overlap=True, warm_start=False), 30)
    assert play(Staggered(6, 1, delay=6), 30) == expected
    late = Staggered(6, 1, delay=6)
    assert late.due(StepInfo(7, 5, 1, 0, 1.0, Pending(0))) == (
        False,
        False,
    )  # although 7 steps are over


def test_a_warm_start_ends_the_first_rounds_at_once() -> None:
    begun, ended = play(Staggered(4, 2, delay=3, warm_start=True), 9)
    assert begun == [(2, 0), (4, 1), (6, 0), (8, 1)]
    assert ended == [(2, 0), (4, 1), (9, 0)]


def test_starts_are_distinct_and_each_fragment_has_one_per_sync_every(
    subtests: pytest.Subtests,
) -> None:
    for every in range(1, 12):
        for fragments in range(1, every + 1):
            with subtests.test(every=every, fragments=fragments):
                begun, _ = play(Staggered(every, fragments), 3 * every)
                steps = [step for step, _ in begun]
                assert [fragment for _, fragment in begun] == list(range(fragments)) * 3
                assert len(set(steps)) == 3 * fragments
                assert steps[fragments - 1 :: fragments] == [every, 2 * every, 3 * every]
                assert steps[fragments:] == [step + every for step in steps[:-fragments]]
                gaps = {after - before for before, after in zip([0, *steps], steps, strict=False)}
                assert max(gaps) - min(gaps) <= 1


def test_a_list_gives_each_worker_its_schedule() -> None:
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


def test_staleness() -> None:
    assert (Staggered(10, delay=2).staleness_of(0), Staggered(10).staleness_of(0)) == (0.2, 0.0)
    assert Staggered(10, delay=10).is_whole_phase
    assert not Staggered(10, delay=9).is_whole_phase
    assert EverySteps(3, True).staleness_of(0) == 1.0
    assert EverySteps(3, True).is_whole_phase


def test_describe_and_str() -> None:
    assert Staggered((4, 8), 2, 1, ("a", "b")).describe() == {
        "sync_every": [4, 8],
        "fragments": 2,
        "delay": 1,
        "pattern": ["a", "b"],
        "warm_start": False,
    }
    assert Staggered(4).describe()["pattern"] == "strided"
    assert str(Staggered(6, 2, 1)) == (
        "a round of each of 2 fragments every 6 local steps, applied 1 steps later"
    )
    assert str(Staggered(6)) == "a round every 6 local steps"


def test_invalid_arguments_are_refused(subtests: pytest.Subtests) -> None:
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
        ({"pattern": ["a("]}, ValueError, r"'a\(' is not a regular expression"),
        ({"pattern": [3]}, ValueError, "3 is not a regular expression"),
    ):
        with subtests.test(arguments=arguments), pytest.raises(error, match=text):
            Staggered(**arguments)

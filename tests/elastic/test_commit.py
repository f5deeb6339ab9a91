"""Whether an exchange counts that has failed for some, for everything that can have happened."""

from __future__ import annotations

import itertools

import pytest

from lightning_loco.elastic.quorum import NO_STATE, Told, counting

MEMBERS = ("a", "b", "c", "d")
GROUP = "7.5/4"
IN_ROUND = 3


def told(round_index: int, made: str = "before/4", received: tuple[str, ...] = ()) -> Told:
    return Told(round_index, "", "host:1", 0, "ours", 1, made, list(received), [])


NOTHING, RECEIVED, LANDED = (
    told(IN_ROUND),
    told(IN_ROUND, received=(GROUP, *MEMBERS)),
    told(IN_ROUND + 1, made=GROUP),
)


def possible(fates: tuple[Told, ...]) -> bool:
    """Nobody lands before all have received."""
    return LANDED not in fates or NOTHING not in fates


def test_those_that_are_left_do_as_the_lost_ones_have_done() -> None:
    histories = filter(possible, itertools.product((NOTHING, RECEIVED, LANDED), repeat=4))
    for fates, count in itertools.product(histories, range(1, 5)):
        for there in itertools.combinations(range(4), count):
            present = {MEMBERS[place]: fates[place] for place in there}
            waiting = {name for name, one in present.items() if one == RECEIVED}
            nobody_gives_it_up = NOTHING not in present.values()
            assert counting(present) == (waiting if nobody_gives_it_up else set())
            assert nobody_gives_it_up or LANDED not in fates


def test_it_does_not_count_once_it_was_repeated(subtests: pytest.Subtests) -> None:
    for name, other in {
        "has repeated it": told(IN_ROUND + 1, made="another/2"),
        "is further": told(IN_ROUND + 2, made=GROUP),
        "has received it in another group": told(IN_ROUND, received=("another/2", *MEMBERS)),
    }.items():
        with subtests.test(name):
            assert counting({"a": RECEIVED, "b": other}) == set()


def test_others_have_no_say(subtests: pytest.Subtests) -> None:
    for name, other in {
        "new": told(NO_STATE),
        "behind": told(IN_ROUND - 1),
        "was elsewhere": told(IN_ROUND),
    }.items():
        with subtests.test(name):
            assert counting({"a": RECEIVED, "b": RECEIVED, "stranger": other}) == {"a", "b"}


def test_a_member_that_knows_nothing_of_the_round_has_no_say() -> None:
    assert counting({"a": RECEIVED, "b": told(NO_STATE)}) == {"a"}

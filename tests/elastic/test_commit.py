"""Whether an exchange counts that has failed for some, for everything that can have happened."""

from __future__ import annotations

import itertools

import pytest

from lightning_loco.elastic.quorum import NO_STATE, MemberInfo, committed_members

MEMBERS = ("a", "b", "c", "d")
GROUP = "7.5/4"
IN_ROUND = 3


def info(
    round_index: int, last_group: str = "before/4", received: tuple[str, ...] = ()
) -> MemberInfo:
    return MemberInfo(round_index, "", "host:1", 0, "ours", 1, last_group, list(received), [])


NOTHING, RECEIVED, LANDED = (
    info(IN_ROUND),
    info(IN_ROUND, received=(GROUP, *MEMBERS)),
    info(IN_ROUND + 1, last_group=GROUP),
)


def possible(fates: tuple[MemberInfo, ...]) -> bool:
    """Nobody lands before all have received."""
    return LANDED not in fates or NOTHING not in fates


def test_the_remaining_members_act_as_the_lost_ones_did() -> None:
    histories = filter(possible, itertools.product((NOTHING, RECEIVED, LANDED), repeat=4))
    for fates, count in itertools.product(histories, range(1, 5)):
        for there in itertools.combinations(range(4), count):
            present = {MEMBERS[place]: fates[place] for place in there}
            waiting = {name for name, one in present.items() if one == RECEIVED}
            nobody_gives_it_up = NOTHING not in present.values()
            assert committed_members(present) == (waiting if nobody_gives_it_up else set())
            assert nobody_gives_it_up or LANDED not in fates


def test_an_exchange_does_not_count_once_it_was_repeated(subtests: pytest.Subtests) -> None:
    for name, other in {
        "has repeated it": info(IN_ROUND + 1, last_group="another/2"),
        "is further": info(IN_ROUND + 2, last_group=GROUP),
        "has received it in another group": info(IN_ROUND, received=("another/2", *MEMBERS)),
    }.items():
        with subtests.test(name):
            assert committed_members({"a": RECEIVED, "b": other}) == set()


def test_workers_outside_the_exchange_do_not_matter(subtests: pytest.Subtests) -> None:
    for name, other in {
        "new": info(NO_STATE),
        "behind": info(IN_ROUND - 1),
        "was elsewhere": info(IN_ROUND),
    }.items():
        with subtests.test(name):
            assert committed_members({"a": RECEIVED, "b": RECEIVED, "stranger": other}) == {
                "a",
                "b",
            }


def test_a_member_without_state_does_not_count() -> None:
    assert committed_members({"a": RECEIVED, "b": info(NO_STATE)}) == {"a"}

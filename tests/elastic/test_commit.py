"""Whether an exchange that failed for some members counts, for all possible histories."""

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
    return MemberInfo(round_index, "", ["host:1"], 0, "ours", 1, last_group, list(received), [])


NOTHING, RECEIVED, APPLIED = (
    info(IN_ROUND),
    info(IN_ROUND, received=(GROUP, *MEMBERS)),
    info(IN_ROUND + 1, last_group=GROUP),
)


def is_possible(outcomes: tuple[MemberInfo, ...]) -> bool:
    """Whether no member applied a result before all members received it."""
    return APPLIED not in outcomes or NOTHING not in outcomes


def test_the_remaining_members_act_as_the_lost_ones_did() -> None:
    histories = filter(is_possible, itertools.product((NOTHING, RECEIVED, APPLIED), repeat=4))
    for outcomes, count in itertools.product(histories, range(1, 5)):
        for ranks in itertools.combinations(range(4), count):
            present = {MEMBERS[rank]: outcomes[rank] for rank in ranks}
            waiting = {name for name, info in present.items() if info == RECEIVED}
            all_received = NOTHING not in present.values()
            assert committed_members(present) == (waiting if all_received else set())
            assert all_received or APPLIED not in outcomes


def test_an_exchange_does_not_count_once_it_was_repeated(subtests: pytest.Subtests) -> None:
    for name, other in {
        "has repeated it": info(IN_ROUND + 1, last_group="another/2"),
        "is ahead": info(IN_ROUND + 2, last_group=GROUP),
        "has received it in another group": info(IN_ROUND, received=("another/2", *MEMBERS)),
    }.items():
        with subtests.test(name):
            assert committed_members({"a": RECEIVED, "b": other}) == set()


def test_workers_outside_the_exchange_do_not_matter(subtests: pytest.Subtests) -> None:
    for name, other in {
        "new": info(NO_STATE),
        "behind": info(IN_ROUND - 1),
        "was in another group": info(IN_ROUND),
    }.items():
        with subtests.test(name):
            assert committed_members({"a": RECEIVED, "b": RECEIVED, "other": other}) == {
                "a",
                "b",
            }


def test_a_member_without_state_does_not_count() -> None:
    assert committed_members({"a": RECEIVED, "b": info(NO_STATE)}) == {"a"}

"""What a quorum means, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_loco.elastic.lighthouse import Member, Quorum
from lightning_loco.elastic.quorum import (
    NO_STATE,
    OtherRun,
    Plan,
    difference,
    make_plan,
    read,
    resumed,
)


def told(
    round_index: int,
    group: str = "",
    data: int = 0,
    run: str = "ours",
    enough: int = 2,
    made: str = "",
    received: tuple[str, ...] = (),
    awaited: tuple[str, ...] = (),
) -> dict[str, Any]:
    return {
        "round_index": round_index,
        "group": group,
        "store": f"host:{max(1, round_index + 2)}",
        "data": data,
        "run": run,
        "enough": enough,
        "made": made,
        "received": list(received),
        "awaited": list(awaited),
    }


def plans(**members: dict[str, Any]) -> dict[str, Plan]:
    quorum = Quorum("7.5", [Member(name, words) for name, words in members.items()])
    return {name: make_plan(quorum, name) for name in members}


def test_a_run_begins_with_the_state_of_the_first_member() -> None:
    a, b = plans(a=told(NO_STATE), b=told(NO_STATE)).values()
    assert (a.own, b.own) == (0, 1)
    assert a.donor == b.donor == 0
    assert a.newcomers == b.newcomers == (1,)
    assert a.round_index == b.round_index == NO_STATE
    assert a.group == b.group == "7.5/2"
    assert a.is_new
    assert a._replace(own=1) == b


def test_the_same_members_keep_their_group() -> None:
    plan = plans(a=told(3, "1.0/2"), b=told(3, "1.0/2"))["b"]
    assert not plan.is_new
    assert plan.group == "1.0/2"
    assert plan.newcomers == ()
    assert plan.round_index == 3


def test_other_members_make_a_new_group(subtests: pytest.Subtests) -> None:
    for name, first, second in [
        ("one has failed", "1.0/2", ""),
        ("two groups", "1.0/2", "2.0/2"),
        ("one is gone", "1.0/3", "1.0/3"),
        ("both have failed", "", ""),
    ]:
        with subtests.test(name):
            plan = plans(a=told(3, first), b=told(3, second))["a"]
            assert plan.is_new
            assert plan.group == "7.5/2"


def test_who_knows_nothing_gets_the_state_and_never_gives_it() -> None:
    found = plans(a=told(NO_STATE), b=told(5, "1.0/2"), c=told(5, "1.0/2"))
    for plan in found.values():
        assert plan.donor == 1
        assert plan.newcomers == (0,)
        assert plan.round_index == 5
        assert plan.stores == ("host:1", "host:7", "host:7")


def test_who_is_behind_gets_the_state() -> None:
    plan = plans(a=told(4, "1.0/2"), b=told(5, "2.0/1"))["a"]
    assert plan.newcomers == (0,)
    assert plan.donor == 1
    assert plan.round_index == 5


def test_who_has_another_past_than_most_gets_the_state() -> None:
    members = {"a": told(5, made="1.0/1"), "b": told(5, made="2.0/2"), "c": told(5, made="2.0/2")}
    for plan in plans(**members).values():
        assert (plan.donor, plan.newcomers, plan.round_index) == (1, (0,), 5)


def test_a_round_that_counts_is_not_made_again() -> None:
    received = ("1.0/3", "a", "b", "gone")
    found = plans(a=told(5, received=received), b=told(5, received=received), c=told(NO_STATE))
    assert {plan.counted for plan in found.values()} == {(0, 1)}
    assert plans(a=told(5, received=received), b=told(5))["a"].counted == ()


def test_all_go_on_in_the_data_where_nobody_has_been() -> None:
    found = plans(a=told(5, "", data=40), b=told(5, "", data=90), c=told(NO_STATE))
    assert {plan.data for plan in found.values()} == {90}


def test_the_least_demanding_says_how_many_members_are_enough() -> None:
    found = plans(a=told(5, "", enough=3), b=told(5, "", enough=1), c=told(NO_STATE, enough=2))
    assert {plan.enough for plan in found.values()} == {1}


def test_a_round_waits_for_whom_all_who_know_the_run_await() -> None:
    a, b = told(5, awaited=("b", "c", "d")), told(5, awaited=("a", "c"))
    for plan in plans(a=a, b=b, new=told(NO_STATE)).values():
        assert plan.missing == ("c",)
    assert plans(a=a, b=told(5))["a"].missing == ()
    assert plans(a=a, b=b, c=told(4), d=told(5, awaited=("c",)))["a"].missing == ()


def test_other_settings_are_refused_and_the_others_go_on() -> None:
    members = {"a": told(5), "b": told(5), "c": told(NO_STATE, run="another")}
    quorum = Quorum("7.5", [Member(name, words) for name, words in members.items()])
    assert make_plan(quorum, "a").names == ("a", "b")
    with pytest.raises(OtherRun) as refused:
        make_plan(quorum, "c")
    assert (refused.value.who, refused.value.store) == ("a", "host:7")


def test_the_first_difference_is_told() -> None:
    own, other = {"algorithm": "DiLoCo", "outer_lr": 0.5}, {"algorithm": "DiLoCo", "outer_lr": 0.7}
    text = difference(own, other, "a")
    assert "outer_lr is 0.5 here and 0.7 in the run (as a has it)" in text


def test_strangers_take_no_part(subtests: pytest.Subtests) -> None:
    for words in (
        {},
        {"round": 1},
        {**told(1), "data": "x"},
        {**told(1), "x": 1},
        {**told(1), "received": [1]},
        {**told(1), "awaited": [1]},
        {**told(1), "store": "somewhere"},
        {**told(1), "store": "host:-1"},
        {**told(1), "store": "host:65536"},
        {**told(1), "store": f"{'x' * 64}.org:1"},
        {**told(1), "store": "a..b:1"},
        {**told(1), "store": "ho\0st:1"},
        {**told(1), "round_index": 10**400},
        {**told(1), "data": 2**64},
    ):
        with subtests.test(words=words):
            quorum = Quorum("7.5", [Member("a", told(1, "1.0/1")), Member("stranger", words)])
            assert make_plan(quorum, "a").names == ("a",)
            assert make_plan(quorum, "a").strangers == ("stranger",)
            assert not make_plan(quorum, "a").is_new
            with pytest.raises(RuntimeError, match="lacks what this worker, stranger, has sent"):
                make_plan(quorum, "stranger")


def test_addresses_of_all_kinds_are_read(subtests: pytest.Subtests) -> None:
    for store in ("10.0.0.1:80", "a-b.c_d.org:65535", "fe80::1%eth0:1", "[::1]:29510", "h.:1"):
        with subtests.test(store=store):
            assert read(Member("a", {**told(1), "store": store})) is not None


def test_a_run_is_resumed_from_the_newest_checkpoint() -> None:
    words = {"a": told(NO_STATE), "b": told(resumed(3)), "c": told(resumed(5), data=40)}
    for plan in plans(**words, d=told(resumed(5))).values():
        assert plan.donor == 2
        assert plan.newcomers == (0, 1)
        assert plan.round_index == NO_STATE
        assert plan.data == 40


def test_a_checkpoint_of_the_first_round_is_worth_more_than_nothing() -> None:
    plan = plans(a=told(NO_STATE), b=told(resumed(0)))["a"]
    assert (plan.donor, plan.newcomers) == (1, (0,))


def test_a_resumed_worker_joins_those_who_make_rounds_whatever_it_knows() -> None:
    plan = plans(a=told(resumed(7)), b=told(4, "1.0/2"), c=told(4, "1.0/2"))["a"]
    assert (plan.donor, plan.newcomers, plan.round_index) == (1, (0,), 4)

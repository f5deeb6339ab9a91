"""The plans that members derive from a quorum."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_loco.elastic.quorum import (
    NO_STATE,
    Member,
    MemberInfo,
    OtherRun,
    Quorum,
    QuorumPlan,
    describe_difference,
    make_plan,
    resumed_round,
)


def info(
    round_index: int,
    group: str = "",
    data: int = 0,
    run: str = "ours",
    enough: int = 2,
    last_group: str = "",
    received: tuple[str, ...] = (),
    awaited: tuple[str, ...] = (),
) -> dict[str, Any]:
    return {
        "round_index": round_index,
        "open_group": group,
        "stores": [f"host:{max(1, round_index + 2)}"],
        "data_position": data,
        "run_hash": run,
        "min_members": enough,
        "last_group": last_group,
        "received": list(received),
        "awaited": list(awaited),
    }


def plans(**members: dict[str, Any]) -> dict[str, QuorumPlan]:
    quorum = Quorum("7.5", [Member(name, data) for name, data in members.items()])
    return {name: make_plan(quorum, name) for name in members}


def test_a_run_begins_with_the_state_of_the_first_member() -> None:
    a, b = plans(a=info(NO_STATE), b=info(NO_STATE)).values()
    assert (a.rank, b.rank) == (0, 1)
    assert a.donor == b.donor == 0
    assert a.joining == b.joining == (1,)
    assert a.round_index == b.round_index == NO_STATE
    assert a.group == b.group == "7.5/2"
    assert a.is_new
    assert a._replace(rank=1) == b


def test_the_same_members_keep_their_group() -> None:
    plan = plans(a=info(3, "1.0/2"), b=info(3, "1.0/2"))["b"]
    assert not plan.is_new
    assert plan.group == "1.0/2"
    assert plan.joining == ()
    assert plan.round_index == 3


def test_other_members_make_a_new_group(subtests: pytest.Subtests) -> None:
    for name, first, second in [
        ("one has failed", "1.0/2", ""),
        ("two groups", "1.0/2", "2.0/2"),
        ("one is gone", "1.0/3", "1.0/3"),
        ("both have failed", "", ""),
    ]:
        with subtests.test(name):
            plan = plans(a=info(3, first), b=info(3, second))["a"]
            assert plan.is_new
            assert plan.group == "7.5/2"


def test_a_worker_without_state_receives_it_and_is_never_the_donor() -> None:
    found = plans(a=info(NO_STATE), b=info(5, "1.0/2"), c=info(5, "1.0/2"))
    for plan in found.values():
        assert plan.donor == 1
        assert plan.joining == (0,)
        assert plan.round_index == 5
        assert plan.stores == ("host:1", "host:7", "host:7")


def test_a_worker_that_is_behind_receives_the_state() -> None:
    plan = plans(a=info(4, "1.0/2"), b=info(5, "2.0/1"))["a"]
    assert plan.joining == (0,)
    assert plan.donor == 1
    assert plan.round_index == 5


def test_a_worker_whose_last_group_was_smaller_receives_the_state() -> None:
    members = {
        "a": info(5, last_group="1.0/1"),
        "b": info(5, last_group="2.0/2"),
        "c": info(5, last_group="2.0/2"),
    }
    for plan in plans(**members).values():
        assert (plan.donor, plan.joining, plan.round_index) == (1, (0,), 5)


def test_a_committed_round_is_not_repeated() -> None:
    received = ("1.0/3", "a", "b", "gone")
    found = plans(a=info(5, received=received), b=info(5, received=received), c=info(NO_STATE))
    assert {plan.committed for plan in found.values()} == {(0, 1)}
    assert plans(a=info(5, received=received), b=info(5))["a"].committed == ()


def test_all_continue_in_the_data_beyond_used_positions() -> None:
    found = plans(a=info(5, "", data=40), b=info(5, "", data=90), c=info(NO_STATE))
    assert {plan.data_position for plan in found.values()} == {90}


def test_the_least_min_members_counts() -> None:
    found = plans(a=info(5, "", enough=3), b=info(5, "", enough=1), c=info(NO_STATE, enough=2))
    assert {plan.min_members for plan in found.values()} == {1}


def test_a_round_waits_for_members_that_all_others_wait_for() -> None:
    a, b = info(5, awaited=("b", "c", "d")), info(5, awaited=("a", "c"))
    for plan in plans(a=a, b=b, new=info(NO_STATE)).values():
        assert plan.missing == ("c",)
    assert plans(a=a, b=info(5))["a"].missing == ()
    assert plans(a=a, b=b, c=info(4), d=info(5, awaited=("c",)))["a"].missing == ()


def test_a_worker_with_other_settings_is_refused_and_the_others_continue() -> None:
    members = {"a": info(5), "b": info(5), "c": info(NO_STATE, run="another")}
    quorum = Quorum("7.5", [Member(name, data) for name, data in members.items()])
    assert make_plan(quorum, "a").names == ("a", "b")
    with pytest.raises(OtherRun) as refused:
        make_plan(quorum, "c")
    assert (refused.value.member, refused.value.store) == ("a", "host:7")


def test_each_rank_of_a_worker_connects_to_those_of_its_place() -> None:
    stores = {"a": ["host:1", "host:2"], "b": ["host:3", "host:4"]}
    members = [Member(name, {**info(5), "stores": found}) for name, found in stores.items()]
    first, second = (make_plan(Quorum("7.5", members), "a", place) for place in range(2))
    assert first.stores == ("host:1", "host:3")
    assert second == first._replace(stores=("host:2", "host:4"))


def test_a_worker_of_another_number_of_ranks_is_refused() -> None:
    other = {**info(NO_STATE), "stores": ["host:8", "host:9"]}
    quorum = Quorum("7.5", [Member("a", info(5)), Member("b", other)])
    assert make_plan(quorum, "a").names == ("a",)
    with pytest.raises(OtherRun):
        make_plan(quorum, "b")


def test_the_first_difference_is_named() -> None:
    own, other = {"algorithm": "DiLoCo", "outer_lr": 0.5}, {"algorithm": "DiLoCo", "outer_lr": 0.7}
    text = describe_difference(own, other, "a")
    assert "outer_lr is 0.5 here and 0.7 in the run (as a has it)" in text


def test_malformed_requests_are_ignored(subtests: pytest.Subtests) -> None:
    for data in (
        {},
        {"round": 1},
        {**info(1), "data_position": "x"},
        {**info(1), "x": 1},
        {**info(1), "received": [1]},
        {**info(1), "awaited": [1]},
        {**info(1), "stores": ["somewhere"]},
        {**info(1), "stores": ["host:-1"]},
        {**info(1), "stores": ["host:65536"]},
        {**info(1), "stores": [f"{'x' * 64}.org:1"]},
        {**info(1), "stores": ["a..b:1"]},
        {**info(1), "stores": ["ho\0st:1"]},
        {**info(1), "stores": ["host:1", 2]},
        {**info(1), "stores": []},
        {**info(1), "round_index": 10**400},
        {**info(1), "data_position": 2**64},
    ):
        with subtests.test(data=data):
            quorum = Quorum("7.5", [Member("a", info(1, "1.0/1")), Member("other", data)])
            assert make_plan(quorum, "a").names == ("a",)
            assert make_plan(quorum, "a").malformed == ("other",)
            assert not make_plan(quorum, "a").is_new
            with pytest.raises(RuntimeError, match="lacks the request of this worker, other"):
                make_plan(quorum, "other")


def test_addresses_of_all_kinds_are_accepted(subtests: pytest.Subtests) -> None:
    for store in ("10.0.0.1:80", "a-b.c_d.org:65535", "fe80::1%eth0:1", "[::1]:29510", "h.:1"):
        with subtests.test(store=store):
            assert MemberInfo.parse(Member("a", {**info(1), "stores": [store]})) is not None


def test_a_run_is_resumed_from_the_newest_checkpoint() -> None:
    members = {
        "a": info(NO_STATE),
        "b": info(resumed_round(3)),
        "c": info(resumed_round(5), data=40),
    }
    for plan in plans(**members, d=info(resumed_round(5))).values():
        assert plan.donor == 2
        assert plan.joining == (0, 1)
        assert plan.round_index == NO_STATE
        assert plan.data_position == 40


def test_a_run_resumes_from_a_checkpoint_of_the_first_round() -> None:
    plan = plans(a=info(NO_STATE), b=info(resumed_round(0)))["a"]
    assert (plan.donor, plan.joining) == (1, (0,))


def test_a_resumed_worker_receives_the_state_of_those_that_make_rounds() -> None:
    plan = plans(a=info(resumed_round(7)), b=info(4, "1.0/2"), c=info(4, "1.0/2"))["a"]
    assert (plan.donor, plan.joining, plan.round_index) == (1, (0,), 4)

"""The stream of samples and its members."""

from __future__ import annotations

import pytest

from lightning_loco.elastic.data_stream import MembersSampler
from lightning_loco.engine.membership import DataShare


def dealt(base: int, count: int) -> list[DataShare]:
    shares = [DataShare() for _ in range(count)]
    for place, share in enumerate(shares):
        share.deal(base, place, count)
    return shares


def test_members_take_all_positions_once() -> None:
    shares = dealt(10, 3)
    taken = [share.take() for _ in range(4) for share in shares]
    assert taken == list(range(10, 22))


def test_after_a_change_nobody_takes_what_was_taken() -> None:
    """Also if a member takes as much as in the last round before it learns of the change."""
    shares = dealt(0, 3)
    taken = []
    for _ in range(2):
        for share, number in zip(shares, (4, 5, 3), strict=True):
            share.begin_round()
            taken += [share.take() for _ in range(number)]
    for share in shares:
        share.begin_round()
    base = max(share.reach for share in shares)
    taken += [share.take() for share in shares for _ in range(5)]
    left = shares[1:]
    for place, share in enumerate(left):
        share.deal(base, place, 2)
    taken += [share.take() for share in left for _ in range(10)]
    assert len(set(taken)) == len(taken)


def test_a_resumed_member_begins_where_nobody_has_been() -> None:
    shares = dealt(10, 3)
    taken = [share.take() for _ in range(4) for share in shares]
    again = DataShare()
    again.begin_at(max(share.reach for share in shares))
    assert again.reach > max(taken)
    again.deal(again.reach, 0, 1)
    assert again.take() > max(taken)


def test_one_member_alone_sees_all_samples_once_in_an_epoch() -> None:
    sampler = MembersSampler(range(7), DataShare(), seed=3)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    again = MembersSampler(range(7), DataShare(), seed=3)
    assert list(again) == first


def test_a_walk_is_as_long_for_all_and_goes_on_where_it_has_ended() -> None:
    walks = []
    for share in dealt(0, 2):
        sampler = MembersSampler(range(8), share, 2, shuffle=False)
        assert len(sampler) == 4
        walks += [list(sampler), list(sampler)]
    assert walks == [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]


def test_empty_data_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        MembersSampler([], DataShare())

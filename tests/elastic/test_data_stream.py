"""The stream of samples and how members share it."""

from __future__ import annotations

import pytest

from lightning_loco.elastic.data_shard import DataShard
from lightning_loco.elastic.data_stream import MembersSampler


def make_shards(base: int, num_members: int) -> list[DataShard]:
    shards = [DataShard() for _ in range(num_members)]
    for rank, shard in enumerate(shards):
        shard.reassign(base, rank, num_members)
    return shards


def test_members_use_all_positions_once() -> None:
    shards = make_shards(10, 3)
    used = [shard.next_position() for _ in range(4) for shard in shards]
    assert used == list(range(10, 22))


def test_after_a_change_of_members_no_position_is_used_twice() -> None:
    """Also if a member reads as many samples as in the last round before it notices the change."""
    shards = make_shards(0, 3)
    used = []
    for _ in range(2):
        for shard, number in zip(shards, (4, 5, 3), strict=True):
            shard.start_round()
            used += [shard.next_position() for _ in range(number)]
    for shard in shards:
        shard.start_round()
    base = max(shard.first_unused for shard in shards)
    used += [shard.next_position() for shard in shards for _ in range(5)]
    remaining = shards[1:]
    for rank, shard in enumerate(remaining):
        shard.reassign(base, rank, 2)
    used += [shard.next_position() for shard in remaining for _ in range(10)]
    assert len(set(used)) == len(used)


def test_a_resumed_member_starts_beyond_all_used_positions() -> None:
    shards = make_shards(10, 3)
    used = [shard.next_position() for _ in range(4) for shard in shards]
    resumed = DataShard()
    resumed.start_at(max(shard.first_unused for shard in shards))
    assert resumed.first_unused > max(used)
    resumed.reassign(resumed.first_unused, 0, 1)
    assert resumed.next_position() > max(used)


def test_a_single_member_sees_all_samples_once_per_epoch() -> None:
    sampler = MembersSampler(range(7), DataShard(), seed=3)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    repeated = MembersSampler(range(7), DataShard(), seed=3)
    assert list(repeated) == first


def test_an_iteration_is_equally_long_for_all_and_continues_the_one_before() -> None:
    iterations = []
    for shard in make_shards(0, 2):
        sampler = MembersSampler(range(8), shard, 2, shuffle=False)
        assert len(sampler) == 4
        iterations += [list(sampler), list(sampler)]
    assert iterations == [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        MembersSampler([], DataShard())

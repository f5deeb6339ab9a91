"""Local steps in proportion to the speed of the workers."""

from __future__ import annotations

import pytest

from lightning_loco.schedules import EverySteps, steps_by_speed


def test_the_fastest_worker_makes_sync_every_steps_and_others_their_share(
    subtests: pytest.Subtests,
) -> None:
    for speeds, sync_every, expected in (
        ([4.1, 4.0, 1.0], 50, [50, 48, 12]),
        ([1.0], 7, [7]),
        ([2, 2, 2], 10, [10, 10, 10]),
        ([0.1, 0.3], 3, [1, 3]),  # 0.1 / 0.3 * 3 is a little below 1 in floating point
        ([1e-6, 1.0], 100, [1, 100]),  # at least one step
    ):
        with subtests.test(speeds=speeds, sync_every=sync_every):
            assert steps_by_speed(speeds, sync_every) == expected
            assert steps_by_speed([speed * 3.7 for speed in speeds], sync_every) == expected


def test_no_worker_waits_for_a_slower_one_by_more_than_a_step() -> None:
    speeds = [3.0, 2.3, 1.1, 0.7]
    steps = steps_by_speed(speeds, 40)
    seconds = [count / speed for count, speed in zip(steps, speeds, strict=True)]
    for took, speed in zip(seconds, speeds, strict=True):
        assert 0 <= max(seconds) - took < 1 / speed
    EverySteps(steps).check(4)


def test_invalid_speeds_are_refused(subtests: pytest.Subtests) -> None:
    for speeds, sync_every, message in (
        ([], 10, r"speeds must be positive, one per worker, got \[\]"),
        ([1.0, 0.0], 10, r"speeds must be positive, one per worker, got \[1.0, 0.0\]"),
        ([1.0, float("nan")], 10, "speeds must be positive"),
        ([1.0, float("inf")], 10, "speeds must be positive"),
        ([1.0], 0, "sync_every must be at least 1, got 0"),
    ):
        with (
            subtests.test(speeds=speeds, sync_every=sync_every),
            pytest.raises(ValueError, match=message),
        ):
            steps_by_speed(speeds, sync_every)

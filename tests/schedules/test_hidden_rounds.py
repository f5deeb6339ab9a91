"""The schedules of async DiLoCo for its arguments."""

from __future__ import annotations

import pytest

from lightning_loco.schedules import EverySteps, Staggered, VaryingSteps, hidden_rounds


def test_arguments_become_a_schedule(subtests: pytest.Subtests) -> None:
    for arguments, schedule in (
        ((100,), Staggered(100, 4, 25, "even")),
        ((10,), Staggered(10, 4, 2, "even")),
        ((3,), Staggered(3, 3, 1, "even")),
        ((1,), Staggered(1, 1, 1, "even")),
        (([9, 30],), Staggered([9, 30], 4, 2, "even")),
        ((10, 5), Staggered(10, 5, 2, "even")),
        ((10, 5, 7), Staggered(10, 5, 7, "even")),
        ((10, 1), Staggered(10, 1, 10, "even")),
        ((10, None, 3, True), Staggered(10, 1, 3, "even", warm_start=True)),
        ((10, None), EverySteps(10, overlap=True, warm_start=False)),
        ((10, None, None, True), EverySteps(10, overlap=True)),
        (({0: 10}, None, None, True), VaryingSteps({0: 10}, overlap=True)),
    ):
        with subtests.test(arguments=arguments):
            assert hidden_rounds(*arguments) == schedule


def test_invalid_arguments_are_refused(subtests: pytest.Subtests) -> None:
    for arguments, error, text in (
        (({0: 10},), ValueError, "need one sync_every for the whole run, got {0: 10}"),
        (({0: 10}, None, 2), ValueError, "need one sync_every for the whole run"),
        ((10, 11), ValueError, "from 1 to sync_every=10, got 11"),
        ((10, 0), ValueError, "from 1 to sync_every=10, got 0"),
        ((10, "many"), TypeError, "must be an integer, got 'many'"),
        ((10, 2, 11), ValueError, "from 0 to sync_every=10, got 11"),
        (("10",), TypeError, "must be an integer"),
        ((0,), ValueError, "must be at least 1, got 0"),
    ):
        with subtests.test(arguments=arguments), pytest.raises(error, match=text):
            hidden_rounds(*arguments)

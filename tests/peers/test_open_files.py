"""Open files: the limit is raised as far as it may be, and others get a share of it."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from lightning_loco.peers.open_files import make_room


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The limits of this process, which are put back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_low_limit_is_raised_to_what_is_needed(limits: tuple[int, int]) -> None:
    hard = limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    assert make_room(3) == 2 * 3 + 32
    soft, still_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert still_hard == hard
    assert soft == (4096 + 3 * 16 if hard == resource.RLIM_INFINITY else min(hard, 4096 + 3 * 16))


def test_a_high_limit_stays(limits: tuple[int, int]) -> None:
    hard = limits[1]
    soft = hard if hard != resource.RLIM_INFINITY else 10_000
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    make_room(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_others_get_an_eighth_at_most(limits: tuple[int, int]) -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert make_room(10_000_000) <= max(soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) // 8

"""Nearness: what is measured as chunks come, and which distances are too long."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.compression import BFloat16, Codec, Int8
from lightning_loco.gossip.model import SERIAL_ELEMENTS, Model
from lightning_loco.gossip.outlier_filter import Nearness
from lightning_loco.gossip.snapshots import Snapshots

NUMEL = 2 * SERIAL_ELEMENTS + 100


def make(
    own: Tensor | None = None,
    most: float | None = 10.0,
    dtype: torch.dtype = torch.float32,
    codec: Codec | None = None,
    numel: int = NUMEL,
) -> Nearness:
    model = Model(1, numel, dtype, codec)
    publications = Snapshots(model)
    if own is not None:
        publications.publish(own, Tag(1, 1))
    return Nearness(model, publications, most)


def look(nearness: Nearness, theirs: Tensor, chunk: int = 50_000) -> bool:
    """As a fetch does it."""
    nearness.clear()
    for start in range(0, len(theirs), chunk):
        nearness.add(start, theirs[start : start + chunk])
    return nearness.is_finite and nearness.is_near()


def at(own: Tensor, distance: float) -> Tensor:
    """Something at this distance."""
    step = torch.randn(len(own))
    return own + step * (distance / step.norm())


def test_the_distance_is_that_to_the_latest_publication(subtests: pytest.Subtests) -> None:
    kinds = [
        (torch.float32, None),
        (torch.float64, None),
        (torch.float32, BFloat16()),
        (torch.float64, Int8()),
        (torch.float32, Int8(block=8)),
        (torch.float32, Int8(block=40_000)),
    ]
    for (dtype, codec), chunk in itertools.product(kinds, (8, SERIAL_ELEMENTS, 50_000, NUMEL)):
        with subtests.test(dtype=dtype, codec=codec, chunk=chunk):
            numel = NUMEL if chunk > 8 else 300
            own, theirs = torch.randn(2, numel, dtype=dtype)
            nearness = make(own, dtype=dtype, codec=codec, numel=numel)
            if codec is None:
                look(nearness, theirs, chunk)
            else:
                look(nearness, theirs, -(-chunk // codec.block) * codec.block)
                own = codec.decode(codec.encode(own), torch.empty_like(own))
            assert nearness.distance == pytest.approx(float((own - theirs).norm()), rel=1e-5)


def test_one_value_that_is_not_finite_is_noticed_and_forgotten(subtests: pytest.Subtests) -> None:
    for own, value in itertools.product(
        (None, torch.zeros(NUMEL)), (math.nan, math.inf, -math.inf)
    ):
        with subtests.test(has_published=own is not None, value=value):
            nearness = make(own)
            theirs = torch.zeros(NUMEL)
            theirs[SERIAL_ELEMENTS] = value
            assert not look(nearness, theirs)
            assert not nearness.is_finite
            assert look(nearness, torch.zeros(NUMEL))


def test_the_absurd_is_too_far_from_the_first_fetch_on(subtests: pytest.Subtests) -> None:
    for dtype, has_published in itertools.product((torch.float32, torch.float64), (False, True)):
        with subtests.test(dtype=dtype, has_published=has_published):
            nearness = make(torch.zeros(NUMEL, dtype=dtype) if has_published else None, dtype=dtype)
            for value in (3e38, 1e30, 1e12):
                for _ in range(50):
                    assert not look(nearness, torch.full((NUMEL,), value, dtype=dtype))
                    assert nearness.is_finite
            assert look(make(None, None, dtype), torch.full((NUMEL,), 3e38, dtype=dtype))


def test_a_norm_of_ones_own_or_one_for_each_parameter_is_the_scale_of_the_first_fetches() -> None:
    for scale in (0.0, 0.01, 1.0, 100.0):
        own = torch.full((NUMEL,), scale)
        root = math.sqrt(NUMEL) * max(scale, 1)
        assert look(make(own), at(own, 9.9 * root))
        assert not look(make(own), at(own, 10.1 * root))
        assert look(make(own, None), at(own, 10.1 * root))


def test_then_it_is_the_median_of_the_recent_distances() -> None:
    own = torch.randn(NUMEL)
    nearness = make(own)
    for distance in (1.0, 2.0, 3.0, 4.0):
        assert look(nearness, at(own, distance))
    assert look(nearness, at(own, 100.0))  # four are not enough
    assert not look(nearness, at(own, 31.0))  # the median is 3
    assert look(nearness, at(own, 34.0))  # 3.5: the last counts as 30
    assert look(nearness, own)


def test_equal_parameters_say_nothing_about_the_usual_distance() -> None:
    own = torch.randn(NUMEL)
    nearness = make(own)
    for _ in range(30):
        assert look(nearness, own)
    assert look(nearness, at(own, 1.0))


def test_short_distances_that_grow_with_the_learning_rate_are_near() -> None:
    """Up to a tenth of the norm of one's own parameters."""
    own = torch.randn(NUMEL)
    nearness = make(own)
    for _ in range(10):
        assert look(nearness, at(own, 1e-4 * own.norm()))
    assert look(nearness, at(own, 0.09 * own.norm()))
    assert not look(nearness, at(own, 0.11 * own.norm()))


def test_a_hostile_minority_is_never_near() -> None:
    own = torch.randn(NUMEL)
    nearness = make(own)
    for _ in range(4):
        look(nearness, at(own, 1.0))
    for _ in range(200):
        assert look(nearness, at(own, 1.0))
        assert look(nearness, at(own, 2.0))
        assert not look(nearness, -own)


def test_who_is_far_from_all_others_takes_part_again() -> None:
    own = torch.randn(NUMEL)
    nearness = make(own)
    for _ in range(30):
        assert look(nearness, at(own, 0.02 * own.norm()))
    refused = 0
    while not look(nearness, at(own, 5.0 * own.norm())):
        refused += 1
    assert 20 < refused < 40


def test_of_a_large_model_random_pieces_and_the_norm_are_measured() -> None:
    numel = 3 * 2**22
    own = torch.randn(numel)
    nearness = make(own, numel=numel)
    for _ in range(5):
        look(nearness, at(own, 10.0), 196_608)
        assert nearness.distance == pytest.approx(10.0, rel=0.02)
    assert not look(nearness, -own, 196_608)
    spike = own.clone()
    spike[12345] = 1e4  # perhaps in none of the pieces
    for _ in range(5):
        assert not look(nearness, spike, 196_608)
    spike[12345] = math.nan
    assert not look(nearness, spike, 196_608)
    assert not nearness.is_finite


def test_parameters_that_are_published_meanwhile_do_no_harm() -> None:
    model = Model(1, NUMEL, torch.float32)
    publications = Snapshots(model)
    publications.publish(torch.zeros(NUMEL), Tag(1, 1))
    nearness = Nearness(model, publications, 10.0)
    is_over = threading.Event()

    def publish() -> None:
        while not is_over.is_set():
            for value in (0.0, 1.0):
                publications.publish(torch.full((NUMEL,), value), Tag(1, 1))

    thread = threading.Thread(target=publish)
    thread.start()
    for _ in range(200):
        nearness.clear()
        nearness.add(0, torch.full((NUMEL,), 1.0))
        assert nearness.is_finite
        assert 0 <= nearness.distance <= 1.001 * math.sqrt(NUMEL)
    is_over.set()
    thread.join()

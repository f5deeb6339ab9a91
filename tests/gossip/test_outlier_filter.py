"""The outlier filter: the measured distance, and which distances are accepted."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.compression import BFloat16, Codec, Int8
from lightning_loco.gossip.outlier_filter import OutlierFilter
from lightning_loco.gossip.protocol import SINGLE_THREAD_ELEMENTS, WireFormat
from lightning_loco.gossip.snapshots import Snapshots

NUMEL = 2 * SINGLE_THREAD_ELEMENTS + 100


def make(
    own: Tensor | None = None,
    max_peer_distance: float | None = 10.0,
    dtype: torch.dtype = torch.float32,
    codec: Codec | None = None,
    numel: int = NUMEL,
) -> OutlierFilter:
    wire_format = WireFormat(1, numel, dtype, codec)
    snapshots = Snapshots(wire_format)
    if own is not None:
        snapshots.publish(own, Tag(1, 1))
    return OutlierFilter(wire_format, snapshots, max_peer_distance)


def check(outlier_filter: OutlierFilter, theirs: Tensor, chunk: int = 50_000) -> bool:
    """Check parameters in chunks, as a fetch does; returns whether they are accepted."""
    outlier_filter.reset()
    for start in range(0, len(theirs), chunk):
        outlier_filter.update(start, theirs[start : start + chunk])
    return outlier_filter.is_finite and outlier_filter.accepts()


def at(own: Tensor, distance: float) -> Tensor:
    """Return random parameters at this distance."""
    step = torch.randn(len(own))
    return own + step * (distance / step.norm())


def test_distance_is_measured_to_the_latest_snapshot(subtests: pytest.Subtests) -> None:
    kinds = [
        (torch.float32, None),
        (torch.float64, None),
        (torch.float32, BFloat16()),
        (torch.float64, Int8()),
        (torch.float32, Int8(block=8)),
        (torch.float32, Int8(block=40_000)),
    ]
    for (dtype, codec), chunk in itertools.product(
        kinds, (8, SINGLE_THREAD_ELEMENTS, 50_000, NUMEL)
    ):
        with subtests.test(dtype=dtype, codec=codec, chunk=chunk):
            numel = NUMEL if chunk > 8 else 300
            own, theirs = torch.randn(2, numel, dtype=dtype)
            outlier_filter = make(own, dtype=dtype, codec=codec, numel=numel)
            if codec is None:
                check(outlier_filter, theirs, chunk)
            else:
                check(outlier_filter, theirs, -(-chunk // codec.block) * codec.block)
                own = codec.decode(codec.encode(own), torch.empty_like(own))
            assert outlier_filter.distance == pytest.approx(float((own - theirs).norm()), rel=1e-5)


def test_one_value_that_is_not_finite_is_detected(subtests: pytest.Subtests) -> None:
    for own, value in itertools.product(
        (None, torch.zeros(NUMEL)), (math.nan, math.inf, -math.inf)
    ):
        with subtests.test(has_published=own is not None, value=value):
            outlier_filter = make(own)
            theirs = torch.zeros(NUMEL)
            theirs[SINGLE_THREAD_ELEMENTS] = value
            assert not check(outlier_filter, theirs)
            assert not outlier_filter.is_finite
            assert check(outlier_filter, torch.zeros(NUMEL))


def test_absurdly_large_parameters_are_rejected_from_the_first_fetch_on(
    subtests: pytest.Subtests,
) -> None:
    for dtype, has_published in itertools.product((torch.float32, torch.float64), (False, True)):
        with subtests.test(dtype=dtype, has_published=has_published):
            outlier_filter = make(
                torch.zeros(NUMEL, dtype=dtype) if has_published else None, dtype=dtype
            )
            for value in (3e38, 1e30, 1e12):
                for _ in range(50):
                    assert not check(outlier_filter, torch.full((NUMEL,), value, dtype=dtype))
                    assert outlier_filter.is_finite
            assert check(make(None, None, dtype), torch.full((NUMEL,), 3e38, dtype=dtype))


def test_first_fetches_are_limited_by_the_own_norm_or_the_number_of_parameters() -> None:
    for scale in (0.0, 0.01, 1.0, 100.0):
        own = torch.full((NUMEL,), scale)
        root = math.sqrt(NUMEL) * max(scale, 1)
        assert check(make(own), at(own, 9.9 * root))
        assert not check(make(own), at(own, 10.1 * root))
        assert check(make(own, None), at(own, 10.1 * root))


def test_later_fetches_are_limited_by_the_median_of_recent_distances() -> None:
    own = torch.randn(NUMEL)
    outlier_filter = make(own)
    for distance in (1.0, 2.0, 3.0, 4.0):
        assert check(outlier_filter, at(own, distance))
    assert check(outlier_filter, at(own, 100.0))  # four distances are not enough
    assert not check(outlier_filter, at(own, 31.0))  # the median is 3
    assert check(outlier_filter, at(own, 34.0))  # 3.5: the last counts as 30
    assert check(outlier_filter, own)


def test_distances_of_zero_are_not_recorded() -> None:
    own = torch.randn(NUMEL)
    outlier_filter = make(own)
    for _ in range(30):
        assert check(outlier_filter, own)
    assert check(outlier_filter, at(own, 1.0))


def test_growing_short_distances_are_accepted() -> None:
    """Up to a tenth of the norm of the own parameters."""
    own = torch.randn(NUMEL)
    outlier_filter = make(own)
    for _ in range(10):
        assert check(outlier_filter, at(own, 1e-4 * own.norm()))
    assert check(outlier_filter, at(own, 0.09 * own.norm()))
    assert not check(outlier_filter, at(own, 0.11 * own.norm()))


def test_minority_of_faulty_peers_is_always_rejected() -> None:
    own = torch.randn(NUMEL)
    outlier_filter = make(own)
    for _ in range(4):
        check(outlier_filter, at(own, 1.0))
    for _ in range(200):
        assert check(outlier_filter, at(own, 1.0))
        assert check(outlier_filter, at(own, 2.0))
        assert not check(outlier_filter, -own)


def test_distant_worker_is_accepted_after_a_while() -> None:
    own = torch.randn(NUMEL)
    outlier_filter = make(own)
    for _ in range(30):
        assert check(outlier_filter, at(own, 0.02 * own.norm()))
    rejected = 0
    while not check(outlier_filter, at(own, 5.0 * own.norm())):
        rejected += 1
    assert 20 < rejected < 40


def test_large_models_are_sampled() -> None:
    numel = 3 * 2**22
    own = torch.randn(numel)
    outlier_filter = make(own, numel=numel)
    for _ in range(5):
        check(outlier_filter, at(own, 10.0), 196_608)
        assert outlier_filter.distance == pytest.approx(10.0, rel=0.02)
    assert not check(outlier_filter, -own, 196_608)
    spike = own.clone()
    spike[12345] = 1e4  # it may not be in the sample
    for _ in range(5):
        assert not check(outlier_filter, spike, 196_608)
    spike[12345] = math.nan
    assert not check(outlier_filter, spike, 196_608)
    assert not outlier_filter.is_finite


def test_snapshots_may_be_published_while_the_distance_is_measured() -> None:
    wire_format = WireFormat(1, NUMEL, torch.float32)
    snapshots = Snapshots(wire_format)
    snapshots.publish(torch.zeros(NUMEL), Tag(1, 1))
    outlier_filter = OutlierFilter(wire_format, snapshots, 10.0)
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            for value in (0.0, 1.0):
                snapshots.publish(torch.full((NUMEL,), value), Tag(1, 1))

    thread = threading.Thread(target=publish)
    thread.start()
    for _ in range(200):
        outlier_filter.reset()
        outlier_filter.update(0, torch.full((NUMEL,), 1.0))
        assert outlier_filter.is_finite
        assert 0 <= outlier_filter.distance <= 1.001 * math.sqrt(NUMEL)
    stop.set()
    thread.join()

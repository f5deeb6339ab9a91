"""Costs of rounds against closed forms; ``tests/simulation`` compares them with simulations."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from lightning_loco.compression import CODECS
from lightning_loco.costs import Link, Links, LinkTimes, as_links
from lightning_loco.costs.method_costs import (
    ENCODINGS,
    Method,
    StepTimes,
    Traffic,
    as_method,
    estimate,
)
from lightning_loco.costs.server_times import BUCKET_BYTES, ServerTimes
from lightning_loco.schedules import EveryInterval, EverySteps
from lightning_loco.topology import RandomMatching, Ring
from tests.harness.sources import ROOT

NUMEL = 1_000_000
BYTES = 4 * NUMEL
NONE = ENCODINGS["none"]


def times_of(links: Any, num_workers: int) -> LinkTimes:
    found = as_links(links)
    assert found is not None
    return LinkTimes(found, num_workers)


def test_encodings_are_those_of_the_codecs() -> None:
    assert set(CODECS) == set(ENCODINGS) - {"none"}
    for name, kind in CODECS.items():
        codec = kind()
        assert ENCODINGS[name] == (codec.block, codec.row_bytes, codec.is_sparse)
        assert ENCODINGS[name].num_bytes(12_345) == codec.num_bytes(12_345)


def test_a_blocking_mean_on_unequal_links_waits_for_the_slowest_of_both() -> None:
    """Workers wait for the last one to compute, and for the slowest of all links."""
    links = [Link(100, 0.01), Link(20, 0.05), Link(50, 0.02), Link(80, 0.0)]
    costs = estimate(
        as_method("diloco", 5), NUMEL, StepTimes([0.1, 0.2, 0.3, 0.1]), times_of(links, 4), 3
    )
    exchange_s = 1.5 * BYTES * 8 / 20e6 + 6 * 0.05
    assert costs.time_s == pytest.approx([3 * (5 * 0.3 + exchange_s)] * 4)
    assert costs.utilisation == pytest.approx(np.array([0.5, 1.0, 1.5, 0.5]) / (1.5 + exchange_s))
    assert costs.bytes_sent.tolist() == [3 * 1.5 * BYTES] * 4


def test_an_overlapped_mean_is_hidden_if_computing_takes_longer() -> None:
    times = times_of(Link(100, 0.01), 4)
    exchange_s = 1.5 * BYTES * 8 / 100e6 + 6 * 0.01
    for step_s, expected in ((1.0, 1.0), (0.01, exchange_s)):
        method = Method(EverySteps(1, overlap=True, warm_start=False))
        costs = estimate(method, NUMEL, StepTimes([step_s] * 4), times, 8, skipped_rounds=2)
        assert costs.seconds_per_round == pytest.approx(expected)


def test_pairs_wait_only_for_each_other() -> None:
    links = Links(Link(100), pairs=((0, 1, Link(1)), (1, 0, Link(1))))
    method = Method(EverySteps(1), "neighbors", RandomMatching(seed=0))
    costs = estimate(method, NUMEL, StepTimes([1.0] * 4), LinkTimes(links, 4), 1)
    partner = RandomMatching(seed=0).partner(0, 4, 0)
    slow_s, fast_s = 1 + BYTES * 8 / 1e6, 1 + BYTES * 8 / 100e6
    slow = [0, 1] if partner == 1 else []
    assert costs.time_s == pytest.approx([slow_s if w in slow else fast_s for w in range(4)])


def test_messages_to_a_server_queue_on_its_link() -> None:
    """The server is at worker 0; the fourth worker is slower than all others together."""
    method, steps = as_method("remote_optimizer"), StepTimes([1.0] * 4)
    queued_s = 4 * BYTES * 8 / 100e6
    for links, exchange_s in (
        ([Link(100, 0.1)] * 4, 2 * (queued_s + 0.1)),
        ([*[Link(100, 0.1)] * 3, Link(10, 0.2)], 2 * (BYTES * 8 / 10e6 + 0.2)),
    ):
        costs = estimate(method, NUMEL, steps, times_of(links, 4), 3)
        assert costs.time_s.max() == pytest.approx(3 * (1 + exchange_s))
        assert costs.bytes_per_round == BYTES


def test_a_server_has_received_what_early_workers_have_sent() -> None:
    """The last worker sends after the messages of the others have arrived."""
    queue_s, last_s = BYTES * 8 / 100e6, 5.0
    steps = StepTimes([1.0, 1.0, 1.0, last_s])
    costs = estimate(as_method("remote_optimizer"), NUMEL, steps, times_of(Link(100, 0.1), 4), 3)
    assert costs.time_s == pytest.approx([3 * (last_s + queue_s + 4 * queue_s + 0.2)] * 4)


UNIT = Link(8e-6 * BUCKET_BYTES)
"""Sending a bucket takes a second."""


def test_a_server_receives_a_part_of_large_gradients_ahead(subtests: pytest.Subtests) -> None:
    """At most 3 buckets of each worker, without the last of several; the rest at the end."""
    for num_buckets, ahead in ((20, 3), (4, 3), (2, 1), (1, 1)):
        times = ServerTimes(times_of(UNIT, 4), num_buckets * BUCKET_BYTES, adds_to_first=False)
        for last_s, in_time in (
            (0.0, 4 * num_buckets),
            (1e4, num_buckets + 3 * (num_buckets - ahead)),
        ):
            with subtests.test(num_buckets=num_buckets, last_s=last_s):
                known_s = times.gradients(np.array([0.0, last_s, 0.0, 0.0]), 0).max()
                assert known_s == pytest.approx(last_s + in_time)


def test_a_server_receives_all_of_the_first_gradient_ahead_without_compression() -> None:
    for sent_s, in_time in (
        ([0.0, 100.0], 20),
        ([100.0, 0.0], 20 + 17),
        ([0.0, 0.0, 100.0], 20 + 17),
    ):
        times = ServerTimes(times_of(UNIT, len(sent_s)), 20 * BUCKET_BYTES)
        found = times.gradients(np.array(sent_s), 0)
        assert found.max() == pytest.approx(100 + in_time)
        if sent_s[0] == 0:
            assert found[0] == pytest.approx(20)
    costs = [
        estimate(
            as_method("remote_optimizer", encoding=ENCODINGS[name]),
            20 * BUCKET_BYTES // size,
            StepTimes([1.0, 100.0]),
            times_of(UNIT, 2),
            1,
        ).time_s[0]
        for name, size in (("none", 4), ("bf16", 2))
    ]
    assert costs == pytest.approx([100 + 20 + 2 * 20, 100 + 20 + 17 + 2 * 20])


def test_a_gradient_from_another_site_is_received_ahead_in_part_as_well() -> None:
    """Worker 1 is at the server's site and sends last; the other site has a separate link."""
    slow = Link(8e-6 * BUCKET_BYTES / 2, 0.5)
    links = Links(UNIT, sites=2, between_sites=slow)
    times = ServerTimes(LinkTimes(links, 4), 20 * BUCKET_BYTES)
    found = times.gradients(np.array([0.0, 100.0, 0.0, 99.0]), 0)
    assert found == pytest.approx([20.0, 120.0, 100 + 2 * 17 + 0.5, 99 + 2 * 20 + 0.5])


def test_workers_at_another_site_share_its_uplink_to_the_servers() -> None:
    """Three of six workers: gradients are sent one by one, parameters at the same time."""
    uplink = 8e-6 * BYTES / 2  # 2 s for one message
    links = Links(Link(1e9), sites=2, between_sites=Link(1e9), uplink_mbit_per_s=uplink)
    times = ServerTimes(LinkTimes(links, 6), BYTES)
    found = times.gradients(np.zeros(6), 0)
    assert found[3:] == pytest.approx([2.0, 4.0, 6.0])
    assert found[:3].max() < 0.01
    back_s = times.parameters(found.max(), 0)
    assert back_s[3:] == pytest.approx([12.0] * 3)
    assert back_s[:3] == pytest.approx([6.0] * 3, rel=1e-3)
    # The others were received ahead, so the last one has the line to itself.
    late = times.gradients(np.array([0.0, 0.0, 0.0, 0.0, 0.0, 100.0]), 0)
    assert late[5] == pytest.approx(102.0)


def test_replies_take_the_links_from_the_server_to_the_workers() -> None:
    slow = Link(8e-6 * BYTES / 5)  # 5 s
    times = ServerTimes(LinkTimes(Links(Link(1e9), pairs=((0, 1, slow),)), 2), BYTES)
    assert times.gradients(np.zeros(2), 0).max() < 0.01
    assert times.parameters(0.0, 0) == pytest.approx([0.0, 5.0], abs=0.01)


def test_a_worker_begins_its_next_step_when_its_own_parameters_are_there() -> None:
    """One worker is slow, another has a slow link: after the first step delays do not add up."""
    links = [Link(1e9), Link(1e9), Link(10)]
    steps, slow_s = StepTimes([0.1, 9.0, 0.1]), BYTES * 8 / 10e6
    costs = estimate(as_method("remote_optimizer"), NUMEL, steps, times_of(links, 3), 3)
    assert costs.time_s == pytest.approx([3 * 9.0, 3 * 9.0, 3 * 9.0 + slow_s], rel=1e-4)


def test_messages_to_several_neighbors_share_the_link() -> None:
    method = as_method("gasloc", 1, Ring())
    costs = estimate(method, NUMEL, StepTimes([1.0] * 4), times_of(Link(100), 4), 2)
    assert costs.seconds_per_round == pytest.approx(1 + 2 * BYTES * 8 / 100e6)
    assert costs.bytes_per_round == 2 * BYTES


def test_fragments_have_parts_of_the_bytes() -> None:
    method = as_method("streaming_diloco", 30, fragments=3)
    costs = estimate(method, NUMEL, StepTimes([1.0] * 2), times_of(Link(100), 2), 6)
    assert costs.steps == 60
    assert costs.bytes_sent.tolist() == pytest.approx([2 * BYTES] * 2)
    assert costs.utilisation == pytest.approx([1.0] * 2)


def test_compression_saves_bytes_and_hops(subtests: pytest.Subtests) -> None:
    for kind, name, expected in (
        ("mean", "none", (2 * 3 * BYTES // 4, 6)),
        ("mean", "int8", (260 * (3907 + 2 * 977), 2)),
        ("mean", "sparse", (3 * 120 * 245, 1)),
        ("gather", "none", (3 * BYTES, 3)),
        ("neighbors", "bf16", (BYTES // 2, 1)),
    ):
        with subtests.test(kind, encoding=name):
            assert Traffic.of(kind, NUMEL, 4, ENCODINGS[name])[1:] == expected
    assert Traffic.of("mean", NUMEL, 1, NONE).num_bytes == 0


def test_a_server_has_no_times_of_an_all_reduce() -> None:
    with pytest.raises(ValueError, match="when workers send. Use ServerTimes"):
        Traffic.of("server", NUMEL, 4, NONE).seconds(times_of("lan", 4), None, 0)


def test_jitter_makes_all_wait_for_the_slowest_step_and_follows_the_seed() -> None:
    times = times_of(Link(1e9), 64)
    found = {}
    for seed in (0, 0, 1):
        steps = StepTimes([1.0] * 64, jitter=0.2, seed=seed)
        costs = estimate(as_method("ddp"), 1, steps, times, 50)
        assert 1.15 < costs.seconds_per_round < 1.2
        assert found.setdefault(seed, costs.seconds_per_round) == costs.seconds_per_round
    assert found[0] != found[1]
    spread = StepTimes.of_spread(64, 2.0, 0.5).mean_s
    assert 1.0 <= spread.min() < 1.2
    assert 2.8 < spread.max() <= 3.0


def test_settings_that_cannot_work_are_refused(subtests: pytest.Subtests) -> None:
    times, two = times_of("lan", 2), StepTimes([1.0, 1.0])
    ddp = as_method("ddp")
    for call, error, text in (
        (lambda: as_method("dilocoo"), ValueError, "method must be one of ddp, .*'dilocoo'"),
        (lambda: as_method("diloco", fragments=2), ValueError, "neither fragments nor a delay"),
        (lambda: as_method("gasloc"), ValueError, "A topology belongs to kind='neighbors'"),
        (lambda: Method(EveryInterval()), ValueError, "a number of local steps that is the same"),
        (lambda: Method(EverySteps([1, 2])), ValueError, "the same for all workers"),
        (lambda: StepTimes([-1.0]), ValueError, "at least 0, and finite"),
        (lambda: StepTimes([1.0], jitter=1.0), ValueError, "from 0 to less than 1, got 1.0"),
        (lambda: StepTimes([1.0], seed="x"), TypeError, "must be an integer, got 'x'"),
        (lambda: StepTimes.of_spread(2, 1.0, 1.5), ValueError, "spread must be from 0"),
        (lambda: estimate(ddp, 1, StepTimes([1.0]), times), ValueError, "steps are of 1 workers"),
        (lambda: estimate(ddp, 1, two, times, 0), ValueError, "num_rounds must be at least 1"),
    ):
        with subtests.test(text), pytest.raises(error, match=text):
            call()


CODE = """
import os, sys
os.environ["LIGHTNING_LOCO_LAZY"] = str(os.getpid())
from lightning_loco.costs import LinkTimes, as_links, method_costs
from lightning_loco.topology import RandomMatching
n = 1000
method = method_costs.as_method("noloco", 10, RandomMatching())
steps = method_costs.StepTimes.of_spread(n, 1.0, 0.3, 0.1)
times = LinkTimes(as_links("two_datacentres"), n)
assert method_costs.estimate(method, 10**9, steps, times, 2).rounds == 2
assert "torch" not in sys.modules
"""


def test_costs_need_no_pytorch() -> None:
    subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, check=True, timeout=60)

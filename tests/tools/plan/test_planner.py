"""Plans: times agree with ``costs``, and recommendations suit the clusters."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from lightning_loco import Simulation
from lightning_loco.algorithms import DecoupledDiLoCo
from lightning_loco.costs import Link, Links, LinkTimes, as_links
from lightning_loco.costs.method_costs import ENCODINGS, METHODS, StepTimes, as_method, estimate
from lightning_loco.syncer import DecoupledSettings, MergeSettings
from lightning_loco.tools.plan.loss import NO_GAP
from lightning_loco.tools.plan.planner import (
    CANDIDATES,
    FRAGMENTS,
    MAX_SHORT_DELAY,
    MIN_ROUNDS,
    SYNC_EVERY,
    TOPOLOGY_TITLES,
    Option,
    Plan,
    PlannedRun,
    make_plan,
)
from lightning_loco.topology import RandomMatching, Ring
from tests.harness.toys import Point


def job(link: Any = "lan", **changes: Any) -> PlannedRun:
    """Return a job of two machines in a building, with 124M parameters."""
    links = as_links(link)
    assert links is not None
    values: dict[str, Any] = {
        "num_parameters": 124_000_000,
        "num_workers": 2,
        "links": links,
        "step_s": 0.5,
        "tokens_per_step": 16_384,
        "tokens": 2_480_000_000,
    }
    return PlannedRun(**{**values, **changes})


AT_HOME = job(
    Link(20, 0.02), num_parameters=300_000_000, num_workers=8, step_s=1.0, tokens=6_000_000_000
)


def option(plan: Plan, title: str) -> Option:
    (found,) = [one for one in plan.options if one.candidate.title == title]
    return found


def test_times_and_bytes_are_those_of_the_costs(subtests: pytest.Subtests) -> None:
    """Computed again with the settings of each option, for more rounds."""
    plan = make_plan(AT_HOME)
    times, steps = LinkTimes(AT_HOME.links, 8), StepTimes([AT_HOME.step_s] * 8)
    topologies = {"ring": Ring(), "random_matching": RandomMatching(), "": None}
    for one in plan.options[1:]:
        if one.candidate.method not in METHODS:
            continue
        with subtests.test(one.candidate.title):
            parts = one.fragments if one.fragments > 1 else None
            method = as_method(
                one.candidate.method,
                one.sync_every,
                topologies[one.candidate.topology],
                ENCODINGS[one.candidate.compression],
                parts,
                one.delay if parts else None,
            )
            count = 6 * one.fragments
            costs = estimate(method, AT_HOME.num_parameters, steps, times, count, count)
            assert one.time_s == pytest.approx(AT_HOME.steps * costs.time_s.mean() / costs.steps)
            assert one.utilisation == pytest.approx(costs.utilisation.mean())
            sent = costs.bytes_per_round * one.fragments
            assert one.round_bytes == pytest.approx(sent)
            assert one.total_bytes == pytest.approx(sent * (AT_HOME.steps // one.sync_every))


def test_ddp_hides_its_all_reduce_behind_the_backward_pass(subtests: pytest.Subtests) -> None:
    for mbit_per_s, bytes_per_gradient in ((1000, 4), (1000, 2), (20_000, 4)):
        with subtests.test(mbit_per_s=mbit_per_s, bytes_per_gradient=bytes_per_gradient):
            made = job(Link(mbit_per_s), bytes_per_gradient=bytes_per_gradient)
            ddp = option(make_plan(made), "DDP")
            exchange_s = 8e-6 * bytes_per_gradient * 124e6 / mbit_per_s
            expected = 0.5 / 3 + max(0.5 * 2 / 3, exchange_s)
            assert ddp.step_s == pytest.approx(expected)
            assert ddp.time_s == pytest.approx(expected * made.steps)


def test_the_messages_of_a_remote_optimizer_queue_at_its_server() -> None:
    """It is never recommended, even if all other methods have to wait."""
    made = job(Link(1000), num_workers=4, tokens=10**10)
    row = option(make_plan(made), "Remote optimizer")
    assert row.step_s == pytest.approx(0.5 + 2 * 4 * 8e-6 * row.round_bytes / 1000)
    assert (row.sync_every, row.round_bytes) == (1, 4 * 124_000_000)
    assert row.gap == NO_GAP
    around = Links(Link(1e6), pairs=((1, 2, Link(0.01)),))
    plan = make_plan(job(around, num_workers=4, tokens=10**10))
    assert option(plan, "Remote optimizer").utilisation > 0.9
    assert plan.chosen.utilisation < 0.1


def test_decoupled_learners_keep_the_pace_of_a_simulation(subtests: pytest.Subtests) -> None:
    """With a link that carries a fragment per local step, and with links that do not."""
    size = 4 * 2400 / 24
    for compression, seconds in (("none", 0.2), ("none", 1.5), ("int8", 1.5)):
        link = Link(8e-6 * 2 * size / seconds, 0.05)
        made = job(link, num_parameters=2400, step_s=1.0, tokens_per_step=1, tokens=20_000)
        title = ", ".join(["Decoupled DiLoCo", compression][: 1 + (compression != "none")])
        planned = option(make_plan(made), title)
        models = [Point(torch.zeros(2400)) for _ in range(2)]
        rounds = MergeSettings(planned.fragments, min_quorum=2)
        settings = DecoupledSettings(DecoupledDiLoCo(), rounds, compression)
        simulation = Simulation.from_settings(models, settings, speeds=[1.0, 1.0], links=link)
        simulation.run(lambda worker: None, seconds=400)
        with subtests.test(compression=compression, seconds=seconds):
            costs, summary = simulation.costs[1], simulation.merge_summary
            assert summary is not None
            assert (planned.sync_every == 24) == (seconds < 1)
            assert planned.sync_every == pytest.approx(summary.sync_every, rel=0.03)
            assert costs.time_s - costs.join_s == pytest.approx(costs.steps * planned.step_s, abs=1)
            sent = costs.bytes_sent / costs.steps
            assert planned.round_bytes / planned.sync_every == pytest.approx(sent, rel=0.07)
            lost = simulation.goodput[1].lost
            assert planned.delay / planned.sync_every == pytest.approx(lost, abs=0.04)


def test_the_link_of_the_syncer_carries_what_all_learners_send() -> None:
    few, many = (
        option(make_plan(job(Link(1000), num_workers=n, tokens=10**10)), "Decoupled DiLoCo")
        for n in (8, 64)
    )
    assert many.sync_every == pytest.approx(64 * 4 * 124e6 * 8e-9 / 0.5, rel=0.01)
    assert few.sync_every == pytest.approx(many.sync_every / 8, rel=0.03)
    assert (few.utilisation, many.utilisation) == (1.0, 1.0)
    slow = job("two_datacentres_one_line", num_workers=8, tokens=10**10)
    assert option(make_plan(slow), "Decoupled DiLoCo").sync_every == math.ceil(
        24 * 4 * 8e-9 * 4 * (124e6 // 24 + 1) / 0.5
    )


def test_no_more_local_steps_per_round_than_needed(subtests: pytest.Subtests) -> None:
    """With the next smaller number, workers would compute for too small a share of the time."""
    made = dataclasses.replace(AT_HOME, utilisation=0.9)
    for one in make_plan(made).options:
        if one.fragments == 1 and not one.delay and one.sync_every > SYNC_EVERY[0]:
            with subtests.test(one.candidate.title):
                before = SYNC_EVERY[SYNC_EVERY.index(one.sync_every) - 1]
                waits = (one.step_s - made.step_s) * one.sync_every
                assert before * made.step_s / (before * made.step_s + waits) < 0.9


def test_a_rack_needs_no_other_method_than_ddp() -> None:
    plan = make_plan(job("datacentre"))
    assert plan.chosen.candidate.title == "DDP"
    assert (plan.faster, plan.better) == ([], None)


def test_two_machines_in_a_building() -> None:
    """DDP is slower than one machine; among equal losses and bytes the fastest option is chosen."""
    plan = make_plan(job())
    assert option(plan, "DDP").time_s > 4 * plan.job.one_worker_s
    assert plan.chosen.candidate.title == "Streaming DiLoCo, int8"
    assert plan.chosen.sync_every == 30
    blocking = option(plan, "DiLoCo, int8")
    assert blocking.gap.percent == plan.chosen.gap.percent
    assert blocking.total_bytes == pytest.approx(plan.chosen.total_bytes, rel=1e-4)
    assert plan.chosen.time_s < 0.95 * blocking.time_s
    assert plan.faster == []


def test_blocking_rounds_suffice_if_they_take_little_longer() -> None:
    plan = make_plan(job(Link(1400)))
    assert plan.chosen.candidate.title == "DiLoCo, int8"
    assert option(plan, "Streaming DiLoCo, int8").time_s > 0.95 * plan.chosen.time_s
    assert plan.faster == []


def test_ddp_is_shown_if_it_takes_little_more_time() -> None:
    plan = make_plan(job(Link(9000)))
    ddp = option(plan, "DDP")
    assert ddp.utilisation < 0.9
    assert plan.chosen.candidate.title == "DiLoCo"
    assert plan.better is ddp
    assert make_plan(job(Link(7000))).better is None


def test_data_centres_and_machines_at_home_need_hidden_rounds() -> None:
    centres = job(
        Link(200, 0.03),
        num_parameters=10**9,
        num_workers=3,
        step_s=1.5,
        tokens_per_step=65_536,
        tokens=20 * 10**9,
    )
    for made, title in ((centres, "Streaming DiLoCo, int8"), (AT_HOME, "Streaming DiLoCo, e3m0")):
        chosen = make_plan(made).chosen
        assert chosen.candidate.title == title
        assert chosen.utilisation > 0.95
        assert chosen.delay <= MAX_SHORT_DELAY
        assert chosen.fragments in FRAGMENTS


def test_what_nothing_suits_is_said() -> None:
    plan = make_plan(job(Link(1)))
    assert plan.chosen.utilisation < 0.9
    assert plan.reason.endswith("this one comes closest")
    known = [one for one in plan.options if one.gap is not None]
    assert plan.chosen.utilisation == max(one.utilisation for one in known)


def test_one_slow_link_holds_up_all_reduces_and_not_all_pairs() -> None:
    """Pairs without the slow worker do not wait for it."""
    slow = Links(Link(1000), workers=((0, Link(10)),))
    plan = make_plan(job(slow, num_workers=8, tokens=10**10))
    pairs, all_reduce = option(plan, "NoLoCo, random pairs"), option(plan, "DiLoCo")
    even = make_plan(job(Link(1000), num_workers=8, tokens=10**10))
    assert all_reduce.sync_every > option(even, "DiLoCo").sync_every
    assert pairs.time_s < all_reduce.time_s


def test_short_runs_have_rounds_enough_or_say_so() -> None:
    for made in (job(), job(tokens=10**8)):
        for one in make_plan(made).options[2:]:
            few = made.steps // one.sync_every < MIN_ROUNDS
            assert one.sync_every == 10 if made.steps < MIN_ROUNDS * SYNC_EVERY[0] else not few


def test_every_candidate_has_a_title_of_its_own() -> None:
    titles = [one.title for one in CANDIDATES]
    assert len(set(titles)) == len(titles)
    assert {one.method for one in CANDIDATES} == METHODS.keys() | {"decoupled_diloco"}
    assert {one.topology for one in CANDIDATES} == {"", *TOPOLOGY_TITLES}


def test_bad_values_are_named(subtests: pytest.Subtests) -> None:
    for changes, message in (
        ({"num_parameters": 0}, "--parameters must be positive and finite, got 0"),
        ({"step_s": -1.0}, "--step-s must be positive and finite, got -1"),
        ({"tokens": 0}, "--tokens must be positive and finite, got 0"),
        ({"num_workers": 1}, "--workers must be from 2 to 100,000, got 1"),
        ({"utilisation": 1.0}, "--utilisation is a share of the time between 0 and 1, got 1"),
        ({"tokens": 200_000}, "The run has 7 local steps of each worker"),
        ({"links": as_links(["lan"] * 3)}, "link has 3 entries"),
    ):
        with subtests.test(message), pytest.raises(ValueError, match=message):
            job(**changes)

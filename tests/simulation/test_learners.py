"""Decoupled learners on a virtual clock: what is merged, when, and what a death costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_loco import Link
from lightning_loco.algorithms import DecoupledDiLoCo
from lightning_loco.compression import BFloat16
from lightning_loco.simulation import Failure, Simulation
from lightning_loco.syncer import DecoupledSettings, MergeSettings
from tests.harness.toys import Point

NUMEL, FRAGMENTS = 12, 3
TARGETS = [1.0, -2.0, 7.0, 3.0]
ROUNDS, METHOD = MergeSettings(FRAGMENTS, 6), DecoupledDiLoCo()


class Run:
    """A simulation whose workers go a tenth of the way to a number of their own in a local step."""

    def __init__(
        self,
        speeds: list[float],
        rounds: MergeSettings = ROUNDS,
        method: DecoupledDiLoCo = METHOD,
        compression: str | None = None,
        **others: Any,
    ) -> None:
        start = torch.arange(NUMEL, dtype=torch.float64)
        self.models = [Point(start.clone()) for _ in speeds]
        settings = DecoupledSettings(method, rounds, compression)
        self.simulation = Simulation.from_settings(self.models, settings, speeds=speeds, **others)
        self.returned: list[int] = []

    def go(self, seconds: float) -> Run:
        self.simulation.run(self._step, seconds=seconds, on_return=self.returned.append)
        return self

    @torch.no_grad()
    def _step(self, worker: int) -> float:
        value = self.models[worker].value
        value += 0.1 * (TARGETS[worker] - value)
        return float(value.mean())


def test_pushes_of_all_make_streaming_diloco() -> None:
    """Without links a push has its result a local step later: the plain loop, to 1e-11."""
    every, delay, steps, mix, n = 6, 1, 40, 0.5, 3
    method = DecoupledDiLoCo(0.7, 0.9, aggregate="mean", weight="equal", mix=mix)
    rounds = MergeSettings(FRAGMENTS, every, min_quorum=n, grace=0.0)
    run = Run([1.0] * n, rounds, method).go(steps)

    start = torch.arange(NUMEL, dtype=torch.float64).view(FRAGMENTS, -1)
    local, received = [start.clone() for _ in range(n)], [start.clone() for _ in range(n)]
    outer, momentum = start.clone(), torch.zeros_like(start)
    pending: dict[int, int] = {}
    merged = 0
    for step in range(1, steps + 1):
        for worker in range(n):
            local[worker] += 0.1 * (TARGETS[worker] - local[worker])
        if step in pending:
            fragment = pending.pop(step)
            for worker in range(n):
                local[worker][fragment].mul_(mix).add_(outer[fragment], alpha=1 - mix)
                received[worker][fragment] = outer[fragment]
        if step > 1 and (step - 1) % (every // FRAGMENTS) == 0:
            fragment = merged % FRAGMENTS
            rows = [received[worker][fragment] - local[worker][fragment] for worker in range(n)]
            mean = torch.stack(rows).mean(0)
            momentum[fragment] = 0.9 * momentum[fragment] + mean
            outer[fragment] -= 0.7 * (mean + 0.9 * momentum[fragment])
            pending[step + delay] = fragment
            merged += 1
    assert len(run.simulation.merges) == merged > 15
    assert run.simulation.steps == [steps] * n
    for found, expected in zip(run.simulation.params(), local, strict=True):
        torch.testing.assert_close(found, expected.view(-1), rtol=1e-11, atol=1e-11)
    # Of the 6 local steps of a fragment, the one until the result arrives is not in the next push.
    for one in run.simulation.goodput:
        assert one.merged + one.pending == pytest.approx(1 - 1 / 6, abs=0.03)
        assert sum(one) == pytest.approx(1.0)


def test_requests_take_their_time_on_the_link_and_no_local_step_waits() -> None:
    """Worker 1 joins with 1 + 3 requests of 0.2 s; 32 bytes of each fragment take 0.3 s more."""
    link = Link(mbit_per_s=32 * 8 / 0.3 / 1e6, latency_s=0.1)
    simulation = Run([1.0, 1.0], links=link).go(31.0).simulation
    beside, remote = simulation.costs
    assert (beside.join_s, beside.steps) == (0.0, 31)
    assert remote.join_s == pytest.approx(0.2 + 3 * 0.5)
    assert remote.steps == 29
    assert remote.time_s == pytest.approx(29 + 1.7)
    assert (beside.wait_s, remote.wait_s) == (0.0, 0.0)
    sent = [event for event in simulation.timeline if event.kind == "send" and event.worker == 1]
    assert len(sent) > 5
    for event in sent:
        assert event.end_s - event.start_s == pytest.approx(0.1 + 0.3)
    assert remote.bytes_sent == 32 * (len(sent) - 1)  # a push is counted when a fragment arrives


def test_a_death_changes_the_local_steps_of_no_other_and_the_next_process_is_merged() -> None:
    speeds = [1.0, 1.0, 0.5]
    untouched = Run(speeds, links="wan").go(120.0).simulation
    run = Run(speeds, links="wan", failures=[Failure(1, 40.5, 60.0)]).go(120.0)
    simulation, died = run.simulation, run.simulation.costs[1]
    assert run.returned == [1]
    for worker in (0, 2):
        assert simulation.costs[worker].steps == untouched.costs[worker].steps
    assert (died.away_s, died.wait_s) == (19.5, 0.0)
    assert died.join_s == pytest.approx(2 * 4 * 2 * 0.03, abs=1e-3)  # 4 requests of two latencies
    assert died.steps == 40 + 59
    generations = [
        push.generation
        for merge in simulation.merges
        for push in merge.pushes
        if push.learner == "worker1"
    ]
    assert {1, 2} == {*generations}
    assert sorted(generations) == generations
    assert generations.count(2) > 15
    goodput = simulation.goodput
    assert goodput[1].away == pytest.approx(19.5 / died.time_s)
    assert goodput[1].lost / (1 - goodput[1].away) > goodput[0].lost  # what it had not sent
    for one in goodput:
        assert min(one) >= 0
        assert sum(one) == pytest.approx(1.0)


def test_the_run_goes_on_after_all_were_dead() -> None:
    failures = [Failure(0, 10.5, 40.0), Failure(1, 20.5, 50.0)]
    simulation = Run([1.0, 1.0], failures=failures).go(80.0).simulation
    assert simulation.steps == [10 + 40, 20 + 30]
    assert simulation.syncer is not None
    assert set(simulation.syncer.status()["learners"]) == {"worker0", "worker1"}
    assert {len(merge.pushes) for merge in simulation.merges[-6:]} == {2}


def test_the_consensus_leaves_out_who_is_dead_or_joins() -> None:
    failures = [Failure(0, 10.5), Failure(1, 20.5, 30.0)]
    run = Run([1.0, 1.0], links=Link(1000.0, 1.0), failures=failures).go(15.0)
    assert torch.equal(run.simulation.consensus(), run.simulation.params()[1])
    run.go(10.0)
    assert torch.equal(run.simulation.consensus(), run.simulation.outer())  # all are dead
    assert run.simulation.round_index == 0
    run.go(30.0)
    assert torch.equal(run.simulation.consensus(), run.simulation.params()[1])
    assert run.simulation.costs[0].away_s == pytest.approx(55.0 - 10.5)


def test_without_a_quorum_nothing_is_merged_and_learners_go_on() -> None:
    rounds = MergeSettings(FRAGMENTS, 6, min_quorum=2, lease_s=10.0)
    run = Run([1.0, 1.0], rounds, failures=[Failure(1, 30.5, 100.0)]).go(60.0)
    merges = len(run.simulation.merges)
    run.go(35.0)
    assert len(run.simulation.merges) == merges > 10
    assert run.simulation.steps[0] == 95
    run.go(25.0)
    assert len(run.simulation.merges) > merges + 5
    assert {len(merge.pushes) for merge in run.simulation.merges} == {2}


@pytest.mark.parametrize("keeps_late", [True, False])
def test_a_slow_learner_is_merged_if_late_pushes_are_kept(keeps_late: bool) -> None:
    rounds = MergeSettings(FRAGMENTS, 6, keep_late=keeps_late)
    simulation = Run([1.0, 1.0, 1.0, 1 / 12], rounds).go(400.0).simulation
    slow = simulation.goodput[3]
    assert (slow.merged > 0.6) == keeps_late
    assert (slow.lost > 0.6) != keeps_late
    ages = [age for merge in simulation.merges for age in merge.ages]
    assert (max(ages) > 0) == keeps_late
    made, every = sum(simulation.steps), len(simulation.merges) / FRAGMENTS
    assert made / 4 / every == pytest.approx(6, rel=0.15)  # what the syncer aims at


@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 6.0]])
def test_the_pace_is_kept_with_more_fragments_than_local_steps(speeds: list[float]) -> None:
    rounds = MergeSettings(fragments=12, sync_every=6)
    summary = Run(speeds, rounds).go(200.0).simulation.merge_summary
    assert summary is not None
    assert summary.sync_every == pytest.approx(6, rel=0.2)


def test_a_run_in_parts_is_the_whole_run_and_jitter_follows_the_seed() -> None:
    def params(parts: int, seed: int) -> torch.Tensor:
        failures = [Failure(2, 20.5, 30.0)]
        run = Run([1.0, 0.7, 0.3], links="dsl", jitter=0.3, seed=seed, failures=failures)
        for _ in range(parts):
            run.go(64.0 / parts)
        return torch.stack(run.simulation.params())

    whole = params(1, 0)
    # Local steps that would end after a part are not taken in it, so times differ a little.
    torch.testing.assert_close(params(4, 0), whole, rtol=0.3, atol=0.3)
    assert torch.equal(params(1, 0), whole)
    assert not torch.equal(params(1, 1), whole)


def test_compressed_pushes_are_merged_as_they_were_sent() -> None:
    plain = Run([1.0, 0.5], links="dsl").go(60.0).simulation
    coded = Run([1.0, 0.5], compression="bf16", links="dsl").go(60.0).simulation
    pushes = [sum(len(m.pushes) for m in one.merges) for one in (plain, coded)]
    assert pushes[0] == pushes[1]
    size = BFloat16().num_bytes(NUMEL // FRAGMENTS)
    for one, other in zip(coded.costs, plain.costs, strict=True):
        assert one.bytes_sent / size == other.bytes_sent / (8 * NUMEL // FRAGMENTS)
    assert not torch.equal(coded.consensus(), plain.consensus())
    torch.testing.assert_close(coded.consensus(), plain.consensus(), rtol=0.02, atol=0.02)


def test_it_may_end_while_a_learner_joins() -> None:
    run = Run([1.0, 1.0], links=Link(1.0, 2.0)).go(7.0)
    assert run.simulation.costs[1].steps == 0
    run.simulation.make_round()
    run.simulation.drain()
    assert run.simulation.costs[1].join_s == pytest.approx(16.0, abs=0.01)
    run.go(40.0)
    assert run.simulation.costs[1].steps == 30


def test_what_cannot_work_is_refused(subtests: pytest.Subtests) -> None:
    method = DecoupledDiLoCo()
    for settings, others, message in (
        (DecoupledSettings(method, syncer="node7"), {}, "have a syncer of their own. Drop syncer"),
        (DecoupledSettings(method, MergeSettings(min_quorum=3)), {}, "more than the 2 workers"),
        (DecoupledSettings(method), {"speeds": None}, "needs to know how long local steps take"),
        (DecoupledSettings(method), {"links": ["wan"] * 3}, "link has 3 entries"),
        (DecoupledSettings(method), {"failures": [Failure(2, 1.0)]}, "failures name worker 2"),
    ):
        models = [Point(torch.zeros(NUMEL)) for _ in range(2)]
        given = {"speeds": [1.0, 1.0], **others}
        with subtests.test(message), pytest.raises(ValueError, match=message):
            Simulation.from_settings(models, settings, **given)
    with pytest.raises(ValueError, match="DecoupledDiLoCo has no rounds. Give seconds"):
        Run([1.0, 1.0]).simulation.run(lambda worker: None, num_rounds=1)

"""Whole runs of syncer and learners on a virtual clock, with every fault that the world has."""

from __future__ import annotations

import pytest
import torch

from lightning_loco.algorithms import DecoupledDiLoCo
from lightning_loco.syncer.merge_rounds import MergeSettings
from tests.syncer.world import Network, World

MEAN = DecoupledDiLoCo(aggregate="mean", weight="equal")


def test_pushes_of_all_make_streaming_diloco() -> None:
    """With a fixed delay it is the plain loop of streaming DiLoCo, to 1e-11."""
    fragments, every, delay, steps, mix = 3, 6, 1, 40, 0.5
    method = DecoupledDiLoCo(0.7, 0.9, aggregate="mean", weight="equal", mix=mix)
    settings = MergeSettings(fragments, every, min_quorum=3, grace=0.0)
    world = World(settings, method)
    targets = {"a": 1.0, "b": -2.0, "c": 7.0}
    for name, toward in targets.items():
        world.start_learner(name, 1.0, toward)
    world.run(steps + 0.5)

    start = torch.arange(9, dtype=torch.float64).view(3, 3)
    local, received = {n: start.clone() for n in targets}, {n: start.clone() for n in targets}
    outer, momentum, pending = start.clone(), torch.zeros(3, 3, dtype=torch.float64), {}
    merged = 0
    for step in range(1, world.made["a"] + 1):
        for name, toward in targets.items():
            local[name] += 0.1 * (toward - local[name])
        if step in pending:  # what was pushed a step ago
            fragment = pending.pop(step)
            for name in targets:
                local[name][fragment].mul_(mix).add_(outer[fragment], alpha=1 - mix)
                received[name][fragment] = outer[fragment]
        if step > 1 and (step - 1) % (every // fragments) == 0:
            fragment = merged % fragments
            rows = [received[name][fragment] - local[name][fragment] for name in targets]
            mean = sum(rows) / 3
            momentum[fragment] = 0.9 * momentum[fragment] + mean
            outer[fragment] -= 0.7 * (mean + 0.9 * momentum[fragment])
            pending[step + delay] = fragment
            merged += 1
    assert merged == len(world.merges) > 15
    for name, process in world.learners.items():
        torch.testing.assert_close(process.local, local[name], rtol=1e-11, atol=1e-11)


FAULTS = Network(least_s=0.01, most_s=2.0, lost=0.1, twice=0.1)


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 2000), marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_in_every_order_of_events_nothing_is_merged_twice(seeds: range) -> None:
    for seed in seeds:
        _check_run(seed)


def _check_run(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    settings = MergeSettings(
        fragments=number(1, 4),
        sync_every=number(2, 8),
        min_quorum=number(1, 2),
        in_flight=number(1, 3),
        delay=number(0, 3),
        retry_s=20.0,
        lease_s=15.0,
    )
    save_every = number(1, 3)
    world = World(settings, MEAN, seed, FAULTS, save_every)
    names = "abc"
    for name in names:
        world.start_learner(name, step_s=number(1, 6) / 2, toward=float(ord(name)))
    for _ in range(6):
        world.run(world.now + number(1, 40))
        victim = names[number(0, 2)]
        fault = number(0, 3)
        if fault == 0:  # within a save, or when there was none for a while
            assert world.syncer is not None
            world.syncer.left = number(0, 12)
            world.run(world.now + number(5, 20))
            world.kill_syncer(machine=bool(number(0, 1)))
            world.run(world.now + number(1, 20))
            world.start_syncer()
        elif fault == 1:
            world.learners[victim].is_alive = False
            world.run(world.now + number(1, 30))
            world.start_learner(victim, number(1, 6) / 2, float(ord(victim)))
        elif fault == 2:  # frozen, and then it goes on with what it has
            process = world.learners[victim]
            step_s, process.step_s = process.step_s, 25.0
            world.run(world.now + 30.0)
            process.step_s = step_s
        else:
            world.disk_is_full = True
            world.run(world.now + 30.0)
            world.disk_is_full = False
    committed = len(world.merges)
    world.run(world.now + 120.0)
    assert len(world.merges) > committed, f"seed {seed}: no progress"
    # Nothing is counted twice: of each fragment no more steps are merged than were made.
    for name in names:
        for fragment in range(settings.fragments):
            merged = [
                push
                for merge in world.merges
                if merge.due.fragment == fragment
                for push in merge.pushes
                if push.learner == name
            ]
            if save_every == 1:
                assert sum(push.steps for push in merged) <= world.made[name], seed
    world.network = Network()
    for process in world.learners.values():
        process.is_training = False
    world.run(world.now + 100.0)
    assert world.syncer is not None
    for name, process in world.learners.items():
        versions = world.syncer.syncer.rounds.versions()
        assert tuple(process.rounds.received) == versions, (seed, name)
        for fragment, params in enumerate(process.received):
            assert torch.equal(params, world.syncer.syncer.fetch(fragment).params), (seed, name)

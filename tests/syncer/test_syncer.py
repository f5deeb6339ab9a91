"""Whole runs of syncer and learners on a virtual clock, with every fault that the world has."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_loco.algorithms import DecoupledDiLoCo
from lightning_loco.syncer.learner_rounds import LearnerRounds
from lightning_loco.syncer.merge_rounds import MergeSettings, Refused, Version
from lightning_loco.syncer.syncer import Syncer
from tests.harness.model_disk import ModelDisk
from tests.syncer.world import SIZE, Network, World, contract_of

MEAN = DecoupledDiLoCo(1.0, 0.0, aggregate="mean", weight="equal")


def make(folder: Path, method: DecoupledDiLoCo = MEAN, **settings: Any) -> Syncer:
    """A syncer with a merge per local step of its learners, which has started at zeros."""
    save_every = settings.pop("save_every", 1)
    chosen = MergeSettings(fragments=2, sync_every=2, **{"grace": 0.0, **settings})
    syncer = Syncer(contract_of(method, chosen), folder, save_every=save_every)
    syncer.start([torch.zeros(SIZE)] * 2)
    return syncer


class Caller:
    """A learner that calls the syncer."""

    def __init__(self, syncer: Syncer, name: str = "a", generation: int = 1) -> None:
        self.rounds = LearnerRounds(name, generation, 2)
        self.follow(syncer)

    def follow(self, syncer: Syncer) -> None:
        said = (self.rounds.name, self.rounds.generation, self.rounds.total_steps)
        reply = syncer.join(*said, syncer.contract.as_plain())
        self.receive(syncer, self.rounds.listen(reply))

    def receive(self, syncer: Syncer, fragments: list[int]) -> None:
        for fragment in fragments:
            self.rounds.receive(fragment, syncer.fetch(fragment).version)

    def step(self, syncer: Syncer, delta: float) -> None:
        """Make a local step, push what is due, and receive what is merged."""
        rounds = self.rounds
        rounds.count(8.0)
        said = (rounds.name, rounds.generation)
        self.receive(syncer, rounds.listen(syncer.poll(*said, rounds.epoch, rounds.total_steps)))
        for push in rounds.answers():
            syncer.push(push, torch.full((SIZE,), delta))
        self.receive(syncer, rounds.listen(syncer.poll(*said, rounds.epoch, rounds.total_steps)))


def test_a_syncer_continues_from_its_folder(tmp_path: Path) -> None:
    """Momentum and versions are those of a syncer that was not stopped."""
    method = DecoupledDiLoCo(0.7, 0.9, mix=0.5)
    whole, first = make(tmp_path / "whole", method), make(tmp_path / "parts", method)
    callers = [Caller(whole), Caller(first)]
    for step in range(5):
        callers[0].step(whole, step + 1.0)
        callers[1].step(first, step + 1.0)
    again = make(tmp_path / "parts", method)
    assert again.rounds.epoch == 2
    with pytest.raises(Refused, match="epoch 2, and not 1: join"):
        callers[1].step(again, 6.0)
    callers[1].follow(again)
    for step in range(5, 9):
        callers[0].step(whole, step + 1.0)
        callers[1].step(again, step + 1.0)
    assert again.rounds.committed == whole.rounds.committed == 9
    for fragment in range(2):
        assert torch.equal(again.fetch(fragment).params, whole.fetch(fragment).params)
    files = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert files == ["fragment_0_2_9.pt", "fragment_1_2_8.pt", "syncer.json"]


def test_what_was_not_saved_is_lost_and_learners_follow(tmp_path: Path) -> None:
    syncer = make(tmp_path, save_every=3)
    caller = Caller(syncer)
    params = {}
    for step in range(5):
        caller.step(syncer, 1.0)
        params[step + 1] = [syncer.fetch(fragment).params for fragment in range(2)]
    again = make(tmp_path, save_every=3)
    assert again.rounds.committed == 3
    for fragment in range(2):
        assert torch.equal(again.fetch(fragment).params, params[3][fragment])
    caller.follow(again)
    assert caller.rounds.received == [Version(1, 3), Version(1, 2)]
    caller.step(again, 1.0)
    assert again.rounds.committed == 4


def test_a_push_that_waited_when_the_syncer_ended_is_repeated(tmp_path: Path) -> None:
    """Otherwise its progress would be gone once others have merged the fragment."""
    syncer = make(tmp_path, min_quorum=2)
    first, second = Caller(syncer, "a"), Caller(syncer, "b")
    for _ in range(2):
        first.step(syncer, 1.0)
    assert syncer.status()["open"] == {1: ["a"]}
    again = make(tmp_path, min_quorum=2)
    for caller in (first, second):
        caller.follow(again)
    leftover = first.rounds.leftover(0, Version(2, 1))
    assert leftover is not None
    assert leftover.steps == 2


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ValueError, match="is of another run: settings.min_quorum is 1 there and 2"):
        make(tmp_path, min_quorum=2)


@pytest.mark.parametrize("damage", ["syncer.json", "fragment_1_1_0"])
def test_a_damaged_folder_is_named(tmp_path: Path, damage: str) -> None:
    make(tmp_path)
    (file,) = tmp_path.glob(f"{damage}*") if "." in damage else tmp_path.glob("fragment_1_*")
    file.write_bytes(b"PK")
    with pytest.raises(ValueError, match=f"{file.name} of the syncer cannot be read"):
        make(tmp_path)


def test_a_file_of_another_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "syncer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"syncer.json of the syncer cannot be read: it has no"):
        make(tmp_path)


def test_a_learner_with_another_model_is_refused(tmp_path: Path) -> None:
    syncer = make(tmp_path)
    own = syncer.contract.as_plain()
    with pytest.raises(Refused, match="b does not fit the syncer: method.outer_lr is 0.5 there"):
        syncer.join("b", 1, 0, {**own, "method": {**own["method"], "outer_lr": 0.5}})
    with pytest.raises(
        Refused, match=r"parameters.weight is \[\[2, 3\], 'float32'\] there and None"
    ):
        syncer.join("b", 1, 0, {**own, "parameters": {"weight": [[2, 3], "float32"]}})
    assert syncer.counts["refused"] == 2


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_push_with_nan_is_left_out(tmp_path: Path, wrong: float) -> None:
    syncer = make(tmp_path)
    caller = Caller(syncer)
    with pytest.raises(Refused, match="push of a for round 1 holds NaN") as caught:
        caller.step(syncer, wrong)
    assert caught.value.reason == "finite"
    caller.rounds.lost(next(iter(syncer.rounds.open.values())).due)
    caller.step(syncer, 1.0)
    assert syncer.fetch(0).params.tolist() == [-1.0] * SIZE


def test_a_full_disk_keeps_the_last_save_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(MergeSettings(1, 2, grace=0.0), MEAN)
    world.start_learner("a", 1.0, 1.0)
    world.run(10.0)
    committed = len(world.merges)
    world.disk_is_full = True
    with caplog.at_level(logging.ERROR):
        world.run(60.0)
    assert committed <= len(world.merges) <= committed + 1
    assert "cannot be saved, so learners do not get it: [Errno 28]" in caplog.text
    assert 3 <= len(caplog.records) <= 6  # every 10 s
    world.disk_is_full = False
    world.run(120.0)
    assert len(world.merges) > committed + 10


def test_a_start_that_cannot_be_saved_is_none() -> None:
    disk = ModelDisk()

    def be_full(operation: str) -> None:
        if operation.startswith("create"):
            raise OSError(28, "No space left on device")

    syncer = Syncer(contract_of(MEAN, MergeSettings(fragments=1)), Path("/run"), disk=disk)
    disk.before = be_full
    with pytest.raises(OSError, match="No space left"):
        syncer.start([torch.zeros(SIZE)])
    assert not syncer.has_started
    disk.before = bool
    syncer.start([torch.ones(SIZE)])
    assert syncer.fetch(0).params.tolist() == [1.0] * SIZE


def test_the_status_is_json(tmp_path: Path) -> None:
    syncer = make(tmp_path)
    caller = Caller(syncer)
    assert syncer.status()["measured_sync_every"] is None
    assert syncer.status()["learners"]["a"]["step_s"] is None
    assert syncer.status()["persistence"] is None
    for _ in range(4):
        caller.step(syncer, 1.0)
    status = json.loads(json.dumps(syncer.status()))
    assert (status["committed"], status["merges"], status["pushes"]) == (4, 4, 4)
    assert status["measured_sync_every"] == 2
    assert status["persistence"] == pytest.approx(1.0)  # all pushes are equal
    assert status["learners"]["a"]["steps"] == 4


def test_the_share_of_steps_that_are_merged(tmp_path: Path) -> None:
    """Of steps that were made while there was no syncer, too; a push that is left out is not."""
    syncer = make(tmp_path)
    caller = Caller(syncer)

    def share() -> float | None:
        value: float | None = syncer.status()["learners"]["a"]["merged_share"]
        return value

    assert share() is None
    caller.step(syncer, 1.0)
    assert share() == 0.5  # of one of two fragments
    for _ in range(9):
        caller.step(syncer, 1.0)
    assert share() == (10 + 9) / (2 * 10)
    for _ in range(4):
        caller.rounds.count(8.0)
    syncer = make(tmp_path)
    caller.follow(syncer)
    assert share() is None
    caller.step(syncer, 1.0)
    assert share() == 5 / (2 * 5)
    caller.step(syncer, 1.0)
    assert share() == (5 + 7) / (2 * 7)
    with pytest.raises(Refused, match="NaN"):
        caller.step(syncer, math.nan)
    assert share() == (5 + 7) / (2 * 8)


def test_who_comes_and_goes_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(MergeSettings(1, 2, grace=0.0, lease_s=30.0), MEAN)
    with caplog.at_level(logging.INFO):
        for name in "ab":
            world.start_learner(name, 1.0)
        world.run(10.0)
        world.learners["a"].is_alive = False
        world.run(60.0)
        assert world.syncer is not None
        for _ in range(2):
            world.syncer.syncer.leave("b", 1)
    assert [record.getMessage() for record in caplog.records] == [
        "Learner a has joined; there are 1.",
        "Learner b has joined; there are 2.",
        "Learner a was silent for 30 s and is not expected any more; there are 1.",
        "Learner b has left; there are 0.",
    ]


def test_close_saves_what_is_committed(tmp_path: Path) -> None:
    syncer = make(tmp_path, save_every=100)
    caller = Caller(syncer)
    for _ in range(5):
        caller.step(syncer, 1.0)
    params = [syncer.fetch(fragment).params for fragment in range(2)]
    syncer.close()
    caller.step(syncer, 1.0)
    assert syncer.rounds.committed == 5
    again = make(tmp_path)
    assert again.rounds.committed == 5
    for fragment in range(2):
        assert torch.equal(again.fetch(fragment).params, params[fragment])


def test_a_merge_that_cannot_be_computed_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncer = make(tmp_path)
    caller = Caller(syncer)
    caller.step(syncer, 1.0)
    full = MemoryError("no room")

    def fail(*_: object) -> None:
        raise full

    monkeypatch.setattr(DecoupledDiLoCo, "combine", fail)
    with pytest.raises(MemoryError):
        caller.step(syncer, 1.0)
    assert syncer.failure is full
    caller.step(syncer, 1.0)
    syncer.close()
    assert syncer.rounds.committed == make(tmp_path).rounds.committed == 1


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_every counts merges .* got 0"):
        make(tmp_path, save_every=0)
    syncer = Syncer(contract_of(MEAN, MergeSettings(fragments=1)), tmp_path)
    assert not syncer.has_started
    with pytest.raises(ValueError, match="Fragment 0 has 2 elements, not 3"):
        syncer.start([torch.zeros(2)])


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


@pytest.mark.parametrize("takes_s", [0.07, 0.12, 0.31, 0.64])
def test_messages_that_take_longer_than_local_steps_hold_nothing_up(takes_s: float) -> None:
    """A push for a version that is on its way would be refused, and the round wait for retries."""
    settings = MergeSettings(fragments=3, sync_every=12, retry_s=1e6)
    world = World(settings, MEAN, 0, Network(takes_s, takes_s))
    for name in "ab":
        world.start_learner(name, 0.1, 1.0)
    world.run(60.0)
    assert len(world.merges) >= 60.0 / (4 * 2 * takes_s)  # four requests for each merge
    assert dict(world.refused) == {}


FAULTS = Network(least_s=0.01, most_s=2.0, lost=0.1, twice=0.1)


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 1000), marks=pytest.mark.soak)], ids=["few", "many"]
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
        process, new = world.learners[victim], (victim, number(1, 6) / 2, float(ord(victim)))
        fault = number(0, 4)
        if fault == 0:  # within a save, or when there was none for a while
            assert world.syncer is not None
            world.syncer.left = number(0, 12)
            world.run(world.now + number(5, 20))
            world.kill_syncer(machine=bool(number(0, 1)))
            world.run(world.now + number(1, 20))
            world.start_syncer()
        elif fault == 1:
            saved = process.save() if number(0, 1) else None
            world.run(world.now + number(1, 10))
            process.is_alive = False
            world.run(world.now + number(1, 30))
            world.start_learner(*new, saved)
        elif fault == 2:  # frozen, and then it goes on with what it has
            process.frozen_until = world.now + 25.0
            world.run(world.now + 30.0)
        elif fault == 3:
            process.is_leaving = True
            world.run(world.now + number(10, 30))
            process.is_alive = False  # or it has left
            world.start_learner(*new)
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
            assert sum(push.steps for push in merged) <= world.made[name], seed
            bases = [push.base for push in merged]
            assert len(bases) == len({*bases}), seed
    world.network = Network(0.1, 0.5)
    for process in world.learners.values():
        process.is_training = False
    world.run(world.now + 100.0)
    assert world.syncer is not None
    for name, process in world.learners.items():
        process.check_heard()
        versions = world.syncer.syncer.rounds.versions()
        assert tuple(process.learner.rounds.received) == versions, (seed, name)
        for fragment, params in enumerate(process.learner.received):
            assert torch.equal(params, world.syncer.syncer.fetch(fragment).params), (seed, name)

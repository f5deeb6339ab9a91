"""An algorithm gets the same round information in the simulation and in processes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from lightning_loco import Simulation, StepEngine
from lightning_loco.algorithms import Algorithm, MergePolicy, Restart, RoundInfo, State
from lightning_loco.engine import RoundSettings
from tests.harness.pool import Pool

NUM_STEPS = 3
WORLD = 3
Seen = list[tuple[str, RoundInfo]]


class Two(nn.Module):
    """Two parameters of 1,500 and 3 elements: two chunks, and one tensor in both."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Parameter(torch.zeros(1500, dtype=torch.float64))
        self.short = nn.Parameter(torch.zeros(3, dtype=torch.float64))


@dataclasses.dataclass(frozen=True)
class Recorder(Algorithm):
    """Local SGD that records the round information of each call."""

    exchange: ClassVar[Literal["mean", "neighbors"]] = "mean"
    start_key = "start"
    merge_policy: ClassVar[MergePolicy | None] = Restart()
    seen: ClassVar[Seen] = []

    def init(self, params: Tensor) -> State:
        return {"start": params, "rounds": 0}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        self.seen.append(("propose", info))
        return params

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        self.seen.append(("update", info))
        state["rounds"] += 1
        start: Tensor = state["start"]
        return start.copy_(received)


class TalkingRecorder(Recorder):
    """The same, and each worker sends a scalar."""

    def scalars(self, state: State) -> tuple[float]:
        return (float(state["rounds"]) + 0.5,)


class NeighborRecorder(Recorder):
    """The same with neighbours."""

    exchange = "neighbors"
    default_topology = "ring"


def move(model: Two, worker: int) -> None:
    for parameter in model.parameters():
        parameter.data.add_(worker + 1)


def record(rank: int, world: int, algorithm: Recorder, overlap: bool, rounds: int) -> Seen:
    """Return what one of several processes records."""
    algorithm.seen.clear()
    model = Two()
    settings: dict[str, Any] = {"overlap": overlap, "warm_start": False, "bucket_bytes": 1}
    engine = StepEngine(model, algorithm, sync_every=NUM_STEPS, **settings)
    for _ in range(rounds * NUM_STEPS):
        move(model, rank)
        engine.step()
    engine.drain()
    engine.close()
    return list(algorithm.seen)


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlapped"])
def test_weights_steps_ages_and_position_of_the_slice(pool: Pool, overlap: bool) -> None:
    for seen in pool.run(record, Recorder(), overlap, 3, world=WORLD):
        updates = [info for call, info in seen if call == "update"]
        assert [info.index for info in updates] == [0, 0, 1, 1, 2, 2]
        slices = [(info.start, info.bounds) for info in updates]
        assert slices == 3 * [(0, ((0, 1024),)), (1024, ((0, 476), (476, 479)))]
        for info in updates:
            assert info.num_workers == WORLD
            assert info.weights == (1.0,) * WORLD
            assert info.scalars == ((),) * WORLD
            assert info.steps == (float(NUM_STEPS),) * WORLD
            is_drained = overlap and info.index == 2
            assert info.ages == (NUM_STEPS if overlap and not is_drained else 0.0,) * WORLD
        proposals = [info for call, info in seen if call == "propose"]
        assert {info.index for info in proposals} == {0, 1, 2}
        assert all(info.weights == info.steps == info.ages == () for info in proposals)
        assert {(info.start, info.bounds) for info in proposals} == set(slices)


def numbers_in(seen: Seen) -> set[tuple[object, ...]]:
    """Everything except slices, which the simulation cuts differently."""
    return {(c, i.index, i.weights, i.scalars, i.steps, i.ages) for c, i in seen}


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlapped"])
@pytest.mark.parametrize("kind", [Recorder, TalkingRecorder])
def test_the_simulation_tells_the_same(pool: Pool, kind: type[Recorder], overlap: bool) -> None:
    algorithm = kind()
    algorithm.seen.clear()
    models = [Two() for _ in range(WORLD)]
    settings: dict[str, Any] = {"overlap": overlap, "warm_start": False}
    simulation = Simulation(models, algorithm, sync_every=NUM_STEPS, **settings)
    simulation.run(lambda worker: move(models[worker], worker), 3)
    simulation.drain()
    simulated = numbers_in(algorithm.seen)
    for seen in pool.run(record, algorithm, overlap, 3, world=WORLD):
        assert numbers_in(seen) == simulated
    if kind is TalkingRecorder:
        scalars = {info.index: info.scalars for call, info in algorithm.seen if call == "update"}
        late = 1 if overlap else 0
        assert scalars[2] == ((2.5 - late,),) * WORLD


def test_neighbours_know_no_numbers_of_all_workers(pool: Pool) -> None:
    for seen in pool.run(record, NeighborRecorder(), False, 2, world=WORLD):
        assert all(info.num_workers == 0 for _, info in seen)
        assert {info.index for _, info in seen} == {0, 1}


def resume(rank: int, world: int, algorithm: Recorder) -> list[RoundInfo]:
    """Run the last round of an engine that was loaded with a pending round."""
    model, settings = Two(), {"overlap": True, "warm_start": False}
    engine = StepEngine(model, algorithm, sync_every=NUM_STEPS, **settings)  # type: ignore[arg-type]
    for _ in range(NUM_STEPS + 1):
        if rank == 1:
            model.short.data.fill_(math.nan)
        else:
            move(model, rank)
        engine.step()
    saved = engine.state_dict()
    engine.close()
    algorithm.seen.clear()
    again = StepEngine(Two(), algorithm, sync_every=NUM_STEPS, **settings)  # type: ignore[arg-type]
    again.load_state_dict(saved)
    again.drain()
    again.close()
    return [info for call, info in algorithm.seen if call == "update"]


def test_a_pending_round_in_a_checkpoint_keeps_the_numbers(pool: Pool) -> None:
    for found in pool.run(resume, TalkingRecorder(), world=WORLD):
        assert found
        for info in found:
            assert info.weights == (1.0, 0.0, 1.0)
            assert info.scalars == ((0.5,),) * WORLD
            assert info.ages == (1.0,) * WORLD


@dataclasses.dataclass(frozen=True)
class Short(Recorder):
    """Announces short messages, and sends long ones."""

    merge_policy = None

    def message_length(self, length: int) -> int:
        return length // 2


def test_a_message_of_another_length_than_announced_is_an_error() -> None:
    engine = StepEngine(Two(), Short(), sync_every=1)
    with pytest.raises(RuntimeError, match=r"message of shape \(1503,\) for 1503 parameters, and "):
        engine.step()
    engine.close()


@dataclasses.dataclass(frozen=True)
class ShortLate(Short):
    """The same, with a merge policy."""

    merge_policy = Restart()


@dataclasses.dataclass(frozen=True)
class Gathering(Recorder):
    """Gathers all messages, but does not define how to combine them."""

    @property
    def gathers(self) -> bool:
        return True


def test_what_such_messages_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="ShortLate sends a part of the parameters, which needs"):
        StepEngine(Two(), ShortLate(), overlap=True)
    with pytest.raises(ValueError, match="Short sends a part of the parameters, which cannot be"):
        StepEngine(Two(), Short(), compression="int8")
    with pytest.raises(ValueError, match="Gathering sends every message to all workers, which"):
        RoundSettings(Gathering(), compression="int8").prepare(2)
    engine = StepEngine(Two(), Gathering(), sync_every=1)
    with pytest.raises(NotImplementedError, match="Gathering gathers messages and has no combine"):
        engine.step()
    engine.close()

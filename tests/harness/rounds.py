"""Algorithms, a codec, a schedule and drivers for tests of rounds."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_loco import NeighborAverage, Simulation
from lightning_loco.algorithms import (
    Algorithm,
    KeepProgress,
    MergePolicy,
    Restart,
    RoundInfo,
    State,
)
from lightning_loco.compression import Codec, ErrorFeedback, Int4, Int8
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import EverySteps, StepInfo
from tests.harness.small_model import flat
from tests.harness.toys import Point, randn, states_of

LARGE = 5000
"""Elements of a model that needs five buckets of the smallest size."""
SMALL_BUCKET = 4096

Move = Callable[[nn.Module, int], None]


# ------------------------------------------------------------------------------ algorithms


@dataclasses.dataclass(frozen=True)
class Counting(Algorithm):
    """Steps to the mean that become shorter, by three counters of different types.

    Args:
        whole: Whether it needs the whole vector at once.
    """

    whole: bool = False

    exchange = "mean"
    start_key = "outer"
    consensus_key = "outer"
    replicated = True
    merge_policy = Restart()

    @property
    def granularity(self) -> int | None:
        return None if self.whole else 1

    def init(self, params: Tensor) -> State:
        return {
            "outer": params,
            "rounds": 0,
            "scale": torch.ones((), dtype=torch.float64),
            "matrix": torch.eye(2, dtype=torch.float64),
        }

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        return torch.sub(state["outer"], params, out=params)

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        state["rounds"] += 1
        state["scale"].mul_(0.9)
        state["matrix"] = state["matrix"] @ torch.tensor([[1.0, 1.0], [0.0, 1.0]]).double()
        rate = float(state["scale"]) / (state["rounds"] + float(state["matrix"][0, 1]))
        outer: Tensor = state["outer"]
        return outer.sub_(received, alpha=rate)


class Forgetful(Counting):
    """Adds an entry to the state that :meth:`init` lacks."""

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        state["surprise"] = 1.0
        return super().update(local, message, received, state, info)


@dataclasses.dataclass(frozen=True)
class SignBlocks(Algorithm):
    """Blocks of four share the sign of their sum.

    Args:
        whole: Whether it needs the whole vector at once.
    """

    whole: bool = False

    exchange = "mean"
    start_key = "outer"
    consensus_key = "outer"
    seen: ClassVar[list[int]] = []

    @property
    def granularity(self) -> int | None:
        return None if self.whole else 4

    def init(self, params: Tensor) -> State:
        return {"outer": params}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        self.seen.append(len(params))
        drift = params - state["outer"]
        blocks = nn.functional.pad(drift, (0, -len(drift) % 4)).view(-1, 4)
        signs = blocks.sum(1, keepdim=True).sign()
        return (blocks.abs() * signs).flatten()[: len(params)]

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        self.seen.append(len(received))
        outer: Tensor = state["outer"]
        return outer.add_(received, alpha=0.5)


@dataclasses.dataclass(frozen=True)
class SendingScalars(Algorithm):
    """Takes outer steps whose length depends on the scalars of all workers.

    Each worker sends its state's ``"own"`` number, which a test sets, and its number of rounds.
    """

    exchange: ClassVar[Literal["mean", "neighbors"]] = "mean"
    merge_policy: ClassVar[MergePolicy | None] = Restart()
    start_key = "outer"

    def init(self, params: Tensor) -> State:
        return {"outer": params, "own": torch.zeros_like(params), "rounds": 0, "received": 0.0}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        return params

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        assert len({rounds for _, rounds in info.scalars}) == 1
        numbers = enumerate(info.scalars)
        state["received"] = sum((i + 1) * own + rounds for i, (own, rounds) in numbers)
        state["rounds"] += 1
        outer: Tensor = state["outer"]
        return outer.lerp_(received, 1.0 / (1.0 + state["received"]))

    def scalars(self, state: State) -> Sequence[float]:
        return float(state["own"][0]), state["rounds"]


class GossipSendingScalars(SendingScalars):
    """The same with neighbours."""

    exchange = "neighbors"
    merge_policy = KeepProgress()
    default_topology = "ring"


@dataclasses.dataclass(frozen=True)
class RandomPairs(NeighborAverage):
    """Averages with a random partner, unless the user chooses another topology."""

    default_topology = "random_matching"


class Lonely(NeighborAverage):
    """Exchanges with neighbours, but has no default topology."""

    default_topology = None


# ------------------------------------------------------------------------ codec and schedule


@dataclasses.dataclass(frozen=True)
class Exact(Codec):
    """Encodes float64 exactly."""

    block: int = 8

    @property
    def row_bytes(self) -> int:
        return 8 * self.block

    def encode_blocks(self, values: Tensor, rows: Tensor) -> None:
        rows.view(torch.float64).copy_(values)

    def decode_blocks(self, rows: Tensor, values: Tensor) -> None:
        values.copy_(rows.view(torch.float64))


def rounding(algorithm: Algorithm) -> Codec | ErrorFeedback:
    """Return a coarse codec, with error feedback if the algorithm averages over all workers."""
    return ErrorFeedback(Int4(8)) if algorithm.exchange == "mean" else Int8(8)


@dataclasses.dataclass(frozen=True)
class Halves(EverySteps):
    """The parameters in two halves, which alternate.

    Args:
        granularity: The second half starts at a multiple of it.
    """

    granularity: int = 4

    @property
    def num_fragments(self) -> int:
        return 2

    def fragment_slices(self, sizes: Mapping[str, int]) -> list[list[range]]:
        total = sum(sizes.values())
        middle = total // 2
        middle -= middle % self.granularity
        return [[range(middle)], [range(middle, total)]]

    def due(self, info: StepInfo) -> tuple[bool, bool]:
        due, _ = super().due(info)
        due = due and info.round_index % 2 == info.fragment
        return due, due and info.pending is not None


# ------------------------------------------------------------------------------ drivers


def approach(worker: int, model: nn.Module) -> None:
    """Take a local step: a tenth of the way to the worker's own target."""
    for index, value in enumerate(model.parameters()):
        target = randn(*value.shape, seed=10 * worker + index).to(value.dtype)
        value.data.add_(target - value.data, alpha=0.1)


def zeros() -> nn.Module:
    """Return a model that needs several buckets."""
    return Point(torch.zeros(LARGE, dtype=torch.float64))


def saved_and_loaded(state: Any) -> Any:
    """Save to a file and load it without running code from it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(
    rank: int,
    world: int,
    settings: RoundSettings,
    rounds: int,
    make: Callable[[], nn.Module] = zeros,
    resume_after: int | None = None,
    own: bool = False,
) -> Tensor:
    """Train with an engine; return the parameters after each round and at the end.

    Args:
        rank: Number of this worker.
        world: Number of workers.
        settings: Settings of the rounds, which count steps.
        rounds: Number of rounds.
        make: Makes the model.
        resume_after: Rounds after which to save, one local step later, and resume in a new engine.
        own: Whether to set the state's entry ``"own"`` to a number of this worker.
    """
    settings = dataclasses.replace(settings, bucket_bytes=SMALL_BUCKET)
    model = make()
    engine = Engine.from_settings(model, settings)
    if own:
        engine.fragments[0].memory.state["own"].fill_(rank + 1.0)
    history: list[Tensor] = []
    saves_at = None
    while len(history) < rounds:
        approach(rank, model)
        if engine.step():
            history.append(flat(model))
            saves_at = engine.worker.steps + 1 if len(history) == resume_after else saves_at
        if engine.worker.steps == saves_at:
            engine.sync_point("a checkpoint")
            saved = saved_and_loaded(engine.state_dict())
            engine.close()
            model = make()
            engine = Engine.from_settings(model, settings)
            engine.load_state_dict(saved)
            saves_at = None
    engine.drain()
    engine.finish()
    engine.close()
    return torch.stack([*history, flat(model)])


def simulate(
    settings: RoundSettings,
    world: int,
    rounds: int,
    make: Callable[[], nn.Module] = zeros,
    own: bool = False,
) -> Tensor:
    """Do the same as :func:`train` in one process: ``(rounds + 1, N, P)``."""
    models = [make() for _ in range(world)]
    simulation = Simulation.from_settings(models, settings)
    for worker, state in enumerate(states_of(simulation) if own else []):
        state["own"].fill_(worker + 1.0)
    history = []
    for _ in range(rounds):
        simulation.run(lambda worker: approach(worker, models[worker]), 1)
        history.append(torch.stack(simulation.params()))
    simulation.drain()
    history.append(simulation.consensus().expand(world, -1))
    return torch.stack(history)

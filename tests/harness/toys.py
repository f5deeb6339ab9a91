"""Toy problems and plain loops for the tests of the algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_loco import Simulation, StepEngine
from lightning_loco.algorithms import Algorithm, RoundInfo, State
from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.engine.exchanges import make_exchange
from lightning_loco.topology import as_topology
from tests.harness.small_model import flat, make_model, train_step, worker_batch

LocalStep = Callable[[int, nn.Module, torch.optim.Optimizer, int], None]
"""(worker, its model, its optimizer, number of the step)."""
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

SGD = partial(torch.optim.SGD, lr=0.05)
ADAMW = partial(torch.optim.AdamW, lr=0.01)

assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


class Point(nn.Module):
    """A model that is one vector."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(start.clone())


SIZES = (1500, 700, 40, 5, 900)
"""Elements of the layers, 3145 in all: three strided fragments of 1505, 1600 and 40."""


class Layers(nn.Module):
    """Numbered blocks, each a vector."""

    def __init__(self, sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Point(torch.zeros(size, dtype=dtype)) for size in sizes)


def plain_step(
    worker: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    clip: float | None = None,
) -> None:
    """Take an optimizer step on the worker's own batch."""
    train_step(model, optimizer, worker_batch(worker, step), clip=clip)


def same_data(worker: int, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give all workers the data of worker 0."""
    plain_step(0, model, optimizer, step)


def states_of(simulation: Simulation) -> list[State]:
    """Return the algorithm's state of each worker, of the first fragment."""
    return [engine.fragments[0].state for engine in simulation.participants]


def simulate(
    algorithm: Algorithm,
    world: int,
    rounds: int,
    *,
    inner: MakeOptimizer = SGD,
    step: LocalStep = plain_step,
    make: Callable[[], nn.Module] = make_model,
    last_round: bool = True,
    **settings: Any,
) -> Tensor:
    """Train a model in the simulation.

    Args:
        algorithm: What a round computes.
        world: Number of workers.
        rounds: Number of rounds.
        inner: Makes the optimizer of a worker.
        step: A worker's local step.
        make: Makes the model of a worker; the tiny model by default.
        last_round: Whether to run the last round and apply pending rounds. A Trainer ends right
            before the last round.
        **settings: Settings of the simulation.

    Returns:
        ``(rounds + 1, N, P)``: each worker's parameters after each round, and the consensus at the
        end for all of them.
    """
    models = [make() for _ in range(world)]
    optimizers = [inner(model.parameters()) for model in models]
    steps = [0] * world

    def local_step(worker: int) -> None:
        step(worker, models[worker], optimizers[worker], steps[worker])
        steps[worker] += 1

    simulation = Simulation(models, algorithm, **settings)
    history = []
    for _ in range(rounds if last_round else rounds - 1):
        simulation.run(local_step, 1)
        history.append(torch.stack(simulation.params()))
    if last_round:
        simulation.drain()
    else:
        every = simulation.settings.schedule.sync_every_of
        for worker in range(world):
            for _ in range(every(worker) or 0):
                local_step(worker)
        history.append(torch.stack(simulation.params()))
    history.append(simulation.consensus().expand(world, -1))
    return torch.stack(history)


def run_engine(
    rank: int,
    world: int,
    algorithm: Algorithm,
    rounds: int,
    settings: dict[str, Any],
    inner: MakeOptimizer = SGD,
) -> Tensor:
    """Do the same as :func:`simulate` in one of several processes: ``(rounds + 1, P)``."""
    model = make_model(seed=rank)  # the engine gives all workers the model of worker 0
    optimizer = inner(model.parameters())
    engine = StepEngine(model, algorithm, **settings)
    history = []
    step = 0
    while len(history) < rounds:
        train_step(model, optimizer, worker_batch(rank, step))
        step += 1
        if engine.step():
            history.append(flat(model))
    engine.drain()
    engine.finish()
    engine.close()
    return torch.stack([*history, flat(model)])


def train_ddp(
    world: int, steps: int, make_optimizer: MakeOptimizer, clip: float | None = None
) -> Tensor:
    """Train synchronously: one model, the mean gradient of all workers' batches."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    history = []
    for step in range(steps):
        batches = [worker_batch(worker, step) for worker in range(world)]
        train_step(model, optimizer, *batches, clip=clip)
        history.append(flat(model))
    return torch.stack(history)


def updated(
    algorithm: Algorithm,
    local: Tensor,
    message: Tensor,
    received: Tensor,
    state: State,
    info: RoundInfo = RoundInfo(),  # noqa: B008 (frozen)
) -> Tensor:
    """Return the new local parameters, for which the algorithm gets only what it reads."""
    reads = algorithm.reads
    own = local if "local" in reads else None, message if "message" in reads else None
    return algorithm.update(*own, received, state, info)


def apply_update(
    algorithm: Algorithm,
    params: Tensor,
    received: Tensor,
    state: State,
    info: RoundInfo = RoundInfo(),  # noqa: B008 (frozen)
) -> None:
    """Write the new local parameters into ``params``."""
    result = updated(algorithm, params, params, received, state, info)
    if result is not params:
        params.copy_(result)


def flat_rounds(
    algorithm: Algorithm,
    starts: Tensor,
    local_phase: Callable[[int, Tensor, int], Tensor],
    rounds: int,
    topology: Any | None = None,
) -> Tensor:
    """Run a prepared algorithm on vectors, from starts that may differ.

    Args:
        algorithm: A prepared algorithm.
        starts: One row per worker, ``(N, P)``.
        local_phase: (worker, its parameters, round) -> its parameters after the local steps.
        rounds: Number of rounds.
        topology: Topology of an exchange with neighbours.

    Returns:
        ``(rounds + 1, N, P)``: the starts, and the parameters after each round.
    """
    graph = None if topology is None else as_topology(topology)
    exchange = make_exchange(algorithm, WorkerGroup(0, 1), Statistics(), graph)
    params = [start.clone() for start in starts]
    states = [algorithm.init(start.clone()) for start in starts]
    history = [torch.stack(params)]
    for t in range(rounds):
        local = [local_phase(worker, p.clone(), t) for worker, p in enumerate(params)]
        messages = [
            algorithm.propose(p, s, RoundInfo()) for p, s in zip(local, states, strict=True)
        ]
        received = exchange.simulate(messages, t)
        if algorithm.gathers:
            info = RoundInfo(weights=(1.0,) * len(messages))
            received = [algorithm.combine(gathered, info) for gathered in received]
        elif exchange.is_weighted:
            received = [total.div_(len(messages)) for total in received]
        for p, r, state in zip(local, received, states, strict=True):
            apply_update(algorithm, p, r, state)
        params = local
        history.append(torch.stack(params))
    return torch.stack(history)


def no_progress(worker: int, params: Tensor, round_index: int) -> Tensor:
    """Return the parameters unchanged: a local phase without progress."""
    return params


def move_to(targets: Sequence[Tensor] | Tensor, fraction: float) -> Callable[..., Tensor]:
    """Return a local phase that moves each worker a fraction of the way to its target.

    Gradient descent on a quadratic: the pseudo-gradient is ``fraction * (x - target)``.
    """

    def local_phase(worker: int, params: Tensor, round_index: int) -> Tensor:
        return params + fraction * (targets[worker] - params)

    return local_phase


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers in float64, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distances(history: Tensor) -> Tensor:
    """Return the workers' distance to their mean in each round: ``(T, N, P)`` -> ``(T,)``."""
    return (history - history.mean(1, keepdim=True)).flatten(1).norm(dim=1)

"""A model of several layers, streaming DiLoCo as a plain loop, and drivers for both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_loco import Simulation
from lightning_loco.algorithms import DiLoCo, Mix
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.schedules import Staggered
from tests.harness.late_backend import late_group
from tests.harness.rounds import SMALL_BUCKET, approach, saved_and_loaded
from tests.harness.small_model import flat
from tests.harness.toys import SIZES, Layers, randn


class Run(NamedTuple):
    """The workers' parameters after each local step, ``(T, N, P)``, and their mean at the end."""

    history: Tensor
    consensus: Tensor


def slices_of(settings: RoundSettings) -> list[list[slice]]:
    """Return the fragments of the model."""
    fragments = settings.schedule.fragment_slices(
        {f"blocks.{i}.value": n for i, n in enumerate(SIZES)}
    )
    return [[slice(part.start, part.stop) for part in fragment] for fragment in fragments]


def stream(settings: RoundSettings, workers: int, steps: int) -> Run:
    """Run streaming DiLoCo with different targets, step by step and element by element."""
    algorithm, schedule, merge_policy = settings.algorithm, settings.schedule, settings.merge_policy
    assert isinstance(algorithm, DiLoCo)
    assert isinstance(schedule, Staggered)
    assert isinstance(merge_policy, Mix)
    every, delay, mix = schedule.sync_every, schedule.delay, merge_policy.mix
    assert isinstance(every, int)
    sizes = torch.tensor(SIZES)
    targets = torch.stack(
        [
            torch.cat([randn(int(n), seed=10 * worker + i) for i, n in enumerate(sizes)])
            for worker in range(workers)
        ]
    )
    local, outer = torch.zeros_like(targets), torch.zeros_like(targets[0])
    momentum = torch.zeros_like(outer)
    fragments = slices_of(settings)
    pending_rounds: dict[int, tuple[int, list[Tensor]]] = {}
    history: list[Tensor] = []

    def begin(p: int, step: int) -> None:
        pending_rounds[p] = (step, [(outer[s] - local[:, s]).mean(0) for s in fragments[p]])

    def apply(p: int, share: float) -> None:
        _, gradients = pending_rounds.pop(p)
        for s, gradient in zip(fragments[p], gradients, strict=True):
            momentum[s] = algorithm.outer_momentum * momentum[s] + gradient
            ahead = gradient + algorithm.outer_momentum * momentum[s]
            outer[s] -= algorithm.outer_lr * (ahead if algorithm.nesterov else momentum[s])
            local[:, s] = share * local[:, s] + (1 - share) * outer[s]

    for step in range(1, steps + 1):
        local += 0.1 * (targets - local)
        for p in [p for p, (began, _) in pending_rounds.items() if step - began == delay]:
            apply(p, mix)
        for p in range(len(fragments)):
            if (step - (p + 1) * every // len(fragments)) % every == 0:
                begin(p, step)
                if delay == 0:
                    apply(p, 0.0)
        history.append(local.clone())
    return Run(torch.stack(history), local.mean(0))


def train(
    rank: int,
    world: int,
    settings: RoundSettings,
    steps: int,
    cuts: Sequence[int] = (),
    syncs: bool = False,
    late: bool = False,
) -> tuple[Tensor, Tensor]:
    """Train with an engine; return this worker's parameters after each step and at the end.

    Args:
        rank: Number of this worker.
        world: Number of workers.
        settings: Settings of the rounds.
        steps: Number of local steps.
        cuts: Steps after which to save, and to continue with a new engine.
        syncs: Whether to use the consensus after each step, as a validation does.
        late: Whether messages arrive late, as with NCCL, while the host continues.
    """
    settings = dataclasses.replace(settings, bucket_bytes=SMALL_BUCKET)
    model: nn.Module = Layers()
    engine = Engine.from_settings(model, settings, late_group() if late else None)
    history: list[Tensor] = []
    for step in range(1, steps + 1):
        approach(rank, model)
        engine.step()
        history.append(flat(model))
        if syncs:
            engine.sync_point("a validation")
            engine.show_consensus()
            engine.worker.show_local()
        if step in cuts:
            engine.sync_point("a checkpoint")
            saved = saved_and_loaded(engine.state_dict())
            engine.close()
            model = Layers()
            engine = Engine.from_settings(model, settings)
            engine.load_state_dict(saved)
    engine.finish()
    engine.close()
    return torch.stack(history), flat(model)


def simulate(settings: RoundSettings, workers: int, steps: int) -> Run:
    """Train in a simulation, up to the start of the last round."""
    models = [Layers() for _ in range(workers)]
    simulation = Simulation.from_settings(models, settings)
    history: list[list[Tensor]] = [[] for _ in range(workers)]

    def local_step(worker: int) -> None:
        history[worker].append(flat(models[worker]))  # the state after the previous step
        approach(worker, models[worker])

    while len(history[0]) < steps:
        simulation.run(local_step, 1)
    pairs = zip(history, models, strict=True)
    after = [torch.stack([*before[1:], flat(model)]) for before, model in pairs]
    return Run(torch.stack(after, dim=1), simulation.consensus())

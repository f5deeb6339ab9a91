"""The methods of the world of rounds: their settings from plain values, and how these are drawn."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_loco.algorithms import (
    SPARTA,
    Algorithm,
    DelayedNesterov,
    DiLoCo,
    EagerDiLoCo,
    GASLoC,
    KeepProgress,
    LocalSGD,
    Mix,
    ModelAverage,
    NeighborAverage,
    NoLoCo,
    Restart,
)
from lightning_loco.compression import Compensated, ErrorFeedback, Int4, Int8, Sparse
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EveryInterval, Staggered, VaryingSteps, by_steps

NUMEL = 8


@dataclasses.dataclass(frozen=True)
class WeightedDiLoCo(DiLoCo):
    """DiLoCo whose messages weigh as much as they hold local steps."""

    def weight(self, steps: float) -> float:
        return steps


ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "local_sgd": LocalSGD,
    "diloco": lambda: DiLoCo(0.7, 0.5),
    "diloco_plain": lambda: DiLoCo(0.7, 0.0),
    "diloco_weighted": lambda: WeightedDiLoCo(0.7, 0.5),
    "diloco_trimmed": lambda: DiLoCo(0.7, 0.3, aggregate="trimmed_mean"),
    "diloco_median": lambda: DiLoCo(0.7, 0.3, aggregate="geometric_median"),
    "diloco_adamw": lambda: DiLoCo(outer_optimizer=torch.optim.AdamW),
    "eager_diloco": lambda: EagerDiLoCo(0.4, 0.5),
    "delayed_nesterov": lambda: DelayedNesterov(1.4, 0.3, every=2),
    "gasloc": GASLoC,
    "gasloc_local": lambda: GASLoC(momentum_on="local"),
    "noloco": NoLoCo,
    "sparta": lambda: SPARTA(0.5),
    "model_average": ModelAverage,
    "neighbor_average": NeighborAverage,
}
OVERLAPS = (
    "diloco", "diloco_plain", "diloco_median", "eager_diloco", "delayed_nesterov", "gasloc",
    "gasloc_local", "model_average", "neighbor_average",
)  # fmt: skip
CODECS: dict[str, Callable[[], Any]] = {
    "int8": lambda: Int8(block=4),
    "int8 feedback": lambda: ErrorFeedback(Int8(block=4), 0.9),
    "int4": lambda: Int4(block=8),
    "sparse": lambda: ErrorFeedback(Sparse(k=4, block=8), 0.95),
    "sparse senders": lambda: ErrorFeedback(Sparse(k=4, block=8, mean_over="senders"), 0.95),
    "compensated": lambda: Compensated(Sparse(k=4, block=8)),
}
MERGES: dict[str, Callable[[], Any]] = {
    "restart": Restart,
    "mix": lambda: Mix(0.5),
    "keep": KeepProgress,
}
TOPOLOGIES = ("ring", "exponential", "star", "random_matching", "one_peer_exponential", "complete")


class Numbers(nn.Module):
    """A model of eight numbers, in four layers."""

    def __init__(self, start: float, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.arange(NUMEL, dtype=torch.float64) * 0.25 - start
        self.layers = nn.ParameterList(values[i : i + 2].to(dtype) for i in range(0, NUMEL, 2))

    @torch.no_grad()
    def step(self, worker: int, step: int) -> None:
        """Take a local step, a quarter of the way to a target that changes from step to step.

        NaN spreads to all layers, as in a network.
        """
        if not all(layer.isfinite().all() for layer in self.layers):
            for layer in self.layers:
                layer.fill_(math.nan)
            return
        for index, layer in enumerate(self.layers):
            first = torch.tensor([2.0 * index, 2.0 * index + 1.0], dtype=torch.float64)
            target = torch.cos(first * 1.7 + 2.3 * worker + 0.9 * step).to(layer.dtype)
            layer.lerp_(target, 0.25)


def is_by_clock(settings: Mapping[str, Any]) -> bool:
    """Whether rounds follow the clock."""
    return bool(settings["schedule"] == "clock")


def round_settings(settings: Mapping[str, Any]) -> RoundSettings:
    """Make the settings of the engines; ValueError if they do not fit each other."""
    sync_every, overlap = settings["sync_every"], settings["overlap"]
    if is_by_clock(settings):
        schedule: Any = EveryInterval(settings["interval_s"])
    elif settings["schedule"] == "staggered":
        schedule = Staggered(
            sync_every, 2, settings["delay"], settings["pattern"], settings["warm_start"]
        )
    elif settings["schedule"] == "varying":
        varying = {int(step): steps for step, steps in settings["varying"].items()}
        schedule = VaryingSteps(varying, overlap, settings["warm_start"])
    else:
        schedule = by_steps(sync_every, overlap, settings["warm_start"])
    codec, merge = settings["codec"], settings["merge"]
    return RoundSettings(
        ALGORITHMS[settings["algorithm"]](),
        schedule,
        settings["topology"],
        None if codec is None else CODECS[codec](),
        None if merge is None else MERGES[merge](),
        bucket_bytes=settings["bucket_bytes"],
    )


def draw_method(
    draw: random.Random, workers: int, wanted: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Draw a method and its settings, such that they fit each other and have what is wanted."""
    while True:
        settings = _draw_any(draw, workers)
        if any(settings[key] != value for key, value in wanted.items()):
            continue
        try:
            prepared = round_settings(settings).prepare(workers, 0)
            prepared.fragment_slices({f"layers.{i}": 2 for i in range(NUMEL // 2)})
        except (ValueError, TypeError):
            continue
        return settings


def _draw_any(draw: random.Random, workers: int) -> dict[str, Any]:
    algorithm = draw.choice(sorted(ALGORITHMS))
    schedule = draw.choice(["steps", "steps", "steps", "varying", "staggered"])
    if algorithm in ("model_average", "neighbor_average") and draw.random() < 0.8:
        schedule = "clock"
    overlap = schedule == "staggered" or (algorithm in OVERLAPS and draw.random() < 0.6)
    is_gossip = algorithm in ("gasloc", "gasloc_local", "neighbor_average")
    slowest = draw.choice([1, 2, 3])
    sync_every: int | list[int] = slowest + (1 if schedule == "staggered" else 0)
    if schedule == "steps" and draw.random() < 0.25:
        sync_every = [draw.choice([1, 2, 3]) for _ in range(workers)]
    return {
        "algorithm": algorithm,
        "schedule": schedule,
        "sync_every": sync_every,
        "varying": {"0": slowest, "4": draw.choice([1, 2, 4])},
        "interval_s": draw.choice([0.0, 0.2, 1.0]),
        "overlap": overlap and schedule != "clock",
        "warm_start": draw.random() < 0.5,
        "delay": draw.choice([0, 1, 2]),
        "pattern": draw.choice(["strided", "contiguous", "even"]),
        "topology": draw.choice(TOPOLOGIES) if is_gossip else None,
        "codec": draw.choice(sorted(CODECS)) if draw.random() < 0.35 else None,
        "merge": draw.choice(sorted(MERGES)) if draw.random() < 0.5 else None,
        "bucket_bytes": draw.choice([2**20, 2**20, 64, 32, 16]),
        "dtype": draw.choice(["float32", "float32", "bfloat16"]),
    }

"""The table of test cases: one row for each algorithm, on which every common test runs.

- "laws": laws that hold for every algorithm (tests/algorithms/test_common.py);
- "same numbers": equal in the simulation, in a plain loop and in Trainer.fit
  (tests/strategies/test_same_numbers.py);
- "resume": a resumed run equals an uninterrupted one (tests/strategies/test_checkpoint.py);
- "uneven": workers with different numbers of batches (tests/strategies/test_uneven.py);
- "alone": one worker computes the same as several workers with equal local steps;
- "nan": a worker with NaN is left out (tests/strategies/test_nan.py).

tests/test_cases.py checks that no method, algorithm or row is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import nn

import lightning_loco as loco
from lightning_loco import (
    AsyncModelAverageStrategy,
    DiLoCo,
    GASLoC,
    LocalSGD,
    ModelAverage,
    NeighborAverage,
    StreamingDiLoCoStrategy,
)
from lightning_loco.algorithms import Algorithm, Cosine, Linear, Piecewise
from lightning_loco.compression import Compensated, ErrorFeedback, Sparse
from lightning_loco.engine import RoundSettings
from lightning_loco.strategies import METHODS
from lightning_loco.topology import Topology, get_topology

BY_CLOCK = "its rounds follow the clock, so that no two runs are equal"
BY_FRAGMENTS = (
    "its schedule is tested in tests/engine/test_staggered.py, and its algorithm has a row"
)
ENDS_WITH_NAN = "a worker with NaN receives too little to recover, and ends the run"
DECAYS = "weight decay changes the parameters without progress"
SLOW = (
    "same numbers",
    "resume",
    "uneven",
    "external updates",
    "nan",
    "nan by hand",
    "nan ends",
    "chunks",
)
LEFT_OUT = (BY_CLOCK, BY_FRAGMENTS)
"""Reasons to leave a row out of a test; with any other reason the row must fail there."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An algorithm and the settings of its rounds.

    Args:
        algorithm: What a round computes.
        topology: Name of the topology.
        overlap: Apply a round's result one round later.
        warm_start: With overlap, run a blocking first round.
        fragments: Number of fragments, if the schedule is ``Staggered``.
        delay: Local steps after which their results are applied, at most one less than
            ``sync_every``.
        mix: Share of the local parameters when a result is applied.
        compression: How messages are encoded.
        accuracy: Distance to the optimum of some quadratics after 300 rounds.
        variant_of: The row that differs from this one only by its formula. Slow tests that do not
            depend on the formula run on that row.
        not_in: Names of tests in which this row is left out or fails, with the reasons.
    """

    algorithm: Algorithm
    topology: str | None = None
    overlap: bool = False
    warm_start: bool = True
    fragments: int | None = None
    delay: int = 0
    mix: float = 0.0
    compression: Compensated | str | None = None
    accuracy: float = 1e-6
    variant_of: str | None = None
    not_in: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def by_clock(self) -> bool:
        """Whether rounds follow the clock instead of counting steps."""
        return isinstance(self.algorithm, ModelAverage) and not self.overlap

    @property
    def consensus_key(self) -> str | None:
        """The state entry that is the consensus; None for the mean of the workers."""
        return self._prepared(2).consensus_key

    def prepared(self, num_workers: int) -> Algorithm:
        """Return the algorithm with its automatic settings filled in."""
        return self._prepared(num_workers).algorithm

    def _prepared(self, num_workers: int) -> RoundSettings:
        return RoundSettings(
            self.algorithm, topology=self.topology, compression=self.compression
        ).prepare(num_workers)

    @property
    def graph(self) -> Topology | None:
        """The topology if the seed of the run is 0."""
        name = self.topology or self.algorithm.default_topology
        return None if name is None else get_topology(name)

    def settings(self, **others: Any) -> dict[str, Any]:
        """Return the keyword arguments for a StepEngine or a Simulation."""
        return {
            "topology": self.topology,
            "overlap": self.overlap,
            "warm_start": self.warm_start,
            "compression": self.compression,
            **others,
        }

    def strategy(self, sync_every: int, **others: Any) -> loco.LocoStrategy:
        """Return the strategy; rounds by the clock follow each other without a pause."""
        if self.by_clock:
            return AsyncModelAverageStrategy(0.0, topology=self.topology, **others)
        if self.fragments is not None:
            assert isinstance(self.algorithm, DiLoCo)
            outer = self.algorithm.outer_lr, self.algorithm.outer_momentum
            delay_and_mix = min(self.delay, sync_every - 1), self.mix
            return StreamingDiLoCoStrategy(
                sync_every, self.fragments, *delay_and_mix, *outer, **others
            )
        return loco.LocoStrategy(self.algorithm, **self.settings(sync_every=sync_every, **others))


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Create an outer optimizer with a state (picklable)."""
    return torch.optim.Adam(params, lr=0.05)


def adagrad(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Create an optimizer that allocates its state in its constructor, not in its first step."""
    return torch.optim.Adagrad(params, lr=0.5)


CLOCK = dict.fromkeys(("same numbers", "resume", "nan by hand"), BY_CLOCK)
FRAGMENTS = dict.fromkeys(("laws", "same numbers", "nan by hand"), BY_FRAGMENTS)
ROUNDED = {
    "alone": "a single worker sends nothing, so nothing is rounded",
    "nan by hand": "the plain loop does not round",
}
COUNTS_WORKERS = {"alone": "the share that is applied without delay depends on the workers"}

CASES = {
    # Each method under its registered name, with its defaults; async DiLoCo a phase late.
    "local_sgd": Case(LocalSGD()),
    "sparta": Case(
        loco.SPARTA(0.25), not_in=dict.fromkeys(("nan by hand", "nan ends"), ENDS_WITH_NAN)
    ),
    "diloco": Case(DiLoCo()),
    "async_diloco": Case(DiLoCo(outer_momentum=0.0), overlap=True),
    "streaming_diloco": Case(DiLoCo(), fragments=2, delay=5, mix=0.25, not_in=FRAGMENTS),
    "eager_diloco": Case(loco.EagerDiLoCo(), overlap=True, not_in=COUNTS_WORKERS),
    "delayed_nesterov": Case(loco.DelayedNesterov()),
    "gasloc": Case(GASLoC(), "ring"),
    "noloco": Case(loco.NoLoCo()),
    "async_model_average": Case(ModelAverage(), not_in=CLOCK),
    # Other settings; slow tests run these rows in the soak only.
    "diloco_schedule": Case(DiLoCo(Cosine(0.9, 0.2, rounds=5), 0.5), variant_of="diloco"),
    "delayed_nesterov_schedule": Case(
        loco.DelayedNesterov(Linear(0.5, 1.4, rounds=3), 0.5), variant_of="delayed_nesterov"
    ),
    "eager_diloco_schedule": Case(
        loco.EagerDiLoCo(Piecewise({0: 0.7, 2: 0.4}), 0.3),
        overlap=True,
        variant_of="eager_diloco",
        not_in=COUNTS_WORKERS,
    ),
    "gasloc_schedule": Case(GASLoC(Cosine(0.9, 0.5, rounds=5)), "ring", variant_of="gasloc"),
    "gasloc_overlap_schedule": Case(
        GASLoC(Cosine(0.9, 0.5, rounds=5)), "ring", overlap=True, variant_of="gasloc_overlap"
    ),
    "diloco_plain": Case(DiLoCo(0.7, 0.0), variant_of="diloco"),
    "diloco_momentum": Case(DiLoCo(0.7, 0.9), variant_of="diloco"),
    "diloco_heavy_ball": Case(DiLoCo(0.7, 0.5, nesterov=False), variant_of="diloco"),
    "diloco_adam": Case(DiLoCo(outer_optimizer=adam), accuracy=1e-2, variant_of="diloco_adamw"),
    "diloco_adamw": Case(
        DiLoCo(outer_optimizer=torch.optim.AdamW),
        accuracy=2.0,
        not_in={"without progress": DECAYS, "external updates": DECAYS},
    ),
    "diloco_adagrad": Case(DiLoCo(outer_optimizer=adagrad), accuracy=1e-2, variant_of="diloco"),
    "diloco_trimmed_mean": Case(
        DiLoCo(aggregate="trimmed_mean"),
        accuracy=2.0,
        not_in={"nan by hand": "the plain loop has the mean"},
    ),
    "diloco_geometric_median": Case(  # equals the mean of two messages
        DiLoCo(0.7, 0.3, aggregate="geometric_median"), overlap=True, accuracy=2.0
    ),
    "async_diloco_momentum": Case(DiLoCo(0.7, 0.3), overlap=True),
    "async_diloco_cold": Case(
        DiLoCo(outer_momentum=0.0), overlap=True, warm_start=False, variant_of="async_diloco"
    ),
    "delayed_nesterov_between": Case(
        loco.DelayedNesterov(2.1, 0.5, every=3, between=0.2), variant_of="delayed_nesterov"
    ),
    "async_delayed_nesterov": Case(loco.DelayedNesterov(1.4, 0.3, every=2), overlap=True),
    "eager_diloco_momentum": Case(
        loco.EagerDiLoCo(0.4, 0.5), overlap=True, variant_of="eager_diloco", not_in=COUNTS_WORKERS
    ),
    "eager_diloco_cold": Case(
        loco.EagerDiLoCo(0.4, 0.5, nesterov=False),
        overlap=True,
        warm_start=False,
        variant_of="eager_diloco",
        not_in=COUNTS_WORKERS,
    ),
    "gasloc_plain": Case(GASLoC(momentum=0.0), "star", variant_of="gasloc"),
    "gasloc_local": Case(GASLoC(momentum_on="local"), "ring", variant_of="gasloc"),
    "gasloc_directed": Case(GASLoC(), "exponential", variant_of="gasloc"),
    "gasloc_matching": Case(GASLoC(), "random_matching"),
    "gasloc_matching_momentum": Case(
        GASLoC(momentum=0.3), "random_matching", variant_of="gasloc_matching"
    ),
    "gasloc_cycle": Case(GASLoC(), "one_peer_exponential", variant_of="gasloc_matching"),
    "neighbor_average": Case(NeighborAverage(), "ring", not_in=CLOCK),
    # Compressed messages.
    "diloco_compressed": Case(
        DiLoCo(),
        compression="e3m0",
        accuracy=0.1,
        variant_of="diloco",
        not_in={**ROUNDED, "chunks": "buckets determine which worker keeps the residual of a sum"},
    ),
    "async_diloco_compressed": Case(
        DiLoCo(outer_momentum=0.0),
        overlap=True,
        compression="sparse",
        accuracy=0.2,
        variant_of="async_diloco",
        not_in=ROUNDED,
    ),
    "local_sgd_compressed": Case(
        LocalSGD(), compression="int8", accuracy=1e-2, variant_of="local_sgd", not_in=ROUNDED
    ),
    "diloco_compensated": Case(
        DiLoCo(1.5, 0.3),
        compression=Compensated(Sparse(k=4, block=16)),
        accuracy=0.2,
        variant_of="diloco",
        not_in=ROUNDED,
    ),
    "sparseloco": Case(
        DiLoCo(1.0, 0.0),
        compression=ErrorFeedback(Sparse(k=4, block=16, mean_over="senders"), 0.95),
        accuracy=0.2,
        variant_of="diloco",
        not_in=ROUNDED,
    ),
    "gasloc_compressed": Case(
        GASLoC(),
        "ring",
        compression="int8",
        variant_of="gasloc",
        not_in={"nan by hand": ROUNDED["nan by hand"]},
    ),
    # Overlap with the merge policy KeepProgress.
    "gasloc_overlap": Case(GASLoC(), "ring", overlap=True),
    "gasloc_overlap_cold": Case(
        GASLoC(momentum_on="local"),
        "ring",
        overlap=True,
        warm_start=False,
        variant_of="gasloc_overlap",
    ),
    "model_average_overlap": Case(ModelAverage(), overlap=True),
    "neighbor_average_overlap": Case(NeighborAverage(), "ring", overlap=True),
}


KINDS = (
    "local_sgd", "async_diloco", "streaming_diloco", "gasloc", "noloco", "async_model_average"
)  # fmt: skip
"""One method of each kind of round: all workers, overlap, fragments, neighbours, random pairs, and
rounds by the clock. Enough for tests that do not depend on formulas."""


def rows(
    test: str, names: Iterable[str] = CASES, often: Collection[str] = METHODS
) -> pytest.MarkDecorator:
    """Run a test on every row, as the argument ``case``; see :func:`params`."""
    return pytest.mark.parametrize("case", params(test, names, often))


def params(
    test: str, names: Iterable[str] = CASES, often: Collection[str] = METHODS
) -> list[ParameterSet]:
    """Return the rows of a test with their marks.

    Args:
        test: Its name in ``not_in``. Rows with a reason of ``LEFT_OUT`` are left out; rows with
            another reason must fail.
        names: The rows to choose from.
        often: Rows of a slow test that run in the test suite; the others run in the soak.
    """
    chosen = []
    for name in names:
        reason = CASES[name].not_in.get(test)
        marks = [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason)]
        if name not in often and test in SLOW:
            marks.append(pytest.mark.soak)
        if reason not in LEFT_OUT:
            chosen.append(pytest.param(CASES[name], id=name, marks=marks))
    return chosen


def without_variants() -> list[str]:
    """Return the names of the rows that are not variants of others."""
    return [name for name, case in CASES.items() if case.variant_of is None]

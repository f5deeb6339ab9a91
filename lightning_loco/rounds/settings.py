"""What a user says about rounds, checked before any process or tensor exists."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from lightning_loco.algorithms import Algorithm
from lightning_loco.rounds.rounds import PARCELS_IN_FLIGHT
from lightning_loco.topology import Ring, as_topology


@dataclasses.dataclass(frozen=True)
class RoundSettings:
    """How a run makes its rounds.

    Args:
        algorithm: What a round computes.
        sync_every: Local steps between rounds, or one number per worker.
        overlap: Apply a round's result one round later.
        warm_start: With overlap, make the first round a blocking one.
        topology: Neighbours; None for all-reduce algorithms, and for a ring otherwise.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    algorithm: Algorithm
    sync_every: int | Sequence[int] = 100
    overlap: bool = False
    warm_start: bool = True
    topology: Any | None = None

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if not isinstance(self.algorithm, Algorithm):
            raise TypeError(
                f"algorithm must be an Algorithm such as DiLoCo(), got {self.algorithm!r}."
            )
        several = isinstance(self.sync_every, Sequence) and not isinstance(self.sync_every, str)
        for steps in self.sync_every if several else [self.sync_every]:  # type: ignore[union-attr]
            if isinstance(steps, bool) or not isinstance(steps, int):
                raise TypeError(
                    "sync_every counts optimizer steps between rounds and must be an integer (or a "
                    f"list with one per worker), got {self.sync_every!r}."
                )
            if steps < 1:
                raise ValueError(
                    "sync_every counts optimizer steps between rounds and must be at least 1, got "
                    f"{self.sync_every!r}. Use sync_every=1 to exchange after every step."
                )
        if self.overlap:
            self.algorithm.check_overlap()

    def prepare(self, num_workers: int) -> RoundSettings:
        """Check everything against the number of workers and resolve ``"auto"`` settings.

        Raises:
            ValueError: If something does not fit; before training starts.
        """
        topology = None if self.topology is None else as_topology(self.topology)
        if topology is None and self.algorithm.exchange == "neighbors":
            topology = Ring()
        if isinstance(self.sync_every, Sequence) and len(self.sync_every) != num_workers:
            raise ValueError(
                f"sync_every lists {len(self.sync_every)} numbers for {num_workers} workers, got "
                f"{list(self.sync_every)}. Give one number per worker, or a single one for all."
            )
        algorithm = self.algorithm.prepare(num_workers, topology)
        if self.overlap:
            algorithm.warn_overlap()
        return dataclasses.replace(self, algorithm=algorithm, topology=topology)

    def describe(self) -> dict[str, Any]:
        """Everything as plain values, for a comparison between workers and for checkpoints."""
        values = {f.name: getattr(self.algorithm, f.name) for f in fields(self.algorithm)}
        plain = {
            key: value if isinstance(value, (int, float, str, type(None))) else type(value).__name__
            for key, value in values.items()
        }
        return {
            "algorithm": type(self.algorithm).__name__,
            **plain,
            "sync_every": self.sync_every
            if isinstance(self.sync_every, int)
            else list(self.sync_every),
            "overlap": self.overlap,
            "warm_start": self.warm_start,
            "topology": None if self.topology is None else repr(self.topology),
        }

    def steps_of(self, worker: int) -> int:
        """Local steps of one worker between rounds."""
        return self.sync_every if isinstance(self.sync_every, int) else self.sync_every[worker]

    def shares(self, num_workers: int) -> list[int]:
        """In which proportion the workers share the data, so that epochs hold equal rounds."""
        steps = [self.steps_of(worker) for worker in range(num_workers)]
        divisor = math.gcd(*steps)
        return [count // divisor for count in steps]

    def parcel_elements(self, model: nn.Module, bucket_bytes: int, num_workers: int) -> int:
        """Longest parcel such that all parcels under way fit into ``bucket_bytes``."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.algorithm.elementwise:
            return max(1, sum(p.numel() for p in parameters))
        copies = 1
        if self.topology is not None:
            degrees = [
                len(self.topology.weights(worker, num_workers, 0)) for worker in range(num_workers)
            ]
            copies = max(degrees)
        itemsize = max(4, *(p.element_size() for p in parameters))
        return max(1024, bucket_bytes // (PARCELS_IN_FLIGHT * copies * itemsize))

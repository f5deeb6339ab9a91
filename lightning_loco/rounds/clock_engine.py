"""Rounds by the clock, while training goes on: no worker ever waits for another one.

The engine in a plain PyTorch loop; the Lightning strategy uses the same one::

    engine = ClockEngine(model, interval_s=0.5)    # on every rank
    for batch in data:                             # as many batches as each worker has
        ...
        optimizer.step()
        engine.step()
    engine.finish()                                # the model is now the mean of all workers
    engine.close()
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_loco.algorithms import ModelAverage, NeighborAverage
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.rows import ROUND, PendingRows, Row
from lightning_loco.comm.stats import Statistics
from lightning_loco.rounds.clock_rounds import MeanClockRounds, NeighborClockRounds
from lightning_loco.rounds.engine import Engine
from lightning_loco.rounds.exchange import MeanExchange
from lightning_loco.rounds.gradients import average_gradients
from lightning_loco.rounds.settings import RoundSettings
from lightning_loco.rounds.setup import WHOLE_MODEL_BYTES, Prepared, prepare_worker


@dataclasses.dataclass(frozen=True)
class ClockSettings(RoundSettings):
    """How a run makes its rounds by the clock.

    Args:
        interval_s: Pause between the end of a round and the next one, in seconds; 0 for none.
        warmup_steps: Local steps at the start in which gradients are averaged instead.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    interval_s: float = 0.5
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        """Check types and ranges."""
        super().__post_init__()
        if isinstance(self.interval_s, bool) or not isinstance(self.interval_s, (int, float)):
            raise TypeError(f"interval_s must be a number of seconds, got {self.interval_s!r}.")
        if not 0 <= self.interval_s < math.inf:
            raise ValueError(
                f"interval_s must be at least 0 and finite, got {self.interval_s!r}. Use 0 to "
                "average again and again without a pause."
            )
        if isinstance(self.warmup_steps, bool) or not isinstance(self.warmup_steps, int):
            raise TypeError(f"warmup_steps must be an integer, got {self.warmup_steps!r}.")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}.")

    @classmethod
    def of(cls, interval_s: float, warmup_steps: int, topology: Any | None) -> ClockSettings:
        """The settings for averaging over all workers, or the neighbours of a topology."""
        algorithm = ModelAverage() if topology is None else NeighborAverage()
        return cls(algorithm, topology=topology, interval_s=interval_s, warmup_steps=warmup_steps)

    def describe(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            **super().describe(),
            "interval_s": self.interval_s,
            "warmup_steps": self.warmup_steps,
        }


class ClockEngine(Engine):
    r"""Average the workers' models again and again while training goes on.

    A round begins at the end of a local step: a snapshot of the parameters leaves. It ends at the
    end of the first local step after all snapshots have come together: the parameters then move by
    ``mean - snapshot``, so that what was learned meanwhile stays. In between, the backend's thread
    communicates. Parameters are only touched between local steps and only by the training thread,
    so nothing can be torn or lost, and no lock is needed.

    Args:
        model: The module to train; its trainable parameters are exchanged.
        interval_s: Pause between the end of a round and the next one, in seconds; 0 for none.
        warmup_steps: Local steps at the start in which :meth:`average_gradients` is to be called
            before the optimizer's step, which makes them steps of DDP.
        topology: Average with the neighbours of a topology only. Default: with all workers.
        group: The workers. Default: all ranks of the default process group, with groups of its own.

    Raises:
        ValueError: On every worker, if the model or the settings do not fit.

    Source:
        Bagua's Asynchronous Model Average; see :class:`~lightning_loco.algorithms.ModelAverage`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> engine = ClockEngine(model, interval_s=0)
        >>> [engine.step() for _ in range(4)]  # a round begins, ends, begins, ends
        [True, True, True, True]
        >>> engine.statistics.rounds
        2
        >>> engine.close()
    """

    settings: ClockSettings
    _rounds: MeanClockRounds | NeighborClockRounds

    def __init__(
        self,
        model: nn.Module,
        *,
        interval_s: float = 0.5,
        warmup_steps: int = 0,
        topology: Any | None = None,
        group: WorkerGroup | None = None,
    ) -> None:
        group = group if group is not None else WorkerGroup.create()
        try:
            prepared = prepare_worker(
                model,
                lambda: ClockSettings.of(interval_s, warmup_steps, topology),
                WHOLE_MODEL_BYTES,
                group,
            )
            super().__init__(group, prepared, _make_clock_rounds)
        except BaseException:
            group.close()
            raise
        self._under_way: PendingRows | None = None
        self._next_start = 0.0
        self._began_at = 0
        self._paused = False

    def _note_progress(self) -> None:
        self._stop.note_anywhere()

    # --------------------------------------------------------------- warm-up

    @property
    def is_warming_up(self) -> bool:
        """Whether gradients are to be averaged in the coming step."""
        return self.steps < self.settings.warmup_steps

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients of these parameters over all workers.

        Raises:
            RuntimeError: If a worker is missing or has failed.
        """
        place = f"warm-up step {self.steps}"
        average_gradients(parameters, self.group, self.statistics, place)

    # ---------------------------------------------------------------- rounds

    @property
    def is_due(self) -> bool:
        """Whether a round can begin or end; no communication."""
        if self._paused or self.steps < self.settings.warmup_steps:
            return False
        if self._under_way is None:
            return time.monotonic() >= self._next_start
        return self._rounds.has_arrived()

    @torch.no_grad()
    def make_round(self) -> None:
        """Begin a round, or end the one under way.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        if self._under_way is not None:
            header, self._under_way = self._under_way, None
            self._run(header)
            self._settle()
            self.statistics.staleness = self.steps - self._began_at
            self._next_start = time.monotonic() + self.settings.interval_s
        else:
            self.replica.check_trainable()
            self._began_at = self.steps
            self._under_way = self._announce(ROUND, f"round {self.round_index}")

    def _takes_part(self, finite: bool) -> bool:
        return finite

    @property
    def _samples_consensus(self) -> bool:
        return False

    def _note(self, rows: list[Row]) -> None:
        super()._note(rows)
        spreads = [row.spread for row in rows if math.isfinite(row.spread)]
        if spreads:
            self.statistics.consensus_distance = math.sqrt(sum(spreads) / len(spreads))

    # -------------------------------------------------------------- meetings

    def meet(self, purpose: str) -> list[Row]:
        """Wait until all workers have come to the same place, taking part in rounds meanwhile."""
        if self._under_way is not None:
            self.make_round()
        return super().meet(purpose)

    def abort(self) -> None:
        """Stop making rounds; all workers must call it. A second call does nothing.

        Raises:
            RuntimeError: If a worker is missing or has failed, or is somewhere else.
        """
        if not self._paused:
            self.meet("abort of the averaging")
            self._paused = True

    def resume(self) -> None:
        """Make rounds again after :meth:`abort`; all workers must call it, twice does no harm."""
        if self._paused:
            self.meet("resumption of the averaging")
            self._paused = False

    @torch.no_grad()
    def finish(self, purpose: str = "the end of training") -> None:
        """Take part in rounds until all workers are here; then leave the mean in the model."""
        self.meet(purpose)
        self.show_consensus("the final consensus")

    def close(self) -> None:
        """Destroy the process groups and stop all threads; a second call does nothing."""
        super().close()
        self._rounds.close()


def _make_clock_rounds(
    prepared: Prepared, group: WorkerGroup, statistics: Statistics
) -> MeanClockRounds | NeighborClockRounds:
    layout, settings = prepared.replica.layout, prepared.settings
    state = settings.algorithm.init(layout.new_flat())
    if settings.topology is None:
        mean = MeanExchange(group, statistics)
        return MeanClockRounds(layout, settings.algorithm, mean, state, group.num_workers)
    return NeighborClockRounds(
        layout, settings.algorithm, group, settings.topology, state, statistics
    )

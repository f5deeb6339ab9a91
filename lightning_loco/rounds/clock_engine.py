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

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_loco.algorithms import ModelAverage, NeighborAverage
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.rounds.engine import Engine
from lightning_loco.rounds.gradients import average_gradients
from lightning_loco.rounds.settings import WHOLE_MODEL_BYTES, RoundSettings
from lightning_loco.schedules import EveryInterval


def clock_settings(interval_s: float, warmup_steps: int, topology: Any | None) -> RoundSettings:
    """Settings for averaging over all workers, or with the neighbours of a topology."""
    algorithm = ModelAverage() if topology is None else NeighborAverage()
    schedule = EveryInterval(interval_s, warmup_steps)
    return RoundSettings(algorithm, schedule, topology, bucket_bytes=WHOLE_MODEL_BYTES)


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

    def __init__(
        self,
        model: nn.Module,
        *,
        interval_s: float = 0.5,
        warmup_steps: int = 0,
        topology: Any | None = None,
        group: WorkerGroup | None = None,
    ) -> None:
        super().__init__(model, lambda: clock_settings(interval_s, warmup_steps, topology), group)

    @property
    def is_warming_up(self) -> bool:
        """Whether gradients are to be averaged in the coming step."""
        schedule = self.settings.schedule
        return isinstance(schedule, EveryInterval) and self.worker.steps < schedule.warmup_steps

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients of these parameters over all workers.

        Raises:
            RuntimeError: If a worker is missing or has failed.
        """
        place = f"warm-up step {self.worker.steps}"
        average_gradients(parameters, self.worker.group, self.statistics, place)

    def abort(self) -> None:
        """Stop making rounds; all workers must call it. A second call does nothing.

        Raises:
            RuntimeError: If a worker is missing or has failed, or is somewhere else.
        """
        if not self.paused:
            self.worker.meet("abort of the averaging")
            self.paused = True

    def resume(self) -> None:
        """Make rounds again after :meth:`abort`; all workers must call it, twice does no harm."""
        if self.paused:
            self.worker.meet("resumption of the averaging")
            self.paused = False

"""One worker's part in the training of all, whatever the method is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.model.worker import Worker


class Participant(ABC):
    """Counts the local steps of one worker, and exchanges with the others when that is due.

    Strategies, checkpoints, callbacks, the simulation and plain loops know a method only by this
    class: call :meth:`step` after every step of the optimizer, on every rank; after the last one
    :meth:`finish`, which leaves the consensus in the model, and :meth:`close`.

    Attributes:
        worker: This worker: its copy of the model, its group and counters.
        settings: What is exchanged, and when; checked against the number of workers.
        statistics: Bytes, seconds and rounds of communication so far.
    """

    worker: Worker
    settings: Any
    statistics: Statistics

    is_saved_after_failure: ClassVar[bool] = False
    """Whether its state can be saved after :meth:`close`, when training has failed."""

    def start(self) -> None:  # noqa: B027  # most take part from the beginning
        """Take part in the run, in its present state; before the first step, after a resume."""

    # ---------------------------------------------------------------- local steps

    def step(self) -> bool:
        """Count one local step, and run what is due.

        Returns:
            Whether something was exchanged.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        self.count_step()
        if due := self.check_due():
            self.make_round()
        return due

    @abstractmethod
    def count_step(self) -> None:
        """Count one local step without exchanging anything."""

    @abstractmethod
    def check_due(self) -> bool:
        """Find out whether :meth:`make_round` has something to do after the last local step.

        All ranks of a worker must call it, because they agree on the answer.
        """

    @abstractmethod
    def make_round(self) -> None:
        """Run what is due: begin or end rounds, or blend in the parameters of a peer."""

    @property
    def stop_agreed(self) -> str | None:
        """The reason to stop, once this worker is at the step that all have agreed on."""
        return self.worker.stop_agreed

    # ------------------------------------------------------------ sync points, end

    @abstractmethod
    def sync_point(self, purpose: str) -> list[WorkerStatus]:
        """Wait until all workers have reached the same sync point; serve the others until then.

        Args:
            purpose: Its purpose, in words that are equal on all workers.

        Returns:
            The statuses with which the workers arrived.

        Raises:
            RuntimeError: If a worker is missing or has failed, or waits at another sync point.
            StopAgreed: If the others have stopped, as agreed, before they came here.
        """

    @torch.no_grad()
    def show_consensus(self, purpose: str = "the consensus") -> None:
        """Put the consensus into the model; all workers must call it.

        The consensus is the mean over the workers whose parameters are finite, or the outer
        parameters. :meth:`Worker.show_local` brings the local parameters back.

        Raises:
            RuntimeError: If no worker's parameters are finite and they are not the outer ones, or
                as in :meth:`sync_point`.
        """
        if not self.worker.replica.shows_consensus:
            self.sync_point(purpose)
            self.write_consensus(purpose)

    @abstractmethod
    def write_consensus(self, purpose: str) -> None:
        """Do what :meth:`show_consensus` does, when all workers are at the same sync point."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the mean of the local parameters in the model, on all workers.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """

    @abstractmethod
    def finish_at_sync_point(self) -> None:
        """Do the rest of :meth:`finish`, when all workers are at the same sync point."""

    @abstractmethod
    def close(self) -> None:
        """Stop all threads and destroy the process groups; a second call does nothing."""

    # ----------------------------------------------------------------------- state

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return everything that this rank needs to resume exactly."""

    @abstractmethod
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict` of the same rank."""

    @abstractmethod
    def reset(self) -> None:
        """Restart from the present values of the model; all workers must call it."""

    def check_whole(self) -> None:  # noqa: B027  # most have nothing to check
        """Raise RuntimeError if a failure has left the parameters half changed."""

    def drop_pending(self) -> None:  # noqa: B027
        """Forget exchanges that have not ended, because this worker ends; none may follow."""

"""One worker's part in the training of all, whatever the method is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.model.worker import EarlierRun, Worker


class Participant(ABC):
    """Counts the local steps of one worker, and exchanges with the others when that is due.

    Strategies, checkpoints, callbacks, the simulation and plain loops know a method only by this
    class: call :meth:`start` before the first step, :meth:`step` after every step of the optimizer,
    on every rank; after the last one :meth:`finish`, which leaves the consensus in the model, and
    :meth:`close`. Methods that concern only some families do nothing in the others.

    Attributes:
        statistics: Bytes, seconds and rounds of communication so far.
        consensus_every: Rounds between measurements of the consensus distance; 0 for never.
        consensus_elements: Number of elements to estimate it from.
        measure_outer_gradient: Whether rounds measure the norm of the outer gradient, which costs
            one more pass over memory.
    """

    statistics: Statistics
    consensus_every = 0
    consensus_elements = 8192
    measure_outer_gradient = False

    is_saved_after_failure: ClassVar[bool] = False
    """Whether its state can be saved after :meth:`close`, when training has failed."""

    def start(self) -> None:  # noqa: B027  # most take part from the beginning
        """Take part in the run, in its present state; before the first step, after a resume."""

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values, for reports."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Return numbers of the method's own, such as the present learning rate, by name."""
        return {}

    # ---------------------------------------------------------------- local steps

    def before_step(self, loss: float | Tensor | None = None) -> None:  # noqa: B027
        """Prepare the next local step, before its gradients are computed.

        Args:
            loss: This worker's recent training loss, one number; None if it has none.
        """

    def before_optimizer_step(self, parameters: Iterable[Tensor]) -> None:  # noqa: B027
        """Prepare the gradients of these parameters, right before the optimizer uses them."""

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

    def check_due(self) -> bool:
        """Find out whether :meth:`make_round` has something to do after the last local step.

        All ranks of a worker must call it, because they agree on the answer.
        """
        return False

    def make_round(self) -> None:  # noqa: B027
        """Run what is due: begin or end rounds, or blend in the parameters of a peer."""

    def round_in_parts(self) -> Iterator[Callable[[], bool]]:
        """Do what :meth:`make_round` does; before each part that may wait, yield a function.

        It returns whether everything that the part needs has arrived. The caller may do something
        else until then, as the simulation does.
        """
        self.make_round()  # which does not wait for others
        yield from ()

    @property
    @abstractmethod
    def stop_agreed(self) -> str | None:
        """The reason to stop, once this worker is at the step that all have agreed on."""

    @abstractmethod
    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop at a common step; safe to call from a signal handler."""

    # ------------------------------------------------------------ sync points, end

    @abstractmethod
    def sync_point(self, purpose: str) -> list[WorkerStatus]:
        """Wait until all workers have reached the same sync point; serve the others until then.

        Args:
            purpose: Its purpose, in words that are equal on all workers.

        Returns:
            The statuses with which the workers arrived; empty if the method exchanges none.

        Raises:
            RuntimeError: If a worker is missing or has failed, or waits at another sync point.
            StopAgreed: If the others have stopped, as agreed, before they came here.
        """

    def finish(self) -> None:
        """Leave the consensus of all workers in the model: the mean of their local parameters.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        self.sync_point("the end of training")
        self.finish_at_sync_point()

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


class LocalParticipant(Participant):
    """A participant whose worker has parameters of its own, which differ between exchanges.

    Attributes:
        worker: This worker: its copy of the model, its group and counters.
        settings: What is exchanged, and when; checked against the number of workers.
        shows_outer: Whether the consensus is the outer parameters, if there are any, instead
            of the mean of the local ones.
    """

    worker: Worker
    settings: Any
    shows_outer = False

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values, for reports."""
        described: dict[str, Any] = self.settings.describe()
        return described

    @property
    def stop_agreed(self) -> str | None:
        """The reason to stop, once this worker is at the step that all have agreed on."""
        return self.worker.stop_agreed

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop at a common step; safe to call from a signal handler."""
        self.worker.stop.request(reason)

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

    # ----------------------------------------------------------------------- state

    @abstractmethod
    def reset(self) -> None:
        """Restart from the present values of the model; all workers must call it."""

    @abstractmethod
    def resume_from(self, saved: EarlierRun) -> list[str]:
        """Load as much as fits of a run with other settings or other workers; all must call it.

        The participant is new, and its model holds the consensus of that run.

        Returns:
            Notes on state that is dropped or reset, equal on all workers.

        Raises:
            KeyError: If an entry of the state is missing.
        """

    def check_whole(self) -> None:  # most have nothing to check
        """Raise RuntimeError if a failure has left the parameters half changed."""

    def drop_pending(self) -> None:
        """Forget exchanges that have not ended, because this worker ends; none may follow."""

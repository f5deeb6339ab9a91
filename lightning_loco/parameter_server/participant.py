"""A worker whose optimizer is on servers, as a participant in the training of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_loco._util.clock import REAL_CLOCK
from lightning_loco.distributed.graceful_stop import StopAgreed
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.distributed.worker_status import WorkerStatus
from lightning_loco.model.participant import Participant
from lightning_loco.parameter_server.optimizer import RemoteOptimizer


class RemoteParticipant(Participant):
    """Exchanges with the other workers within each step of the :class:`RemoteOptimizer`.

    So nothing is due between two steps, a round is a step, and at a sync point all workers have the
    same parameters, which are the consensus.

    Attributes:
        optimizer: The optimizer to step; it belongs to this participant, which closes it.
        streams: Whether to send gradients while the backward pass computes them.
        shows_mean: Whether the gradients are averaged before the optimizer's step already, for code
            that reads or changes them.
    """

    def __init__(self, optimizer: RemoteOptimizer) -> None:
        self.optimizer = optimizer
        self.statistics = Statistics()
        self.streams = self.shows_mean = False
        self._has_mean = False

    def start(self) -> None:
        """Receive parameters and hyper-parameters from the servers."""
        self.optimizer.receive_weights()

    def before_step(self, loss: float | Tensor | None = None) -> None:
        """Prepare to send gradients, if they are streamed."""
        if self.streams:
            self.optimizer.expect_backward()

    def average_gradients(self) -> None:
        """Replace the gradients by their mean over all workers, which all must call."""
        self.optimizer.average_gradients()
        self._has_mean = True

    def before_optimizer_step(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients of a step in which no backward pass has done so."""
        if self.shows_mean and not self._has_mean:
            self.average_gradients()

    @contextmanager
    def counting_bytes(self) -> Iterator[None]:
        """A context whose messages count; those of checkpoints and sync points do not."""
        remote, statistics = self.optimizer, self.statistics
        sent, saved = remote.bytes_sent, remote.bytes_saved
        yield
        statistics.bytes_sent += remote.bytes_sent - sent
        statistics.bytes_saved += remote.bytes_saved - saved

    def count_step(self) -> None:
        """Count one step of the optimizer, and the seconds for which it has waited."""
        statistics, wait_s = self.statistics, self.optimizer.wait_s
        now_s = REAL_CLOCK.now()
        self._has_mean = False
        statistics.rounds += 1
        statistics.steps += 1
        statistics.record("wait", now_s - (wait_s - statistics.wait_s), now_s)
        statistics.wait_s = wait_s

    @property
    def stop_agreed(self) -> str | None:
        """Why all workers stop, after the step in which they have agreed."""
        return self.optimizer.stop_agreed

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop after the same step; safe to call from a signal handler."""
        self.optimizer.request_stop(reason)

    def sync_point(self, purpose: str) -> list[WorkerStatus]:
        """Wait until all workers are at the same sync point; others take steps meanwhile.

        Arguments, result and errors as in :meth:`Participant.sync_point`. Afterwards all workers
        have the parameters of the last step.
        """
        had_agreed = self.stop_agreed is not None
        self.optimizer.sync_point(purpose)
        if self.stop_agreed is not None and not had_agreed:
            raise StopAgreed(self.stop_agreed)
        return []

    def finish_at_sync_point(self) -> None:
        """Leave the servers; the model has the parameters of the last step."""
        self.optimizer.leave()

    def close(self) -> None:
        """Drop all connections; for servers that this worker has not left, that is a failure."""
        self.optimizer.release()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer on the servers; see :class:`RemoteOptimizer`."""
        return self.optimizer.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state into the optimizer on the servers."""
        self.optimizer.load_state_dict(saved)

"""What all engines share: counting steps, meeting the others, the consensus, checkpoints.

An engine drives one worker. ``StepEngine`` makes rounds after every H local steps; other engines
differ in when, and with whom, they exchange.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.rows import ROUND, PendingRows, Row, meeting_number
from lightning_loco.comm.stats import Statistics
from lightning_loco.comm.stopping import StopAgreement
from lightning_loco.rounds.rounds import BlockingRounds
from lightning_loco.rounds.setup import Prepared

log = logging.getLogger(__name__)


class StopAgreed(Exception):
    """Raised out of a meeting when the other workers have stopped, as agreed, somewhere else."""


class Engine(ABC):
    """One worker's part in the training of all.

    Args:
        group: The workers.
        prepared: This worker's model and settings, checked.
        make_rounds: Makes the machinery of rounds.

    Attributes:
        statistics: What communication cost so far.
        was_finite: Whether this worker's parameters were finite at its last exchange.
        last_loss: Set it to the last training loss, to have it travel with the rounds.
        consensus_every: Measure the consensus distance every that many rounds; 0 for never.
    """

    def __init__(
        self,
        group: WorkerGroup,
        prepared: Prepared,
        make_rounds: Callable[[Prepared, WorkerGroup, Statistics], BlockingRounds],
    ) -> None:
        self.group = group
        self.statistics = Statistics()
        self.last_loss: float | Tensor = math.nan
        self.consensus_every = 0
        self.consensus_elements = 65536
        self.round_index = 0
        self.steps = 0
        self.steps_since_round = 0
        self.was_finite = True
        self.settings = prepared.settings
        self.algorithm = self.settings.algorithm
        self.sync_every = self.settings.steps_of(group.worker)
        self.replica = prepared.replica
        self.checksum = prepared.checksum
        self._progress = False
        self._header: PendingRows | None = None
        self._stop = StopAgreement(group)
        self._rounds = make_rounds(prepared, group, self.statistics)
        self._buffers_at_start = self.replica.buffers.new_flat()

    @property
    def measure_outer_gradient(self) -> bool:
        """Whether rounds measure the norm of the outer gradient (one more pass over memory)."""
        return self._rounds.measure_gradient

    @measure_outer_gradient.setter
    def measure_outer_gradient(self, value: bool) -> None:
        self._rounds.measure_gradient = value

    # ------------------------------------------------------------------ rounds

    def count_step(self) -> None:
        """Count one local step without making a round."""
        self.steps += 1
        self.steps_since_round += 1
        self._note_progress()

    def _note_progress(self) -> None:
        """See whether to stop after this step."""
        self._stop.note(self.round_index, self.steps_since_round, self.sync_every)

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop soon, at one point of the run; safe in a signal handler.

        Args:
            reason: What :attr:`stop_agreed` will be on every worker.
        """
        self._stop.request(reason)

    @property
    def stop_agreed(self) -> str | None:
        """The reason to stop, once this worker is at the step that all have agreed on."""
        return self._stop.agreed

    @property
    @abstractmethod
    def is_due(self) -> bool:
        """Whether there is something to exchange after the step that was counted last."""

    def step(self) -> bool:
        """Count one local step and exchange when it is due.

        Returns:
            Whether something was exchanged.
        """
        self.count_step()
        if not self.is_due:
            return False
        self.make_round()
        return True

    @abstractmethod
    def make_round(self) -> None:
        """Do what is due.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """

    @torch.no_grad()
    def _make_blocking_round(self) -> None:
        self.replica.check_trainable()
        self._settle()
        self._run(self._announce(ROUND, f"round {self.round_index}"))

    def _announce(self, place: float, words: str) -> PendingRows:
        finite = self._rounds.load()
        self.was_finite = finite
        self._progress = self._takes_part(finite)
        norm = self._rounds.gradient_norm
        row = Row(
            place=place,
            round_index=self.round_index,
            steps=self.steps_since_round,
            weight=float(self._progress),
            finite=float(finite),
            loss=float(self.last_loss),
            spread=math.nan if norm is None else norm**2,
        )
        return self._rounds.announce(self.group, self.statistics, row, words)

    def _takes_part(self, finite: bool) -> bool:
        """Whether the others should hear of this worker's parameters."""
        return finite and self.steps_since_round > 0

    @property
    def _samples_consensus(self) -> bool:
        """Whether the coming round measures the consensus distance, by an exchange of its own."""
        return bool(self.consensus_every) and self.round_index % self.consensus_every == 0

    def _run(self, header: PendingRows) -> None:
        """Make the round that a control exchange has announced."""
        self._header = header
        if self._samples_consensus:
            header.wait()
            self.statistics.consensus_distance = self._measure_consensus()
        self._rounds.run(self.round_index, self._progress, self._weight_from(header))
        if not self.was_finite:
            self.replica.buffers.write(self._buffers_at_start)
        self._buffers_at_start = self.replica.buffers.new_flat()
        self.round_index += 1
        self.steps_since_round = 0
        self.statistics.rounds += 1
        self.statistics.outer_grad_norm = self._rounds.gradient_norm
        if header.arrived:
            self._settle()

    def _weight_from(self, header: PendingRows) -> Callable[[], float]:
        """How to learn the weight of all messages; only a mean needs it, and waits for it."""
        if self.algorithm.exchange == "mean":
            return header.total_weight
        return lambda: 1.0

    def _settle(self) -> None:
        """Take note of what the workers said in the last control exchange."""
        if self._header is None:
            return
        rows = self._header.wait()
        self._header = None
        self._note(rows)

    def _note(self, rows: list[Row]) -> None:
        self.statistics.losses = [row.loss for row in rows]
        broken = [worker for worker, row in enumerate(rows) if not row.finite]
        if len(broken) == len(rows):
            raise RuntimeError(
                "The parameters hold NaN or infinity on every worker, so there is no consensus. "
                "Lower the learning rate, or go back to the last checkpoint."
            )
        if broken and self.group.worker == 0:
            log.warning(
                "NaN or infinity in the parameters of worker %s at round %d: left out of the "
                "exchange; it goes on from the start of the round.",
                ", ".join(map(str, broken)),
                rows[0].round_index,
            )

    # ---------------------------------------------------------------- meetings

    @torch.no_grad()
    def meet(self, purpose: str) -> list[Row]:
        """Wait until all workers have come to the same place, taking part in rounds meanwhile.

        Args:
            purpose: Where, in words that are equal on all workers.

        Returns:
            What every worker said on arrival.

        Raises:
            RuntimeError: If a worker is missing or has failed, or waits somewhere else.
        """
        self._settle()
        place = meeting_number(purpose)
        while True:
            header = self._announce(place, purpose)
            rows = header.wait()
            if any(row.place == ROUND for row in rows):
                self._run(header)
                self._settle()
                continue
            self._note(rows)
            if all(row.place == place for row in rows):
                return rows
            self._part(purpose)

    def _part(self, purpose: str) -> None:
        """Leave a meeting that cannot take place, because some workers wait elsewhere."""
        if self._stop.agreed is None and self._stop.catch_up():
            raise StopAgreed(self._stop.agreed)
        if self._stop.agreed is not None:
            return
        places = self.group.gather_objects(f"{purpose} after {self.steps} local steps")
        raise RuntimeError(
            "Workers wait for each other in different places: "
            + "; ".join(f"worker {i} in {where}" for i, where in enumerate(places))
            + ". They have different numbers of batches. Give every worker the same number "
            "(Trainer(limit_train_batches=...)), or validate and save at the end of epochs only."
        )

    @torch.no_grad()
    def show_consensus(self, purpose: str = "the consensus") -> None:
        """Put the consensus into the model; :meth:`show_local` brings the local parameters back.

        The consensus is the algorithm's outer parameters, or the mean over the workers. All workers
        must call it.
        """
        if self.replica.shows_consensus:
            return
        rows = self.meet(purpose)
        total = sum(row.finite for row in rows)
        key = self.algorithm.consensus_key
        outer = None if key is None else self._rounds.state[key]
        valid = bool(rows[self.group.worker].finite)
        self.replica.show_consensus(self.group, self.statistics, outer, valid, total)

    @torch.no_grad()
    def show_local(self) -> None:
        """Put the local parameters back into the model."""
        self.replica.show_local()

    @torch.no_grad()
    def finish(self, purpose: str = "the end of training") -> None:
        """Share what is not shared yet and leave the consensus in the model, on all workers."""
        rows = self.meet(purpose)
        if any(row.steps > 0 for row in rows):
            self._make_blocking_round()
        self._settle()
        self._rounds.drain()
        self.show_consensus("the final consensus")

    def _measure_consensus(self) -> float:
        """Root mean square distance to the mean, from the same sample of elements everywhere."""
        sample = self.replica.sample(self.consensus_elements, self.round_index)
        if self.group.data is None:
            return 0.0
        n = self.group.num_workers
        sums = torch.stack([sample, sample.square()])
        dist.all_reduce(sums, group=self.group.data)
        self.statistics.bytes_sent += 2 * (n - 1) * sums.nbytes // n
        variance = (sums[1] / n - (sums[0] / n).square()).clamp_(min=0).sum()
        scale = self.replica.layout.numel / max(sample.numel(), 1)
        return math.sqrt(float(variance) * scale)

    # -------------------------------------------------------------- checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Everything this worker needs to go on exactly, also in the middle of a round."""
        self._settle()
        params, buffers = self.replica.local()
        return {
            "round_index": self.round_index,
            "steps": self.steps,
            "steps_since_round": self.steps_since_round,
            "params": params,
            "buffers": buffers,
            "buffers_at_start": self._buffers_at_start,
            "state": dict(self._rounds.state),
            "pending": self._rounds.pending(),
            "statistics": self.statistics.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict` of the same worker."""
        self.round_index = saved["round_index"]
        self.steps = saved["steps"]
        self.steps_since_round = saved["steps_since_round"]
        self.replica.set_local(saved["params"], saved["buffers"])
        self._buffers_at_start = saved["buffers_at_start"]
        for key, value in saved["state"].items():
            current = self._rounds.state.get(key)
            if isinstance(current, Tensor):
                current.copy_(value)
            else:
                self._rounds.state[key] = value
        self._rounds.restore_pending(saved["pending"])
        self.statistics.load_state_dict(saved["statistics"])

    def close(self) -> None:
        """Destroy the process groups and stop the watchdog; a second call does nothing."""
        self.group.close()

"""Defects that the world of rounds finds: old ones of this project, and others of their kinds."""

from __future__ import annotations

from tests.exploration.mutants import Mutant

_DISTRIBUTED = "lightning_loco.distributed"
_ENGINE = "lightning_loco.engine"

MUTANTS = (
    Mutant(
        "worker 0 blames a worker from a barrier, and does not tell the others (2482a34)",
        f"{_DISTRIBUTED}.store_barrier:StoreBarrier.wait",
        "raise watchdog.blame(label, timeout_s)",
        "raise __import__('lightning_loco').distributed.watchdog.WorkerFailure("
        "watchdog.explain(label, timeout_s))",
    ),
    Mutant(
        "worker 0 waits for readers in each of its reports (41c805e)",
        f"{_DISTRIBUTED}.watchdog:Watchdog.report",
        "self._report_deadline = min(self._report_deadline, deadline)",
        "self._report_deadline = deadline",
    ),
    Mutant(
        "workers without rounds stop after different steps (341f67a)",
        "lightning_loco.model.worker:Worker.count_step",
        "watchdog.position = position",
        "watchdog.position = position if sync_every is not None else (0, 0, 1)",
    ),
    Mutant(
        "a stop at the last step of an epoch is not seen by those at a sync point (49fa3b3)",
        "lightning_loco.model.worker:Worker.are_together",
        "if self.stop.agreed is None and self.stop.catch_up():",
        "if False:",
    ),
    Mutant(
        "whoever waits for others that have stopped does not wait for the position (774c8fc)",
        f"{_DISTRIBUTED}.graceful_stop:StopAgreement.catch_up",
        "if watchdog is None or not watchdog.stop_seen:",
        "if watchdog is None or watchdog.stop_at is None:",
    ),
    Mutant(
        "half of a round is saved (35b7003)",
        f"{_ENGINE}.fragment_sync:FragmentSync.check_whole",
        "if self.is_torn:",
        "if False:",
    ),
    Mutant(
        "a worker with NaN keeps what it has sent (c0f4586)",
        f"{_ENGINE}.fragment_sync:FragmentSync.restore_start",
        "chunk.sent_params.copy_(start)",
        "pass",
    ),
    Mutant(
        "the buffers of a worker with NaN keep it while a round is pending (785c665)",
        f"{_ENGINE}.engine:Engine.end_in_parts",
        "self.worker.replica.restore_buffers(self.buffers_at_start)",
        "pass",
        lacks="A model with buffers.",
    ),
    Mutant(
        "a healthy neighbour is blamed: the watchdog is not asked",
        f"{_DISTRIBUTED}.worker_group:WorkerGroup.explain_error",
        "return watchdog.blame(label, self.clock.now() - started)",
        "return error",
    ),
    Mutant(
        "a worker that was suspended takes all others for dead",
        f"{_DISTRIBUTED}.watchdog:Watchdog._read_heartbeats",
        "self._first_seen[worker] = (number, now)",
        "self._first_seen[worker] = (number, min(now, self._first_seen.get(worker, (0, now))[1]))",
    ),
    Mutant(
        "workers at a sync point are not called to a round",
        f"{_ENGINE}.exchanges.all_reduce:StatusesBehindMessage._call",
        "if not self._is_called:",
        "if False:",
    ),
    Mutant(
        "a worker without steps counts in a mean",
        f"{_ENGINE}.engine:Engine._prepare",
        "has_moved = worker.steps > fragment.fresh_at or self._sync_every is None",
        "has_moved = True",
    ),
    Mutant(
        "a resumed worker forgets how many steps its round has",
        "lightning_loco.model.worker:Worker.load_counters",
        'self.steps_since_round = saved["steps_since_round"]',
        "self.steps_since_round = 0",
    ),
    Mutant(
        "the result of a late barrier is deleted before all have read it",
        f"{_DISTRIBUTED}.store_barrier:StoreBarrier._come",
        "self._counted[0] < number - 1",
        "self._counted[0] < number + 1",
    ),
    Mutant(
        "a worker publishes a position for a stop that it may have passed already",
        f"{_DISTRIBUTED}.watchdog:Watchdog._agree_on_stop",
        "earliest = rounds + Fraction(steps + 1, sync_every)",
        "earliest = rounds + Fraction(steps, sync_every)",
    ),
    Mutant(
        "a worker that stops meets one that saves at the end of its data",
        "lightning_loco.model.worker:Worker.sync_point_id",
        "stops = self.stop.agreed is not None",
        "stops = False",
    ),
    Mutant(
        "a compressed message is read again while it is on its way",
        f"{_ENGINE}.fragment_sync:FragmentSync.prepare",
        "self._is_proposed = memory.holds_all and self.pending is None",
        "self._is_proposed = memory.holds_all",
    ),
)

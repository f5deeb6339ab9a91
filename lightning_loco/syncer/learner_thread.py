"""The thread in which a learner asks the syncer what is due, receives, and sends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_loco._util.background import BackgroundThread
from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco._util.decisions import carry_out
from lightning_loco.syncer.learner import POLL_S, SHORTEST_PAUSE_S, Do, Learner
from lightning_loco.syncer.service import SyncerClient

log = logging.getLogger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 10.0

_TICK_S = 0.1
"""How long a wait of the training thread lasts at most before signals are handled."""


class LearnerThread:
    """Carries out the exchanges of a learner.

    If the syncer does not answer, training goes on, and it is asked again with growing pauses.

    Args:
        learner: The learner.
        client: The connection to the syncer, which :meth:`close` closes.
        clock: The clock.
    """

    def __init__(self, learner: Learner, client: SyncerClient, clock: Clock = REAL_CLOCK) -> None:
        self._learner, self._client, self._clock = learner, client, clock
        self._wake, self._is_ending = threading.Event(), threading.Event()
        learner.wake = self._wake.set
        self._thread = BackgroundThread("loco-learner", self._run, ask_to_end=self._ask_to_end)
        self._requests: dict[Do, Callable[..., Any]] = {
            Do.JOIN: client.join,
            Do.START: client.start,
            Do.POLL: client.poll,
            Do.PUSH: client.push,
            Do.FETCH: client.fetch,
            Do.LEAVE: client.leave,
        }

    def start(self) -> None:
        """Start to follow the syncer."""
        self._thread.start()

    def wait_until_ready(self, timeout_s: float, is_asked_to_stop: Callable[[], bool]) -> None:
        """Wait until every fragment has arrived, or was received earlier.

        Raises:
            RuntimeError: If that takes longer, the syncer refuses this learner, or it is asked to
                stop.
        """
        learner, deadline = self._learner, self._clock.now() + timeout_s
        while not learner.is_ready.wait(_TICK_S):
            learner.raise_error()
            if is_asked_to_stop():
                raise RuntimeError(
                    f"Learner {learner.rounds.name} was asked to stop before the syncer at "
                    f"{learner.address} had sent its parameters, so there is nothing to save."
                )
            if self._clock.now() > deadline:
                why = f" ({learner.last_loss})" if learner.last_loss else ""
                raise RuntimeError(
                    f"The syncer at {learner.address} has not sent its parameters within "
                    f"{timeout_s:.0f} s{why}. Start it with `lightning-loco syncer`, check the "
                    "address, that its port can be reached from here, and that both have the same "
                    "key file or none, or raise timeout_s."
                )

    def leave(self, read: Callable[[int], Tensor], timeout_s: float) -> bool:
        """Send the progress that was not sent, and leave; return whether that was in time."""
        learner, deadline = self._learner, self._clock.now() + timeout_s
        while not (learner.has_left.is_set() or self._is_ending.is_set()):
            if learner.error is not None or self._clock.now() > deadline:
                return False
            learner.prepare_to_leave(read)
            learner.has_left.wait(_TICK_S)
        return True

    def close(self) -> None:
        """Stop following the syncer; a second call does nothing."""
        self._ask_to_end()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def _ask_to_end(self) -> None:
        self._is_ending.set()
        self._wake.set()
        self._client.abort()

    def _run(self) -> None:
        learner, retry_s = self._learner, _FIRST_RETRY_S
        while not (self._is_ending.is_set() or learner.has_left.is_set() or learner.error):
            try:
                carry_out(learner.exchange(), self._do)
            except OSError as error:
                if not self._is_ending.is_set():
                    learner.note_loss(error)
                self._is_ending.wait(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
                continue
            except Exception as error:
                log.exception("Learner %s cannot go on.", learner.rounds.name)
                learner.error = f"The exchange with the syncer has failed: {error!r}."
            retry_s = _FIRST_RETRY_S
            self._wake.wait(POLL_S)
            self._wake.clear()
            self._is_ending.wait(SHORTEST_PAUSE_S)

    def _do(self, what: Do, arguments: tuple[Any, ...]) -> Any:
        return self._requests[what](*arguments)

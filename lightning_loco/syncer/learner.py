"""What a learner does between local steps, and what it asks the syncer in the background.

There are no threads and sockets here: :class:`~lightning_loco.syncer.learner_thread.LearnerThread`
sends the requests, or the simulation.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco._util.decisions import Decision
from lightning_loco._util.fault_points import reach
from lightning_loco.algorithms.robust import is_finite
from lightning_loco.syncer.contract import Contract
from lightning_loco.syncer.learner_rounds import LearnerRounds
from lightning_loco.syncer.merge_rounds import Push, Refused, Reply
from lightning_loco.syncer.syncer import Fragment
from lightning_loco.transport import CertificateRefused

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Longest pause between two exchanges, also if local steps take longer."""

SHORTEST_PAUSE_S = 0.01
"""Shortest pause between two, so that short local steps do not make hundreds a second."""

_MOST_RESETS = 10
"""Most resets in a row after which a learner goes on."""

_JOIN_AGAIN = ("epoch", "learner", "start")
"""Refusals of a syncer that was restarted, or has not heard of this learner for long."""


class Do(enum.Enum):
    """A request to the syncer; its arguments are those of the method of ``SyncerClient``.

    Attributes:
        JOIN: Join; the reply also says whether the run has started.
        START: Begin the run with these parameters, unless another learner has.
        POLL: Report progress, and ask what is due.
        PUSH: Send a pseudo-gradient.
        FETCH: Receive a fragment into a vector of its length.
        LEAVE: Say that the learner leaves.
    """

    JOIN = "join"
    START = "start"
    POLL = "poll"
    PUSH = "push"
    FETCH = "fetch"
    LEAVE = "leave"


class Boundary(NamedTuple):
    """What is to be done between two local steps.

    Attributes:
        written: The fragments to write into the model, with their new parameters.
        is_reset: Whether they replace parameters with NaN or infinity.
    """

    written: dict[int, Tensor]
    is_reset: bool = False


class Outgoing(NamedTuple):
    """A pseudo-gradient that is to be sent: the difference of two vectors that do not change.

    Attributes:
        push: What is said of it.
        local: The parameters of the learner.
        received: Those that it had received before.
    """

    push: Push
    local: Tensor
    received: Tensor


class Learner:
    """Follows the syncer while this process trains; no call waits.

    Between two local steps the training thread calls :meth:`count_step` and :meth:`at_boundary`.
    In the background :meth:`exchange` is carried out again and again: right after :attr:`wake` was
    called, but at least :data:`SHORTEST_PAUSE_S` and at most :data:`POLL_S` later.

    Args:
        contract: Of the run.
        name: Unique name of this learner.
        generation: Of this process: larger than that of an earlier one of this name.
        received: The parameters of each fragment, ``(P,)`` on the CPU. A run that has not started
            begins with them. They are replaced, and never changed.
        address: Of the syncer, for messages.
        clock: The clock.
        as_stored: Returns the parameters of a fragment as the model stores them, which may be
            narrower numbers: progress is relative to these. Default: they are stored as they are.

    Attributes:
        rounds: Its counters.
        received: Each fragment as it was received last.
        counts: Numbers since the start: fragments ``received``, and pushes that were ``pushed`` or
            ``refused``.
        address: Of the syncer.
        wake: Called when there is something to exchange; does nothing unless it is set.
        is_ready: Set when every fragment has arrived, or was received earlier.
        has_left: Set when the syncer does not expect the learner any more.
        error: Why it cannot go on; None if it can.
        last_loss: Why the syncer could not be reached the last time; empty before.
    """

    def __init__(
        self,
        contract: Contract,
        name: str,
        generation: int,
        received: Sequence[Tensor],
        address: str,
        clock: Clock = REAL_CLOCK,
        as_stored: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        self.rounds = LearnerRounds(name, generation, len(received))
        self.received = [*received]
        self.counts = dict.fromkeys(("received", "pushed", "refused"), 0)
        self.address = address
        self.wake: Callable[[], object] = bool
        self.is_ready, self.has_left = threading.Event(), threading.Event()
        self.error: str | None = None
        self.last_loss = ""
        self._sent = 0, 0
        self._contract, self._clock, self._as_stored = contract, clock, as_stored
        self._lock = threading.Lock()
        self._arrived: dict[int, Fragment] = {}
        self._outgoing: deque[Outgoing] = deque()
        self._has_nan = self._has_joined = self._is_leaving = False
        self._resets = 0
        self._away_since: float | None = None

    # ------------------------------------------------------------- training thread

    @property
    def is_due(self) -> bool:
        """Whether :meth:`at_boundary` has something to do."""
        return bool(self._arrived or self.rounds.is_asked or self.error or self._has_nan)

    def count_step(self, tokens: float) -> None:
        """Count a local step."""
        with self._lock:
            self.rounds.count(tokens)
        self.wake()

    def at_boundary(self, read: Callable[[int], Tensor]) -> Boundary:
        """Answer the syncer between two local steps.

        Args:
            read: Returns a copy of this learner's parameters of a fragment, ``(P,)`` on the CPU.

        Raises:
            RuntimeError: If the syncer has refused this learner, or its parameters had NaN again
                and again.
        """
        self.raise_error()
        with self._lock:
            if self._has_nan:
                return self._start_again()
            written = self._apply(read)
            for push in self.rounds.answers():
                self._send(push, read(push.due.fragment))
        self.wake()
        return Boundary(written)

    def _apply(self, read: Callable[[int], Tensor]) -> dict[int, Tensor]:
        written, method = {}, self._contract.method
        for fragment, (epoch, version, params) in sorted(self._arrived.items()):
            if not self.rounds.is_news(epoch, fragment, version):
                continue
            leftover = self.rounds.leftover(fragment, version)
            mixes = method.mix > 0 and self.rounds.received[fragment] is not None
            if leftover is not None:
                self._send(leftover, read(fragment))
            own = read(fragment) if mixes else None
            written[fragment] = params if own is None else method.continue_from(params, own)
            stored = params if self._as_stored is None else self._as_stored(fragment, params)
            self.received[fragment] = stored
            self.rounds.receive(fragment, version)
            self.counts["received"] += 1
        self._arrived.clear()
        return written

    def _start_again(self) -> Boundary:
        log.warning(
            "NaN or infinity in the parameters of learner %s: it continues from what it has "
            "received last.",
            self.rounds.name,
        )
        self._has_nan = False
        self._resets += 1
        if self._resets > _MOST_RESETS:
            raise RuntimeError(
                f"The parameters of learner {self.rounds.name} had NaN or infinity {self._resets} "
                "times in a row. The state of its optimizer may hold them: start it again from a "
                "checkpoint, with a lower learning rate or clipped gradients."
            )
        self._forget_waiting()
        self.rounds.drop_progress()
        return Boundary(dict(enumerate(self.received)), is_reset=True)

    def _send(self, push: Push, local: Tensor) -> None:
        self._outgoing.append(Outgoing(push, local, self.received[push.due.fragment]))

    def raise_error(self) -> None:
        """Raise RuntimeError if this learner cannot go on."""
        if self.error is not None:
            raise RuntimeError(self.error)

    def prepare_to_leave(self, read: Callable[[int], Tensor]) -> None:
        """Send the progress that was not sent, and then leave, in the next exchange.

        Call it again until :attr:`has_left`: pushes may be lost.

        The syncer merges it with the next merges of the fragments, if other learners go on.
        """
        with self._lock:
            if self._has_nan:
                self._start_again()
            for fragment in self.rounds.unsent:
                version = self.rounds.received[fragment]
                assert version is not None
                if (push := self.rounds.leftover(fragment, version)) is not None:
                    self._send(push, read(fragment))
            self._is_leaving = True
        self.wake()

    def count_sent(self) -> tuple[int, int]:
        """Return the bytes sent since the last call, and their number without compression."""
        with self._lock:
            sent, self._sent = self._sent, (0, 0)
        return sent

    def count_lost(self) -> float:
        """Return the local steps whose progress was lost since the last call."""
        with self._lock:
            lost, self.rounds.lost_steps = self.rounds.lost_steps, 0.0
        return lost

    def state_dict(self) -> dict[str, Any]:
        """Return what the next process of this learner continues with."""
        with self._lock:
            return {
                "received": torch.cat(self.received),
                "lengths": [len(one) for one in self.received],
                "rounds": self.rounds.state_dict(),
            }

    # ------------------------------------------------------------------ background

    def exchange(self) -> Decision[Do, None]:
        """Join if that is needed, send what waits, ask what is due, and fetch what is new."""
        try:
            if self._has_joined:
                yield from self._send_waiting()
            reply = yield from (self._poll() if self._has_joined else self._join())
            yield from self._listen(reply)
            if self._is_leaving and not (self._outgoing or self.rounds.unsent):
                yield Do.LEAVE, (self.rounds.name, self.rounds.generation)
                self.has_left.set()
        except Refused as error:
            self._note_refusal(error)

    def _join(self) -> Decision[Do, Reply]:
        rounds = self.rounds
        said = (rounds.name, rounds.generation, rounds.total_steps)
        reply: Reply
        has_started, reply = yield Do.JOIN, (*said, self._contract.as_plain())
        if not has_started:
            if rounds.epoch > 0:
                log.warning(
                    "The syncer at %s has lost its parameters: the run goes on from those that a "
                    "learner has received last.",
                    self.address,
                )
            yield Do.START, (self.received,)  # another learner may do so too: the first one counts
        self._has_joined = True
        return reply

    def _poll(self) -> Decision[Do, Reply]:
        rounds = self.rounds
        said = (rounds.name, rounds.generation, rounds.epoch, rounds.total_steps)
        reply: Reply = yield Do.POLL, said
        return reply

    def _listen(self, reply: Reply) -> Decision[Do, None]:
        if self._away_since is not None:
            away_s, self._away_since = self._clock.now() - self._away_since, None
            log.warning("The syncer at %s answers again, after %.0f s.", self.address, away_s)
        with self._lock:
            news = self.rounds.listen(reply)
        for fragment in news:
            arrived = self._arrived.get(fragment)
            if arrived is not None and arrived[:2] == (reply.epoch, reply.versions[fragment]):
                continue  # it waits for the end of a long local step
            into = torch.empty_like(self.received[fragment])
            found: Fragment = yield Do.FETCH, (fragment, into)
            with self._lock:
                if self.rounds.is_news(found.epoch, fragment, found.version):
                    self._arrived[fragment] = found
        missing = [f for f, version in enumerate(self.rounds.received) if version is None]
        if all(fragment in self._arrived for fragment in missing):
            self.is_ready.set()

    def _send_waiting(self) -> Decision[Do, None]:
        codec = self._contract.codec
        while (outgoing := self._next_outgoing()) is not None:
            push = outgoing.push
            if self._is_replaced(push):  # it may have waited for a syncer that was restarted
                push = push._replace(epoch=self.rounds.epoch)
            delta = self._contract.method.propose(outgoing.local, outgoing.received)
            if not is_finite(delta):
                with self._lock:
                    self.rounds.lost(push.due)
                    self._has_nan = True
                return
            try:
                yield Do.PUSH, (push, delta)
                reach("after sending")
            except (Refused, OSError) as error:
                if isinstance(error, OSError) or error.reason in _JOIN_AGAIN:
                    with self._lock:
                        self._outgoing.appendleft(outgoing)
                        self._forget_waiting()
                    raise
                self.counts["refused"] += 1
                with self._lock:
                    self.rounds.refused(push)
                log.debug("%s", error)
            else:
                self.counts["pushed"] += 1
                self._resets = 0
                num_bytes = codec.num_bytes(len(delta)) if codec else delta.nbytes
                with self._lock:
                    self._sent = self._sent[0] + num_bytes, self._sent[1] + delta.nbytes

    def _next_outgoing(self) -> Outgoing | None:
        with self._lock:
            return self._outgoing.popleft() if self._outgoing else None

    def _is_replaced(self, push: Push) -> bool:
        """Return whether the model does not have this progress any more, nor a later push."""
        return push.base != self.rounds.received[push.due.fragment]

    def _forget_waiting(self) -> None:
        """Drop the pushes that wait, unless no later one has their progress."""
        for one in self._outgoing:
            if not self._is_replaced(one.push):
                self.rounds.lost(one.push.due)
        self._outgoing = deque(one for one in self._outgoing if self._is_replaced(one.push))

    def note_loss(self, error: OSError) -> None:
        """Note that an exchange has ended because the syncer could not be reached."""
        self.last_loss = str(error) or type(error).__name__
        if isinstance(error, CertificateRefused) and self.rounds.epoch == 0:
            self.error = (
                f"The syncer at {self.address} and this learner have different key files: "
                f"{error}. Copy the syncer's to this machine."
            )
        elif self._away_since is None:
            self._away_since = self._clock.now()
            log.warning(
                "The syncer at %s cannot be reached (%s). Learner %s %s, and tries again.",
                self.address,
                self.last_loss,
                self.rounds.name,
                "goes on" if self.is_ready.is_set() else "waits for it",
            )

    def _note_refusal(self, error: Refused) -> None:
        if error.reason in _JOIN_AGAIN:
            self._has_joined = False
            self.wake()
        elif error.reason == "generation" and self.rounds.epoch == 0:
            # The clock has been set back since an earlier process: the one that starts is newer.
            self.rounds.generation *= 2
            self.wake()
        else:
            does = " Learners need different names." if error.reason == "generation" else ""
            self.error = f"The syncer at {self.address} refuses this learner: {error}{does}"

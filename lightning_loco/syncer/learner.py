"""The background part of a learner: it asks the syncer what is due, receives, and sends."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_loco._util.background import BackgroundThread
from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco._util.fault_points import reach
from lightning_loco.algorithms.robust import is_finite
from lightning_loco.syncer.contract import Contract
from lightning_loco.syncer.learner_rounds import LearnerRounds
from lightning_loco.syncer.merge_rounds import Push, Refused, Reply
from lightning_loco.syncer.syncer import Fragment
from lightning_loco.transport import CertificateRefused

log = logging.getLogger(__name__)

_POLL_S = 0.25
"""Longest pause between two polls, also if local steps take longer."""

_SHORTEST_PAUSE_S = 0.01
"""Shortest pause between two polls, so that short local steps do not make hundreds a second."""

_JOIN_AGAIN = ("epoch", "learner", "start")
"""Refusals of a syncer that was restarted, or has not heard of this learner for long."""

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 10.0

_TICK_S = 0.1
"""How long a wait of the training thread lasts at most before signals are handled."""


class Requests(Protocol):
    """A connection to the syncer: a ``SyncerClient``, or one within this process."""

    def join(
        self, name: str, generation: int, steps: int, contract: Mapping[str, Any]
    ) -> tuple[bool, Reply]:
        """Join; return also whether the run has started."""

    def start(self, params: Sequence[Tensor]) -> None:
        """Begin the run with these parameters, unless another learner has."""

    def poll(self, name: str, generation: int, epoch: int, steps: int) -> Reply:
        """Report progress, and ask what is due."""

    def push(self, push: Push, delta: Tensor) -> None:
        """Send a pseudo-gradient."""

    def fetch(self, fragment: int, into: Tensor) -> Fragment:
        """Receive a fragment into a vector of its length."""

    def leave(self, name: str, generation: int) -> None:
        """Say that the learner leaves."""

    def close(self) -> None:
        """Close the connection."""

    def abort(self) -> None:
        """Make the present request and all later ones fail at once. Thread-safe."""


class Boundary(NamedTuple):
    """What is to be done between two local steps.

    Attributes:
        written: The fragments to write into the model, with their new parameters.
        is_reset: Whether they replace parameters with NaN or infinity.
    """

    written: dict[int, Tensor]
    is_reset: bool = False


class Outgoing(NamedTuple):
    """A pseudo-gradient that is to be sent: the difference of two vectors that do not change."""

    push: Push
    local: Tensor
    received: Tensor


class Learner:
    """Follows the syncer while this process trains; no call but :meth:`wait_until_ready` waits.

    Between two local steps the training thread calls :meth:`count_step` and :meth:`at_boundary`. A
    thread in the background does the rest: if the syncer does not answer, training goes on, and it
    is asked again with growing pauses.

    Args:
        contract: Of the run.
        name: Unique name of this learner.
        generation: Of this process: larger than that of an earlier one of this name.
        received: The parameters of each fragment, ``(P,)`` on the CPU. A run that has not started
            begins with them. They are replaced, and never changed.
        client: The connection to the syncer.
        address: Of the syncer, for messages.
        clock: The clock.
        as_stored: Returns the parameters of a fragment as the model stores them, which may be
            narrower numbers: progress is relative to these. Default: they are stored as they are.

    Attributes:
        rounds: Its counters.
        received: Each fragment as it was received last.
        counts: Numbers since the start: fragments ``received``, and pushes that were ``pushed`` or
            ``refused``.
    """

    def __init__(
        self,
        contract: Contract,
        name: str,
        generation: int,
        received: Sequence[Tensor],
        client: Requests,
        address: str,
        clock: Clock = REAL_CLOCK,
        as_stored: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        self.rounds = LearnerRounds(name, generation, len(received))
        self.received = [*received]
        self.counts = dict.fromkeys(("received", "pushed", "refused"), 0)
        self._sent = 0, 0
        self._contract, self._client, self._address = contract, client, address
        self._clock, self._as_stored = clock, as_stored
        self._lock = threading.Lock()
        self._arrived: dict[int, Fragment] = {}
        self._outgoing: deque[Outgoing] = deque()
        self._has_nan = False
        self._error: str | None = None
        self._away_since: float | None = None
        self._last_loss = ""
        self._has_joined = False
        self._wake, self._is_ending = threading.Event(), threading.Event()
        self._is_ready, self._is_leaving, self._has_left = (threading.Event() for _ in range(3))
        self._thread = BackgroundThread("loco-learner", self._run, ask_to_end=self._ask_to_end)

    # ------------------------------------------------------------- training thread

    def start(self) -> None:
        """Start to follow the syncer."""
        self._thread.start()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until every fragment has arrived, or was received earlier.

        Raises:
            RuntimeError: If that takes longer, or the syncer refuses this learner.
        """
        deadline = self._clock.now() + timeout_s
        while not self._is_ready.wait(_TICK_S):
            self._raise_error()
            if self._clock.now() > deadline:
                why = f" ({self._last_loss})" if self._last_loss else ""
                raise RuntimeError(
                    f"The syncer at {self._address} has not sent its parameters within "
                    f"{timeout_s:.0f} s{why}. Start it with `lightning-loco syncer`, check the "
                    "address and that its port can be reached from here, or raise timeout_s."
                )

    @property
    def is_due(self) -> bool:
        """Whether :meth:`at_boundary` has something to do."""
        return bool(self._arrived or self.rounds.is_asked or self._error or self._has_nan)

    def count_step(self, tokens: float) -> None:
        """Count a local step."""
        with self._lock:
            self.rounds.count(tokens)
        self._wake.set()

    def at_boundary(self, read: Callable[[int], Tensor]) -> Boundary:
        """Answer the syncer between two local steps.

        Args:
            read: Returns a copy of this learner's parameters of a fragment, ``(P,)`` on the CPU.

        Raises:
            RuntimeError: If the syncer has refused this learner.
        """
        self._raise_error()
        with self._lock:
            if self._has_nan:
                return self._start_again()
            written = self._apply(read)
            for push in self.rounds.answers():
                self._send(push, read(push.due.fragment))
        self._wake.set()
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
        while self._outgoing:
            self.rounds.lost(self._outgoing.popleft().push.due)
        self.rounds.drop_progress()
        return Boundary(dict(enumerate(self.received)), is_reset=True)

    def _send(self, push: Push, local: Tensor) -> None:
        self._outgoing.append(Outgoing(push, local, self.received[push.due.fragment]))

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)

    def leave(self, read: Callable[[int], Tensor], timeout_s: float) -> bool:
        """Send the progress that was not sent, and leave; return whether that was in time.

        The syncer merges it with the next merges of the fragments, if other learners go on.
        """
        with self._lock:
            for fragment, version in enumerate(self.rounds.received):
                if version is not None and (push := self.rounds.leftover(fragment, version)):
                    self._send(push, read(fragment))
        self._is_leaving.set()
        self._wake.set()
        deadline = self._clock.now() + timeout_s
        while not (self._has_left.wait(_TICK_S) or self._is_ending.is_set()):
            if self._error is not None or self._clock.now() > deadline:
                return False
        return True

    def count_sent(self) -> tuple[int, int]:
        """Return the bytes sent since the last call, and their number without compression."""
        with self._lock:
            sent, self._sent = self._sent, (0, 0)
        return sent

    def state_dict(self) -> dict[str, Any]:
        """Return what the next process of this learner continues with."""
        with self._lock:
            return {
                "received": torch.cat(self.received),
                "lengths": [len(one) for one in self.received],
                "rounds": self.rounds.state_dict(),
            }

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

    # ------------------------------------------------------------------ background

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while not (self._is_ending.is_set() or self._has_left.is_set() or self._error):
            try:
                self.exchange()
            except OSError as error:
                self._note_loss(error)
                self._is_ending.wait(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
                continue
            except Exception as error:
                log.exception("Learner %s cannot go on.", self.rounds.name)
                self._error = f"The exchange with the syncer has failed: {error!r}."
            retry_s = _FIRST_RETRY_S
            self._wake.wait(_POLL_S)
            self._wake.clear()
            self._is_ending.wait(_SHORTEST_PAUSE_S)

    def exchange(self) -> None:
        """Join if that is needed, send what waits, ask what is due, and fetch what is new.

        OSError if the syncer cannot be reached.
        """
        try:
            if self._has_joined:
                self._send_waiting()
            self._listen(self._poll() if self._has_joined else self._join())
            if self._is_leaving.is_set():
                self._client.leave(self.rounds.name, self.rounds.generation)
                self._has_left.set()
        except Refused as error:
            self._note_refusal(error)

    def _join(self) -> Reply:
        rounds = self.rounds
        said = (rounds.name, rounds.generation, rounds.total_steps)
        has_started, reply = self._client.join(*said, self._contract.as_plain())
        if not has_started:
            if rounds.epoch > 0:
                log.warning(
                    "The syncer at %s has lost its parameters: the run goes on from those that a "
                    "learner has received last.",
                    self._address,
                )
            self._client.start(self.received)  # another learner may do so too: the first one counts
        self._has_joined = True
        return reply

    def _poll(self) -> Reply:
        rounds = self.rounds
        return self._client.poll(rounds.name, rounds.generation, rounds.epoch, rounds.total_steps)

    def _listen(self, reply: Reply) -> None:
        if self._away_since is not None:
            away_s, self._away_since = self._clock.now() - self._away_since, None
            log.warning("The syncer at %s answers again, after %.0f s.", self._address, away_s)
        with self._lock:
            fetched = self.rounds.listen(reply)
        for fragment in fetched:
            found = self._client.fetch(fragment, torch.empty_like(self.received[fragment]))
            with self._lock:
                if self.rounds.is_news(found.epoch, fragment, found.version):
                    self._arrived[fragment] = found
        missing = [f for f, version in enumerate(self.rounds.received) if version is None]
        if all(fragment in self._arrived for fragment in missing):
            self._is_ready.set()

    def _send_waiting(self) -> None:
        codec = self._contract.codec
        while (outgoing := self._next_outgoing()) is not None:
            push, local, received = outgoing
            delta = self._contract.method.propose(local, received)
            if not is_finite(delta):
                self._forget(push)
                self._has_nan = True
                return
            try:
                self._client.push(push, delta)
                reach("after sending")
            except (Refused, OSError) as error:
                if isinstance(error, OSError) or error.reason in _JOIN_AGAIN:
                    self._forget(push)
                    raise
                self.counts["refused"] += 1
                log.debug("%s", error)
            else:
                self.counts["pushed"] += 1
                num_bytes = codec.num_bytes(len(delta)) if codec else delta.nbytes
                with self._lock:
                    self._sent = self._sent[0] + num_bytes, self._sent[1] + delta.nbytes

    def _next_outgoing(self) -> Outgoing | None:
        with self._lock:
            return self._outgoing.popleft() if self._outgoing else None

    def _forget(self, push: Push) -> None:
        """Note that a push and all that wait are lost: what is due then is answered again."""
        with self._lock:
            for lost in (push, *(one.push for one in self._outgoing)):
                self.rounds.lost(lost.due)
            self._outgoing.clear()

    def _note_loss(self, error: OSError) -> None:
        self._last_loss = str(error) or type(error).__name__
        if isinstance(error, CertificateRefused) and self.rounds.epoch == 0:
            self._error = (
                f"The syncer at {self._address} and this learner have different key files: "
                f"{error}. Copy the syncer's to this machine."
            )
        elif self._away_since is None and not self._is_ending.is_set():
            self._away_since = self._clock.now()
            does = "goes on" if self._is_ready.is_set() else "waits for it"
            log.warning(
                "The syncer at %s cannot be reached (%s). Learner %s %s, and tries again.",
                self._address,
                self._last_loss,
                self.rounds.name,
                does,
            )

    def _note_refusal(self, error: Refused) -> None:
        if error.reason in _JOIN_AGAIN:
            self._has_joined = False
            self._wake.set()
        else:
            self._error = f"The syncer at {self._address} refuses this learner: {error}"

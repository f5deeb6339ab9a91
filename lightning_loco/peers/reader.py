"""One fetch: ask a few peers, one after the other, until one has sent all of its parameters."""

from __future__ import annotations

import enum
import logging
from typing import NamedTuple

from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.clock import REAL_CLOCK, Clock
from lightning_loco.peers.counts import FetchCounts
from lightning_loco.peers.directory import Directory
from lightning_loco.peers.flow import FlowControl
from lightning_loco.peers.keys import Keys
from lightning_loco.peers.link import Link, LinkBroken
from lightning_loco.peers.links import Links
from lightning_loco.peers.model import Model
from lightning_loco.peers.nearness import Nearness
from lightning_loco.peers.protocol import EMPTY, GONE, OTHER_MODEL, MalformedMessage, Reply
from lightning_loco.peers.transfer import CHUNK_BYTES, WINDOW, Assembly, Transfer

log = logging.getLogger(__name__)

_MOST_PEERS_PER_FETCH = 3
_MOST_RESTARTS = 10
_LONGEST_NAP_S = 0.05
_MOST_LOG_LINES = 100
_LOOK_S = 0.05
_LOOK_S_PER_LINK = 0.001


class Received(NamedTuple):
    """The parameters of a peer.

    Attributes:
        params: Flat ``(P,)``; valid until the next fetch is started.
        tag: Their clock and loss.
        peer: Name of the peer.
        fetch_s: How long it took, in seconds.
        received_bytes: Bytes of parameters that came for it.
        emulated_s: How long it was to take, on a link that is emulated.
    """

    params: Tensor
    tag: Tag
    peer: str
    fetch_s: float
    received_bytes: int
    emulated_s: float = 0.0


class _Outcome(enum.Enum):
    DONE = enum.auto()
    EMPTY = enum.auto()
    SILENT = enum.auto()
    REFUSED = enum.auto()
    NOT_FINITE = enum.auto()
    TOO_FAR = enum.auto()


class ReaderStopped(Exception):
    """The fetch was given up, because :meth:`Reader.stop` was called."""


class Reader:
    """Read the parameters of one peer at a time, chosen by the flow control; for one thread.

    A peer that refuses is left at once, and one that is silent for half of ``fetch_timeout_s`` is
    left as well, for another one. No peer is given up for good: those that failed are only chosen
    less often.

    Args:
        model: What is read; peers with another model, or another compression, are refused.
        directory: Where the peers are; used by the reading thread alone.
        flow: Which peer is next.
        fetch_timeout_s: The longest fetch, in seconds.
        keys: The job's keys, if it has any.
        nearness: Which parameters are refused. Default: those that are not finite.
        pinned: Whether a GPU copies from what is handed over.
        chunk_bytes: Length of the chunks that are asked for, at most 4 MiB.
        window: Chunks that are asked for at the same time, 1 to 8.
        clock: What peers are waited for by.

    Attributes:
        counts: What has become of the fetches so far.
        fetch_timeout_s: The longest fetch, in seconds.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        model: Model,
        directory: Directory,
        flow: FlowControl,
        *,
        fetch_timeout_s: float = 2.5,
        keys: Keys | None = None,
        nearness: Nearness | None = None,
        pinned: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        window: int = WINDOW,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        if not fetch_timeout_s > 0:
            raise ValueError(f"fetch_timeout_s must be positive, got {fetch_timeout_s}. Try 2.5.")
        self.counts = FetchCounts()
        self.fetch_timeout_s = fetch_timeout_s
        self._assembly = Assembly(model, nearness, pinned=pinned)
        self._transfer = Transfer(model, self._assembly, chunk_bytes, window)
        self._model = model
        self._total_bytes = model.total_bytes
        self._flow = flow
        self._links = Links(directory, keys, self._transfer.chunk_bytes)
        self._logged: set[tuple[str, str]] = set()
        self._clock = clock
        self._is_stopped = False

    def fetch(self, deadline: float) -> Received | None:
        """Ask a few peers, one after the other, until one has answered.

        Args:
            deadline: When to give up, by the clock.

        Returns:
            The parameters, or None if no peer sent usable ones.

        Raises:
            ReaderStopped: Soon after :meth:`stop`.
        """
        started = self._clock.now()
        tried: set[str] = set()
        while self._clock.now() < deadline and len(tried) < _MOST_PEERS_PER_FETCH:
            name = self._flow.choose(without=tried)
            if name is None:
                break
            tried.add(name)
            outcome = self._ask(name, deadline)
            if outcome is _Outcome.DONE:
                return Received(
                    self._assembly.params,
                    self._transfer.tag,
                    name,
                    self._clock.now() - started,
                    self._total_bytes,
                )
            if outcome in (_Outcome.NOT_FINITE, _Outcome.TOO_FAR):
                break
        return None

    def _ask(self, name: str, deadline: float) -> _Outcome:
        """Read from one peer, and remember how that went."""
        try:
            outcome = self._read(name, deadline)
        except ReaderStopped:
            raise
        except Exception as error:
            kind = type(error).__name__
            self._log_once(name, kind, f"{kind}: {error}")
            self.counts.errors += 1
            outcome = None
        counts = self.counts
        if outcome is _Outcome.EMPTY:
            counts.empty += 1
            return outcome
        if outcome is _Outcome.DONE:
            counts.fetches += 1
            self._flow.succeeded(name)
            return outcome
        self._flow.failed(name)
        if outcome is _Outcome.NOT_FINITE:
            counts.not_finite += 1
            text = f"NaN, infinity or nonsense in its parameters or in {self._transfer.tag}"
            self._log_once(name, "not finite", text)
            return outcome
        if outcome is _Outcome.TOO_FAR:
            counts.too_far += 1
            self._log_once(
                name,
                "too far",
                f"its parameters are {self._assembly.nearness.distance:.3g} away, further than "
                "max_peer_distance allows",
            )
            return outcome
        counts.timeouts += outcome is _Outcome.SILENT
        counts.refused += outcome is _Outcome.REFUSED
        self._links.drop(name)
        return outcome or _Outcome.REFUSED

    def _read(self, name: str, deadline: float) -> _Outcome:
        """Read from one peer; a connection from before that turns out broken is made anew."""
        alone = len(self._flow.scores) == 1
        patience_s = self.fetch_timeout_s / (1 if alone else 2)
        while True:
            link, is_new = self._links.get(name)
            if link is None:
                return _Outcome.REFUSED
            try:
                return self._receive(link, deadline, patience_s)
            except LinkBroken:
                self._links.drop(name)
                if is_new:
                    return _Outcome.REFUSED

    def _receive(self, link: Link, deadline: float, patience_s: float) -> _Outcome:
        """Ask for chunk after chunk until all are there."""
        transfer = self._transfer
        transfer.restart()
        num_gone = 0
        patient_until = self._clock.now() + patience_s
        while not transfer.is_done:
            if self._is_stopped:
                raise ReaderStopped
            for request in transfer.requests():
                link.send(request)
            left_s = min(deadline, patient_until) - self._clock.now()
            if left_s <= 0 or num_gone == _MOST_RESTARTS:
                self._explain_silence(link.peer.name, deadline)
                return _Outcome.SILENT
            try:
                reply = link.receive(transfer)
            except MalformedMessage as error:
                self.counts.malformed += 1
                self._log_once(link.peer.name, "malformed", f"dropped a reply: {error}")
                continue
            if reply is None:
                link.wait(min(left_s, _LONGEST_NAP_S))
            elif reply.kind == EMPTY:
                return _Outcome.EMPTY
            elif reply.kind == OTHER_MODEL:
                self._explain_refusal(link.peer.name, reply)
                return _Outcome.REFUSED
            elif reply.kind == GONE:
                num_gone += 1
                transfer.restart()
            else:
                transfer.accept(reply)
                if not reply.tag.is_plausible:
                    return _Outcome.NOT_FINITE
                self.counts.bytes_received += reply.length
                patient_until = self._clock.now() + patience_s
        nearness = self._assembly.nearness
        if not nearness.is_finite:
            return _Outcome.NOT_FINITE
        return _Outcome.DONE if nearness.is_near() else _Outcome.TOO_FAR

    def _explain_refusal(self, name: str, reply: Reply) -> None:
        if reply.checksum == self._model.checksum:
            text = "its parameters travel in another compression. Give all peers the same one"
        else:
            text = "it holds another model"
        self._log_once(name, "other model", text)

    def _explain_silence(self, name: str, deadline: float) -> None:
        done = self._transfer.received_bytes
        if done and self._clock.now() >= deadline:
            self._log_once(
                name,
                "too slow",
                f"only {done} of {self._total_bytes} bytes came in fetch_timeout_s="
                f"{self.fetch_timeout_s:g}. Raise it if the network needs longer",
            )

    def _log_once(self, name: str, kind: str, text: str) -> None:
        """Write one line for each peer and kind of failure."""
        if (name, kind) not in self._logged and len(self._logged) < _MOST_LOG_LINES:
            self._logged.add((name, kind))
            log.warning("Reading from peer %s failed: %s.", name, text)

    @property
    def look_after_s(self) -> float | None:
        """How often to :meth:`look` between fetches, in seconds; None if there is no connection."""
        return max(_LOOK_S, _LOOK_S_PER_LINK * len(self._links)) if len(self._links) else None

    def look(self) -> None:
        """Between fetches: drop connections over which comes what nobody has asked for."""
        self._links.look()

    def stop(self) -> None:
        """Have the fetch under way, and every later one, end soon; for any thread."""
        self._is_stopped = True

    def close(self) -> None:
        """Close all connections, in the thread that reads or once it has ended."""
        self._links.close()

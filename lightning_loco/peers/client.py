"""The thread that reads parameters from peers while training goes on."""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
import time
from typing import NamedTuple

import torch
import zmq
from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.peers.directory import Directory
from lightning_loco.peers.flow import FlowControl
from lightning_loco.peers.keys import Keys
from lightning_loco.peers.link import Link, LinkBroken
from lightning_loco.peers.protocol import (
    EMPTY,
    GONE,
    MAX_CHUNK_BYTES,
    OTHER_MODEL,
    MalformedMessage,
    Model,
)
from lightning_loco.peers.transfer import Landing, Transfer

log = logging.getLogger(__name__)

CHUNK_BYTES = 3 * 2**18  # benchmarks/fetch.py is fastest so, among 256 KiB to 4 MiB
WINDOW = 8
_MOST_PEERS_PER_FETCH = 3
_MOST_RESTARTS = 10
_LONGEST_NAP_S = 0.05
_MOST_LOG_LINES = 100


class Received(NamedTuple):
    """The parameters of a peer.

    Attributes:
        params: Flat ``(P,)``; valid until the next fetch is started.
        tag: Their clock and loss.
        peer: Name of the peer.
        fetch_s: How long it took, in seconds.
        received_bytes: Bytes of parameters that came for it.
    """

    params: Tensor
    tag: Tag
    peer: str
    fetch_s: float
    received_bytes: int


@dataclasses.dataclass
class FetchCounts:
    """What has become of the fetches.

    Attributes:
        fetches: Fetches that brought parameters.
        timeouts: Peers that were silent for too long, or too slow.
        refused: Peers that did not listen, closed the connection or have another model or key.
        empty: Peers that had not published anything yet.
        not_finite: Fetches whose parameters held NaN or infinity.
        errors: Other errors; each kind has a line in the log.
        malformed: Replies that were dropped.
        bytes_received: Bytes of parameters, those of failed fetches included.
    """

    fetches: int = 0
    timeouts: int = 0
    refused: int = 0
    empty: int = 0
    not_finite: int = 0
    errors: int = 0
    malformed: int = 0
    bytes_received: int = 0


class _Outcome(enum.Enum):
    DONE = enum.auto()
    EMPTY = enum.auto()
    SILENT = enum.auto()
    REFUSED = enum.auto()
    NOT_FINITE = enum.auto()


class _Closing(Exception):
    """The client is being closed."""


class Client(threading.Thread):
    """Read the parameters of one peer at a time, chosen by the flow control.

    A fetch ends at the latest ``fetch_timeout_s`` after its start, with or without parameters. A
    peer that refuses is left at once, and one that is silent for half of that time is left as well,
    for another one. No peer is given up for good: those that failed are only chosen less often.

    Args:
        model: What is read; peers with another model are refused.
        dtype: The dtype in which parameters are handed over.
        directory: Where the peers are; used by this thread alone once it has started.
        flow: Which peer is next.
        fetch_timeout_s: The longest fetch, in seconds.
        keys: The job's keys, if it has any.
        chunk_bytes: Length of the pieces that are asked for, at most 4 MiB.
        window: Pieces that are asked for at the same time.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        model: Model,
        dtype: torch.dtype,
        directory: Directory,
        flow: FlowControl,
        *,
        fetch_timeout_s: float = 2.5,
        keys: Keys | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        window: int = WINDOW,
    ) -> None:
        super().__init__(name="loco-peer-client", daemon=True)
        if not fetch_timeout_s > 0:
            raise ValueError(f"fetch_timeout_s must be positive, got {fetch_timeout_s}. Try 2.5.")
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % 8:
            raise ValueError(
                f"chunk_bytes must be a multiple of 8 up to {MAX_CHUNK_BYTES}, got {chunk_bytes}."
            )
        if not 1 <= window <= WINDOW:
            raise ValueError(f"window must be 1 to {WINDOW}, got {window}.")
        self.counts = FetchCounts()
        self._landing = Landing(model, dtype)
        self._transfer = Transfer(model, self._landing, chunk_bytes, window)
        self._total_bytes = model.total_bytes
        self._directory = directory
        self._flow = flow
        self._fetch_timeout_s = fetch_timeout_s
        self._keys = keys
        self._zmq = zmq.Context()
        self._links: dict[str, Link] = {}
        self._logged: set[tuple[str, str]] = set()
        # Fetches are numbered; all below is shared with the training thread.
        self._changed = threading.Condition()
        self._closing = False
        self._wanted = 0
        self._wanted_at = 0.0
        self._ended = 0
        self._handed_over = 0
        self._received: Received | None = None

    def start_fetch(self) -> None:
        """Begin to read from a peer; what was received before is no longer valid."""
        with self._changed:
            self._wanted += 1
            self._wanted_at = time.monotonic()
            self._received = None
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> Received | None:
        """Wait until the fetch has ended, at most ``fetch_timeout_s`` after its start.

        Args:
            timeout_s: Wait for less; the fetch goes on and can be waited for again.

        Returns:
            The parameters, once; None if there are none, or no fetch was started.
        """
        with self._changed:
            if self._handed_over == self._wanted:
                return None
            left_s = self._wanted_at + self._fetch_timeout_s - time.monotonic()
            patience_s = left_s if timeout_s is None else min(left_s, timeout_s)
            ended = self._changed.wait_for(
                lambda: self._ended == self._wanted or self._closing, max(patience_s, 0)
            )
            if not ended and patience_s < left_s:
                return None
            self._handed_over = self._wanted
            received, self._received = self._received, None
            return received

    @property
    def has_ended(self) -> bool:
        """Whether no fetch is under way, so that :meth:`wait` would not block."""
        return self._ended == self._wanted

    def run(self) -> None:
        """Make one fetch after the other until closed."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._ended < self._wanted)
                    number, deadline = self._wanted, self._wanted_at + self._fetch_timeout_s
                self._check_open()
                received = self._fetch(deadline)
                with self._changed:
                    self._ended = number
                    if number == self._wanted:
                        self._received = received
                    self._changed.notify_all()
        except _Closing:
            pass
        except Exception:
            log.exception("Parameters are no longer read from peers.")
        finally:
            for link in self._links.values():
                link.close()
            self._zmq.term()

    def _fetch(self, deadline: float) -> Received | None:
        """Ask a few peers, one after the other, until one has answered."""
        started = time.monotonic()
        tried: set[str] = set()
        while time.monotonic() < deadline and len(tried) < _MOST_PEERS_PER_FETCH:
            name = self._flow.choose(without=tried)
            if name is None:
                break
            tried.add(name)
            outcome = self._ask(name, deadline)
            if outcome is _Outcome.DONE:
                return Received(
                    self._landing.params,
                    self._transfer.tag,
                    name,
                    time.monotonic() - started,
                    self._total_bytes,
                )
            if outcome is _Outcome.NOT_FINITE:
                break
        return None

    def _ask(self, name: str, deadline: float) -> _Outcome:
        """Read from one peer, and remember how that went."""
        try:
            outcome = self._read(name, deadline)
        except _Closing:
            raise
        except Exception as error:
            self._log_once(name, f"{type(error).__name__}: {error}")
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
            self._log_once(name, "its parameters hold NaN or infinity")
            return outcome
        counts.timeouts += outcome is _Outcome.SILENT
        counts.refused += outcome is _Outcome.REFUSED
        self._drop_link(name)
        return outcome or _Outcome.REFUSED

    def _read(self, name: str, deadline: float) -> _Outcome:
        """Read from one peer; a connection from before that turns out broken is made anew."""
        alone = len(self._flow.scores) == 1
        patience_s = self._fetch_timeout_s / (1 if alone else 2)
        while True:
            link, is_new = self._link(name)
            if link is None:
                return _Outcome.REFUSED
            try:
                return self._receive(link, deadline, patience_s)
            except LinkBroken:
                self._drop_link(name)
                if is_new:
                    return _Outcome.REFUSED

    def _receive(self, link: Link, deadline: float, patience_s: float) -> _Outcome:
        """Ask for chunk after chunk until all are there."""
        transfer = self._transfer
        transfer.restart()
        num_gone = 0
        patient_until = time.monotonic() + patience_s
        while not transfer.is_done:
            self._check_open()
            for request in transfer.requests():
                link.send(request)
            left_s = min(deadline, patient_until) - time.monotonic()
            if left_s <= 0 or num_gone == _MOST_RESTARTS:
                self._explain_silence(link.peer.name, deadline)
                return _Outcome.SILENT
            try:
                reply = link.receive(transfer)
            except MalformedMessage as error:
                self.counts.malformed += 1
                self._log_once(link.peer.name, f"dropped a reply: {error}")
                continue
            if reply is None:
                link.wait(min(left_s, _LONGEST_NAP_S))
            elif reply.kind == EMPTY:
                return _Outcome.EMPTY
            elif reply.kind == OTHER_MODEL:
                self._log_once(link.peer.name, "it holds another model, or another wire_dtype")
                return _Outcome.REFUSED
            elif reply.kind == GONE:
                num_gone += 1
                transfer.restart()
            else:
                transfer.accept(reply)
                self.counts.bytes_received += reply.length
                patient_until = time.monotonic() + patience_s
        return _Outcome.DONE if transfer.is_finite() else _Outcome.NOT_FINITE

    def _link(self, name: str) -> tuple[Link | None, bool]:
        """The connection to a peer, and whether it is a new one."""
        link = self._links.get(name)
        if link is not None:
            try:
                link.check()
                return link, False
            except LinkBroken:
                self._drop_link(name)
        peer = self._directory.find(name)
        if peer is None:
            return None, True
        link = self._links[name] = Link(self._zmq, peer, self._keys)
        return link, True

    def _drop_link(self, name: str) -> None:
        link = self._links.pop(name, None)
        if link is not None:
            link.close()
        self._directory.forget(name)

    def _explain_silence(self, name: str, deadline: float) -> None:
        done = self._transfer.received_bytes
        if done and time.monotonic() >= deadline:
            self._log_once(
                name,
                f"only {done} of {self._total_bytes} bytes came in fetch_timeout_s="
                f"{self._fetch_timeout_s:g}. Raise it if the network needs longer",
            )

    def _log_once(self, name: str, text: str) -> None:
        kind = (name, text.partition(":")[0].partition(" of ")[0])
        if kind not in self._logged and len(self._logged) < _MOST_LOG_LINES:
            self._logged.add(kind)
            log.warning("Reading from peer %s failed: %s.", name, text)

    def _check_open(self) -> None:
        if self._closing:
            raise _Closing

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self.ident is None:
            self._zmq.term()
        elif self.is_alive():
            self.join(self._fetch_timeout_s + 5)

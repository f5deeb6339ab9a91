"""Fetches the parameters of peers, one peer at a time, in a background thread."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_loco._util.background import TaskThread
from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip.peer_selection import PeerDiscovery, PeerSelector
from lightning_loco.gossip.protocol import (
    NOTHING_PUBLISHED,
    OTHER_MODEL,
    PARAMETERS,
    ReplyHeader,
    WireFormat,
    pack_request,
    parse_reply,
)
from lightning_loco.gossip.snapshots import Snapshots
from lightning_loco.transport import (
    CertificateRefused,
    Client,
    JobCertificate,
    MalformedMessage,
    Reply,
)

log = logging.getLogger(__name__)

CHUNK_BYTES = 3 * 2**18
"""Bytes that are received before they are decoded and checked, while they are in the cache."""

_MAX_PEERS_PER_FETCH = 3
_MAX_LOG_LINES = 100
_MAX_NORM_RATIO = 10.0
_MAX_ROOT_MEAN_SQUARE = 1e9  # as long as this worker has published nothing

# NumPy has the fastest dot product. From 10,000 values on it uses a thread pool.
_SINGLE_THREAD_DOT = 9_984

FetchDuration = Callable[[str, int, int], float]
"""``(name of the peer, bytes, number of the fetch) -> seconds`` on an emulated link."""


class Received(NamedTuple):
    """The parameters of a peer.

    Attributes:
        params: Flat vector ``(P,)``, valid until the next fetch is started.
        tag: Clock and loss of the parameters.
        peer: Name of the peer.
        fetch_s: Duration of the fetch in seconds.
        received_bytes: Size of the encoded parameters.
    """

    params: Tensor
    tag: Tag
    peer: str
    fetch_s: float
    received_bytes: int


@dataclasses.dataclass
class FetchCounts:
    """Outcomes of all fetches.

    Attributes:
        fetches: Fetches that received parameters.
        timeouts: Peers that did not answer in time, or were too slow.
        refused: Peers that refused or closed the connection, or have another model or key file.
        empty: Peers that had not published anything yet.
        not_finite: Fetches whose parameters held NaN or infinity, or with an implausible clock or
            loss.
        too_large: Fetches whose parameters had a norm that :class:`ParameterCheck` rejects.
        errors: Other errors; each kind of error is logged once for each peer.
        malformed: Replies that violated the protocol.
        bytes_received: Bytes of parameters, failed fetches included.
    """

    fetches: int = 0
    timeouts: int = 0
    refused: int = 0
    empty: int = 0
    not_finite: int = 0
    too_large: int = 0
    errors: int = 0
    malformed: int = 0
    bytes_received: int = 0


class FetcherStopped(Exception):
    """The fetch was aborted, because :meth:`Fetcher.stop` was called."""


class _Outcome(enum.Enum):
    DONE = enum.auto()
    EMPTY = enum.auto()
    TIMEOUT = enum.auto()
    REFUSED = enum.auto()
    NOT_FINITE = enum.auto()
    TOO_LARGE = enum.auto()
    ERROR = enum.auto()


class ParameterCheck:
    """Checks that the parameters of a peer are finite and not much larger than this worker's own.

    Their norm may be ten times the norm of this worker's latest snapshot, or ten times the square
    root of their number if that is more; before the first snapshot, only absurd norms are rejected.
    This detects faults, not attacks. The values are checked while they arrive: call :meth:`reset`,
    and :meth:`update` for every chunk.

    Attributes:
        is_finite: Whether all values since :meth:`reset` are finite.
    """

    def __init__(self, numel: int, own: Snapshots | None) -> None:
        self._root_numel = math.sqrt(numel)
        self._own = own
        self.reset()

    def reset(self) -> None:
        """Start with the parameters of another fetch."""
        self.is_finite = True
        self._squares = 0.0

    def update(self, values: Tensor) -> None:
        """Add the next decoded values, on the CPU."""
        array = values.numpy()
        starts = range(0, len(array), _SINGLE_THREAD_DOT)
        blocks = (array[start : start + _SINGLE_THREAD_DOT] for start in starts)
        with np.errstate(all="ignore"):
            squares = sum(float(np.dot(block, block)) for block in blocks)
        if not math.isfinite(squares):  # the square of a finite value may overflow, too
            self.is_finite = self.is_finite and bool(torch.isfinite(values).all())
        self._squares += squares

    @property
    def norm(self) -> float:
        """Norm of the values since :meth:`reset`."""
        return math.sqrt(self._squares)

    @property
    def max_norm(self) -> float:
        """The largest norm that is accepted."""
        own = None if self._own is None else self._own.latest
        if own is None:
            return _MAX_ROOT_MEAN_SQUARE * self._root_numel
        return _MAX_NORM_RATIO * max(own.norm, self._root_numel)


class Fetcher:
    """Fetches the parameters of one peer that a :class:`PeerSelector` chooses. Not thread-safe.

    If a peer refuses, or does not answer within half of ``fetch_timeout_s``, the next peer is
    tried. No peer is given up for good: those that failed are only chosen less often. Parameters
    are received into preallocated memory, pinned for a model on a GPU, and decoded and checked
    chunk by chunk. Peers with another model or another encoding are refused.

    Args:
        wire_format: How the parameters are encoded.
        discovery: Where the peers are.
        selector: Chooses among the peers, and records successes and failures.
        fetch_timeout_s: Longest duration of a fetch in seconds, positive.
        certificate: Certificate of the job. Default: no encryption.
        own: This worker's snapshots, with which the norm of received parameters is compared.
        pinned: Whether to receive into pinned memory.
        clock: Clock of the deadlines.
    """

    def __init__(
        self,
        wire_format: WireFormat,
        discovery: PeerDiscovery,
        selector: PeerSelector,
        *,
        fetch_timeout_s: float = 2.5,
        certificate: JobCertificate | None = None,
        own: Snapshots | None = None,
        pinned: bool = False,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        if not fetch_timeout_s > 0:
            raise ValueError(f"fetch_timeout_s must be positive, got {fetch_timeout_s}. Try 2.5.")
        self.counts = FetchCounts()
        self.fetch_timeout_s = fetch_timeout_s
        self._wire_format = wire_format
        self._model_id = wire_format.model_id
        self._total_bytes = wire_format.total_bytes
        row_bytes = wire_format.row_bytes
        self._chunk_bytes = max(CHUNK_BYTES // row_bytes, 1) * row_bytes
        is_plain = wire_format.codec is None
        self._wire = torch.zeros(
            self._total_bytes, dtype=torch.uint8, pin_memory=pinned and is_plain, device="cpu"
        )
        self._memory = self._wire.numpy().data
        if is_plain:
            self._params = self._wire.view(wire_format.dtype)
        else:
            self._params = torch.empty(
                wire_format.numel, dtype=wire_format.dtype, pin_memory=pinned, device="cpu"
            )
        self._tag = Tag(0.0, 0.0)
        self._check = ParameterCheck(wire_format.numel, own)
        self._discovery = discovery
        self._selector = selector
        self._certificate = certificate
        self._clients: dict[str, Client] = {}
        self._logged: set[tuple[str, str]] = set()
        self._clock = clock
        self._stopped = threading.Event()

    def fetch(self, deadline: float) -> Received | None:
        """Try up to three peers, one after the other, until one has sent usable parameters.

        None if none has by ``deadline``, a time of the clock. FetcherStopped soon after
        :meth:`stop`.
        """
        started = self._clock.now()
        tried: set[str] = set()
        while self._clock.now() < deadline and len(tried) < _MAX_PEERS_PER_FETCH:
            name = self._selector.choose(exclude=tried)
            if name is None:
                break
            tried.add(name)
            outcome = self._try_peer(name, deadline)
            if outcome is _Outcome.DONE:
                fetch_s = self._clock.now() - started
                return Received(self._params, self._tag, name, fetch_s, self._total_bytes)
            if outcome in (_Outcome.NOT_FINITE, _Outcome.TOO_LARGE):
                break
        return None

    def _try_peer(self, name: str, deadline: float) -> _Outcome:
        """Fetch from one peer and record the outcome."""
        try:
            outcome = self._fetch_from(name, deadline)
        except TimeoutError:
            outcome = _Outcome.TIMEOUT
        except MalformedMessage as error:
            self.counts.malformed += 1
            self._log_once(name, "malformed", str(error))
            outcome = _Outcome.REFUSED
        except CertificateRefused as error:
            self._log_once(name, "key file", str(error))
            outcome = _Outcome.REFUSED
        except OSError:
            outcome = _Outcome.REFUSED
        except Exception as error:
            kind = type(error).__name__
            self._log_once(name, kind, f"{kind}: {error}")
            outcome = _Outcome.ERROR
        if self._stopped.is_set():
            raise FetcherStopped
        self._record(name, outcome)
        if outcome in (_Outcome.TIMEOUT, _Outcome.REFUSED, _Outcome.ERROR):
            self._disconnect(name)
        return outcome

    def _fetch_from(self, name: str, deadline: float) -> _Outcome:
        """Request and receive the parameters of one peer and their tag."""
        now = self._clock.now
        has_other_peers = len(self._selector.scores) > 1
        limit_s = self.fetch_timeout_s / (2 if has_other_peers else 1)
        client = self._client(name)
        if client is None:
            return _Outcome.REFUSED
        left_s = min(deadline - now(), limit_s)
        reply = client.request(pack_request(self._model_id), timeout_s=left_s)
        header = self._parse(reply)
        if header.kind == OTHER_MODEL:
            self._log_refusal(name, header)
            return _Outcome.REFUSED
        if header.kind == NOTHING_PUBLISHED:
            return _Outcome.EMPTY
        if not header.tag.is_plausible:
            self._log_once(name, "not finite", f"implausible values in its {header.tag}")
            return _Outcome.NOT_FINITE
        self._tag = header.tag
        self._check.reset()
        for start in range(0, self._total_bytes, self._chunk_bytes):
            chunk = self._memory[start : start + self._chunk_bytes]
            try:
                left_s = min(deadline - now(), limit_s)
                reply.receive_into(chunk, timeout_s=left_s)
            except TimeoutError:
                self._log_slow_peer(name, start, deadline)
                raise
            self.counts.bytes_received += len(chunk)
            part = self._wire_format.elements(start, len(chunk))
            values = self._wire_format.decode(self._wire, part.start, self._params[part])
            self._check.update(values)
        return self._check_parameters(name)

    def _client(self, name: str) -> Client | None:
        """Return the connection to a peer; None if its address is not known yet."""
        client = self._clients.get(name)
        if client is None:
            peer = self._discovery.find(name)
            if peer is None:
                return None
            client = Client(peer.host, peer.port, self._certificate, self._clock)
            self._clients[name] = client
        if self._stopped.is_set():  # stop() may not have seen the new client
            raise FetcherStopped
        return client

    def _parse(self, reply: Reply) -> ReplyHeader:
        """Parse the header of a reply and check it against the request."""
        header = parse_reply(reply.header)
        has_parameters = header.kind == PARAMETERS
        expected_bytes = self._total_bytes if has_parameters else 0
        if has_parameters and header.model_id != self._model_id:
            raise MalformedMessage("it sends another model than was requested")
        if reply.body_bytes != expected_bytes:
            raise MalformedMessage(f"it sends {reply.body_bytes} bytes and not {expected_bytes}")
        return header

    def _check_parameters(self, name: str) -> _Outcome:
        """Decide whether the received parameters may be used."""
        check = self._check
        if not check.is_finite:
            self._log_once(name, "not finite", "NaN or infinity in its parameters")
            return _Outcome.NOT_FINITE
        if check.norm <= check.max_norm:
            return _Outcome.DONE
        text = (
            f"the norm of its parameters is {check.norm:.3g}, more than {check.max_norm:.3g}, "
            "which this worker's own parameters allow"
        )
        self._log_once(name, "too large", text)
        return _Outcome.TOO_LARGE

    def _record(self, name: str, outcome: _Outcome) -> None:
        """Update the counts and the score of a peer."""
        counts = self.counts
        counts.fetches += outcome is _Outcome.DONE
        counts.empty += outcome is _Outcome.EMPTY
        counts.timeouts += outcome is _Outcome.TIMEOUT
        counts.refused += outcome is _Outcome.REFUSED
        counts.not_finite += outcome is _Outcome.NOT_FINITE
        counts.too_large += outcome is _Outcome.TOO_LARGE
        counts.errors += outcome is _Outcome.ERROR
        if outcome is _Outcome.DONE:
            self._selector.record_success(name)
        elif outcome is not _Outcome.EMPTY:
            self._selector.record_failure(name)

    def _disconnect(self, name: str) -> None:
        """Close the connection to a peer, and look up its address again the next time."""
        client = self._clients.pop(name, None)
        if client is not None:
            client.close()
        self._discovery.forget(name)

    def _log_refusal(self, name: str, header: ReplyHeader) -> None:
        if header.model_id.schema_checksum == self._model_id.schema_checksum:
            text = "it uses another compression. Give all peers the same one"
        else:
            text = "it has another model"
        self._log_once(name, "other model", text)

    def _log_slow_peer(self, name: str, num_bytes: int, deadline: float) -> None:
        if num_bytes and self._clock.now() >= deadline:
            self._log_once(
                name,
                "too slow",
                f"only {num_bytes} of {self._total_bytes} bytes arrived in fetch_timeout_s="
                f"{self.fetch_timeout_s:g}. Raise it if the network needs longer",
            )

    def _log_once(self, name: str, kind: str, text: str) -> None:
        """Log a warning once for each peer and kind of failure."""
        if (name, kind) not in self._logged and len(self._logged) < _MAX_LOG_LINES:
            self._logged.add((name, kind))
            log.warning("Reading from peer %s failed: %s.", name, text)

    def stop(self) -> None:
        """Abort the current fetch, and every later one. Thread-safe."""
        self._stopped.set()
        for client in list(self._clients.values()):
            client.abort()

    def close(self) -> None:
        """Close all connections. Call it in the fetching thread, or after that has ended."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


class DelayedFetcher:
    """A fetcher that returns parameters when they would have arrived over the emulated link.

    If that is after the deadline, they are not returned, and the fetch counts as a timeout.

    Args:
        fetcher: Fetches the parameters.
        duration: How long a fetch takes on the emulated link.
        clock: Clock of the fetcher.
    """

    def __init__(
        self, fetcher: Fetcher, duration: FetchDuration, clock: Clock = REAL_CLOCK
    ) -> None:
        self.counts = fetcher.counts
        self.fetch_timeout_s = fetcher.fetch_timeout_s
        self._fetcher = fetcher
        self._duration = duration
        self._clock = clock
        self._count = 0
        self._stopped = threading.Event()

    def fetch(self, deadline: float) -> Received | None:
        """Fetch, and wait until the parameters would have arrived; see :meth:`Fetcher.fetch`."""
        received = self._fetcher.fetch(deadline)
        if received is None:
            return None
        seconds = self._duration(received.peer, received.received_bytes, self._count)
        self._count += 1
        arrival = self._clock.now() - received.fetch_s + seconds
        left_s = min(arrival, deadline) - self._clock.now()
        if self._clock.wait(self._stopped, max(0.0, left_s)):
            raise FetcherStopped
        if arrival > deadline:
            self.counts.fetches -= 1
            self.counts.timeouts += 1
            return None
        return received._replace(fetch_s=max(seconds, received.fetch_s))

    def stop(self) -> None:
        """Abort the current fetch, and every later one. Thread-safe."""
        self._stopped.set()
        self._fetcher.stop()

    def close(self) -> None:
        """Close all connections; see :meth:`Fetcher.close`."""
        self._fetcher.close()


class FetchingThread(TaskThread):
    """Runs the fetches that the training thread starts, and hands over the results.

    A fetch ends within ``fetch_timeout_s`` of the fetcher, with or without parameters. Only this
    thread uses the fetcher, and closes it at the end.
    """

    def __init__(self, fetcher: Fetcher | DelayedFetcher) -> None:
        super().__init__("loco-peer-fetching")
        self._fetcher = fetcher
        self._deadline = 0.0
        self._last: Future[Received | None] | None = None
        self._is_taken = True

    @property
    def counts(self) -> FetchCounts:
        """Outcomes of the fetches so far."""
        return self._fetcher.counts

    def start_fetch(self) -> None:
        """Start a fetch. The result of the previous one is no longer valid."""
        if self._last is not None:
            self._last.cancel()  # if it waits for the one before it
        self._deadline = time.monotonic() + self._fetcher.fetch_timeout_s
        self._last = self.submit(functools.partial(self._fetch, self._deadline))
        self._is_taken = False

    def wait(self, timeout_s: float | None = None) -> Received | None:
        """Wait for the fetch, as :meth:`PeerNode.wait` does; return the parameters once."""
        if self._is_taken or self._last is None:
            return None
        left_s = self._deadline - time.monotonic()
        limit_s = left_s if timeout_s is None else min(left_s, timeout_s)
        if not self.is_alive():
            limit_s = 0.0
        try:
            error = self._last.exception(max(limit_s, 0.0))
        except futures.TimeoutError:
            self._is_taken = limit_s >= left_s
            return None
        self._is_taken = True
        return self._last.result() if error is None else None

    @property
    def has_ended(self) -> bool:
        """Whether no fetch is running, so that :meth:`wait` would not block."""
        return self._last is None or (self._last.done() and self._last.exception() is None)

    def _fetch(self, deadline: float) -> Received | None:
        try:
            return self._fetcher.fetch(deadline)
        except FetcherStopped:
            raise
        except Exception:
            log.exception("Parameters are no longer read from peers.")
            self.end()
            raise

    def run(self) -> None:
        """Run the fetches until the thread is closed."""
        try:
            super().run()
        finally:
            self._fetcher.close()

    def close(self) -> None:
        """End the thread. Calling it again does nothing."""
        self._fetcher.stop()
        self.end()
        if self.ident is None:
            self._fetcher.close()
        elif self.is_alive():
            self.join(self._fetcher.fetch_timeout_s + 5)

    def end_with_process(self) -> float:
        """Abort the current fetch."""
        self._fetcher.stop()
        return super().end_with_process()

"""What a node decides in a fetch: which peer to ask, how long to wait, which reply to accept.

There are no sockets and no threads here, and time is what the clock says; see
:mod:`lightning_loco._util.decisions`. The :class:`~lightning_loco.gossip.fetcher.Fetcher` does what
is decided, and so does the simulation, on its virtual clock.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco._util.decisions import Decision
from lightning_loco._util.text import format_bytes
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip.peer_selection import PeerSelector
from lightning_loco.gossip.protocol import (
    NOTHING_PUBLISHED,
    OTHER_MODEL,
    PARAMETERS,
    ReplyHeader,
    WireFormat,
    parse_reply,
)
from lightning_loco.gossip.snapshots import Snapshots
from lightning_loco.transport import CertificateRefused, MalformedMessage

log = logging.getLogger(__name__)

CHUNK_BYTES = 3 * 2**18
"""Bytes that are received before they are decoded and checked, while they are in the cache."""

_MAX_PEERS_PER_FETCH = 3
_MAX_LOG_LINES = 100
_TIMEOUTS_BEFORE_WARNING = 10
_MAX_NORM_RATIO = 10.0
_MAX_ROOT_MEAN_SQUARE = 1e9  # as long as this worker has published nothing

# NumPy has the fastest dot product. From 10,000 values on it uses a thread pool.
_SINGLE_THREAD_DOT = 9_984

FetchDuration = Callable[[str, int, int], float]
"""``(name of the peer, bytes, number of the fetch) -> seconds`` on an emulated link."""


# ---------------------------------------------------------------- actions and their outcomes


class Do(enum.Enum):
    """What a node does in a fetch; an action is one of these with its argument.

    Times are those of the clock. TimeoutError if the time is over, OSError if the peer has ended.

    Attributes:
        REQUEST: Ask a peer, by its name, until a time: the header of its reply, and how many bytes
            follow.
        RECEIVE: Receive the next bytes, a slice of all, and decode them as a slice of all values,
            until a time: these values.
        DISCONNECT: Close the connection to a peer, and look up its address again the next time.
        PAUSE: Wait until a time.
    """

    REQUEST = enum.auto()
    RECEIVE = enum.auto()
    DISCONNECT = enum.auto()
    PAUSE = enum.auto()


class Accepted(NamedTuple):
    """The end of a fetch whose parameters may be used: name of the peer, tag, and duration."""

    peer: str
    tag: Tag
    fetch_s: float


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
    """The fetch was aborted, because the node was closed."""


class _Outcome(enum.Enum):
    """How the attempt with one peer has ended; the value is the name of its count."""

    DONE = "fetches"
    EMPTY = "empty"
    TIMEOUT = "timeouts"
    REFUSED = "refused"
    NOT_FINITE = "not_finite"
    TOO_LARGE = "too_large"
    ERROR = "errors"


# ---------------------------------------------------------------------------- the decisions


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


class FetchDecisions:
    """Decides how parameters are fetched from one of the peers. Used by one thread at a time.

    If a peer refuses, or does not answer within half of ``fetch_timeout_s``, the next peer is
    tried. No peer is given up for good: those that failed are only chosen less often.

    Args:
        wire_format: How the parameters are encoded.
        selector: Chooses among the peers, and records successes and failures.
        own: This worker's snapshots, with which the norm of received parameters is compared.
        fetch_timeout_s: Longest duration of a fetch in seconds, positive.
        max_peers: How many peers are tried in one fetch.
        duration: How long a fetch takes on an emulated link. Default: no emulation.
        clock: Clock of the deadlines.

    Attributes:
        counts: Outcomes of the fetches so far.
        is_stopped: Whether the node was closed.
    """

    def __init__(
        self,
        wire_format: WireFormat,
        selector: PeerSelector,
        own: Snapshots | None = None,
        *,
        fetch_timeout_s: float = 2.5,
        max_peers: int = _MAX_PEERS_PER_FETCH,
        duration: FetchDuration | None = None,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        if not fetch_timeout_s > 0:
            raise ValueError(f"fetch_timeout_s must be positive, got {fetch_timeout_s}. Try 2.5.")
        self.wire_format, self.clock = wire_format, clock
        self.counts = FetchCounts()
        self.fetch_timeout_s = fetch_timeout_s
        self.is_stopped = False
        self._model_id = wire_format.model_id
        self._total_bytes = wire_format.total_bytes
        row_bytes = wire_format.row_bytes
        self._chunk_bytes = max(CHUNK_BYTES // row_bytes, 1) * row_bytes
        self._check = ParameterCheck(wire_format.numel, own)
        self._selector = selector
        self._max_peers = min(max_peers, len(selector.scores))
        self._duration = duration
        self._num_delayed = 0
        self._tag = Tag(0.0, 0.0)
        self._logged: set[tuple[str, str]] = set()

    def run(self, deadline: float) -> Decision[Do, Accepted | None]:
        """Try some peers, one after the other, until one has sent usable parameters.

        None if none has by ``deadline``, a time of the clock. FetcherStopped if the node was closed
        meanwhile.
        """
        started = self.clock.now()
        tried: set[str] = set()
        while self.clock.now() < deadline and len(tried) < self._max_peers:
            name = self._selector.choose(exclude=tried)
            assert name is not None
            tried.add(name)
            outcome = yield from self._try_peer(name, deadline)
            if outcome is _Outcome.DONE:
                accepted = Accepted(name, self._tag, self.clock.now() - started)
                if self._duration is None:
                    return accepted
                return (yield from self._delay(accepted, self._duration, started, deadline))
            # Most such parameters arrived in full: another peer would need as long again.
            if outcome in (_Outcome.NOT_FINITE, _Outcome.TOO_LARGE):
                break
        return None

    def _delay(
        self, accepted: Accepted, duration: FetchDuration, started: float, deadline: float
    ) -> Decision[Do, Accepted | None]:
        """Hold parameters back until they would have arrived over the emulated link."""
        seconds = duration(accepted.peer, self._total_bytes, self._num_delayed)
        self._num_delayed += 1
        arrival = started + seconds
        yield Do.PAUSE, min(arrival, deadline)
        if arrival > deadline:
            self.counts.fetches -= 1
            self.counts.timeouts += 1
            self._warn_of_timeouts()
            return None
        return accepted._replace(fetch_s=max(seconds, accepted.fetch_s))

    def _try_peer(self, name: str, deadline: float) -> Decision[Do, _Outcome]:
        """Fetch from one peer and record the outcome."""
        try:
            outcome = yield from self._fetch_from(name, deadline)
        except TimeoutError:
            outcome = _Outcome.TIMEOUT
        except MalformedMessage as error:
            self.counts.malformed += 1
            self._log_once(name, "malformed", str(error))
            outcome = _Outcome.REFUSED
        except CertificateRefused as error:
            self._log_once(name, "key file", str(error))
            outcome = _Outcome.REFUSED
        except OSError:  # it has ended, or not started yet, which is no news
            outcome = _Outcome.REFUSED
        except Exception as error:
            kind = type(error).__name__
            self._log_once(name, kind, f"{kind}: {error}")
            outcome = _Outcome.ERROR
        # The end of this node aborts its connections, for which no peer is to blame.
        if self.is_stopped:
            raise FetcherStopped
        count = outcome.value
        setattr(self.counts, count, getattr(self.counts, count) + 1)
        if outcome is _Outcome.TIMEOUT:
            self._warn_of_timeouts()
        if outcome is _Outcome.DONE:
            self._selector.record_success(name)
        elif outcome is not _Outcome.EMPTY:  # a peer that has just started loses no points
            self._selector.record_failure(name)
        if outcome in (_Outcome.TIMEOUT, _Outcome.REFUSED, _Outcome.ERROR):
            # The rest of a late reply would be taken for the next one, and a peer that was started
            # again may have another address.
            yield Do.DISCONNECT, name
        return outcome

    def _fetch_from(self, name: str, deadline: float) -> Decision[Do, _Outcome]:
        """Request and receive the parameters of one peer and their tag."""
        header = self._parse(*(yield Do.REQUEST, (name, self._limit(deadline))))
        if header.kind == OTHER_MODEL:
            is_same_model = header.model_id.schema_checksum == self._model_id.schema_checksum
            other = "it uses another compression. Give all peers the same one"
            self._log_once(name, "other model", other if is_same_model else "it has another model")
            return _Outcome.REFUSED
        if header.kind == NOTHING_PUBLISHED:
            return _Outcome.EMPTY
        if not header.tag.is_plausible:
            self._log_once(name, "not finite", f"implausible values in its {header.tag}")
            return _Outcome.NOT_FINITE
        self._tag = header.tag
        self._check.reset()
        for start in range(0, self._total_bytes, self._chunk_bytes):
            length = min(self._chunk_bytes, self._total_bytes - start)
            part = slice(start, start + length), self.wire_format.elements(start, length)
            try:
                values = yield Do.RECEIVE, (*part, self._limit(deadline))
            except TimeoutError:
                if start and self.clock.now() >= deadline:
                    text = (
                        f"only {start} of {self._total_bytes} bytes arrived in fetch_timeout_s="
                        f"{self.fetch_timeout_s:g}. Raise it if the network needs longer"
                    )
                    self._log_once(name, "too slow", text)
                raise
            self.counts.bytes_received += length
            self._check.update(values)
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

    def _limit(self, deadline: float) -> float:
        """Return until when a peer may be silent: time is left for another one, if there is one."""
        limit_s = self.fetch_timeout_s / (2 if self._max_peers > 1 else 1)
        return min(deadline, self.clock.now() + limit_s)

    def _parse(self, packed: bytes, body_bytes: int) -> ReplyHeader:
        """Parse the header of a reply and check it against the request."""
        header = parse_reply(packed)
        has_parameters = header.kind == PARAMETERS
        expected_bytes = self._total_bytes if has_parameters else 0
        if has_parameters and header.model_id != self._model_id:
            raise MalformedMessage("it sends another model than was requested")
        # Compared before anything is received: the memory has exactly this size.
        if body_bytes != expected_bytes:
            raise MalformedMessage(f"it sends {body_bytes} bytes and not {expected_bytes}")
        return header

    def _warn_of_timeouts(self) -> None:
        """Log a warning if all of the first requests were too slow: nothing has been averaged."""
        counts = self.counts
        if counts.fetches == 0 and counts.timeouts == _TIMEOUTS_BEFORE_WARNING:
            log.warning(
                "None of the first %d fetches has ended within fetch_timeout_s=%g s, so nothing "
                "was averaged yet. Raise fetch_timeout_s if %s take longer on this network.",
                counts.timeouts,
                self.fetch_timeout_s,
                format_bytes(self._total_bytes),
            )

    def _log_once(self, name: str, kind: str, text: str) -> None:
        """Log a warning once for each peer and kind of failure."""
        if (name, kind) not in self._logged and len(self._logged) < _MAX_LOG_LINES:
            self._logged.add((name, kind))
            log.warning("Reading from peer %s failed: %s.", name, text)

"""Reads the parameters of peers, one peer at a time, in a thread beside the one that trains."""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.background import BackgroundThread
from lightning_loco.clock import REAL_CLOCK, Clock
from lightning_loco.gossip.flow import FlowControl
from lightning_loco.gossip.model import Model
from lightning_loco.gossip.outlier_filter import Nearness
from lightning_loco.gossip.peer_selection import Directory
from lightning_loco.gossip.protocol import (
    NOTHING_YET,
    OTHER_MODEL,
    PARAMETERS,
    Answer,
    pack_request,
    parse_answer,
)
from lightning_loco.transport import (
    CertificateRefused,
    Client,
    JobCertificate,
    MalformedMessage,
    Reply,
)

log = logging.getLogger(__name__)

PIECE_BYTES = 3 * 2**18
"""What is received before it is looked at, so that the cache still has it."""

_MOST_PEERS_PER_FETCH = 3
_MOST_LOG_LINES = 100

FetchSeconds = Callable[[str, int, int], float]
"""From a peer's name, the bytes and the number of the fetch to seconds."""


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


@dataclasses.dataclass
class FetchCounts:
    """What has become of the fetches.

    Attributes:
        fetches: Fetches that brought parameters.
        timeouts: Peers that were silent for too long, or too slow.
        refused: Peers that did not listen, closed the connection or have another model or key.
        empty: Peers that had not published anything yet.
        not_finite: Fetches whose parameters held NaN or infinity, or that came with a clock or
            loss that no worker has.
        too_far: Fetches whose parameters were further away than ``max_peer_distance`` allows.
        errors: Other errors; each kind has a line in the log.
        malformed: Messages that are none of this protocol.
        bytes_received: Bytes of parameters, those of failed fetches included.
    """

    fetches: int = 0
    timeouts: int = 0
    refused: int = 0
    empty: int = 0
    not_finite: int = 0
    too_far: int = 0
    errors: int = 0
    malformed: int = 0
    bytes_received: int = 0


class FetcherStopped(Exception):
    """The fetch was given up, because :meth:`Fetcher.stop` was called."""


class _Outcome(enum.Enum):
    DONE = enum.auto()
    EMPTY = enum.auto()
    SILENT = enum.auto()
    REFUSED = enum.auto()
    NOT_FINITE = enum.auto()
    TOO_FAR = enum.auto()
    ERROR = enum.auto()


class Fetcher:
    """Read the parameters of one peer, chosen by the flow control; for one thread.

    A peer that refuses is left at once, and one that is silent for half of ``fetch_timeout_s`` is
    left as well, for another one. No peer is given up for good: those that failed are only chosen
    less often. Parameters are received into memory that is made once, and looked at in pieces.

    Args:
        model: What is read; peers with another model, or another compression, are refused.
        directory: Where the peers are.
        flow: Chooses among them and is told how they did.
        fetch_timeout_s: The longest fetch, in seconds.
        certificate: Of the job, if it has one.
        nearness: Measures how far away parameters are. Default: only whether they are finite.
        pinned: Whether a GPU copies from what is received.
        seconds: How long a fetch takes, on links that are emulated: what it brings is handed over
            when it would come there, or not at all after ``fetch_timeout_s``.
        clock: Says how much time is left.

    Attributes:
        counts: What has become of the fetches so far.
        fetch_timeout_s: The longest fetch, in seconds.

    Raises:
        ValueError: If ``fetch_timeout_s`` is not positive.
    """

    def __init__(
        self,
        model: Model,
        directory: Directory,
        flow: FlowControl,
        *,
        fetch_timeout_s: float = 2.5,
        certificate: JobCertificate | None = None,
        nearness: Nearness | None = None,
        pinned: bool = False,
        seconds: FetchSeconds | None = None,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        if not fetch_timeout_s > 0:
            raise ValueError(f"fetch_timeout_s must be positive, got {fetch_timeout_s}. Try 2.5.")
        self.counts = FetchCounts()
        self.fetch_timeout_s = fetch_timeout_s
        self._model = model
        self._content = model.content
        self._total_bytes = model.total_bytes
        self._piece_bytes = max(PIECE_BYTES // model.row_bytes, 1) * model.row_bytes
        is_plain = model.codec is None
        self._wire = torch.zeros(
            self._total_bytes, dtype=torch.uint8, pin_memory=pinned and is_plain
        )
        self._memory = self._wire.numpy().data
        if is_plain:
            self._params = self._wire.view(model.dtype)
        else:
            self._params = torch.empty(model.numel, dtype=model.dtype, pin_memory=pinned)
        self._tag = Tag(0.0, 0.0)
        self._nearness = nearness or Nearness(model)
        self._directory = directory
        self._flow = flow
        self._certificate = certificate
        self._clients: dict[str, Client] = {}
        self._logged: set[tuple[str, str]] = set()
        self._seconds = seconds
        self._num_delayed = 0
        self._clock = clock
        self._stopped = threading.Event()

    def fetch(self, deadline: float) -> Received | None:
        """Ask a few peers, one after the other, until one has answered.

        Args:
            deadline: When to give up, by the clock.

        Returns:
            The parameters, or None if no peer sent usable ones.

        Raises:
            FetcherStopped: Soon after :meth:`stop`.
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
                fetch_s = self._clock.now() - started
                received = Received(self._params, self._tag, name, fetch_s, self._total_bytes)
                return received if self._seconds is None else self._delay(received, deadline)
            if outcome in (_Outcome.NOT_FINITE, _Outcome.TOO_FAR):
                break
        return None

    def _ask(self, name: str, deadline: float) -> _Outcome:
        """Read from one peer, and remember how that went."""
        try:
            outcome = self._read(name, deadline)
        except TimeoutError:
            outcome = _Outcome.SILENT
        except MalformedMessage as error:
            self.counts.malformed += 1
            self._log_once(name, "malformed", str(error))
            outcome = _Outcome.REFUSED
        except CertificateRefused as error:
            self._log_once(name, "key file", f"it holds another key file, or none ({error})")
            outcome = _Outcome.REFUSED
        except OSError:
            outcome = _Outcome.REFUSED
        except Exception as error:
            kind = type(error).__name__
            self._log_once(name, kind, f"{kind}: {error}")
            outcome = _Outcome.ERROR
        if self._stopped.is_set():
            raise FetcherStopped
        self._note_outcome(name, outcome)
        if outcome in (_Outcome.SILENT, _Outcome.REFUSED, _Outcome.ERROR):
            self._drop(name)
        return outcome

    def _note_outcome(self, name: str, outcome: _Outcome) -> None:
        counts = self.counts
        counts.fetches += outcome is _Outcome.DONE
        counts.empty += outcome is _Outcome.EMPTY
        counts.timeouts += outcome is _Outcome.SILENT
        counts.refused += outcome is _Outcome.REFUSED
        counts.not_finite += outcome is _Outcome.NOT_FINITE
        counts.too_far += outcome is _Outcome.TOO_FAR
        counts.errors += outcome is _Outcome.ERROR
        if outcome is _Outcome.DONE:
            self._flow.succeeded(name)
        elif outcome is not _Outcome.EMPTY:
            self._flow.failed(name)

    def _read(self, name: str, deadline: float) -> _Outcome:
        """Ask a peer and receive its parameters and their tag."""
        now = self._clock.now
        patience_s = self.fetch_timeout_s / (1 if len(self._flow.scores) == 1 else 2)
        client = self._client(name)
        if client is None:
            return _Outcome.REFUSED
        left_s = min(deadline - now(), patience_s)
        reply = client.request(pack_request(self._content), timeout_s=left_s)
        answer = self._parse(reply)
        if answer.kind == OTHER_MODEL:
            self._explain_refusal(name, answer)
            return _Outcome.REFUSED
        if answer.kind == NOTHING_YET:
            return _Outcome.EMPTY
        if not answer.tag.is_plausible:
            self._log_once(name, "not finite", f"nonsense in its {answer.tag}")
            return _Outcome.NOT_FINITE
        self._tag = answer.tag
        self._nearness.clear()
        for start in range(0, self._total_bytes, self._piece_bytes):
            piece = self._memory[start : start + self._piece_bytes]
            try:
                left_s = min(deadline - now(), patience_s)
                reply.receive_into(piece, timeout_s=left_s)
            except TimeoutError:
                self._explain_slowness(name, start, deadline)
                raise
            self.counts.bytes_received += len(piece)
            part = self._model.elements(start, len(piece))
            values = self._model.read(self._wire, part.start, self._params[part])
            self._nearness.add(part.start, values)
        return self._judge(name)

    def _parse(self, reply: Reply) -> Answer:
        """What a peer answers, if it fits to what was asked for."""
        answer = parse_answer(reply.header)
        has_parameters = answer.kind == PARAMETERS
        expected_bytes = self._total_bytes if has_parameters else 0
        if has_parameters and answer.content != self._content:
            raise MalformedMessage("it sends another model than it was asked for")
        if reply.body_bytes != expected_bytes:
            raise MalformedMessage(f"it sends {reply.body_bytes} bytes and not {expected_bytes}")
        return answer

    def _judge(self, name: str) -> _Outcome:
        """Whether all that has come may be used."""
        if not self._nearness.is_finite:
            self._log_once(name, "not finite", "NaN or infinity in its parameters")
            return _Outcome.NOT_FINITE
        if self._nearness.is_near():
            return _Outcome.DONE
        text = (
            f"its parameters are {self._nearness.distance:.3g} away, further than "
            "max_peer_distance allows"
        )
        self._log_once(name, "too far", text)
        return _Outcome.TOO_FAR

    def _client(self, name: str) -> Client | None:
        """The connection to a peer; None while nobody knows where the peer is."""
        client = self._clients.get(name)
        if client is None:
            peer = self._directory.find(name)
            if peer is None:
                return None
            client = Client(peer.host, peer.port, self._certificate, self._clock)
            self._clients[name] = client
        if self._stopped.is_set():  # it may have come too late to be aborted
            raise FetcherStopped
        return client

    def _drop(self, name: str) -> None:
        """Close the connection to a peer, and look anew where it is the next time."""
        client = self._clients.pop(name, None)
        if client is not None:
            client.close()
        self._directory.forget(name)

    def _delay(self, received: Received, deadline: float) -> Received | None:
        """Hand over what was received when it would come over the link that is emulated."""
        assert self._seconds is not None
        seconds = self._seconds(received.peer, received.received_bytes, self._num_delayed)
        self._num_delayed += 1
        ends = self._clock.now() - received.fetch_s + seconds
        left_s = min(ends, deadline) - self._clock.now()
        if self._clock.wait(self._stopped, max(0.0, left_s)):
            raise FetcherStopped
        if ends > deadline:
            self.counts.fetches -= 1
            self.counts.timeouts += 1
            return None
        return received._replace(fetch_s=max(seconds, received.fetch_s), emulated_s=seconds)

    def _explain_refusal(self, name: str, answer: Answer) -> None:
        if answer.content.checksum == self._content.checksum:
            text = "its parameters travel in another compression. Give all peers the same one"
        else:
            text = "it holds another model"
        self._log_once(name, "other model", text)

    def _explain_slowness(self, name: str, num_bytes: int, deadline: float) -> None:
        if num_bytes and self._clock.now() >= deadline:
            self._log_once(
                name,
                "too slow",
                f"only {num_bytes} of {self._total_bytes} bytes came in fetch_timeout_s="
                f"{self.fetch_timeout_s:g}. Raise it if the network needs longer",
            )

    def _log_once(self, name: str, kind: str, text: str) -> None:
        """Write one line for each peer and kind of failure."""
        if (name, kind) not in self._logged and len(self._logged) < _MOST_LOG_LINES:
            self._logged.add((name, kind))
            log.warning("Reading from peer %s failed: %s.", name, text)

    def stop(self) -> None:
        """Have the fetch under way, and every later one, end soon; for any thread."""
        self._stopped.set()
        for client in list(self._clients.values()):
            client.abort()

    def close(self) -> None:
        """Close all connections, in the thread that reads or once it has ended."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


class FetchingThread(BackgroundThread):
    """Make the fetches that the training thread asks for, and hand over what they bring.

    A fetch ends at the latest the fetcher's ``fetch_timeout_s`` after its start, with or without
    parameters.

    Args:
        fetcher: Makes a fetch; from now on it belongs to this thread, which closes it in the end.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        super().__init__("loco-peer-fetching")
        self._fetcher = fetcher
        self._fetch_timeout_s = fetcher.fetch_timeout_s
        # Fetches are numbered; all below is shared with the training thread.
        self._changed = threading.Condition()
        self._closing = False
        self._wanted = 0
        self._wanted_at = 0.0
        self._ended = 0
        self._handed_over = 0
        self._received: Received | None = None

    @property
    def counts(self) -> FetchCounts:
        """What has become of the fetches so far."""
        return self._fetcher.counts

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
                    if self._closing:
                        return
                    number, deadline = self._wanted, self._wanted_at + self._fetch_timeout_s
                received = self._fetcher.fetch(deadline)
                with self._changed:
                    self._ended = number
                    if number == self._wanted:
                        self._received = received
                    self._changed.notify_all()
        except FetcherStopped:
            pass
        except Exception:
            log.exception("Parameters are no longer read from peers.")
        finally:
            self._fetcher.close()

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        self._tell_to_end()
        if self.ident is None:
            self._fetcher.close()
        elif self.is_alive():
            self.join(self._fetch_timeout_s + 5)

    def end_with_process(self) -> float:
        """Give up the fetch under way."""
        self._tell_to_end()
        return super().end_with_process()

    def _tell_to_end(self) -> None:
        with self._changed:
            self._closing = True
            self._fetcher.stop()
            self._changed.notify_all()

"""The syncer on the network: a server of its requests, and the client of a learner.

Headers are JSON and hold a ``kind``; the body of a push, and of the reply to a fetch, is the vector
of a fragment as it is in memory, little endian. Learners only connect outwards: the syncer opens no
connection.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_loco import transport
from lightning_loco._util.background import BackgroundThread
from lightning_loco.compression import Codec
from lightning_loco.costs import Link
from lightning_loco.syncer.contract import Contract
from lightning_loco.syncer.merge_rounds import Due, Push, Refused, Reply, Version
from lightning_loco.syncer.syncer import Fragment, Syncer
from lightning_loco.transport import Client, JobCertificate, MalformedMessage, Request, Server

_MAX_TEXT_BYTES = 16 * 2**20
"""Longest contract or reply in JSON."""

_SLOWEST_BYTES_PER_S = 125_000
"""Of a link that learners may have, 1 Mbit/s: the timeout grows with what is sent on it."""

_LONGEST_WAIT_S = 1.0
_LOGGED = ("contract", "finite", "generation")
_MOST_LOG_LINES = 20

log = logging.getLogger(__name__)


class SyncerServer:
    """Answers learners' requests, and lets the syncer do what is due by the clock.

    Other arguments and errors as in :class:`~lightning_loco.transport.Server`.

    Args:
        open_syncer: Makes the syncer from the contract of the first learner that joins, or returns
            one that is there.
        host: Address to listen on.
        port: Port to listen on; 0 takes any free one.
        certificate: Certificate of the job. Default: no encryption.
        max_connections: Most open connections.
        timeout_s: Longest time for a request and its reply, in seconds.

    Attributes:
        server: Listens on ``server.port``.
        syncer: What the requests are for; None before the first learner.
    """

    def __init__(
        self,
        open_syncer: Callable[[Contract], Syncer],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: JobCertificate | None = None,
        max_connections: int = 256,
        timeout_s: float = 600.0,
    ) -> None:
        self._open_syncer = open_syncer
        self._opening = threading.Lock()
        self.syncer: Syncer | None = None
        self._logged: set[tuple[str, str]] = set()
        self._answers: dict[str, Callable[[dict[str, Any], Request], None]] = {
            "join": self._join,
            "start": self._start,
            "poll": self._poll,
            "push": self._push,
            "fetch": self._fetch,
            "leave": self._leave,
            "status": lambda header, request: _reply(request, self.status()),
        }
        self._is_ending = threading.Event()
        self._timer = BackgroundThread(
            "loco-syncer-timer", self._follow_the_clock, ask_to_end=self._is_ending.set
        )
        self.server = Server(
            self._answer_learner,
            host=host,
            port=port,
            certificate=certificate,
            max_connections=max_connections,
            timeout_s=timeout_s,
        )

    def start(self) -> None:
        """Start to answer."""
        self.server.start()
        self._timer.start()

    def close(self) -> None:
        """Close all connections and free the port."""
        self._is_ending.set()
        self.server.close()

    def _follow_the_clock(self) -> None:
        wait_s: float | None = None
        while not self._is_ending.wait(min(_LONGEST_WAIT_S, wait_s or _LONGEST_WAIT_S)):
            wait_s = None if self.syncer is None else self.syncer.advance()

    def status(self) -> dict[str, Any]:
        """Return the numbers of :meth:`Syncer.status`; nothing before the first learner."""
        return {} if self.syncer is None else self.syncer.status()

    @property
    def _opened(self) -> Syncer:
        if self.syncer is None:
            raise Refused("learner", "No learner has joined: join.")
        return self.syncer

    def _answer_learner(self, request: Request) -> None:
        try:
            header = json.loads(request.header)
            answer = self._answers[header["kind"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise MalformedMessage("a request that no learner sends") from error
        try:
            answer(header, request)
        except Refused as error:
            self._log(error, str(header.get("name") or header.get("push", [""])[0]))
            request.discard_body()
            request.reply(json.dumps({"refused": [error.reason, str(error)[:500]]}).encode())
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise MalformedMessage(f"a malformed request to {header['kind']}: {error}") from error

    def _log(self, error: Refused, learner: str) -> None:
        """Log what a user should know, once for each learner."""
        key = (error.reason, learner)
        if error.reason in _LOGGED and key not in self._logged:
            self._logged.add(key)
            if len(self._logged) <= _MOST_LOG_LINES:
                log.warning("Refused: %s Later ones of this learner are only counted.", error)

    def _join(self, header: dict[str, Any], request: Request) -> None:
        contract = json.loads(_receive_text(request))
        if not isinstance(contract, dict):
            raise ValueError("a contract that is no object")
        name, generation, steps = str(header["name"]), int(header["generation"]), header["steps"]
        with self._opening:
            if self.syncer is None:
                try:
                    self.syncer = self._open_syncer(Contract.from_plain(contract))
                except ValueError as error:
                    raise Refused("contract", str(error)) from error
        reply = self.syncer.join(name, generation, int(steps), contract)
        _reply(request, [self.syncer.has_started, reply])

    def _start(self, header: dict[str, Any], request: Request) -> None:
        syncer = self._opened
        lengths = syncer.contract.lengths
        syncer.start([self._receive_vector(request, length) for length in lengths])
        _reply(request, None)

    def _poll(self, header: dict[str, Any], request: Request) -> None:
        said = (str(header["name"]), int(header["generation"]), int(header["epoch"]))
        _reply(request, self._opened.poll(*said, int(header["steps"])))

    def _push(self, header: dict[str, Any], request: Request) -> None:
        push = Push(*header["push"])
        push = push._replace(due=Due(*map(int, push.due)), base=Version(*map(int, push.base)))
        push = push._replace(steps=int(push.steps), tokens=float(push.tokens))
        syncer = self._opened
        lengths = syncer.contract.lengths
        if not 0 <= push.due.fragment < len(lengths):
            raise ValueError(f"no fragment {push.due.fragment}")
        with syncer.hearing(push.learner):
            delta = self._receive_delta(request, lengths[push.due.fragment])
        syncer.push(push, delta)
        _reply(request, None)

    def _fetch(self, header: dict[str, Any], request: Request) -> None:
        epoch, version, params = self._opened.fetch(int(header["fragment"]))
        header_of_reply = {"fragment": [epoch, version]}
        request.reply(json.dumps(header_of_reply).encode(), _bytes_of(params))

    def _leave(self, header: dict[str, Any], request: Request) -> None:
        self._opened.leave(str(header["name"]), int(header["generation"]))
        _reply(request, None)

    def _receive_vector(self, request: Request, length: int) -> Tensor:
        vector = torch.empty(length, dtype=self._opened.contract.dtype, device="cpu")
        request.receive_into(_bytes_of(vector))
        return vector

    def _receive_delta(self, request: Request, length: int) -> Tensor:
        contract = self._opened.contract
        if contract.codec is None:
            return self._receive_vector(request, length)
        wire = torch.empty(contract.codec.num_bytes(length), dtype=torch.uint8, device="cpu")
        request.receive_into(_bytes_of(wire))
        values = torch.empty(length, dtype=contract.dtype, device="cpu")
        return contract.codec.decode(wire, values)


class SyncerClient:
    """A learner's connection to the syncer; see :class:`Syncer` for the requests.

    Not thread-safe. Every request raises OSError if the syncer cannot be reached, and
    :class:`Refused` if it does not accept it.

    Args:
        host: Name or address of the syncer.
        port: Its port.
        certificate: Certificate of the job. Default: no encryption.
        codec: Encodes pushes, as the contract says. Default: they are sent as they are.
        timeout_s: Longest time for a request and its reply, in seconds; longer for large ones.
        link: A slower link to emulate, without its jitter: messages take as long as on it. Default:
            no emulation.
    """

    def __init__(
        self,
        host: str,
        port: int,
        certificate: JobCertificate | None = None,
        codec: Codec | None = None,
        timeout_s: float = 60.0,
        link: Link | None = None,
    ) -> None:
        self._client = Client(host, port, certificate)
        self._codec, self._timeout_s, self._link = codec, timeout_s, link
        self._is_aborted = threading.Event()

    def join(
        self, name: str, generation: int, steps: int, contract: Mapping[str, Any]
    ) -> tuple[bool, Reply]:
        """Join; return also whether the run has started, or waits for :meth:`start`."""
        said = {"name": name, "generation": generation, "steps": steps}
        has_started, reply = self._ask("join", said, json.dumps(contract).encode())
        return has_started, _read_reply(reply)

    def start(self, params: Sequence[Tensor]) -> None:
        """Begin the run with these parameters, unless another learner has."""
        self._ask("start", {}, _bytes_of(torch.cat([*params])))

    def poll(self, name: str, generation: int, epoch: int, steps: int) -> Reply:
        """Report progress, and ask what is due."""
        said = {"name": name, "generation": generation, "epoch": epoch, "steps": steps}
        return _read_reply(self._ask("poll", said))

    def push(self, push: Push, delta: Tensor) -> None:
        """Send a pseudo-gradient."""
        body = delta if self._codec is None else self._codec.encode(delta)
        self._ask("push", {"push": push}, _bytes_of(body))

    def fetch(self, fragment: int, into: Tensor) -> Fragment:
        """Receive a fragment into a vector of its length."""
        header, reply = self._request("fetch", {"fragment": fragment})
        epoch, version = header["fragment"]
        if reply.body_bytes != into.nbytes:
            raise MalformedMessage(f"{reply.body_bytes} bytes for a fragment of {into.nbytes}")
        reply.receive_into(_bytes_of(into), timeout_s=self._longest_s(into.nbytes))
        return Fragment(epoch, Version(*version), into)

    def leave(self, name: str, generation: int) -> None:
        """Say that the learner leaves."""
        self._ask("leave", {"name": name, "generation": generation})

    def status(self) -> dict[str, Any]:
        """Return the numbers of :meth:`Syncer.status`."""
        status: dict[str, Any] = self._ask("status", {})
        return status

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def abort(self) -> None:
        """Make the present request and all later ones fail at once. Thread-safe."""
        self._is_aborted.set()
        self._client.abort()

    def _longest_s(self, num_bytes: int) -> float:
        return self._timeout_s + num_bytes / _SLOWEST_BYTES_PER_S

    def _ask(self, kind: str, said: Mapping[str, Any], body: bytes | memoryview = b"") -> Any:
        _, reply = self._request(kind, said, body)
        if reply.body_bytes > _MAX_TEXT_BYTES:
            raise MalformedMessage(f"a reply of {reply.body_bytes} bytes to {kind}")
        text = bytearray(reply.body_bytes)
        reply.receive_into(memoryview(text), timeout_s=self._timeout_s)
        return json.loads(text)

    def _request(
        self, kind: str, said: Mapping[str, Any], body: bytes | memoryview = b""
    ) -> tuple[dict[str, Any], transport.Reply]:
        request = json.dumps({"kind": kind, **said}).encode()
        reply = self._client.request(request, body, timeout_s=self._longest_s(len(body)))
        header: dict[str, Any] = json.loads(reply.header)
        if self._link is not None:
            busy_s = self._link.seconds(len(body)) + self._link.seconds(reply.body_bytes)
            self._is_aborted.wait(busy_s + 2 * self._link.latency_s)
        if "refused" in header:
            raise Refused(*header["refused"])
        return header, reply


def _reply(request: Request, value: Any) -> None:
    request.reply(b"{}", json.dumps(value).encode())


def _receive_text(request: Request) -> bytearray:
    if request.body_bytes > _MAX_TEXT_BYTES:
        raise ValueError(f"{request.body_bytes} bytes of text")
    text = bytearray(request.body_bytes)
    request.receive_into(memoryview(text))
    return text


def _read_reply(value: Any) -> Reply:
    epoch, asked, versions = value
    return Reply(
        epoch, tuple(Due(*due) for due in asked), tuple(Version(*version) for version in versions)
    )


def _bytes_of(vector: Tensor) -> memoryview:
    return memoryview(vector.detach().numpy()).cast("B")  # type: ignore[arg-type]

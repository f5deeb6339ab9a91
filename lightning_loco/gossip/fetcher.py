"""Fetches the parameters of peers, one peer at a time, in a background thread.

What is done here is decided in :mod:`lightning_loco.gossip.fetch_decisions`.
"""

from __future__ import annotations

import functools
import logging
import threading
from concurrent import futures
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco._util.background import TaskThread
from lightning_loco._util.decisions import carry_out
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip.fetch_decisions import Do, FetchDecisions, FetcherStopped
from lightning_loco.gossip.peer_selection import PeerDiscovery
from lightning_loco.gossip.protocol import pack_request
from lightning_loco.transport import Client, JobCertificate, Reply

log = logging.getLogger(__name__)


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


class Fetcher:
    """Fetches the parameters of one peer, as :class:`FetchDecisions` decides. Not thread-safe.

    Parameters are received into preallocated memory, pinned for a model on a GPU, and decoded and
    checked chunk by chunk. Peers with another model or another encoding are refused.

    Args:
        decisions: What decides.
        discovery: Where the peers are.
        certificate: Certificate of the job. Default: no encryption.
        pinned: Whether to receive into pinned memory.
    """

    def __init__(
        self,
        decisions: FetchDecisions,
        discovery: PeerDiscovery,
        *,
        certificate: JobCertificate | None = None,
        pinned: bool = False,
    ) -> None:
        self.decisions, self.clock = decisions, decisions.clock
        self._wire_format = wire_format = decisions.wire_format
        self._request = pack_request(wire_format.model_id)
        self._stopped = threading.Event()
        # Without a codec the bytes are the parameters: they are received where they stay.
        is_plain = wire_format.codec is None
        self._wire = torch.zeros(
            wire_format.total_bytes, dtype=torch.uint8, pin_memory=pinned and is_plain, device="cpu"
        )
        self._memory = self._wire.numpy().data
        if is_plain:
            self._params = self._wire.view(wire_format.dtype)
        else:
            self._params = torch.empty(
                wire_format.numel, dtype=wire_format.dtype, pin_memory=pinned, device="cpu"
            )
        self._discovery = discovery
        self._certificate = certificate
        self._clients: dict[str, Client] = {}
        self._reply: Reply | None = None

    def fetch(self, deadline: float) -> Received | None:
        """Return the parameters of a peer; None if none has sent usable ones by ``deadline``.

        ``deadline`` is a time of the clock. FetcherStopped soon after :meth:`stop`.
        """
        accepted = carry_out(self.decisions.run(deadline), self._do)
        if accepted is None:
            return None
        peer, tag, fetch_s = accepted
        return Received(self._params, tag, peer, fetch_s, len(self._memory))

    def _do(self, what: Do, argument: Any) -> tuple[bytes, int] | Tensor | None:
        match what:
            case Do.REQUEST:
                name, until = argument
                timeout_s = until - self.clock.now()
                self._reply = self._client(name).request(self._request, timeout_s=timeout_s)
                return self._reply.header, self._reply.body_bytes
            case Do.RECEIVE:
                part, values, until = argument
                assert self._reply is not None
                timeout_s = until - self.clock.now()
                self._reply.receive_into(self._memory[part], timeout_s=timeout_s)
                return self._wire_format.decode(self._wire, values.start, self._params[values])
            case Do.DISCONNECT:
                if (client := self._clients.pop(argument, None)) is not None:
                    client.close()
                self._discovery.forget(argument)
            case Do.PAUSE:
                left_s = max(0.0, argument - self.clock.now())
                if self.clock.wait(self._stopped, left_s):
                    raise FetcherStopped
        return None

    def _client(self, name: str) -> Client:
        """Return the connection to a peer; ConnectionError if its address is not known yet."""
        client = self._clients.get(name)
        if client is None:
            peer = self._discovery.find(name)
            if peer is None:
                raise ConnectionError(f"the address of {name} is not known yet")
            client = Client(peer.host, peer.port, self._certificate, self.clock)
            self._clients[name] = client
        if self._stopped.is_set():  # stop() may not have seen the new client
            raise ConnectionAbortedError("the node was closed")
        return client

    def stop(self) -> None:
        """Abort the current fetch, and every later one. Thread-safe."""
        # Set first, so that the errors of the aborted connections are not counted.
        self.decisions.is_stopped = True
        self._stopped.set()
        for client in list(self._clients.values()):
            client.abort()

    def close(self) -> None:
        """Close all connections. Call it in the fetching thread, or after that has ended."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


class FetchingThread(TaskThread):
    """Runs the fetches that the training thread starts, and hands over the results.

    A fetch ends within ``fetch_timeout_s`` of the fetcher, with or without parameters. Only this
    thread uses the fetcher, and closes it at the end.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        super().__init__("loco-peer-fetching")
        self.decisions = fetcher.decisions
        self._fetcher = fetcher
        self._deadline = 0.0
        self._last: Future[Received | None] | None = None
        self._is_taken = True

    def start_fetch(self) -> None:
        """Start a fetch. The result of the previous one is no longer valid."""
        if self._last is not None:
            self._last.cancel()  # if it waits for the one before it
        self._deadline = self.decisions.clock.now() + self.decisions.fetch_timeout_s
        self._last = self.submit(functools.partial(self._fetch, self._deadline))
        self._is_taken = False

    def wait(self, timeout_s: float | None = None) -> Received | None:
        """Wait for the fetch, as :meth:`PeerNode.wait` does; return the parameters once."""
        if self._is_taken or self._last is None:
            return None
        left_s = self._deadline - self.decisions.clock.now()
        limit_s = left_s if timeout_s is None else min(left_s, timeout_s)
        if not self.is_alive():  # closed, or not started: nothing will come
            limit_s = 0.0
        try:
            error = self._last.exception(max(limit_s, 0.0))
        except futures.TimeoutError:
            # It may hang in the look-up of an address: it is not waited for a second time.
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
        # A defect, since errors of peers are handled: training continues without them.
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
        if self.ident is None:  # never started, so that run() does not close it
            self._fetcher.close()
        elif self.is_alive():
            self.join(self.decisions.fetch_timeout_s + 5)

    def end_with_process(self) -> float:
        """Abort the current fetch."""
        self._fetcher.stop()
        return super().end_with_process()

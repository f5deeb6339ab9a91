"""Serves this worker's snapshots to whoever asks for them."""

from __future__ import annotations

import resource
import threading

from lightning_loco.gossip.model import Model
from lightning_loco.gossip.protocol import (
    NOTHING_YET,
    OTHER_MODEL,
    PARAMETERS,
    Answer,
    pack_answer,
    parse_request,
)
from lightning_loco.gossip.snapshots import Snapshots
from lightning_loco.transport import JobCertificate, MalformedMessage, Request, Server

_SPARE_CONNECTIONS = 32
_SHARE = 8


class SnapshotServer:
    """Answers requests with the parameters of a snapshot, one at a time for each connection.

    Args:
        model: What is served; requests for another model, or another compression, are refused.
        snapshots: Where the parameters are.
        num_peers: Twice as many connections are held at once, and 32; but no more than an eighth of
            the files that this process may have open.
        timeout_s: The longest time that a reader may take, in seconds.
        host: Address to listen at.
        port: Port to listen at, 0 for any that is free.
        certificate: Of the job, if it has one.

    Attributes:
        bytes_sent: Bytes of parameters handed out.

    Raises:
        RuntimeError: If the port is taken or the host is not an address of this machine.
    """

    def __init__(
        self,
        model: Model,
        snapshots: Snapshots,
        *,
        num_peers: int,
        timeout_s: float,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: JobCertificate | None = None,
    ) -> None:
        self.bytes_sent = 0
        self._lock = threading.Lock()
        self._content = model.content
        self._snapshots = snapshots
        self._server = Server(
            self._answer,
            host=host,
            port=port,
            certificate=certificate,
            max_connections=most_connections(num_peers),
            timeout_s=timeout_s,
        )

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    @property
    def malformed(self) -> int:
        """Connections that were closed for what came over them."""
        return self._server.malformed

    def _answer(self, request: Request) -> None:
        asked = parse_request(request.header)
        if request.body_bytes:
            raise MalformedMessage("a request for parameters with a body")
        if asked != self._content:
            request.reply(pack_answer(Answer(OTHER_MODEL, self._content)))
            return
        with self._snapshots.reading() as snapshot:
            if snapshot is None:
                request.reply(pack_answer(Answer(NOTHING_YET, self._content)))
                return
            with self._lock:
                self.bytes_sent += len(snapshot.data)
            answer = Answer(PARAMETERS, self._content, snapshot.tag)
            request.reply(pack_answer(answer), snapshot.data)

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()

    def close(self) -> None:
        """Close all connections and free the port; a second call does nothing."""
        self._server.close()


def most_connections(num_peers: int) -> int:
    """How many connections others may hold at once, so that most files are left to the worker."""
    wanted = 2 * num_peers + _SPARE_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files // _SHARE))

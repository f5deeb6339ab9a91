"""Client of the lighthouse, a server of torchft that tracks which workers are alive.

Each worker sends it heartbeats, and asks it before every round for a quorum: the workers that take
part.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from typing import Any

from torchft.coordination import LighthouseClient, ManagerServer

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco.elastic.quorum import Member, Quorum
from lightning_loco.transport import address_towards

HEARTBEAT_S = 0.1
"""Time between two heartbeats."""

MIN_UPTIME_S = 1.0
"""Uptime after which a lighthouse has received several heartbeats of every worker that is alive."""

_RECONNECT_S = 1.0
"""Longest attempt of a heartbeat; a longer one delays the first to a restarted lighthouse."""

_KEEPALIVE_IDLE_S = 10
_LOOPBACK = "127.0.0.1:0"
_RETRY_S = 0.2
_STATUS_S, _MAX_STATUS_BYTES, _MAX_NAMES = 1.0, 2**20, 10
_STATUS = re.compile(r"Next quorum status: ([\w ,.\[\]/=()!-]{1,300})")
_HEARTBEAT = re.compile(r"^\s*([\w.-]{1,120}): seen (\d+(?:\.\d)?)", re.MULTILINE)


class Lighthouse:
    """This worker's connection with the lighthouse.

    The heartbeats are sent by a thread of torchft, which is blocked neither by Python's global lock
    nor by an exchange. They end with the process, or with :meth:`close`.

    Nothing is connected before :meth:`quorum`, so a worker may be started before the lighthouse.

    Args:
        address: ``"host:port"`` of the lighthouse.
        name: Name of this worker, never used by another one.
        clock: Clock for its waits.

    Attributes:
        error: Why the lighthouse cannot be reached at the moment; empty if it can.
        uptime: Measures for how long the lighthouse has been up.
    """

    def __init__(self, address: str, name: str, *, clock: Clock = REAL_CLOCK) -> None:
        self.name = name
        self.address = address.removeprefix("http://")
        self.error = "it does not answer"
        self.uptime = Uptime(address, clock=clock)
        self._clock = clock
        self._url = f"http://{self.address}"
        self._client: LighthouseClient | None = None
        self._heartbeats: ManagerServer | None = None

    def quorum(self, make_data: Callable[[], dict[str, Any]], timeout_s: float) -> Quorum | None:
        """Ask to take part and wait for the other workers; None if some are late.

        The request is sent once the lighthouse has been up for :data:`MIN_UPTIME_S`. ``make_data``
        is called immediately before each request, and returns this worker's request for the others
        as plain values. RuntimeError if the lighthouse cannot be reached within
        ``timeout_s``.
        """
        deadline = self._clock.now() + timeout_s
        while True:
            try:
                client = self._connect(deadline)
                self.uptime.wait(deadline)
                left = timedelta(seconds=max(_RETRY_S, deadline - self._clock.now()))
                quorum = client.quorum(self.name, left, data=make_data())
            except TimeoutError:
                return None
            except (RuntimeError, ConnectionError) as error:
                # The next attempt connects again, perhaps to a lighthouse that was restarted.
                self._client, self.error = None, str(error)
                if self.uptime.is_closed or self._clock.now() + _RETRY_S > deadline:
                    raise RuntimeError(
                        f"The lighthouse at {self.address} does not answer within {timeout_s:g} s "
                        f"({error}). Start it with `lightning-loco lighthouse`, and check that "
                        "this machine can reach its port."
                    ) from error
                self._clock.sleep(_RETRY_S)
                continue
            members = [Member(each.replica_id, each.data or {}) for each in quorum.participants]
            return Quorum(f"{quorum.created.seconds}.{quorum.created.nanos:09}", members)

    def _connect(self, deadline: float) -> LighthouseClient:
        """Return the connected client; the first call starts the heartbeats."""
        self.uptime.connect(deadline)
        longest = timedelta(seconds=max(_RETRY_S, deadline - self._clock.now()))
        if self._heartbeats is None:
            # Of the manager of torchft only the heartbeats are used.
            self._heartbeats = ManagerServer(
                replica_id=self.name,
                lighthouse_addr=self._url,
                hostname=socket.gethostname(),
                bind=_LOOPBACK,  # unused here, and open to any client that can connect
                store_addr="",
                world_size=1,
                heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
                connect_timeout=timedelta(seconds=_RECONNECT_S),
                quorum_retries=0,
            )
        if self._client is None:
            self._client = LighthouseClient(self._url, longest)
        if self.uptime.is_closed:  # by another thread, meanwhile
            self._heartbeats.shutdown()
            raise ConnectionAbortedError("This worker has left the run.")
        self.error = ""
        return self._client

    def status(self) -> str:
        """Return the report of the lighthouse's status page; empty if it does not answer."""
        try:
            with closing(HTTPConnection(self.address, timeout=_STATUS_S)) as connection:
                connection.request("GET", "/status")
                page = connection.getresponse().read(_MAX_STATUS_BYTES).decode(errors="replace")
        except (OSError, HTTPException):
            return ""
        status = _STATUS.search(page)
        ages = sorted((float(age), name) for name, age in _HEARTBEAT.findall(page))[:_MAX_NAMES]
        heartbeats = ", ".join(f"{name} {age:g} s ago" for age, name in ages)
        parts = [] if status is None else [f"it reports: {status[1]}"]
        return "; ".join(parts + ([f"last heartbeats: {heartbeats}"] if heartbeats else []))

    def close(self) -> None:
        """Stop the heartbeats; the others continue without this worker."""
        self.uptime.close()
        if self._heartbeats is not None:
            self._heartbeats.shutdown()
        self._client = None


class Uptime:
    """Measures the uptime of the lighthouse by a TCP connection that ends when the lighthouse does.

    A restarted lighthouse has no heartbeats yet. It would let the first workers that ask continue
    without the others, and let workers without a state begin a second run.
    """

    def __init__(self, lighthouse: str, *, clock: Clock = REAL_CLOCK) -> None:
        host, _, port = lighthouse.removeprefix("http://").rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._connection: socket.socket | None = None
        self._since, self._num_connections = 0.0, 0
        self._clock = clock
        self.is_closed = False

    def wait(self, deadline: float) -> None:
        """Wait until the lighthouse has been up for :data:`MIN_UPTIME_S`, as far as is known.

        At most until ``deadline``, by the clock. ConnectionError if it does not answer,
        or after :meth:`close`.
        """
        while True:
            self.connect(deadline)
            now = self._clock.now()
            left_s = min(self._since + MIN_UPTIME_S, deadline) - now
            if left_s <= 0:
                return
            self._clock.sleep(left_s)

    def connect(self, deadline: float) -> None:
        """Connect unless connected; arguments and errors as in :meth:`wait`."""
        if self._connection is None or _has_ended(self._connection):
            self._reconnect(deadline)

    def has_restarted(self, within_s: float) -> bool:
        """Whether the lighthouse was restarted less than ``within_s`` seconds ago.

        A member of earlier rounds may then need longer than :data:`MIN_UPTIME_S` to reach it.
        """
        return self._num_connections > 1 and self._clock.now() - self._since < within_s

    def close(self) -> None:
        """Close the connection for good."""
        self.is_closed = True
        self._disconnect()

    def _reconnect(self, deadline: float) -> None:
        self._disconnect()
        left_s = max(MIN_UPTIME_S, deadline - self._clock.now())
        if self.is_closed:
            raise ConnectionAbortedError("This worker has left the run.")
        try:
            connection = socket.create_connection(self._address, timeout=left_s)
        except OSError as error:
            raise ConnectionError(str(error)) from error
        # A machine that vanishes from the network closes no connection.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        self._connection, self._since = connection, self._clock.now()
        self._num_connections += 1

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _has_ended(connection: socket.socket) -> bool:
    try:
        # To read nothing is the end of the connection; as long as it is open, that is an error.
        connection.setblocking(False)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def address_seen_by(lighthouse: str) -> str:
    """Return the address under which the lighthouse sees this machine; RuntimeError if none."""
    host, _, port = lighthouse.removeprefix("http://").rpartition(":")
    try:
        return address_towards(host.strip("[]"), int(port))
    except OSError as error:
        message = f"This machine does not reach the lighthouse at {lighthouse}: {error}."
        raise RuntimeError(message) from error

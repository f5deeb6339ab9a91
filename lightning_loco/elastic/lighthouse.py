"""The lighthouse: a server of torchft that hears who is alive and says who takes part."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from typing import Any, NamedTuple

from torchft.coordination import LighthouseClient, ManagerServer

HEARD_S = 1.0
"""After so long a new lighthouse has heard several signs of life of everyone who is not held up."""

_IDLE_S = 10

HEARTBEAT_S = 0.1
"""Time between two signs of life."""

_RECONNECT_S = 1.0
"""With a longer one, signs of life stay away for several seconds from a lighthouse that is back."""

_LOOPBACK = "127.0.0.1:0"
_PAUSE_S = 0.2
_PAGE_S, _LONGEST_PAGE_BYTES, _MOST_NAMES = 1.0, 2**20, 10
_STATUS = re.compile(r"Next quorum status: ([\w ,.\[\]/=()!-]{1,300})")
_HEARD = re.compile(r"^\s*([\w.-]{1,120}): seen (\d+(?:\.\d)?)", re.MULTILINE)


class Uptime:
    """A connection with the lighthouse that ends when the lighthouse does.

    It tells whether the lighthouse has been up for long enough to have heard of all who are alive.
    One that was started again knows nobody. It would let those who ask first go on without the
    others, and workers that know nothing of the run begin another one.

    Args:
        lighthouse: ``"host:port"``.

    Attributes:
        is_closed: Whether this worker takes part no longer.
    """

    def __init__(self, lighthouse: str) -> None:
        host, _, port = lighthouse.removeprefix("http://").rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._line: socket.socket | None = None
        self._since, self._connections = 0.0, 0
        self.is_closed = False

    def wait(self, deadline: float) -> None:
        """Wait until the lighthouse has been up for :data:`HEARD_S`, as far as is known here.

        Args:
            deadline: When to wait no longer, by ``time.monotonic()``.

        Raises:
            ConnectionError: If nobody answers there, or after :meth:`close`.
        """
        while True:
            self.connect(deadline)
            now = time.monotonic()
            left_s = min(self._since + HEARD_S, deadline) - now
            if left_s <= 0:
                return
            time.sleep(left_s)

    def connect(self, deadline: float) -> None:
        """Connect, unless there is a connection; arguments and errors are those of :meth:`wait`."""
        if self._line is None or _has_ended(self._line):
            self._open(deadline)

    def is_new(self, known_s: float) -> bool:
        """Whether this connection followed another one, less than so long ago.

        Those who took part before may then be held up for longer than :data:`HEARD_S`.
        """
        return self._connections > 1 and time.monotonic() - self._since < known_s

    def close(self) -> None:
        """End the connection for good."""
        self.is_closed = True
        self._end()

    def _end(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _open(self, deadline: float) -> None:
        self._end()
        left_s = max(HEARD_S, deadline - time.monotonic())
        if self.is_closed:
            raise ConnectionAbortedError("this worker takes part no longer")
        try:
            line = socket.create_connection(self._address, timeout=left_s)
        except OSError as error:
            raise ConnectionError(str(error)) from error
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        self._line, self._since = line, time.monotonic()
        self._connections += 1


def _has_ended(line: socket.socket) -> bool:
    try:
        line.setblocking(False)
        return line.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class Member(NamedTuple):
    """A worker that has asked to take part.

    Attributes:
        name: Unlike that of any other worker, dead ones included.
        told: What it says of itself.
    """

    name: str
    told: dict[str, Any]


class Quorum(NamedTuple):
    """Who takes part.

    Attributes:
        number: Never used before, also by a lighthouse that was restarted.
        members: In an order that is the same for all.
    """

    number: str
    members: list[Member]


def address_towards(lighthouse: str) -> str:
    """The address under which the lighthouse sees this machine; RuntimeError if there is none."""
    host, _, port = lighthouse.removeprefix("http://").rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        message = f"This machine does not reach the lighthouse at {lighthouse}: {error}."
        raise RuntimeError(message) from error


class Lighthouse:
    """This worker's line to the lighthouse.

    Signs of life are sent by a thread of torchft's own, which neither Python's lock nor an exchange
    holds up. They end with the process, or with :meth:`close`.

    Nothing is connected before :meth:`quorum`, so that a worker may be started before the
    lighthouse.

    Args:
        address: ``"host:port"`` of the lighthouse.
        name: Of this worker, unlike that of any other.

    Attributes:
        trouble: Why the lighthouse cannot be reached at present; empty if it can.
        uptime: A connection that tells for how long the lighthouse has been up.
    """

    def __init__(self, address: str, name: str) -> None:
        self.name = name
        self.address = address.removeprefix("http://")
        self.trouble = "it does not answer"
        self._url = f"http://{self.address}"
        self._client: LighthouseClient | None = None
        self._heart: ManagerServer | None = None
        self.uptime = Uptime(address)

    def quorum(self, tell: Callable[[], dict[str, Any]], wait_s: float) -> Quorum | None:
        """Ask to take part, and wait for the others; not before the lighthouse has heard of all.

        Args:
            tell: What the others should know of this worker, as plain values; called right before
                the lighthouse is asked.
            wait_s: Longest wait, in seconds.

        Returns:
            All who take part; None if they are not together after that time.

        Raises:
            RuntimeError: If the lighthouse cannot be reached for that long.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                client = self._connected(deadline)
                self.uptime.wait(deadline)
                left = timedelta(seconds=max(_PAUSE_S, deadline - time.monotonic()))
                found = client.quorum(self.name, left, data=tell())
            except TimeoutError:
                return None
            except (RuntimeError, ConnectionError) as error:
                self._client, self.trouble = None, str(error)
                if self.uptime.is_closed or time.monotonic() + _PAUSE_S > deadline:
                    raise self._unreachable(error, wait_s) from error
                time.sleep(_PAUSE_S)
                continue
            members = [Member(one.replica_id, one.data or {}) for one in found.participants]
            return Quorum(f"{found.created.seconds}.{found.created.nanos:09}", members)

    def _connected(self, deadline: float) -> LighthouseClient:
        """Reach the lighthouse and begin with the signs of life, if that is still to be done."""
        self.uptime.connect(deadline)
        longest = timedelta(seconds=max(_PAUSE_S, deadline - time.monotonic()))
        if self._heart is None:
            self._heart = ManagerServer(
                replica_id=self.name,
                lighthouse_addr=self._url,
                hostname=socket.gethostname(),
                bind=_LOOPBACK,  # nobody needs it, and it obeys whoever reaches it
                store_addr="",
                world_size=1,
                heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
                connect_timeout=timedelta(seconds=_RECONNECT_S),
                quorum_retries=0,
            )
        if self._client is None:
            self._client = LighthouseClient(self._url, longest)
        if self.uptime.is_closed:  # meanwhile
            self._heart.shutdown()
            raise ConnectionAbortedError("This worker takes part no longer.")
        self.trouble = ""
        return self._client

    def describe(self) -> str:
        """What the page of the lighthouse says of those it hears; empty if it says nothing."""
        try:
            with closing(HTTPConnection(self.address, timeout=_PAGE_S)) as line:
                line.request("GET", "/status")
                text = line.getresponse().read(_LONGEST_PAGE_BYTES).decode(errors="replace")
        except (OSError, HTTPException):
            return ""
        status = _STATUS.search(text)
        heard = sorted((float(age), name) for name, age in _HEARD.findall(text))[:_MOST_NAMES]
        last = ", ".join(f"{name} {age:g} s ago" for age, name in heard)
        found = [] if status is None else [f"it says: {status[1]}"]
        return "; ".join(found + ([f"it has heard {last}"] if last else []))

    def _unreachable(self, error: Exception, seconds: float) -> RuntimeError:
        return RuntimeError(
            f"The lighthouse at {self.address} does not answer within {seconds:g} s ({error}). "
            "Start it with `lightning-loco lighthouse`, and see that this machine reaches its port."
        )

    def close(self) -> None:
        """Stop the signs of life; the others go on without this worker."""
        self.uptime.close()
        if self._heart is not None:
            self._heart.shutdown()
        self._client = None

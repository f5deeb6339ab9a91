"""The lighthouse: a server of torchft that hears who is alive and says who takes part."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any, NamedTuple

from torchft.coordination import LighthouseClient, ManagerServer

from lightning_loco.elastic.uptime import Uptime

HEARTBEAT_S = 0.1
"""Time between two signs of life."""

_LOOPBACK = "127.0.0.1:0"
_PAUSE_S = 0.2


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

    Args:
        address: ``"host:port"`` of the lighthouse.
        name: Of this worker, unlike that of any other.
        timeout_s: Longest wait for a connection, in seconds.

    Raises:
        RuntimeError: If nobody answers there.
    """

    def __init__(self, address: str, name: str, timeout_s: float) -> None:
        self.name = name
        self._url = address if "://" in address else f"http://{address}"
        self._address = address
        self._patience = timedelta(seconds=timeout_s)
        self._client: LighthouseClient | None = None
        self._uptime = Uptime(address)
        try:
            self._heart = ManagerServer(
                replica_id=name,
                lighthouse_addr=self._url,
                hostname=socket.gethostname(),
                bind=_LOOPBACK,  # nobody needs it, and it obeys whoever reaches it
                store_addr="",
                world_size=1,
                heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
                connect_timeout=self._patience,
                quorum_retries=0,
            )
        except (RuntimeError, TimeoutError) as error:
            raise self._unreachable(error, timeout_s) from error

    def quorum(self, told: dict[str, Any], wait_s: float) -> Quorum | None:
        """Ask to take part, and wait for the others; not before the lighthouse has heard of all.

        Args:
            told: What the others should know of this worker, as plain values.
            wait_s: Longest wait, in seconds.

        Returns:
            All who take part; None if they are not together after that time.

        Raises:
            RuntimeError: If the lighthouse cannot be reached for that long.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self._uptime.wait(deadline)
                left_s = max(_PAUSE_S, deadline - time.monotonic())
                if self._client is None:
                    self._client = LighthouseClient(self._url, timedelta(seconds=left_s))
                found = self._client.quorum(self.name, timedelta(seconds=left_s), data=told)
            except TimeoutError:
                return None
            except (RuntimeError, ConnectionError) as error:
                self._client = None
                if self._uptime.is_closed or time.monotonic() + _PAUSE_S > deadline:
                    raise self._unreachable(error, wait_s) from error
                time.sleep(_PAUSE_S)
                continue
            members = [Member(one.replica_id, one.data or {}) for one in found.participants]
            return Quorum(f"{found.created.seconds}.{found.created.nanos:09}", members)

    def _unreachable(self, error: Exception, seconds: float) -> RuntimeError:
        return RuntimeError(
            f"The lighthouse at {self._address} does not answer within {seconds:g} s ({error}). "
            "Start it with `lightning-loco lighthouse`, and see that this machine reaches its port."
        )

    def close(self) -> None:
        """Stop the signs of life; the others go on without this worker."""
        self._heart.shutdown()
        self._uptime.close()
        self._client = None

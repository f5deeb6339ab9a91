"""All machines join at machine 0, which sends each of them the facts of all and, later, findings.

The messages, in this order: every machine sends :class:`Hello` and receives :class:`Participants`
(or :class:`Refusal`), sends :class:`~lightning_loco.tools.doctor.connectivity.Results` and receives
:class:`Findings`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_loco.tools.doctor.connectivity import (
    CONNECT_SHARE,
    FAILURES,
    BadMessageError,
    ConnectError,
    Results,
    connect,
    connect_to_all,
    encode,
    listen,
    measure_bandwidth,
    receive,
)
from lightning_loco.tools.doctor.facts import (
    Facts,
    addresses_of,
    addresses_of_interfaces,
    name_of_interface,
    slow_names_of,
)
from lightning_loco.tools.doctor.findings import Finding, judge, matrix

MAX_MACHINES = 256
MAX_CHECKS_S = 5.0
"""Seconds for the checks once all machines have joined; half of the timeout if that is less."""

RESULTS_SHARE = 0.85
"""Share of the time for the checks after which machine 0 waits for no more results."""

BANDWIDTH_SHARE = 0.4
"""Share of the time for the checks in which the bandwidth is measured, after the connections.

It is not measured if the connections have taken longer than that.
"""

SLOW_NAME_S = 0.5
"""A name server that takes longer than this is reported."""

_HELLO_S = 2.0
_CONNECT_S = 2.0
_RETRY_S = 0.2
_EXTRA_WAIT_S = 0.5
_MAX_REFUSALS = 16
_SMALL_PACKET_BYTES = 500

_REMEDIES = {
    "silent": "Open TCP port {port} of machine 0, or pass as --master an address of machine 0 that "
    "all machines can reach",
    "refused": "Start lightning-loco doctor on machine 0 at the same time, or raise --timeout; if "
    "it is running there, open port {port}, and check that {host} is machine 0",
    "unreachable": "Pass as --master an address of machine 0 that all machines can reach",
}


@dataclass(frozen=True)
class RendezvousSettings:
    """Which machine this is, and where all machines join.

    Attributes:
        rank: Number of this machine; 0 for the one with the master's address.
        world: Number of machines.
        host: Host name or address of machine 0.
        port: Port on machine 0.
        timeout_s: Seconds for everything.
        measures: Whether machine 0 asks all to measure the bandwidth.
        started: Time of the monotonic clock at which ``timeout_s`` starts.

    Raises:
        ValueError: If a value is out of range.
    """

    rank: int
    world: int
    host: str
    port: int
    timeout_s: float
    measures: bool = False
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MAX_MACHINES:
            raise ValueError(f"--world must be 1 to {MAX_MACHINES} machines, got {self.world}.")
        if not 0 <= self.rank < self.world:
            raise ValueError(
                f"--rank must be 0 to {self.world - 1} for --world {self.world}, got {self.rank}."
            )
        if not 1 <= self.port <= 65535:
            raise ValueError(f"the port of --master must be 1 to 65535, got {self.port}.")
        if not 2 <= self.timeout_s <= 3600:
            raise ValueError(f"--timeout must be 2 to 3600 seconds, got {self.timeout_s:g}.")

    @property
    def checks_s(self) -> float:
        """Seconds for the checks after all machines have joined."""
        return min(MAX_CHECKS_S, self.timeout_s / 2)

    @property
    def join_deadline(self) -> float:
        """Time by which all machines must have joined and the checks start."""
        return self.deadline - self.checks_s

    @property
    def deadline(self) -> float:
        """Time by which everything must have finished."""
        return self.started + self.timeout_s


class RendezvousError(Exception):
    """Machine 0 cannot be reached, or refuses this machine. The text says what to do."""


# ------------------------------------------------------------------------------ messages


@dataclass(frozen=True)
class Hello:
    """The first message of a machine: its facts, and how many seconds it can wait for others."""

    facts: Facts
    max_wait_s: float


@dataclass(frozen=True)
class Refusal:
    """The reply to a machine that may not join."""

    reason: str


@dataclass(frozen=True)
class Participants:
    """The reply to a machine that has joined: the facts of all machines that have.

    Each of them measures the bandwidth to the next one for ``bandwidth_s`` seconds, 0 for not.
    """

    facts: tuple[Facts, ...]
    bandwidth_s: float


@dataclass(frozen=True)
class Findings:
    """The last message to all machines: the findings, and the lines of the matrix."""

    findings: tuple[Finding, ...]
    matrix: tuple[str, ...]


# ----------------------------------------------------------------- what machine 0 does


class RendezvousServer:
    """Waits for all machines, or until the first one can wait no longer; collects their results."""

    def __init__(self, settings: RendezvousSettings) -> None:
        self._settings = settings
        self._present: dict[int, Facts] = {}
        self._results: dict[int, Results | None] = {}
        self._refusals: list[str] = []
        self._findings = b""
        self._tasks: list[asyncio.Task[None]] = []
        self._all_joined = asyncio.Event()
        self._finished = asyncio.Event()

    async def serve(self) -> None:
        """Run until all machines have the findings; RendezvousError if the port is taken."""
        port = self._settings.port
        try:
            listener = listen("", port)
        except OSError as error:
            raise RendezvousError(
                f"port {port} of machine 0 ({socket.gethostname()}) is taken, perhaps by a run "
                f"that has not ended: {error.strerror}. End that run, or choose another port"
            ) from error
        with contextlib.suppress(OSError):  # small packets get through where large ones are lost
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_PACKET_BYTES)
        limit = 2**14 + 2**7 * self._settings.world  # facts, or results for all other machines
        server = await asyncio.start_server(self._handle, sock=listener, limit=limit)
        self._start_checks_in(self._settings.join_deadline - time.monotonic())
        try:
            await self._all_joined.wait()
            if self._tasks:
                left_s = self._settings.deadline - time.monotonic()
                await asyncio.wait(self._tasks, timeout=left_s)
        finally:
            server.close()

    def _start_checks_in(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(max(seconds, 0), self._all_joined.set)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: let the machine join, or refuse it."""
        try:
            hello = await receive(reader, _HELLO_S, Hello)
            address = str(writer.get_extra_info("peername")[0]).removeprefix("::ffff:")
            reason = self._refusal_reason(hello.facts, address)
            if reason:
                self._refusals = [*self._refusals, reason][:_MAX_REFUSALS]
                writer.write(encode(Refusal(reason)))
            else:
                await self._serve_machine(hello, reader, writer)
            writer.close()
            await writer.wait_closed()  # until everything is sent
        except (BadMessageError, OSError, asyncio.CancelledError):
            writer.transport.abort()

    def _refusal_reason(self, facts: Facts, address: str) -> str:
        """Return why a machine may not join; empty if it may."""
        world, reason = self._settings.world, ""
        if facts.world != world:
            reason = f"has --world {facts.world}, machine 0 has {world}: pass the same on all"
        elif not 0 <= facts.rank < world:
            reason = f"has a rank that does not exist: pass --rank 0 to {world - 1}"
        elif facts.rank in self._present:
            other = self._present[facts.rank].name
            reason = f"has the rank of another machine ({other}): pass another --rank on each"
        elif self._all_joined.is_set():
            reason = "joined after the checks had started: start all at once, or raise --timeout"
        return reason and f"machine {facts.rank} ({facts.name}, {address}) {reason}"

    async def _serve_machine(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send a machine the facts of all, receive its results, and send it the findings."""
        task, rank = asyncio.current_task(), hello.facts.rank
        assert task is not None
        self._tasks.append(task)
        self._present[rank] = hello.facts
        is_complete = len(self._present) == self._settings.world
        self._start_checks_in(0 if is_complete else hello.max_wait_s)
        await self._all_joined.wait()
        present = self.present
        bandwidth_s = BANDWIDTH_SHARE * self._settings.checks_s * self._settings.measures
        writer.write(encode(Participants(present, bandwidth_s)))
        results = None
        with contextlib.suppress(BadMessageError, OSError):
            results = await receive(reader, RESULTS_SHARE * self._settings.checks_s, Results)
        is_valid = results is not None and results.are_valid(rank, self._present)
        self._results[rank] = results if is_valid else None
        if len(self._results) == len(present):
            self._findings = self._judge(present)
            self._finished.set()
        await self._finished.wait()
        writer.write(self._findings)

    @property
    def present(self) -> tuple[Facts, ...]:
        """The facts of all machines that have joined, in the order of their ranks."""
        return tuple(facts for _, facts in sorted(self._present.items()))

    @property
    def results(self) -> list[Results]:
        """The results of all machines that have sent them, in the order of their ranks."""
        return [one for _, one in sorted(self._results.items()) if one is not None]

    def _judge(self, present: Sequence[Facts]) -> bytes:
        """Return the last message to all machines, from the results of all."""
        received = self.results
        findings = judge(self._settings.world, present, received, self._refusals)
        return encode(Findings(tuple(findings), tuple(matrix(present, received))))


# ------------------------------------------------------------ what every machine does


async def join(settings: RendezvousSettings, facts: Facts) -> tuple[Facts, Findings]:
    """Join the rendezvous, connect to all other machines, and receive the findings.

    This machine already answers the others. Returns its facts with the addresses that only a
    connection shows, and the findings. RendezvousError if machine 0 cannot be reached, or refuses
    it.
    """
    reader, writer = await _connect_to_machine_0(settings, facts.name)
    try:
        route = str(writer.get_extra_info("sockname")[0]).removeprefix("::ffff:")
        interface = name_of_interface(route, addresses_of_interfaces())
        if not facts.address:
            facts = dataclasses.replace(facts, address=route, interface=interface)
        facts = dataclasses.replace(facts, route_address=route, route_interface=interface)
        max_wait_s = max(settings.join_deadline - time.monotonic(), 0.0)
        writer.write(encode(Hello(facts, max_wait_s)))
        reply: Participants | Refusal = await receive(
            reader, max_wait_s + _EXTRA_WAIT_S, Participants, Refusal
        )
        if isinstance(reply, Refusal):
            raise RendezvousError(f"machine 0 refuses this one: {reply.reason}")
        # PyTorch's key-value store looks up the names of all clients on machine 0, and the name of
        # machine 0 on the others.
        looked_up = {str(writer.get_extra_info("peername")[0])}
        if settings.rank == 0:
            looked_up |= {one.route_address for one in reply.facts}
        others = [one for one in reply.facts if one.rank != settings.rank]
        started = time.monotonic()
        connections, slow_names = await asyncio.gather(
            connect_to_all(others, settings.checks_s),
            slow_names_of(sorted(looked_up), min(SLOW_NAME_S, CONNECT_SHARE * settings.checks_s)),
        )
        took_s, mbit_per_s = time.monotonic() - started, 0.0
        if others and took_s < reply.bandwidth_s and all(not one.failure for one in connections):
            following = next((one for one in others if one.rank > settings.rank), others[0])
            mbit_per_s = await measure_bandwidth(following, reply.bandwidth_s)
        writer.write(encode(Results(settings.rank, connections, slow_names, mbit_per_s)))
        return facts, await receive(reader, settings.deadline - time.monotonic(), Findings)
    except (BadMessageError, OSError) as error:
        raise RendezvousError(
            f"machine 0 at {settings.host}:{settings.port} has ended too early, or the connection "
            "to it is broken, or what listens there is another program, perhaps a run that has not "
            "ended, or another version: choose another port, and install the same version on all"
        ) from error
    finally:
        writer.transport.abort()


async def _connect_to_machine_0(
    settings: RendezvousSettings, name: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to machine 0, and retry until the join deadline, since it may start later."""
    this = f"machine {settings.rank} ({name})"
    while True:
        text = (
            f"{this} cannot resolve {settings.host}: pass the address of machine 0 as --master, or "
            "write the name into /etc/hosts"
        )
        for address in await addresses_of(settings.host):
            limit_s = max(min(_CONNECT_S, settings.join_deadline - time.monotonic()), _RETRY_S)
            try:
                return await connect(address, settings.port, limit_s, 2**16 * settings.world)
            except ConnectError as error:
                failure = str(error)
                where = f"[{address}]" if ":" in address else address
                remedy = _REMEDIES[failure].format(host=settings.host, port=settings.port)
                text = (
                    f"{this} cannot reach machine 0 at {where}:{settings.port}: "
                    f"{FAILURES[failure]}. {remedy}"
                )
        if time.monotonic() + _RETRY_S > settings.join_deadline:
            raise RendezvousError(text)
        await asyncio.sleep(_RETRY_S)

"""All machines meet at machine 0, which tells each who has come and then what all have found."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_loco.doctor.connectivity import (
    CONNECT_SHARE,
    FAILURES,
    ConnectError,
    Results,
    connect,
    connect_to_all,
    listen,
)
from lightning_loco.doctor.facts import (
    Facts,
    addresses_of,
    addresses_of_interfaces,
    name_of_interface,
    slow_names_of,
)
from lightning_loco.doctor.messages import BadMessageError, encode, receive
from lightning_loco.doctor.report import Finding, judge, matrix

MOST_MACHINES = 256
MOST_CHECKS_S = 5.0
"""Seconds for the checks, once the machines have met; half of the whole time if that is less."""

RESULTS_SHARE = 0.85
"""Share of them after which machine 0 waits for no more results."""

SLOW_NAME_S = 0.5
"""A name server that takes longer is reported."""

_HELLO_S = 2.0
_CONNECT_S = 2.0
_AGAIN_S = 0.2
_GRACE_S = 0.5
_MOST_REFUSED = 16
_SMALL_BYTES = 500

_WHAT_TO_DO = {
    "silent": "Open TCP port {port} of machine 0, or give --master an address of it that all reach",
    "refused": "Start lightning-loco doctor on machine 0 within the same seconds, or raise "
    "--timeout; if it runs there, open port {port}, and see that {host} is machine 0",
    "unreachable": "Give --master an address of machine 0 that all reach",
}


@dataclass(frozen=True)
class Job:
    """Which machine this is, and where all meet.

    Attributes:
        rank: Its number, 0 for the one with the master's address.
        world: How many machines there are.
        host: Name or address of machine 0.
        port: There.
        timeout_s: Seconds for everything.
        began: Time of the monotonic clock from which they count.
    """

    rank: int
    world: int
    host: str
    port: int
    timeout_s: float
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MOST_MACHINES:
            raise ValueError(f"--world must be 1 to {MOST_MACHINES} machines, got {self.world}.")
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
        """How much of the time is for the checks."""
        return min(MOST_CHECKS_S, self.timeout_s / 2)

    @property
    def meet_by(self) -> float:
        """When the checks must begin."""
        return self.deadline - self.checks_s

    @property
    def deadline(self) -> float:
        """When everything must be over."""
        return self.began + self.timeout_s


class RendezvousError(Exception):
    """Machine 0 cannot be reached, or refuses this machine; the text says what to do."""


# ----------------------------------------------------------------------- what is sent


@dataclass(frozen=True)
class Hello:
    """The first message of a machine: its facts, and for how many seconds it can wait."""

    facts: Facts
    patience_s: float


@dataclass(frozen=True)
class Refusal:
    """The answer to a machine that does not belong here."""

    reason: str


@dataclass(frozen=True)
class Roster:
    """The answer to the others: who has come. Each then connects to all and sends its results."""

    present: tuple[Facts, ...]


@dataclass(frozen=True)
class Report:
    """The last message to all: what the results mean, and the lines of the matrix."""

    findings: tuple[Finding, ...]
    matrix: tuple[str, ...]


# ------------------------------------------------------------------ what machine 0 does


class Rendezvous:
    """Waits until all are there, or the first can wait no longer, and collects their results.

    Args:
        job: Of machine 0.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._present: dict[int, Facts] = {}
        self._results: dict[int, Results | None] = {}
        self._refused: list[str] = []
        self._report = b""
        self._tasks: list[asyncio.Task[None]] = []
        self._has_begun = asyncio.Event()
        self._has_ended = asyncio.Event()

    async def hold(self) -> None:
        """Do all that, for those who connect to the port.

        Raises:
            RendezvousError: If the port is taken.
        """
        try:
            listening = listen("", self._job.port)
        except OSError as error:
            raise RendezvousError(
                f"port {self._job.port} of machine 0 ({socket.gethostname()}) is taken, perhaps by "
                f"a run that has not ended: {error.strerror}. End that, or choose another port"
            ) from error
        with contextlib.suppress(OSError):  # small packets both ways pass where large ones do not
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_BYTES)
        limit = 2**14 + 2**7 * self._job.world  # facts, or contacts with all others
        server = await asyncio.start_server(self._serve, sock=listening, limit=limit)
        self._begin_within(self._job.meet_by - time.monotonic())
        try:
            await self._has_begun.wait()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self._job.deadline - time.monotonic())
        finally:
            server.close()

    def _begin_within(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(max(seconds, 0), self._has_begun.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await receive(reader, _HELLO_S, Hello)
            came_from = str(writer.get_extra_info("peername")[0]).removeprefix("::ffff:")
            reason = self._reason_against(hello.facts, came_from)
            if reason:
                self._refused = [*self._refused, reason][:_MOST_REFUSED]
                writer.write(encode(Refusal(reason)))
            else:
                await self._serve_guest(hello, reader, writer)
            writer.close()
            await writer.wait_closed()  # until all is sent
        except (BadMessageError, OSError, asyncio.CancelledError):
            writer.transport.abort()

    def _reason_against(self, facts: Facts, came_from: str) -> str:
        world, reason = self._job.world, ""
        if facts.world != world:
            reason = (
                f"expects {facts.world} machines and machine 0 {world}: give all the same --world"
            )
        elif not 0 <= facts.rank < world:
            reason = f"has a number that does not exist: give --rank 0 to {world - 1}"
        elif facts.rank in self._present:
            other = self._present[facts.rank].name
            reason = f"has the number of another machine ({other}): give each its own --rank"
        elif self._has_begun.is_set():
            reason = "has come after the others had begun: start all at once, or raise --timeout"
        return reason and f"machine {facts.rank} ({facts.name}, {came_from}) {reason}"

    async def _serve_guest(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Tell a machine who has come, and then what all have found."""
        task, rank = asyncio.current_task(), hello.facts.rank
        assert task is not None
        self._tasks.append(task)
        self._present[rank] = hello.facts
        self._begin_within(0 if len(self._present) == self._job.world else hello.patience_s)
        await self._has_begun.wait()
        present = tuple(facts for _, facts in sorted(self._present.items()))
        writer.write(encode(Roster(present)))
        results = None
        with contextlib.suppress(BadMessageError, OSError):
            results = await receive(reader, RESULTS_SHARE * self._job.checks_s, Results)
        is_sound = results is not None and results.are_of(rank, self._present)
        self._results[rank] = results if is_sound else None
        if len(self._results) == len(present):
            self._report = self._judge(present)
            self._has_ended.set()
        await self._has_ended.wait()
        writer.write(self._report)

    def _judge(self, present: Sequence[Facts]) -> bytes:
        """The last message to all, once all results are there."""
        received = [one for _, one in sorted(self._results.items()) if one is not None]
        findings = judge(self._job.world, present, received, self._refused)
        return encode(Report(tuple(findings), tuple(matrix(present, received))))


# ------------------------------------------------------------- what every machine does


async def take_part(job: Job, facts: Facts) -> tuple[Facts, Report]:
    """Connect to machine 0, then to all others, and receive what all have found.

    Args:
        job: Which machine this is.
        facts: Of this machine, which answers to the others.

    Returns:
        The facts, with the addresses that only a connection shows, and what all have found.

    Raises:
        RendezvousError: If machine 0 cannot be reached, or refuses this machine.
    """
    reader, writer = await _connect_to_machine_0(job, facts.name)
    try:
        route = str(writer.get_extra_info("sockname")[0]).removeprefix("::ffff:")
        interface = name_of_interface(route, addresses_of_interfaces())
        if not facts.address:
            facts = dataclasses.replace(facts, address=route, interface=interface)
        facts = dataclasses.replace(facts, route_address=route, route_interface=interface)
        patience_s = max(job.meet_by - time.monotonic(), 0.0)
        writer.write(encode(Hello(facts, patience_s)))
        roster: Roster | Refusal = await receive(reader, patience_s + _GRACE_S, Roster, Refusal)
        if isinstance(roster, Refusal):
            raise RendezvousError(f"machine 0 refuses this one: {roster.reason}")
        # PyTorch's key-value store asks for the names of all on machine 0, else for that of 0.
        asked = {str(writer.get_extra_info("peername")[0])}
        if job.rank == 0:
            asked |= {one.route_address for one in roster.present}
        others = [one for one in roster.present if one.rank != job.rank]
        contacts, slow_names = await asyncio.gather(
            connect_to_all(others, job.checks_s),
            slow_names_of(sorted(asked), min(SLOW_NAME_S, CONNECT_SHARE * job.checks_s)),
        )
        writer.write(encode(Results(job.rank, contacts, slow_names)))
        return facts, await receive(reader, job.deadline - time.monotonic(), Report)
    except (BadMessageError, OSError) as error:
        raise RendezvousError(
            f"machine 0 at {job.host}:{job.port} has ended too early, or the way to it is broken, "
            "or what listens there is another program, perhaps a run that has not ended, or "
            "another version: choose another port, and install the same version on all"
        ) from error
    finally:
        writer.transport.abort()


async def _connect_to_machine_0(
    job: Job, name: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Again and again, since it may be started later."""
    this = f"machine {job.rank} ({name})"
    while True:
        text = (
            f"{this} does not find {job.host}: give --master the address of machine 0, or write "
            "the name into /etc/hosts"
        )
        for address in await addresses_of(job.host):
            limit_s = max(min(_CONNECT_S, job.meet_by - time.monotonic()), _AGAIN_S)
            try:
                return await connect(address, job.port, limit_s, 2**16 * job.world)
            except ConnectError as error:
                failure = str(error)
                where = f"[{address}]" if ":" in address else address
                text = (
                    f"{this} cannot reach machine 0 at {where}:{job.port}: {FAILURES[failure]}. "
                    f"{_WHAT_TO_DO[failure].format(host=job.host, port=job.port)}"
                )
        if time.monotonic() + _AGAIN_S > job.meet_by:
            raise RendezvousError(text)
        await asyncio.sleep(_AGAIN_S)

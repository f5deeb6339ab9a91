"""What machines tell each other: at the meeting, and at the doors."""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL = 1
"""Changes when these records do."""

# ---------------------------------------------------------------------- at the meeting


@dataclass(frozen=True)
class Door:
    """Where a machine listens as gloo or NCCL would.

    Attributes:
        use: ``gloo``, ``NCCL`` or ``gloo and NCCL``.
        interface: Name of the network interface, as far as it is known.
        address: Of the interface.
        port: A free one, taken as gloo and NCCL take theirs.
    """

    use: str
    interface: str
    address: str
    port: int


@dataclass(frozen=True)
class Facts:
    """What a machine knows of itself.

    Attributes:
        rank: Its number.
        world: How many machines it believes in.
        name: Its host name.
        host: The same for machines that share a kernel and a network, so that loopback works.
        name_address: What the host name leads to; empty if it leads nowhere.
        name_s: Seconds that it took to find out.
        doors: Where it listens.
        faults: What is wrong with its interfaces, with the mend.
        road_interface: By which it reaches the master; empty if unknown.
        road_address: The same.
        versions: Of Python and of packages.
        open_files: How many this process may have open.
        ports: The range from which free ports are taken.
    """

    rank: int
    world: int
    name: str
    host: str
    name_address: str
    name_s: float
    doors: tuple[Door, ...]
    faults: tuple[str, ...]
    road_interface: str
    road_address: str
    versions: dict[str, str]
    open_files: int
    ports: str


@dataclass(frozen=True)
class Hello:
    """The first word of a machine at the meeting.

    Attributes:
        protocol: :data:`PROTOCOL`.
        facts: Of the machine.
        patience_s: Seconds that it can wait for the others.
    """

    protocol: int
    facts: Facts
    patience_s: float


@dataclass(frozen=True)
class Welcome:
    """The answer to it: the time of the meeting's clock."""

    clock_s: float


@dataclass(frozen=True)
class Refusal:
    """The answer to a machine that does not belong here."""

    reason: str


@dataclass(frozen=True)
class Roster:
    """Who has come; now each tries the doors of the others.

    Attributes:
        token: Shown at the doors, so that machines of another meeting are not taken for these.
        checks_s: Seconds for all that follows.
        present: Facts of those who have come.
        came_from: The addresses that they have come from.
    """

    token: str
    checks_s: float
    present: tuple[Facts, ...]
    came_from: tuple[str, ...]


@dataclass(frozen=True)
class Contact:
    """What came of trying one door of another machine.

    Attributes:
        source: Who tried.
        target: Whose door.
        door: Which of that machine's doors, from 0.
        failure: Empty if it is open, else one of :data:`FAILURES`.
        round_trip_s: Shortest of a few; 0 if unknown.
        bytes_per_s: As counted on the other side; 0 if unknown.
    """

    source: int
    target: int
    door: int
    failure: str
    round_trip_s: float
    bytes_per_s: float


FAILURES = ("silent", "refused", "unreachable", "stranger", "broken")
"""No answer; turned away; no way there; another program answers; the connection breaks."""


@dataclass(frozen=True)
class Results:
    """What a machine has found out about the others.

    Attributes:
        contacts: One for each of their doors.
        slow_lookups: Addresses for which the name server took too long.
        clock_offset_s: How far its own clock is ahead of machine 0's.
        clock_error_s: By how much that may be wrong.
    """

    contacts: tuple[Contact, ...]
    slow_lookups: tuple[str, ...]
    clock_offset_s: float
    clock_error_s: float

    def is_sound(self, rank: int, present: tuple[Facts, ...]) -> bool:
        """Whether these can be the results of a machine, given all who are there."""
        num_doors = {facts.rank: len(facts.doors) for facts in present}
        return all(
            one.source == rank
            and 0 <= one.door < num_doors.get(one.target, 0)
            and one.failure in ("", *FAILURES)
            for one in self.contacts
        )


@dataclass(frozen=True)
class Summary:
    """All that is known at the end.

    Attributes:
        present: Facts of those who have come.
        results: Theirs, in the same order; None of who has told nothing.
        refused: Why others were turned away.
    """

    present: tuple[Facts, ...]
    results: tuple[Results | None, ...]
    refused: tuple[str, ...]

    def is_sound(self) -> bool:
        """Whether its parts belong together."""
        return len(self.present) == len(self.results) and all(
            results is None or results.is_sound(facts.rank, self.present)
            for facts, results in zip(self.present, self.results, strict=False)
        )


# ------------------------------------------------------------------------- at the doors


@dataclass(frozen=True)
class Knock:
    """The first word at a door."""

    token: str
    rank: int


@dataclass(frozen=True)
class Here:
    """The answer to it: who is at home."""

    rank: int


@dataclass(frozen=True)
class Ping:
    """To be answered at once, by the same."""


@dataclass(frozen=True)
class Bulk:
    """Raw bytes follow; they are counted for so many seconds at most."""

    seconds: float


@dataclass(frozen=True)
class Counted:
    """How many bytes have come, in what time since the first."""

    count: int
    seconds: float

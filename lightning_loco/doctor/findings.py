"""What the facts and results of all machines mean: findings, each with its mend.

All machines judge the same summary by the same rules, so that each shows the same faults.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address

from lightning_loco.doctor.messages import Door, Facts, Summary

OK, WARNING, FAILED = "ok", "warning", "failed"

CHECKS = (
    "machines",
    "master port",
    "host names",
    "interfaces",
    "connections",
    "name server",
    "clocks",
    "versions",
    "open files",
    "packages",
    "hardware",
    "disk",
)
"""In the order in which they are shown."""

MOST_CLOCK_S = 1.0
SLOW_NAME_S = 0.5
FEWEST_OPEN_FILES = 1024


@dataclass(frozen=True)
class Finding:
    """What came of one check.

    Attributes:
        check: One of :data:`CHECKS`.
        status: ``ok``, ``warning`` or ``failed``.
        text: What is so; where something is wrong, also what to do.
    """

    check: str
    status: str
    text: str


def who(facts: Facts) -> str:
    """A machine as users know it."""
    return f"machine {facts.rank} ({facts.name})"


def is_loopback(address: str) -> bool:
    """Whether only the machine itself reaches an address; a text that is none does not count."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def judge_machines(summary: Summary, world: int) -> Iterator[Finding]:
    """Who is missing, who has been turned away, and who has gone before the end."""
    present = {facts.rank for facts in summary.present}
    missing = [str(rank) for rank in range(world) if rank not in present]
    if missing:
        some = "machine " if len(missing) == 1 else "machines "
        have = " has" if len(missing) == 1 else " have"
        text = (
            f"{some}{', '.join(missing)}{have} not come: start lightning-loco doctor there within "
            "the same seconds, or raise --timeout; if it runs, it says there what is in the way"
        )
        yield Finding("machines", FAILED, text)
    for reason in summary.refused:
        yield Finding("machines", FAILED, reason)
    for facts, results in zip(summary.present, summary.results, strict=True):
        if results is None:
            text = (
                f"{who(facts)} came, and has told no results: its process has ended, or its "
                "connection to machine 0 has stalled"
            )
            yield Finding("machines", FAILED, text)
    if not missing:
        yield Finding("machines", OK, f"{world} of {world} have come")


def judge_names(summary: Summary) -> Iterator[Finding]:
    """Whether host names lead somewhere, quickly, and to addresses that others reach."""
    several = len({facts.host for facts in summary.present}) > 1
    for facts in summary.present:
        local = [door for door in facts.doors if is_loopback(door.address)]
        if several and local:
            yield from (_only_local(facts, door) for door in local)
        elif not facts.name_address:
            text = (
                f"{who(facts)}: its host name leads to no address: write it into /etc/hosts, or "
                "set GLOO_SOCKET_IFNAME there"
            )
            yield Finding("host names", WARNING, text)
        elif facts.name_s > SLOW_NAME_S:
            text = (
                f"{who(facts)}: it took {facts.name_s:.1f} s to look up its own host name: write "
                "it into /etc/hosts"
            )
            yield Finding("host names", WARNING, text)


def _only_local(facts: Facts, door: Door) -> Finding:
    """Of a door that no other machine reaches, be it by the host name or by a variable."""
    is_known = facts.road_interface and not is_loopback(facts.road_address)
    interface = facts.road_interface if is_known else "INTERFACE"
    address = facts.road_address if is_known else "its own address"
    variable = "NCCL_SOCKET_IFNAME" if door.use == "NCCL" else "GLOO_SOCKET_IFNAME"
    what = f"{door.use} listens at {door.address}, where no other machine reaches it"
    mend = f"set {variable}={interface} there"
    if door.use == "NCCL" or not (facts.name_address == "" or is_loopback(facts.name_address)):
        return Finding("interfaces", FAILED, f"{who(facts)}: {what}: {mend}")
    text = (
        f"{who(facts)}: its host name leads to {facts.name_address or 'no address'}, so that "
        f"{what}: {mend}, or write {address} into its /etc/hosts"
    )
    return Finding("host names", FAILED, text)


def judge_interfaces(summary: Summary) -> Iterator[Finding]:
    """Whether the interfaces that variables name are there."""
    for facts in summary.present:
        for fault in facts.faults:
            yield Finding("interfaces", FAILED, f"{who(facts)}: {fault}")


def judge_lookups(summary: Summary) -> Iterator[Finding]:
    """Whether the name server holds up PyTorch's key-value store."""
    for facts, results in zip(summary.present, summary.results, strict=True):
        if results is not None and results.slow_lookups:
            text = (
                f"{who(facts)}: no name for {', '.join(results.slow_lookups[:3])} within half a "
                "second, and PyTorch's key-value store asks for the name of each connection: set "
                'RES_OPTIONS="timeout:1 attempts:1", or write the addresses into /etc/hosts'
            )
            yield Finding("name server", WARNING, text)


def judge_clocks(summary: Summary) -> Iterator[Finding]:
    """Whether clocks agree with machine 0's."""
    largest = 0.0
    for facts, results in zip(summary.present, summary.results, strict=True):
        if results is None:
            continue
        offset_s, error_s = results.clock_offset_s, results.clock_error_s
        largest = max(largest, abs(offset_s))
        if abs(offset_s) - error_s > MOST_CLOCK_S:
            side = "ahead of" if offset_s > 0 else "behind"
            text = (
                f"the clock of {who(facts)} is {abs(offset_s):.1f} s {side} machine 0's: times in "
                "logs will not fit together; run a time service (chrony, systemd-timesyncd) there"
            )
            yield Finding("clocks", WARNING, text)
    if largest <= MOST_CLOCK_S:
        yield Finding("clocks", OK, f"at most {largest:.2f} s apart from machine 0's")


def judge_versions(summary: Summary) -> Iterator[Finding]:
    """Whether all run the same versions."""
    for name in dict.fromkeys(key for facts in summary.present for key in facts.versions):
        where: dict[str, list[str]] = defaultdict(list)
        for facts in summary.present:
            where[facts.versions.get(name, "unknown")].append(str(facts.rank))
        if len(where) > 1:
            found = "; ".join(
                f"{version} on {'machine' if len(ranks) == 1 else 'machines'} {', '.join(ranks)}"
                for version, ranks in where.items()
            )
            yield Finding("versions", FAILED, f"{name} differs: {found}. Install the same on all")
        elif "not installed" in where:
            yield Finding("versions", FAILED, f"{name} is not installed on any machine")


def judge_open_files(summary: Summary) -> Iterator[Finding]:
    """Whether connections will find room."""
    for facts in summary.present:
        if facts.open_files < FEWEST_OPEN_FILES:
            text = (
                f"{who(facts)}: a process may have only {facts.open_files:,} files open, and "
                "connections count as files: raise it with ulimit -n 65536"
            )
            yield Finding("open files", WARNING, text)

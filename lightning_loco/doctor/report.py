"""What the facts and connections of all machines mean, what to do, and how it is printed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from lightning_loco.doctor.connectivity import FAILURES, Results
from lightning_loco.doctor.facts import Facts

OK, WARNING, FAILED = "ok", "warning", "failed"

FEWEST_OPEN_FILES = 1024
LEAST_DISK_BYTES = 2**30
LARGEST_MATRIX = 16
"""More machines have no matrix, only the longest round trip."""

_MOST_NAMED = 8


@dataclass(frozen=True)
class Finding:
    """What came of one check.

    Attributes:
        check: Its name.
        status: ``ok``, ``warning`` or ``failed``.
        text: What is so; where something is wrong, also what to do.
    """

    check: str
    status: str
    text: str


def judge(
    world: int, present: Sequence[Facts], results: Sequence[Results], refused: Iterable[str]
) -> list[Finding]:
    """What machine 0 tells all.

    Args:
        world: How many machines there should be.
        present: Facts of those that have come.
        results: Of those that have sent them.
        refused: Why others were refused.
    """
    found = [*_judge_machines(world, present, results), *_judge_names(present, results)]
    found += [Finding("machines", FAILED, reason) for reason in refused]
    found += _judge_connections(present, results)
    return [*found, *judge_facts(present)]


def judge_facts(present: Sequence[Facts]) -> list[Finding]:
    """What is wrong with machines by themselves, and which versions differ."""
    found = list(_judge_versions(present))
    for facts in present:
        who = _who(facts)
        found += [Finding("interfaces", FAILED, f"{who}: {fault}") for fault in facts.faults]
        if facts.open_files < FEWEST_OPEN_FILES:
            text = (
                f"{who}: a process may have only {facts.open_files:,} files open, and connections "
                "count as files: raise it with ulimit -n 65536"
            )
            found.append(Finding("open files", WARNING, text))
        if facts.free_bytes < LEAST_DISK_BYTES:
            text = f"{who}: {_free(facts)}: checkpoints may not fit; delete something"
            found.append(Finding("disk", WARNING, text))
    return found


# -------------------------------------------------------------------------- the checks


def _judge_machines(
    world: int, present: Sequence[Facts], results: Sequence[Results]
) -> Iterator[Finding]:
    """Who is missing, and who has gone before the end."""
    missing = set(range(world)) - {facts.rank for facts in present}
    if missing:
        text = (
            f"{_numbered(missing)} {'has' if len(missing) == 1 else 'have'} not come: start "
            "lightning-loco doctor there within the same seconds, or raise --timeout; if it runs, "
            "it says there what is in the way"
        )
        yield Finding("machines", FAILED, text)
    for facts in present:
        if facts.rank not in {one.rank for one in results}:
            text = (
                f"{_who(facts)} came, and has sent no results: its process has ended, or its "
                "connection to machine 0 has stalled"
            )
            yield Finding("machines", FAILED, text)
    if not missing:
        yield Finding("machines", OK, f"{world} of {world} have come")


def _judge_connections(present: Sequence[Facts], results: Sequence[Results]) -> Iterator[Finding]:
    """Which machines cannot reach which others: one finding for all to whom the same happens."""
    facts_of = {facts.rank: facts for facts in present}
    contacts = [(one.rank, contact) for one in results for contact in one.contacts]
    failed: dict[tuple[int, str], list[str]] = defaultdict(list)
    for source, contact in contacts:
        if contact.failure:
            failed[contact.target, contact.failure].append(_who(facts_of[source]))
    for (rank, failure), sources in sorted(failed.items()):
        there = facts_of[rank]
        address = f"[{there.address}]" if ":" in there.address else there.address
        some = ", ".join(sources[:_MOST_NAMED])
        if len(sources) > _MOST_NAMED:
            some += f" and {len(sources) - _MOST_NAMED} others"
        text = f"{some} cannot reach {_who(there)} at {address}:{there.port}: "
        yield Finding("connections", FAILED, text + _explain(there, failure))
    if contacts and not failed:
        longest_s, source, target = max(
            (one.round_trip_s, rank, one.target) for rank, one in contacts
        )
        longest = f"{1000 * longest_s:.2f} ms, from machine {source} to machine {target}"
        text = f"all {len(contacts)} are open; the longest round trip is {longest}"
        yield Finding("connections", OK, text)


def _explain(there: Facts, failure: str) -> str:
    """Why a machine cannot be reached, and what to do."""
    why, first = FAILURES[failure], ""
    change = f"set GLOO_SOCKET_IFNAME on machine {there.rank} to an interface that all reach"
    is_known = there.route_interface and not _is_loopback(there.route_address)
    if is_known and there.route_interface != there.interface:
        change = (
            f"set GLOO_SOCKET_IFNAME={there.route_interface} on machine {there.rank}, by which it "
            "reaches machine 0"
        )
    if _is_loopback(there.address):
        why = "only that machine itself reaches this address"
        if there.name_address in ("", there.address):
            why += ", to which its host name leads"
            change += f", or write {there.route_address if is_known else 'its address'} into its "
            change += "/etc/hosts"
    elif failure in ("silent", "refused"):
        ports = "all TCP ports" if there.ports == "any" else f"the TCP ports {there.ports}"
        first = f"open {ports} of machine {there.rank} to the others, since any free one is taken, "
    elif failure == "stalled":
        first = f"lower the MTU of {there.interface or 'the interface'} on both, "
    advice = f"{first}or {change}" if first else change
    return f"{why}. {advice[0].upper()}{advice[1:]}"


def _judge_names(present: Sequence[Facts], results: Sequence[Results]) -> Iterator[Finding]:
    """Whether the name server holds up PyTorch's key-value store."""
    who = {facts.rank: _who(facts) for facts in present}
    for one in results:
        if one.slow_names:
            text = (
                f"{who[one.rank]}: no name for {', '.join(one.slow_names[:3])} within half a "
                "second, and PyTorch's key-value store asks for the name of each connection: set "
                'RES_OPTIONS="timeout:1 attempts:1", or write the addresses into /etc/hosts'
            )
            yield Finding("name server", WARNING, text)


def _judge_versions(present: Sequence[Facts]) -> Iterator[Finding]:
    """Whether all machines have the same versions."""
    for name in dict.fromkeys(key for facts in present for key in facts.versions):
        where: dict[str, set[int]] = defaultdict(set)
        for facts in present:
            where[facts.versions.get(name, "unknown")].add(facts.rank)
        if len(where) > 1:
            found = "; ".join(f"{one} on {_numbered(ranks)}" for one, ranks in where.items())
            yield Finding("versions", FAILED, f"{name} differs: {found}. Install the same on all")
        elif "not installed" in where:
            yield Finding("versions", FAILED, f"{name} is not installed on any machine")


def _who(facts: Facts) -> str:
    return f"machine {facts.rank} ({facts.name})"


def _numbered(ranks: set[int]) -> str:
    return f"machine{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _free(facts: Facts) -> str:
    return f"{facts.free_bytes / 2**30:.1f} GiB free in the current folder"


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


# ---------------------------------------------------------------------------- printing


def matrix(present: Sequence[Facts], results: Sequence[Results]) -> list[str]:
    """Lines of a table: from each machine to each other one, milliseconds or the failure."""
    ranks = [facts.rank for facts in present]
    if not 2 <= len(ranks) <= LARGEST_MATRIX:
        return []
    cells = {
        (one.rank, contact.target): contact.failure or f"{1000 * contact.round_trip_s:.2f}"
        for one in results
        for contact in one.contacts
    }
    cells |= {(rank, rank): "-" for rank in ranks}
    lines = [f"{'round trip, ms':<14}" + "".join(f"{f'to {target}':>12}" for target in ranks)]
    for source in ranks:
        row = (f"{cells.get((source, target), '?'):>12}" for target in ranks)
        lines.append(f"{f'from {source}':<14}" + "".join(row))
    return lines


def report(head: str, own: Facts, findings: Sequence[Finding], table: Sequence[str]) -> str:
    """What a user reads; where nothing was found, the facts of this machine.

    Args:
        head: The first line.
        own: Facts of this machine.
        findings: Of :func:`judge` or :func:`judge_facts`.
        table: Lines of :func:`matrix`.
    """
    here = own.address or "the address by which it reaches machine 0"
    here += f" ({own.interface})" if own.interface else ""
    facts = {
        "interfaces": f"gloo at {here}; {own.name} is {own.name_address or 'without an address'}",
        "versions": ", ".join(f"{name} {version}" for name, version in own.versions.items()),
        "open files": f"{own.open_files:,}",
        "hardware": own.hardware,
        "environment": own.environment or "no variables of gloo, NCCL or OpenMP",
        "disk": _free(own),
    }
    found = {one.check for one in findings}
    shown = [*findings, *(Finding(one, OK, facts[one]) for one in facts if one not in found)]
    order = ["machines", "connections", "name server", *facts]
    shown.sort(key=lambda one: [*order, one.check].index(one.check))
    rows = [f"{one.check:<14}{one.status:<9}{one.text}" for one in shown]
    num_failed = sum(one.status == FAILED for one in shown)
    num_warnings = sum(one.status == WARNING for one in shown)
    end = f"{num_failed} failed" if num_failed else "all well"
    if num_warnings:
        end += f", {num_warnings} warning{'s' * (num_warnings > 1)}"
    lines = [f"lightning-loco doctor: {head}", "", *rows, ""]
    return "\n".join([*lines, *table, *[""] * bool(table), end])

"""Findings from the facts and connections of all machines, and how they are printed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from lightning_loco.tools.doctor.connectivity import FAILURES, Results
from lightning_loco.tools.doctor.facts import Facts

OK, WARNING, FAILED = "ok", "warning", "failed"

MIN_OPEN_FILES = 1024
MIN_DISK_BYTES = 2**30
MAX_MATRIX_SIZE = 16
"""For more machines only the longest round trip is printed, no matrix."""

_MAX_NAMED = 8


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: Name of the check.
        status: ``ok``, ``warning`` or ``failed``.
        text: What was found and, unless the status is ``ok``, what to do.
    """

    check: str
    status: str
    text: str


def judge(
    world: int, present: Sequence[Facts], results: Sequence[Results], refused: Iterable[str]
) -> list[Finding]:
    """Derive the findings that machine 0 sends to all: ``world`` machines should be ``present``.

    ``results`` has one entry for each machine that sent them; ``refused`` has the reason for each
    machine that was refused.
    """
    found = [*_judge_machines(world, present, results), *_judge_names(present, results)]
    found += [Finding("machines", FAILED, reason) for reason in refused]
    found += _judge_connections(present, results)
    return [*found, *judge_facts(present)]


def judge_facts(present: Sequence[Facts]) -> list[Finding]:
    """Derive the findings about single machines, and about versions that differ."""
    found = list(_judge_versions(present))
    for facts in present:
        who = _who(facts)
        found += [Finding("interfaces", FAILED, f"{who}: {fault}") for fault in facts.faults]
        if facts.open_files < MIN_OPEN_FILES:
            text = (
                f"{who}: a process may have only {facts.open_files:,} files open, and connections "
                "count as files: raise it with ulimit -n 65536"
            )
            found.append(Finding("open files", WARNING, text))
        if facts.free_bytes < MIN_DISK_BYTES:
            text = f"{who}: {_free(facts)}: checkpoints may not fit; free some space"
            found.append(Finding("disk", WARNING, text))
    return found


# -------------------------------------------------------------------------- the checks


def _judge_machines(
    world: int, present: Sequence[Facts], results: Sequence[Results]
) -> Iterator[Finding]:
    """Which machines are missing or have sent no results."""
    missing = set(range(world)) - {facts.rank for facts in present}
    if missing:
        text = (
            f"{_numbered(missing)} {'has' if len(missing) == 1 else 'have'} not joined: start "
            "lightning-loco doctor there at the same time, or raise --timeout; if it is running "
            "there, its own output says what is wrong"
        )
        yield Finding("machines", FAILED, text)
    for facts in present:
        if facts.rank not in {one.rank for one in results}:
            text = (
                f"{_who(facts)} joined, but sent no results: its process has ended, or its "
                "connection to machine 0 has stalled"
            )
            yield Finding("machines", FAILED, text)
    if not missing:
        yield Finding("machines", OK, f"{world} of {world} have joined")


def _judge_connections(present: Sequence[Facts], results: Sequence[Results]) -> Iterator[Finding]:
    """Which machines cannot reach which others: one finding per target and kind of failure."""
    facts_of = {facts.rank: facts for facts in present}
    connections = [(one.rank, result) for one in results for result in one.connections]
    failed: dict[tuple[int, str], list[str]] = defaultdict(list)
    for source, result in connections:
        if result.failure:
            failed[result.target, result.failure].append(_who(facts_of[source]))
    for (rank, failure), sources in sorted(failed.items()):
        target = facts_of[rank]
        address = f"[{target.address}]" if ":" in target.address else target.address
        names = ", ".join(sources[:_MAX_NAMED])
        if len(sources) > _MAX_NAMED:
            names += f" and {len(sources) - _MAX_NAMED} others"
        text = f"{names} cannot reach {_who(target)} at {address}:{target.port}: "
        yield Finding("connections", FAILED, text + _explain(target, failure))
    if connections and not failed:
        longest_s, source, to = max(
            (one.round_trip_s, rank, one.target) for rank, one in connections
        )
        longest = f"{1000 * longest_s:.2f} ms, from machine {source} to machine {to}"
        text = f"all {len(connections)} are open; the longest round trip is {longest}"
        yield Finding("connections", OK, text)
    measured = [(one.mbit_per_s, one.rank) for one in results if one.mbit_per_s]
    if measured:
        slowest, source = min(measured)
        text = f"at least {slowest:,.0f} Mbit/s to the next machine, from machine {source}"
        yield Finding("bandwidth", OK, text)


def _explain(target: Facts, failure: str) -> str:
    """Return why a machine cannot be reached, and what to do."""
    why, first = FAILURES[failure], ""
    change = f"set GLOO_SOCKET_IFNAME on machine {target.rank} to an interface that all can reach"
    is_known = target.route_interface and not _is_loopback(target.route_address)
    if is_known and target.route_interface != target.interface:
        change = (
            f"set GLOO_SOCKET_IFNAME={target.route_interface} on machine {target.rank}, by which "
            "it reaches machine 0"
        )
    if _is_loopback(target.address):
        why = "only that machine itself can reach this address"
        if target.name_address in ("", target.address):
            why += ", to which its host name resolves"
            change += f", or write {target.route_address if is_known else 'its address'} into its "
            change += "/etc/hosts"
    elif failure in ("silent", "refused"):
        ports = "all TCP ports" if target.ports == "any" else f"the TCP ports {target.ports}"
        first = (
            f"open {ports} of machine {target.rank} to the others, since gloo uses any free one, "
        )
    elif failure == "stalled":
        first = f"lower the MTU of {target.interface or 'the interface'} on both, "
    advice = f"{first}or {change}" if first else change
    return f"{why}. {advice[0].upper()}{advice[1:]}"


def _judge_names(present: Sequence[Facts], results: Sequence[Results]) -> Iterator[Finding]:
    """Whether a slow name server delays PyTorch's key-value store."""
    who = {facts.rank: _who(facts) for facts in present}
    for one in results:
        if one.slow_names:
            text = (
                f"{who[one.rank]}: no name for {', '.join(one.slow_names[:3])} within half a "
                "second, and PyTorch's key-value store looks up the name of each connection: set "
                'RES_OPTIONS="timeout:1 attempts:1", or write the addresses into /etc/hosts'
            )
            yield Finding("name server", WARNING, text)


def _judge_versions(present: Sequence[Facts]) -> Iterator[Finding]:
    """Which versions differ between machines, and which packages are missing."""
    for name in dict.fromkeys(key for facts in present for key in facts.versions):
        ranks_with: dict[str, set[int]] = defaultdict(set)
        for facts in present:
            ranks_with[facts.versions.get(name, "unknown")].add(facts.rank)
        if len(ranks_with) > 1:
            found = "; ".join(f"{one} on {_numbered(ranks)}" for one, ranks in ranks_with.items())
            yield Finding("versions", FAILED, f"{name} differs: {found}. Install the same on all")
        elif "not installed" in ranks_with:
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
    """Return the lines of a table: round trips in milliseconds, or failures, for each pair."""
    ranks = [facts.rank for facts in present]
    if not 2 <= len(ranks) <= MAX_MATRIX_SIZE:
        return []
    cells = {
        (one.rank, result.target): result.failure or f"{1000 * result.round_trip_s:.2f}"
        for one in results
        for result in one.connections
    }
    cells |= {(rank, rank): "-" for rank in ranks}
    lines = [f"{'round trip, ms':<14}" + "".join(f"{f'to {target}':>12}" for target in ranks)]
    for source in ranks:
        row = (f"{cells.get((source, target), '?'):>12}" for target in ranks)
        lines.append(f"{f'from {source}':<14}" + "".join(row))
    return lines


def report(head: str, own: Facts, findings: Sequence[Finding], table: Sequence[str]) -> str:
    """Return the text that is printed: the findings, and facts of this machine without findings.

    It begins with ``head`` and ends with ``table``, the lines of :func:`matrix`.
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
    checked = {one.check for one in findings}
    shown = [*findings, *(Finding(one, OK, facts[one]) for one in facts if one not in checked)]
    order = ["machines", "connections", "bandwidth", "name server", *facts]
    shown.sort(key=lambda one: [*order, one.check].index(one.check))
    rows = [f"{one.check:<14}{one.status:<9}{one.text}" for one in shown]
    num_failed = sum(one.status == FAILED for one in shown)
    num_warnings = sum(one.status == WARNING for one in shown)
    end = f"{num_failed} failed" if num_failed else "all well"
    if num_warnings:
        end += f", {num_warnings} warning{'s' * (num_warnings > 1)}"
    lines = [f"lightning-loco doctor: {head}", "", *rows, ""]
    return "\n".join([*lines, *table, *[""] * bool(table), end])


def write_json(
    path: str, present: Sequence[Facts], results: Sequence[Results], findings: Sequence[Finding]
) -> None:
    """Write machines, findings and the measured links; ``links`` has the form of a file of links.

    The bandwidth of a machine is the larger one of its connections to the next machine and from
    the one before; its latency is half of its longest round trip. ``links`` is null if the
    bandwidth of a connection was not measured. ValueError if the file cannot be written.
    """
    content = {
        "machines": [{"rank": one.rank, "name": one.name} for one in present],
        "findings": [asdict(one) for one in findings],
        "links": _links(results) if len(results) == len(present) > 1 else None,
    }
    try:
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--json cannot write {path}: {error.strerror}.") from error


def _links(results: Sequence[Results]) -> dict[str, Any] | None:
    if any(one.failure for own in results for one in own.connections) or any(
        own.mbit_per_s == 0 for own in results
    ):
        return None
    links = [
        {
            "mbit_per_s": round(max(own.mbit_per_s, before.mbit_per_s), 3),
            "latency_s": max(one.round_trip_s for one in own.connections) / 2,
        }
        for before, own in zip([results[-1], *results[:-1]], results, strict=True)
    ]
    slowest = min(links, key=lambda link: link["mbit_per_s"])
    return {"default": slowest, "workers": dict(enumerate(links))}

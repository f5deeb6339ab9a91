"""What it means that a door could not be reached, and how far and wide the roads are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lightning_loco.doctor.findings import FAILED, OK, Finding, is_loopback, who
from lightning_loco.doctor.messages import Contact, Door, Facts, Summary

_WHAT = {
    "silent": "no answer, as when a firewall drops packets",
    "refused": "the connection is refused, by a firewall or by another machine with that address",
    "unreachable": "there is no way to that address",
    "stranger": "something else answers there, so another machine has that address, too",
    "broken": "the connection opens and then breaks or stalls, as when large packets are lost",
}


def judge_connections(summary: Summary) -> Iterator[Finding]:
    """Which machines cannot reach which others, and what to do about it."""
    facts_of = {facts.rank: facts for facts in summary.present}
    contacts = all_contacts(summary)
    groups: dict[tuple[int, int, str], list[Facts]] = defaultdict(list)
    for one in contacts:
        if one.failure:
            groups[one.target, one.door, one.failure].append(facts_of[one.source])
    for (target, number, failure), sources in sorted(groups.items(), key=lambda item: item[0]):
        there = facts_of[target]
        door = there.doors[number]
        if is_loopback(door.address) and any(one.host != there.host for one in sources):
            continue  # told with the host names
        some = ", ".join(map(who, sources))
        text = (
            f"{some} cannot reach {who(there)} at {_joined(door)} ({door.use}): "
            f"{_WHAT[failure]}. {_mend(there, door, failure)}"
        )
        yield Finding("connections", FAILED, text)
    num_open = sum(not one.failure for one in contacts)
    if not contacts:
        yield Finding("connections", OK, "none to try")
    elif num_open == len(contacts):
        yield Finding("connections", OK, f"all {num_open} are open")


def all_contacts(summary: Summary) -> list[Contact]:
    """Those of all machines."""
    return [one for results in summary.results if results for one in results.contacts]


def _joined(door: Door) -> str:
    address = f"[{door.address}]" if ":" in door.address else door.address
    return f"{address}:{door.port}"


def _mend(there: Facts, door: Door, failure: str) -> str:
    variable = "NCCL_SOCKET_IFNAME" if door.use == "NCCL" else "GLOO_SOCKET_IFNAME"
    is_other = there.road_interface not in ("", door.interface)
    other = is_other and not is_loopback(there.road_address)
    elsewhere = (
        f"set {variable}={there.road_interface} on machine {there.rank}, by which it reaches "
        "machine 0"
        if other
        else f"set {variable} on machine {there.rank} to an interface that the others reach"
    )
    if failure in ("unreachable", "stranger"):
        return elsewhere[0].upper() + elsewhere[1:]
    if failure == "broken":
        return f"Lower the MTU of {door.interface or 'the interface'} on both, or {elsewhere}"
    ports = "all TCP ports" if there.ports == "any" else f"the TCP ports {there.ports}"
    return (
        f"Open {ports} of machine {there.rank} to the others, since any free one is taken, or "
        f"{elsewhere}"
    )


def measured(summary: Summary, most: int) -> list[str]:
    """Lines of a table: round trip and throughput of the narrowest roads.

    Args:
        summary: Of all machines.
        most: How many lines at most.
    """
    open_ones = [one for one in all_contacts(summary) if not one.failure]
    known = sorted((one for one in open_ones if one.bytes_per_s), key=lambda one: one.bytes_per_s)
    lines = [
        f"{f'{one.source} -> {one.target}':<12}{1000 * one.round_trip_s:>10.2f} ms"
        f"{one.bytes_per_s / 1e6:>12.2f} MB/s"
        for one in known[:most]
    ]
    if not lines:
        return []
    some = "" if len(known) <= most else f", the {most} slowest of {len(known)}"
    if len(known) < len(open_ones):
        some += f"; {len(open_ones) - len(known)} not measured in time"
    return [f"{'machines':<12}{'round trip':>13}{'throughput':>17}{some}", *lines]

"""All findings of a run, with and without a meeting."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from lightning_loco.doctor.findings import (
    CHECKS,
    FAILED,
    OK,
    Finding,
    judge_clocks,
    judge_interfaces,
    judge_lookups,
    judge_machines,
    judge_names,
    judge_open_files,
    judge_versions,
    who,
)
from lightning_loco.doctor.messages import Facts, Summary
from lightning_loco.doctor.place import Place
from lightning_loco.doctor.roads import judge_connections
from lightning_loco.doctor.visit import MasterError


def judge(summary: Summary, own: Facts, world: int) -> list[Finding]:
    """What the summary of a meeting means.

    Args:
        summary: Of all who have come.
        own: Facts of this machine, which are shown where nothing is wrong.
        world: How many machines should have come.
    """
    found = chain(
        judge_machines(summary, world),
        judge_names(summary),
        judge_interfaces(summary),
        judge_connections(summary),
        judge_lookups(summary),
        judge_clocks(summary),
        judge_versions(summary),
        judge_open_files(summary),
    )
    return _complete([*found, Finding("master port", OK, "reached by all who have come")], own)


def judge_alone(place: Place, own: Facts, error: MasterError) -> list[Finding]:
    """What a machine can say that has not been at the meeting, or not until its end."""
    alone = Summary((own,), (None,), ())
    found = chain(
        [Finding("master port", FAILED, _text_of(place, own, error))],
        judge_names(alone),
        judge_interfaces(alone),
        judge_open_files(alone),
    )
    return _complete(list(found), own, without=("machines", "connections", "name server", "clocks"))


def _complete(found: list[Finding], own: Facts, without: tuple[str, ...] = ()) -> list[Finding]:
    """Findings in the order of the checks; those of which nothing is wrong say what is so here."""
    named = {one.check for one in found}
    found += [one for one in _all_well(own) if one.check not in {*named, *without}]
    return sorted(found, key=lambda one: CHECKS.index(one.check))


def _all_well(own: Facts) -> Iterator[Finding]:
    yield Finding("host names", OK, f"{own.name} is {own.name_address}")
    doors = ", ".join(
        f"{door.use} at {door.address}" + (f" ({door.interface})" if door.interface else "")
        for door in own.doors
    )
    yield Finding("interfaces", OK, doors)
    yield Finding("name server", OK, "quick enough")
    yield Finding("versions", OK, ", ".join(f"{k} {v}" for k, v in own.versions.items()))
    yield Finding("open files", OK, f"{own.open_files:,}")


def _text_of(place: Place, own: Facts, error: MasterError) -> str:
    host = f"[{error.address}]" if ":" in error.address else error.address
    port, where = place.port, f"machine 0 at {host}:{place.port}"
    cannot = f"{who(own)} cannot reach {where}: "
    texts = {
        "name": f"{who(own)} does not find {place.host}: give --master the address of machine 0, "
        "or write the name into /etc/hosts",
        "refused": f"{cannot}the connection is refused. Start lightning-loco doctor on machine 0 "
        f"within the same seconds, or raise --timeout; if it runs there, open port {port}, and see "
        f"that {place.host} is machine 0",
        "silent": f"{cannot}no answer, as when a firewall drops packets. Open TCP port {port} of "
        "machine 0, or give --master an address of it that all reach",
        "unreachable": f"{cannot}{error.detail}. Give --master an address of machine 0 that all "
        "reach",
        "stranger": f"{cannot}what listens there is no doctor, perhaps a run that has not ended, "
        "or another version. Choose another port, and install the same version on all",
        "turned_away": f"machine 0 has turned this one away: {error.detail}",
        "lost": f"{where} was there, and has gone before the end, or the way to it is broken",
        "taken": f"port {port} of machine 0 ({own.name}) is taken, perhaps by a run that has not "
        f"ended: {error.detail}. End that, or choose another port",
    }
    return texts[error.kind]

"""The command: from the command line and the launcher's variables to the exit status.

If a launcher starts several processes on a machine, only the first one checks it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from lightning_loco.tools.doctor.connectivity import Results, answering, listen
from lightning_loco.tools.doctor.facts import Facts, gather_facts
from lightning_loco.tools.doctor.findings import FAILED, Finding, judge_facts, report, write_json
from lightning_loco.tools.doctor.rendezvous import (
    Findings,
    RendezvousError,
    RendezvousServer,
    RendezvousSettings,
    join,
)

DEFAULT_PORT = 29500

_LAUNCHERS = (  # variables: number of this machine, number of machines, number of the process
    ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("RANK", "WORLD_SIZE", ""),  # by hand
    ("SLURM_NODEID", "SLURM_NNODES", "SLURM_LOCALID"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--master",
        metavar="HOST:PORT",
        help=f"address of machine 0 and a free port there, {DEFAULT_PORT} if none is given; default"
        " MASTER_ADDR and MASTER_PORT, or the first node of SLURM",
    )
    parser.add_argument("--rank", type=int, metavar="I", help="number of this machine, from 0")
    parser.add_argument("--world", type=int, metavar="N", help="number of machines")
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="seconds for everything, including the wait for machines started later; default 10",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="machine 0 has all machines measure the bandwidth as well, each to the next one at "
        "the same time, and writes machines, findings and links to FILE; other machines ignore it",
    )


def run(args: argparse.Namespace) -> int:
    """Check this machine, and the connections to the others if there are any; print a report.

    Returns 0 if no check has failed, else 1. ValueError if an argument is missing or out of range.
    """
    settings = find_settings(args, os.environ)
    if args.rank is None and not is_first(os.environ):
        return 0
    return asyncio.run(_check(settings, os.environ, args.json))


# ------------------------------------------------------------------ which machine this is


def find_settings(
    args: argparse.Namespace, environ: Mapping[str, str]
) -> RendezvousSettings | None:
    """Combine the command line and the launcher's variables; None for this machine alone.

    ValueError, which names the argument, if something is missing or out of range.
    """
    rank_name, world_name, _ = _launcher(environ)
    rank = _number(environ, rank_name) if args.rank is None else args.rank
    world = _number(environ, world_name) if args.world is None else args.world
    host, port = _split(args.master) if args.master else _master(environ)
    if rank is None and world is None and not host:
        return None
    if rank is None or world is None or not host:
        given = {"--master": host, "--rank": rank is not None, "--world": world is not None}
        missing = " ".join(name for name, value in given.items() if not value)
        raise ValueError(f"missing: {missing}, which no launcher has set either.")
    return RendezvousSettings(rank, world, host, port, args.timeout, bool(args.json))


def is_first(environ: Mapping[str, str]) -> bool:
    """Whether this is the first process on its machine, which does the checks."""
    return environ.get(_launcher(environ)[2], "0") == "0"


def _launcher(environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the names of the variables of the launcher that is in use."""
    return next((names for names in _LAUNCHERS if names[0] in environ), _LAUNCHERS[1])


def _number(environ: Mapping[str, str], name: str) -> int | None:
    if name in environ and not environ[name].isdecimal():
        raise ValueError(f"{name} must be a number, got {environ[name]!r}.")
    return int(environ[name]) if name in environ else None


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return address and port of machine 0 as a run would use them; empty address if unknown."""
    job = environ.get("SLURM_JOB_ID", "")
    default = 15000 + int(job[-4:]) if job[-4:].isdecimal() else DEFAULT_PORT
    port = _number(environ, "MASTER_PORT") or default
    # torchrun's own key-value store already uses that port.
    port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return environ.get("MASTER_ADDR") or _first_node(environ.get("SLURM_JOB_NODELIST", "")), port


def _first_node(nodes: str) -> str:
    """Return the first node of SLURM's list of nodes.

    Example:
        >>> _first_node("node[07-09,12],other3"), _first_node("alpha,beta")
        ('node07', 'alpha')
    """
    first = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in first.groups()) if first else ""


def _split(master: str) -> tuple[str, int]:
    """Split ``host``, ``host:port``, ``[address]:port`` or an IPv6 address into host and port."""
    if master.count(":") > 1 and not master.startswith("["):
        return master, DEFAULT_PORT
    try:
        parts = urlsplit(f"//{master}")
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        raise ValueError(f"--master must be HOST:PORT, got {master!r}.") from None
    return parts.hostname or "", port


# ----------------------------------------------------------------------------- the checks


async def _check(
    settings: RendezvousSettings | None, environ: Mapping[str, str], path: str | None
) -> int:
    rank, world = (settings.rank, settings.world) if settings else (0, 1)
    facts = await gather_facts(rank, world, environ)
    found = Findings(tuple(judge_facts([facts])), ())
    present: Sequence[Facts] = [facts]
    results: Sequence[Results] = ()
    head = f"{facts.name} alone"
    if settings is not None:
        rendezvous = f"{settings.host}:{settings.port}"
        head = f"machine {rank} of {world} ({facts.name}), rendezvous at {rendezvous}"
        try:
            facts, found, present, results = await _check_together(settings, facts)
        except RendezvousError as error:
            failed = Finding("machines", FAILED, str(error))
            found = Findings((failed, *found.findings), ())
    print(report(head, facts, found.findings, found.matrix), flush=True)
    if path and rank == 0:
        write_json(path, present, results, found.findings)
    return int(any(one.status == FAILED for one in found.findings))


async def _check_together(
    settings: RendezvousSettings, facts: Facts
) -> tuple[Facts, Findings, Sequence[Facts], Sequence[Results]]:
    """Join the rendezvous, which runs on machine 0 at the same time.

    Returns the facts of this machine, the findings and, on machine 0, facts and results of all.
    """
    try:
        listener = listen(facts.address, 0)
    except OSError as error:
        raise RendezvousError(
            f"gloo cannot listen on {facts.address} ({facts.interface}): {error.strerror}. Set "
            "GLOO_SOCKET_IFNAME to another interface"
        ) from error
    facts = dataclasses.replace(facts, port=listener.getsockname()[1])
    async with answering(facts, listener):
        if settings.rank:
            return *await join(settings, facts), (), ()
        server = RendezvousServer(settings)
        _, result = await asyncio.gather(server.serve(), join(settings, facts))
        return *result, server.present, server.results

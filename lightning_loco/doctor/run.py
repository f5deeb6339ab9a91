"""One run of the doctor, from the command line and a launcher's variables to the exit status.

In a job with several ranks on a machine, only the first rank of each examines it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from lightning_loco.doctor.connectivity import answering, listen
from lightning_loco.doctor.facts import Facts, gather_facts
from lightning_loco.doctor.rendezvous import (
    Job,
    Rendezvous,
    RendezvousError,
    Report,
    take_part,
)
from lightning_loco.doctor.report import FAILED, Finding, judge_facts, report

DEFAULT_PORT = 29500

_LAUNCHERS = (  # variables with a machine's number, how many there are, a rank's number there
    ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("RANK", "WORLD_SIZE", ""),  # by hand
    ("SLURM_NODEID", "SLURM_NNODES", "SLURM_LOCALID"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a user may say."""
    parser.add_argument(
        "--master",
        metavar="HOST:PORT",
        help=f"address of machine 0 and a free port there, {DEFAULT_PORT} if none is given; default"
        " MASTER_ADDR and MASTER_PORT, or the first node of SLURM",
    )
    parser.add_argument("--rank", type=int, metavar="I", help="number of this machine, from 0")
    parser.add_argument("--world", type=int, metavar="N", help="how many machines there are")
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="for everything, waiting for machines that are started later included; default 10",
    )


def run(args: argparse.Namespace) -> int:
    """Examine this machine together with the others, if there are, and print what is found.

    Args:
        args: Of :func:`add_arguments`.

    Returns:
        0 if all is well, 1 if something has failed.

    Raises:
        ValueError: If an argument is missing or out of range.
    """
    job = find_job(args, os.environ)
    if args.rank is None and not is_first(os.environ):
        return 0
    return asyncio.run(_examine(job, os.environ))


# ------------------------------------------------------------------ which machine this is


def find_job(args: argparse.Namespace, environ: Mapping[str, str]) -> Job | None:
    """Put together what the command line and the launcher say.

    Args:
        args: Of :func:`add_arguments`.
        environ: The variables of this process.

    Returns:
        None if nothing is said at all, which means this machine alone.

    Raises:
        ValueError: If something is missing or out of range; it says which argument.
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
    return Job(rank, world, host, port, args.timeout)


def is_first(environ: Mapping[str, str]) -> bool:
    """Whether this is the first process on its machine, which examines it."""
    return environ.get(_launcher(environ)[2], "0") == "0"


def _launcher(environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Names of the variables that count."""
    return next((names for names in _LAUNCHERS if names[0] in environ), _LAUNCHERS[1])


def _number(environ: Mapping[str, str], name: str) -> int | None:
    if name in environ and not environ[name].isdecimal():
        raise ValueError(f"{name} must be a number, got {environ[name]!r}.")
    return int(environ[name]) if name in environ else None


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Address and port of machine 0 as a run would take them; the address is empty if unknown."""
    job = environ.get("SLURM_JOB_ID", "")
    default = 15000 + int(job[-4:]) if job[-4:].isdecimal() else DEFAULT_PORT
    port = _number(environ, "MASTER_PORT") or default
    # torchrun's own key-value store is behind that port already.
    port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return environ.get("MASTER_ADDR") or _first_node(environ.get("SLURM_JOB_NODELIST", "")), port


def _first_node(nodes: str) -> str:
    """The first of SLURM's list of nodes.

    Example:
        >>> _first_node("node[07-09,12],other3"), _first_node("alpha,beta")
        ('node07', 'alpha')
    """
    first = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in first.groups()) if first else ""


def _split(master: str) -> tuple[str, int]:
    """Host and port of ``host``, ``host:port``, ``[address]:port`` or an IPv6 address."""
    if master.count(":") > 1 and not master.startswith("["):
        return master, DEFAULT_PORT
    try:
        parts = urlsplit(f"//{master}")
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        raise ValueError(f"--master must be HOST:PORT, got {master!r}.") from None
    return parts.hostname or "", port


# ------------------------------------------------------------------------ the examination


async def _examine(job: Job | None, environ: Mapping[str, str]) -> int:
    rank, world = (job.rank, job.world) if job else (0, 1)
    facts = await gather_facts(rank, world, environ)
    found = Report(tuple(judge_facts([facts])), ())
    head = f"{facts.name} alone"
    if job is not None:
        head = f"machine {rank} of {world} ({facts.name}), sync point at {job.host}:{job.port}"
        try:
            facts, found = await _meet(job, facts)
        except RendezvousError as error:
            failed = Finding("machines", FAILED, str(error))
            found = Report((failed, *found.findings), ())
    print(report(head, facts, found.findings, found.matrix), flush=True)
    return int(any(one.status == FAILED for one in found.findings))


async def _meet(job: Job, facts: Facts) -> tuple[Facts, Report]:
    """Take part in the rendezvous, which machine 0 holds as well."""
    try:
        listening = listen(facts.address, 0)
    except OSError as error:
        raise RendezvousError(
            f"gloo cannot listen at {facts.address} ({facts.interface}): {error.strerror}. Set "
            "GLOO_SOCKET_IFNAME to another interface"
        ) from error
    facts = dataclasses.replace(facts, port=listening.getsockname()[1])
    async with answering(facts, listening):
        if job.rank:
            return await take_part(job, facts)
        _, found = await asyncio.gather(Rendezvous(job).hold(), take_part(job, facts))
        return found

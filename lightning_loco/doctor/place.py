"""Which machine this is and where all meet: from the command line, torchrun's variables or SLURM's.

In a job with several ranks on a machine, only the first rank of each examines it.
"""

from __future__ import annotations

import argparse
import random
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

MOST_MACHINES = 256
DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where this machine stands among all.

    Attributes:
        rank: Its number, 0 for the one with the master's address.
        world: How many machines there are.
        host: Name or address of machine 0.
        port: There.
        gloo_interface: Value of ``GLOO_SOCKET_IFNAME``, empty if not set.
        nccl_interface: Value of ``NCCL_SOCKET_IFNAME``, empty if not set.
        timeout_s: Seconds for everything.
        is_first: Whether this is the process that examines the machine.
    """

    rank: int
    world: int
    host: str
    port: int
    gloo_interface: str
    nccl_interface: str
    timeout_s: float
    is_first: bool = True

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
        "--interface",
        default="",
        metavar="NAME",
        help="network interface; default GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="for everything, waiting for machines that are started later included; default 10",
    )


def find_place(args: argparse.Namespace, environ: Mapping[str, str]) -> Place:
    """Put together what the command line and the launcher say.

    Args:
        args: Of :func:`add_arguments`.
        environ: The variables of this process.

    Returns:
        This machine alone, which meets itself, if nothing is said at all.

    Raises:
        ValueError: If something is missing or out of range; it says which argument.
    """
    rank, world, is_first = _numbers(environ)
    if args.rank is not None:
        rank, is_first = args.rank, True
    world = world if args.world is None else args.world
    host, port = _split(args.master) if args.master else _master(environ)
    if rank is None and world is None and not host:
        rank, world, host, port = 0, 1, LOOPBACK, _free_port()
    if rank is None or world is None or not host:
        given = {"--master": host, "--rank": rank is not None, "--world": world is not None}
        missing = " ".join(name for name, value in given.items() if not value)
        raise ValueError(f"missing: {missing}, which no launcher has set either.")
    return Place(
        rank=rank,
        world=world,
        host=host,
        port=port,
        gloo_interface=args.interface or environ.get("GLOO_SOCKET_IFNAME", ""),
        nccl_interface=args.interface or environ.get("NCCL_SOCKET_IFNAME", ""),
        timeout_s=args.timeout,
        is_first=is_first,
    )


def _numbers(environ: Mapping[str, str]) -> tuple[int | None, int | None, bool]:
    """Number of this machine, how many there are, and whether this is the first process here."""
    if "GROUP_RANK" in environ:
        return (
            _number(environ, "GROUP_RANK"),
            _number(environ, "GROUP_WORLD_SIZE"),
            environ.get("LOCAL_RANK", "0") == "0",
        )
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _number(environ, "RANK"), _number(environ, "WORLD_SIZE"), True
    if "SLURM_NODEID" in environ:
        return (
            _number(environ, "SLURM_NODEID"),
            _number(environ, "SLURM_NNODES"),
            environ.get("SLURM_LOCALID", "0") == "0",
        )
    return None, None, True


def _number(environ: Mapping[str, str], name: str) -> int | None:
    if name not in environ:
        return None
    if not environ[name].isdecimal():
        raise ValueError(f"{name} must be a number, got {environ[name]!r}.")
    return int(environ[name])


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Address and port of machine 0 as a run would take them; the address is empty if unknown."""
    job = environ.get("SLURM_JOB_ID", "")
    default = 15000 + int(job[-4:]) if job[-4:].isdecimal() else DEFAULT_PORT
    port = _number(environ, "MASTER_PORT") or default
    # torchrun's own key-value store is behind that port already.
    port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = environ.get("MASTER_ADDR") or _first_node(environ.get("SLURM_JOB_NODELIST", ""))
    return host, port


def _free_port() -> int:
    """One below those that systems give to connections, so that nobody takes it meanwhile."""
    for port in random.sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("No free port between 20000 and 30000 was found on this machine.")


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
    bracketed = re.fullmatch(r"\[(.*)\](?::(\d+))?", master)
    if bracketed is None and master.count(":") > 1:
        return master, DEFAULT_PORT
    found = bracketed or re.fullmatch(r"([^:]+)(?::(\d+))?", master)
    if found is None:
        raise ValueError(f"--master must be HOST:PORT, got {master!r}.")
    return found.group(1), int(found.group(2) or DEFAULT_PORT)

"""Facts that a machine gathers about itself: addresses, versions, hardware and limits."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from lightning_loco.__about__ import __version__
from lightning_loco._util.background import run_in_thread

T = TypeVar("T")

NAME_LIMIT_S = 2.0
"""Longest wait for the name server."""

MAX_TEXT_LENGTH = 2000
"""Longest text in the facts, in characters."""

TIMEOUTS = (TimeoutError, asyncio.TimeoutError)
"""Both are the same class since Python 3.11."""

PACKAGE = "lightning-loco"
PACKAGES = ("torch", "lightning", PACKAGE)
VARIABLES = ("GLOO_", "NCCL_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RES_OPTIONS")
"""Prefixes of the environment variables that are shown."""


@dataclass(frozen=True)
class Facts:
    """Facts of a machine about itself.

    Attributes:
        rank: Its number.
        world: Number of machines that it was started with.
        name: Its host name.
        name_address: Address of the host name; empty if it has none.
        address: Address on which gloo listens; empty if it is not known before the rendezvous.
        interface: Network interface of ``address``; empty if unknown.
        faults: Errors in the variables that name interfaces, and what to do.
        port: Port on which this machine answers the others.
        route_address: Its address on the connection to machine 0; empty if there is none.
        route_interface: Network interface of ``route_address``; empty if unknown.
        versions: Versions of Python and packages, and a checksum of this package's code.
        hardware: Number of cores and GPUs.
        environment: Variables that affect connections and the number of threads.
        open_files: Number of files that a process may have open.
        ports: The range of free ports, as ``40000-40999``; ``any`` if it is unknown.
        free_bytes: Free space on the disk of the current folder.
    """

    rank: int
    world: int
    name: str
    name_address: str
    address: str
    interface: str
    faults: tuple[str, ...]
    port: int
    route_address: str
    route_interface: str
    versions: dict[str, str]
    hardware: str
    environment: str
    open_files: int
    ports: str
    free_bytes: int


async def gather_facts(rank: int, world: int, environ: Mapping[str, str]) -> Facts:
    """Gather what machine ``rank`` of ``world`` can know before the rendezvous."""
    name, interfaces = socket.gethostname(), addresses_of_interfaces()
    name_addresses = await addresses_of(name)
    chosen = environ.get("GLOO_SOCKET_IFNAME", "")
    address = (
        interfaces.get(chosen.split(",")[0], "") if chosen else address_of_gloo(name_addresses)
    )
    names = list(interfaces) or [name for _, name in socket.if_nameindex()]
    shown = [
        f"{key}={value}" for key, value in sorted(environ.items()) if key.startswith(VARIABLES)
    ]
    return Facts(
        rank=rank,
        world=world,
        name=name,
        name_address=name_addresses[0] if name_addresses else "",
        address=address,
        interface=name_of_interface(address, interfaces),
        faults=faults_of_variables(environ, names),
        port=0,
        route_address="",
        route_interface="",
        versions={**versions(), "code of lightning-loco": _code_checksum()},
        hardware=_hardware(),
        environment=", ".join(shown)[:MAX_TEXT_LENGTH],
        open_files=_open_files(),
        ports=_ports(),
        free_bytes=shutil.disk_usage(".").free,
    )


# ------------------------------------------------------------------- names and addresses


async def in_thread(limit_s: float, call: Callable[[], T]) -> T:
    """Run a call in a thread, because the system may block it, as it may name lookups.

    TimeoutError if it does not return in time; its thread ends with the process.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(run_in_thread(call)), max(limit_s, 0))
    except TIMEOUTS as error:
        raise TimeoutError(f"no answer within {limit_s:g} s") from error


async def addresses_of(name: str) -> list[str]:
    """Look up the addresses of a host, in the system's order; none if that takes too long."""
    look_up = partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    try:
        found = await in_thread(NAME_LIMIT_S, look_up)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def slow_names_of(addresses: list[str], limit_s: float) -> tuple[str, ...]:
    """Return the addresses whose names take longer to look up, as PyTorch's store does it."""
    mapped = [one if ":" in one else f"::ffff:{one}" for one in addresses]
    calls = (in_thread(limit_s, partial(socket.getnameinfo, (one, 0, 0, 0), 0)) for one in mapped)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    return tuple(
        one
        for one, answer in zip(mapped, answers, strict=True)
        if isinstance(answer, TimeoutError)  # an error such as "unknown name" is a quick answer
    )


def address_of_gloo(name_addresses: list[str]) -> str:
    """Return where gloo listens by default: the first address of the host name that is local."""
    for address in name_addresses:
        with suppress(OSError), socket.create_server((address, 0), family=family_of(address)):
            return address
    return "127.0.0.1"


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an IPv4 or IPv6 address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def addresses_of_interfaces() -> dict[str, str]:
    """Return the first address of each network interface, if Linux lets this user look it up.

    A UDP socket that is bound to an interface gets the interface's address when it connects;
    nothing is sent. IPv4 is tried only on interfaces with a route, because one without an IPv4
    address would get the address of another interface.
    """
    found: dict[str, str] = {}
    try:
        routes = Path("/proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return found
    with_ipv4 = {"lo", *(route.split()[0] for route in routes)}
    for _, name in socket.if_nameindex():
        for target in ("2001:db8::1", *["127.0.0.1"] * (name in with_ipv4)):
            with suppress(OSError), socket.socket(family_of(target), socket.SOCK_DGRAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
                probe.connect((target, 9))
                found[name] = str(probe.getsockname()[0])
    return found


def name_of_interface(address: str, interfaces: Mapping[str, str]) -> str:
    """Return the interface with an address; empty if it is unknown or ambiguous."""
    if address.startswith("127."):
        address = "127.0.0.1"
    names = [name for name, one in interfaces.items() if one == address]
    return names[0] if len(names) == 1 else ""


def faults_of_variables(environ: Mapping[str, str], names: list[str]) -> tuple[str, ...]:
    """Return what is wrong with the variables that name network interfaces, and what to do.

    Example:
        >>> faults_of_variables({"NCCL_SOCKET_IFNAME": "^docker,lo"}, ["lo", "eth0"])
        ()
    """
    gloo, nccl = environ.get("GLOO_SOCKET_IFNAME", ""), environ.get("NCCL_SOCKET_IFNAME", "")
    wrong = [name for name in gloo.split(",") if name and name not in names]
    text = "here that is up and has an address"
    faults = [f"GLOO_SOCKET_IFNAME={gloo}: there is no interface {name} {text}" for name in wrong]
    # NCCL expects prefixes. ^ excludes interfaces instead, = expects whole names.
    rule = nccl.removeprefix("^").removeprefix("=").split(",")
    is_not, is_exact = nccl.startswith("^"), nccl.removeprefix("^").startswith("=")
    fits = [n in rule if is_exact else n.startswith(tuple(filter(None, rule))) for n in names]
    if nccl and all(one == is_not for one in fits):
        faults.append(f"NCCL_SOCKET_IFNAME={nccl} matches no interface here")
    choice = ", ".join(name for name in names if not name.startswith("lo")) or "none"
    return tuple(f"{fault}; set it to one of {choice}" for fault in faults)


# --------------------------------------------------------------------- the machine itself


def versions() -> dict[str, str]:
    """Return the versions of Python (major.minor) and of packages, without importing them."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def describe_versions() -> str:
    """Return the versions in one line, this package first.

    Example:
        >>> describe_versions()
        'lightning-loco ... (python ..., torch ..., lightning ...)'
    """
    others = ", ".join(f"{name} {value}" for name, value in versions().items() if name != PACKAGE)
    return f"{PACKAGE} {__version__} ({others})"


def _code_checksum() -> str:
    """Return a checksum of this package's files; two checkouts may have the same version."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _hardware() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cores: {cores}, NVIDIA GPUs: {len(list(Path('/dev').glob('nvidia[0-9]*')))}"


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def _ports() -> str:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return "any"
    return f"{low}-{high}"

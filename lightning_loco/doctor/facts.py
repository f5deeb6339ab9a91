"""What a machine finds out about itself."""

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
from lightning_loco.background import begin
from lightning_loco.doctor.messages import LONGEST_TEXT, TIMEOUTS

T = TypeVar("T")

NAME_LIMIT_S = 2.0
"""Longest wait for the name server."""

PACKAGE = "lightning-loco"
PACKAGES = ("torch", "lightning", PACKAGE)
VARIABLES = ("GLOO_", "NCCL_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RES_OPTIONS")
"""Beginnings of the environment variables that are shown."""


@dataclass(frozen=True)
class Facts:
    """What a machine knows of itself.

    Attributes:
        rank: Its number.
        world: How many machines it believes in.
        name: Its host name.
        name_address: The address of the host name; empty if it has none.
        address: Where gloo listens; before the rendezvous empty if only a connection will tell.
        interface: The network interface of this address; empty if unknown.
        faults: What is wrong with the variables that name interfaces, and what to do.
        port: At which this machine listens for the others.
        route_address: With which it reaches machine 0; empty if it does not.
        route_interface: The network interface of this address; empty if unknown.
        versions: Of Python, of packages, and a checksum of this package's code.
        hardware: Cores and GPUs.
        environment: The variables that decide how machines connect, and with how many threads.
        open_files: How many a process may have open.
        ports: The range of free ports, as ``40000-40999``; ``any`` if the system does not tell.
        free_bytes: On the disk of the current folder.
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
    """All that a machine knows before it listens and meets the others.

    Args:
        rank: Of this machine.
        world: How many machines there are.
        environ: The variables of the run.
    """
    name, interfaces = socket.gethostname(), addresses_of_interfaces()
    leads_to = await addresses_of(name)
    chosen = environ.get("GLOO_SOCKET_IFNAME", "")
    address = interfaces.get(chosen.split(",")[0], "") if chosen else address_of_gloo(leads_to)
    names = list(interfaces) or [name for _, name in socket.if_nameindex()]
    shown = [
        f"{key}={value}" for key, value in sorted(environ.items()) if key.startswith(VARIABLES)
    ]
    return Facts(
        rank=rank,
        world=world,
        name=name,
        name_address=leads_to[0] if leads_to else "",
        address=address,
        interface=name_of_interface(address, interfaces),
        faults=faults_of_variables(environ, names),
        port=0,
        route_address="",
        route_interface="",
        versions={**versions(), "code of lightning-loco": _code()},
        hardware=_hardware(),
        environment=", ".join(shown)[:LONGEST_TEXT],
        open_files=_open_files(),
        ports=_ports(),
        free_bytes=shutil.disk_usage(".").free,
    )


# ------------------------------------------------------------------- names and addresses


async def in_thread(limit_s: float, call: Callable[[], T]) -> T:
    """The result of a call that the system may keep waiting, such as one to a name server.

    Raises:
        TimeoutError: If it does not come back in time; its thread ends with the process.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(begin(call)), max(limit_s, 0))
    except TIMEOUTS as error:
        raise TimeoutError(f"no answer within {limit_s:g} s") from error


async def addresses_of(name: str) -> list[str]:
    """Of a host, in the system's order; none if they are not known in time."""
    ask = partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM)
    try:
        found = await in_thread(NAME_LIMIT_S, ask)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def slow_names_of(addresses: list[str], limit_s: float) -> tuple[str, ...]:
    """Those whose names take longer, asked in the form of PyTorch's key-value store."""
    mapped = [one if ":" in one else f"::ffff:{one}" for one in addresses]
    asked = (in_thread(limit_s, partial(socket.getnameinfo, (one, 0, 0, 0), 0)) for one in mapped)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return tuple(
        one
        for one, answer in zip(mapped, answers, strict=True)
        if isinstance(answer, TimeoutError)  # that there is no name is an answer, too
    )


def address_of_gloo(of_host_name: list[str]) -> str:
    """Where gloo listens without a variable: the first address of the host name that is here."""
    for address in of_host_name:
        with suppress(OSError), socket.create_server((address, 0), family=family_of(address)):
            return address
    return "127.0.0.1"


def family_of(address: str) -> socket.AddressFamily:
    """Of IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def addresses_of_interfaces() -> dict[str, str]:
    """The first address of each network interface, where Linux tells it to this user.

    A UDP socket that is bound to an interface gets its address when it connects; nothing is sent.
    An interface without an IPv4 address, which has no routes either, would get that of another one.
    """
    found: dict[str, str] = {}
    try:
        routes = Path("/proc/net/route").read_text().splitlines()[1:]
    except OSError:
        return found
    with_ipv4 = {"lo", *(route.split()[0] for route in routes)}
    for _, name in socket.if_nameindex():
        for target in ("2001:db8::1", *["127.0.0.1"] * (name in with_ipv4)):
            with suppress(OSError), socket.socket(family_of(target), socket.SOCK_DGRAM) as asked:
                asked.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
                asked.connect((target, 9))
                found[name] = str(asked.getsockname()[0])
    return found


def name_of_interface(address: str, interfaces: Mapping[str, str]) -> str:
    """The interface with an address; empty if it is not known, or not certain."""
    if address.startswith("127."):
        address = "127.0.0.1"
    names = [name for name, one in interfaces.items() if one == address]
    return names[0] if len(names) == 1 else ""


def faults_of_variables(environ: Mapping[str, str], names: list[str]) -> tuple[str, ...]:
    """Whether the variables that name network interfaces name some that are here.

    Example:
        >>> faults_of_variables({"NCCL_SOCKET_IFNAME": "^docker,lo"}, ["lo", "eth0"])
        ()
    """
    gloo, nccl = environ.get("GLOO_SOCKET_IFNAME", ""), environ.get("NCCL_SOCKET_IFNAME", "")
    wrong = [name for name in gloo.split(",") if name and name not in names]
    text = "here that is up and has an address"
    faults = [f"GLOO_SOCKET_IFNAME={gloo}: there is no interface {name} {text}" for name in wrong]
    # For NCCL: prefixes; after ^ those that it does not take; after = whole names.
    rule = nccl.removeprefix("^").removeprefix("=").split(",")
    is_not, is_exact = nccl.startswith("^"), nccl.removeprefix("^").startswith("=")
    fits = [n in rule if is_exact else n.startswith(tuple(filter(None, rule))) for n in names]
    if nccl and all(one == is_not for one in fits):
        faults.append(f"NCCL_SOCKET_IFNAME={nccl} fits no interface here")
    choice = ", ".join(name for name in names if not name.startswith("lo")) or "none"
    return tuple(f"{fault}; set it to one of {choice}" for fault in faults)


# --------------------------------------------------------------------- the machine itself


def versions() -> dict[str, str]:
    """Of Python without its last number, and of packages, without importing them."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def describe_versions() -> str:
    """The versions on one line, this package's first.

    Example:
        >>> describe_versions()
        'lightning-loco ... (python ..., torch ..., lightning ...)'
    """
    others = ", ".join(f"{name} {value}" for name, value in versions().items() if name != PACKAGE)
    return f"{PACKAGE} {__version__} ({others})"


def _code() -> str:
    """A checksum of this package's files, since a checkout changes without its version."""
    package = Path(__file__).parent.parent
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

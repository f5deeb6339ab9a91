"""What a machine finds out about itself."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_loco.__about__ import __version__
from lightning_loco.doctor.addresses import Addresses, find_addresses
from lightning_loco.doctor.deadlines import within
from lightning_loco.doctor.interfaces import Interface, interfaces
from lightning_loco.doctor.messages import Facts
from lightning_loco.doctor.place import Place
from lightning_loco.doctor.records import printable

if sys.platform != "win32":
    import resource

NAME_LIMIT_S = 2.0
"""Longest wait for the name server."""

PACKAGE = "lightning-loco"
PACKAGES = ("torch", "lightning", PACKAGE)

_DIGITS = 12
_UNLIMITED = 2**31


def gather_facts(place: Place) -> tuple[Facts, list[Interface], Addresses]:
    """Facts without doors and the road to machine 0, all interfaces, and where doors should be."""
    own = interfaces()
    name = socket.gethostname()
    began = time.monotonic()
    leads_to = resolve(name)
    name_s = time.monotonic() - began
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    found = find_addresses(own, leads_to, place.gloo_interface, place.nccl_interface, has_gpu)
    facts = Facts(
        rank=place.rank,
        world=place.world,
        name=printable(name),
        host=shared_host(),
        name_address=leads_to[0] if leads_to else "",
        name_s=name_s,
        doors=(),
        faults=tuple(map(printable, found.faults)),
        road_interface="",
        road_address="",
        versions={**versions(), "code of lightning-loco": _code()},
        open_files=_open_files(),
        ports=_ports(),
    )
    return facts, own, found


def resolve(name: str, limit_s: float = NAME_LIMIT_S) -> list[str]:
    """Addresses that a name leads to, in the system's order; none if it is not known in time."""
    try:
        found = within(limit_s, partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def shared_host() -> str:
    """The same text on machines between which loopback works: one kernel and one network."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return printable(platform.node())


def versions() -> dict[str, str]:
    """Of Python without its last number, and of packages, without importing them."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = printable(version(name))
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
    return digest.hexdigest()[:_DIGITS]


def _open_files() -> int:
    if sys.platform == "win32":
        return _UNLIMITED
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _ports() -> str:
    """The range of free ports, as ``40000-40999``; ``any`` if the system does not tell."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return "any"
    return f"{low}-{high}"

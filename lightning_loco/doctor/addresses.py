"""Which address gloo and NCCL would take on this machine, found by the rules of their own."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_loco.doctor.interfaces import Interface, interface_of

# In this order, when NCCL_SOCKET_IFNAME is not set: prefixes that an interface must have or lack.
_NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")


@dataclass
class Addresses:
    """What was found, and what stands in the way.

    Attributes:
        gloo: Interfaces that gloo listens at; none if it cannot.
        nccl: The same for NCCL, the first of those that it may use; empty without GPUs.
        faults: What is wrong, with the mend.
    """

    gloo: list[Interface] = field(default_factory=list)
    nccl: list[Interface] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def find_addresses(
    own: Sequence[Interface], name_addresses: Sequence[str], gloo: str, nccl: str, has_gpu: bool
) -> Addresses:
    """Follow the rules of gloo and NCCL.

    Args:
        own: Of this machine.
        name_addresses: What its host name leads to, in order.
        gloo: Value of ``GLOO_SOCKET_IFNAME``, empty if not set.
        nccl: Value of ``NCCL_SOCKET_IFNAME``, empty if not set.
        has_gpu: Whether NCCL is likely to be used.
    """
    found = Addresses()
    if gloo:
        _by_name(found, own, gloo)
    else:
        _by_host_name(found, own, name_addresses)
    if nccl or has_gpu:
        rules = [nccl] if nccl else _NCCL_ORDER
        fitting = [one for rule in rules for one in own if fits(one.name, rule)]
        found.nccl = [one for one in fitting if one.address != "::1"][:1]
    if nccl and not found.nccl:
        found.faults.append(
            f"NCCL_SOCKET_IFNAME={nccl} fits no interface here: set it to one of {_names(own)}"
        )
    return found


def fits(name: str, rule: str) -> bool:
    """Whether NCCL takes an interface for a value of ``NCCL_SOCKET_IFNAME``.

    Args:
        name: Of the interface.
        rule: Prefixes separated by commas; ``^`` before them means all others, ``=`` whole names.

    Example:
        >>> fits("eth0", "eth"), fits("eth0", "=eth"), fits("eth0", "^docker,lo")
        (True, False, True)
    """
    is_not = rule.startswith("^")
    is_exact = rule.removeprefix("^").startswith("=")
    words = rule.removeprefix("^").removeprefix("=").split(",")
    found = any(name == word if is_exact else name.startswith(word) for word in words if word)
    return found != is_not


def _by_name(found: Addresses, own: Sequence[Interface], names: str) -> None:
    for name in filter(None, names.split(",")):
        first = next((one for one in own if one.name == name), None)
        if first is not None:
            found.gloo.append(first)
        else:
            found.faults.append(
                f"GLOO_SOCKET_IFNAME={names}: there is no interface {name} here that is up and "
                f"has an address; set it to one of {_names(own)}"
            )


def _by_host_name(
    found: Addresses, own: Sequence[Interface], name_addresses: Sequence[str]
) -> None:
    """Gloo takes the first address of the host name that belongs to this machine."""
    address = next((one for one in name_addresses if _is_own(one)), "127.0.0.1")
    found.gloo.append(Interface(interface_of(address, list(own)), address))


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True


def _names(own: Sequence[Interface]) -> str:
    return ", ".join(dict.fromkeys(one.name for one in own if not one.is_loopback)) or "none"

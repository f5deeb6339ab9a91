"""What one machine has for training, without others: packages in range, cores and GPUs, disk."""

from __future__ import annotations

import operator
import os
import platform
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from lightning_loco.doctor.facts import PACKAGE
from lightning_loco.doctor.findings import FAILED, OK, WARNING, Finding

LEAST_DISK_BYTES = 2**30
OPTIONAL = ("torchft",)
"""Packages of extras that are checked where they are installed."""

_COMPARED = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def judge_this_machine() -> Iterator[Finding]:
    """Findings that need no other machine."""
    yield from _judge_packages()
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("hardware", OK, f"cores: {cores}, NVIDIA GPUs: {gpus}")
    yield _judge_disk(shutil.disk_usage(".").free)


def is_within(version: str, spec: str) -> bool:
    """Whether a version is one of those that a package asks for.

    Example:
        >>> is_within("2.6.6+cpu", ">=2.5.6,<3,!=2.6.2"), is_within("2.6.2", ">=2.5.6,!=2.6.2")
        (True, False)
    """
    parts = re.findall(r"([<>=!]=|[<>])\s*([\d.]+)", spec)
    return all(_COMPARED[sign](_numbers(version), _numbers(bound)) for sign, bound in parts)


def _judge_packages() -> Iterator[Finding]:
    try:
        needed = dict(_requirements())
    except PackageNotFoundError:
        text = f"{PACKAGE} is not installed, so that nothing is known of what it needs"
        yield Finding("packages", WARNING, f"{text}: pip install {PACKAGE}")
        return
    found, is_well = [], True
    for name, spec in needed.items():
        try:
            here = platform.python_version() if name == "python" else version(name)
        except PackageNotFoundError:
            if name not in OPTIONAL:
                is_well = False
                yield Finding("packages", FAILED, f"{name} is not installed: pip install {PACKAGE}")
            continue
        found.append(f"{name} {here}")
        if not is_within(here, spec):
            is_well = False
            text = f"{name} is {here}, and must be {spec}: pip install '{name}{spec}'"
            yield Finding("packages", FAILED, text)
    if is_well:
        yield Finding("packages", OK, ", ".join(found))


def _requirements() -> Iterator[tuple[str, str]]:
    """Name and range of what this package needs."""
    yield "python", metadata(PACKAGE)["Requires-Python"]
    for line in requires(PACKAGE) or ():
        needed = re.match(r"([\w-]+)(?:\[[^]]*\])?\s*([^;]*)", line)
        if needed and ("extra ==" not in line or needed[1] in OPTIONAL):
            yield needed[1], needed[2].strip()


def _judge_disk(free_bytes: int) -> Finding:
    text = f"{free_bytes / 2**30:.1f} GiB free in {Path.cwd()}"
    if free_bytes < LEAST_DISK_BYTES:
        return Finding("disk", WARNING, f"{text}: checkpoints may not fit; make room")
    return Finding("disk", OK, text)


def _numbers(version: str) -> tuple[int, ...]:
    """The release that a text names, without zeros at its end: 2.0 is 2."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)

"""The table that a user reads."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from lightning_loco.doctor.findings import FAILED, WARNING, Finding
from lightning_loco.doctor.messages import Facts
from lightning_loco.doctor.place import Place

_CHECK = 14
_STATUS = 9
_FEWEST = 40  # characters of text in a line


def report(
    place: Place,
    own: Facts,
    findings: Sequence[Finding],
    roads: Sequence[str],
    width: int | None = None,
) -> str:
    """All findings, one a line, and the measurements.

    Args:
        place: Which machine this is.
        own: Its facts.
        findings: In the order in which they are shown.
        roads: Lines about round trips and throughput.
        width: Of the terminal; longer lines are broken.
    """
    head = f"lightning-loco doctor: machine {place.rank} of {place.world} ({own.name}), meeting at "
    head += f"{place.host}:{place.port}"
    if place.world == 1:
        head = (
            f"lightning-loco doctor: {own.name} alone, meeting itself at {place.host}:{place.port}"
        )
    rows = [f"{one.check:<{_CHECK}}{one.status:<{_STATUS}}{one.text}" for one in findings]
    if width is not None:
        room = max(width, _CHECK + _STATUS + _FEWEST)
        indent = " " * (_CHECK + _STATUS)
        rows = [
            textwrap.fill(
                row,
                room,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for row in rows
        ]
    parts = [head, "", *rows, ""]
    if roads:
        parts += [*roads, ""]
    return "\n".join([*parts, _conclusion(findings)])


def _conclusion(findings: Sequence[Finding]) -> str:
    num_failed = sum(one.status == FAILED for one in findings)
    num_warnings = sum(one.status == WARNING for one in findings)
    warnings = f", {num_warnings} warning{'s' * (num_warnings > 1)}" if num_warnings else ""
    return f"{num_failed} failed{warnings}" if num_failed else f"all well{warnings}"

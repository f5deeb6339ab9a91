"""Converts a user's description of links: a name, a map, a list or a file."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightning_loco._util.text import suggestion
from lightning_loco._util.user_files import MAX_ERROR, read_yaml
from lightning_loco.costs.link import LINKS, NETWORKS, Link, Links

LinkLike: TypeAlias = Link | Links | str | Path | Sequence[Any] | Mapping[str, Any]
"""Values that :func:`as_links` converts."""

_KEYS = ("default", "workers", "pairs", "sites", "between_sites", "uplink_mbit_per_s", "seed")
_PAIR = re.compile(r"\s*(\d+)\s*(-|->)\s*(\d+)\s*")
_SUFFIXES = (".yaml", ".yml", ".json")
_FIELDS = {field.name for field in dataclasses.fields(Link)}


def as_links(value: LinkLike | None) -> Links | None:
    """Convert a user's description of links.

    Args:
        value: A name of :data:`LINKS` or :data:`NETWORKS`, a :class:`Link`, a list with a link or
            its name for each worker, a map as in :func:`read_links`, the path of such a file, or
            None.

    Raises:
        TypeError: If it is something else, or a number has the wrong type.
        ValueError: If a name is unknown, a value is out of range or a file is invalid.
        FileNotFoundError: If the file does not exist.

    Example:
        >>> links = as_links(["wan", "wan", Link(20)])
        >>> links.between(0, 2)
        Link(mbit_per_s=20, latency_s=0.03, jitter_s=0.003)
    """
    if value is None or isinstance(value, Links):
        return value
    if isinstance(value, str) and value in NETWORKS:
        return NETWORKS[value]
    if isinstance(value, Path) or (isinstance(value, str) and _is_path(value)):
        return read_links(value)
    if isinstance(value, Mapping) and not set(value) <= _FIELDS:
        return _from_map(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        links = [_as_link(entry, f"link[{index}]") for index, entry in enumerate(value)]
        if not links:
            raise ValueError("link is an empty list. Give one link for each worker, or None.")
        return Links(links[0], tuple(enumerate(links)), num_workers=len(links))
    return Links(_as_link(value, "link"))


def read_links(path: str | Path) -> Links:
    """Read links from a YAML or JSON file. All keys but ``default`` are optional::

        default: wan                                  # all workers that are not listed
        workers:
          3: dsl                                      # a name, or numbers:
          2: {mbit_per_s: 50, latency_s: 0.01, jitter_s: 0.001}
        pairs:
          0-1: lan                                    # in both directions
          1->2: {mbit_per_s: 10}                      # from worker 1 to worker 2
        sites: 2                                      # the first and the second half of the workers
        between_sites: wan                            # for any two workers at different sites
        uplink_mbit_per_s: 1000                       # of each site, which all its workers share
        seed: 0                                       # seed of the jitter

    The file may also hold a list with one link for each worker, or a single link for all.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it cannot be read or its content is invalid.
    """
    try:
        content = read_yaml(path, "file of links")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no file of links {str(path)!r}. Pass the path of one, or one of "
            f"{', '.join((*LINKS, *NETWORKS))}."
        ) from None
    try:
        if content is None or (isinstance(content, str) and content not in (*LINKS, *NETWORKS)):
            raise ValueError(f"there is no link in it, only {content!r}.")
        links = as_links(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{str(path)!r}: {str(error)[:MAX_ERROR]}") from None
    assert links is not None
    return links


def _is_path(text: str) -> bool:
    return text not in LINKS and (text.endswith(_SUFFIXES) or "/" in text)


def _as_link(value: object, where: str) -> Link:
    if isinstance(value, Link):
        return value
    if isinstance(value, str):
        if value not in LINKS:
            names = (*LINKS, *NETWORKS) if where == "link" else tuple(LINKS)
            instead = suggestion(value, names, "'{}'")
            raise ValueError(
                f"{where} must be one of {', '.join(names)}, a Link(...) or the path of a .yaml or "
                f".json file, got {value!r}.{instead}"
            )
        return LINKS[value]
    if isinstance(value, Mapping):
        if unknown := sorted(set(map(str, value)) - _FIELDS):
            raise ValueError(f"{where} has no {unknown[0]!r}. Use {', '.join(sorted(_FIELDS))}.")
        if "mbit_per_s" not in value:
            raise ValueError(f"{where} needs mbit_per_s, got {dict(value)!r}.")
        return Link(**value)
    raise TypeError(
        f"{where} must be a name such as 'wan', a Link(...), a list with one for each worker or "
        f"the path of a file, got {value!r}."
    )


def _from_map(content: Mapping[str, Any]) -> Links:
    if unknown := sorted(set(map(str, content)) - set(_KEYS)):
        raise ValueError(f"link has no {unknown[0]!r}. Use {', '.join(_KEYS)}.")
    if "default" not in content:
        raise ValueError("link needs 'default': the link of all workers that are not listed.")
    parts = {key: content.get(key) or {} for key in ("workers", "pairs")}
    for key, part in parts.items():
        if not isinstance(part, Mapping):
            raise ValueError(f"link.{key} must be a map, got {part!r}.")
    workers = [
        (_worker_number(worker), _as_link(link, f"link.workers[{worker}]"))
        for worker, link in parts["workers"].items()
    ]
    pairs: list[tuple[int, int, Link]] = []
    for name, value in parts["pairs"].items():
        match = _PAIR.fullmatch(str(name))
        if not match or match[1] == match[3]:
            raise ValueError(f"link.pairs names two workers, as in 0-1 or 0->1, got {name!r}.")
        link = _as_link(value, f"link.pairs[{name}]")
        pairs.append((int(match[1]), int(match[3]), link))
        if match[2] == "-":
            pairs.append((int(match[3]), int(match[1]), link))
    default = _as_link(content["default"], "link.default")
    between, uplink = content.get("between_sites"), content.get("uplink_mbit_per_s")
    return Links(
        default,
        tuple(workers),
        tuple(pairs),
        content.get("seed", 0),
        sites=content.get("sites", 1),
        between_sites=None if between is None else _as_link(between, "link.between_sites"),
        uplink_mbit_per_s=math.inf if uplink is None else uplink,
    )


def _worker_number(worker: object) -> int:
    if not re.fullmatch(r"\d+", str(worker)):
        raise ValueError(f"link.workers needs the workers' numbers from 0 on, got {worker!r}.")
    return int(str(worker))

"""The links of all workers: one for all, one for each worker, or one for each pair."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml  # type: ignore[import-untyped]

from lightning_loco.links.link import LINKS, Link

_KEYS = ("default", "workers", "pairs", "seed")
_PAIR = re.compile(r"\s*(\d+)\s*(-|->)\s*(\d+)\s*")
_SUFFIXES = (".yaml", ".yml", ".json")


@dataclasses.dataclass(frozen=True)
class Links:
    """Which link each message passes through.

    Args:
        default: Of every worker that is not named.
        workers: A worker's number and its link.
        pairs: Who sends, who receives, and a link between these two that nobody shares.
        seed: Of the jitter.
        num_workers: How many workers there must be; None for any number.

    Raises:
        TypeError: If the seed is no integer.
    """

    default: Link
    workers: tuple[tuple[int, Link], ...] = ()
    pairs: tuple[tuple[int, int, Link], ...] = ()
    seed: int = 0
    num_workers: int | None = None

    def __post_init__(self) -> None:
        """Check the seed."""
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed of the links must be an integer, got {self.seed!r}.")

    def check(self, num_workers: int) -> None:
        """Raise ValueError if they are not those of so many workers."""
        if self.num_workers not in (None, num_workers):
            raise ValueError(
                f"link has {self.num_workers} entries, one for each worker, but there are "
                f"{num_workers} workers. Give one link for all, or {num_workers}."
            )
        named = {worker for worker, _ in self.workers}
        named |= {worker for first, second, _ in self.pairs for worker in (first, second)}
        for worker in sorted(named):
            if worker >= num_workers:
                raise ValueError(
                    f"link names worker {worker}, but there are {num_workers} workers, numbered "
                    f"0 to {num_workers - 1}."
                )

    def of(self, worker: int) -> Link:
        """What connects a worker with all others."""
        return dict(self.workers).get(worker, self.default)

    def own(self, sender: int, receiver: int) -> Link | None:
        """What connects these two alone, if anything does."""
        return {(first, second): link for first, second, link in self.pairs}.get((sender, receiver))

    def between(self, sender: int, receiver: int) -> Link:
        """What a message meets on its way."""
        return self.own(sender, receiver) or self.of(sender).slower(self.of(receiver))


LinkLike: TypeAlias = Link | Links | str | Path | Sequence[Any] | Mapping[str, Any]
"""What :func:`as_links` understands."""


def as_links(value: LinkLike | None) -> Links | None:
    """The links that a user means.

    Args:
        value: A name (``"wan"``, ``"dsl"``, ``"lan"``, ``"datacentre"``), a :class:`Link`, a list
            with one of these for each worker, a map as in :func:`read_links`, the path of such a
            file, or None.

    Raises:
        TypeError: If it is something else, or a number has the wrong type.
        ValueError: If a name is unknown, a value out of range or a file not understood.
        FileNotFoundError: If there is no such file.

    Example:
        >>> links = as_links(["wan", "wan", Link(20)])
        >>> links.between(0, 2)
        Link(mbit_per_s=20, latency_s=0.03, jitter_s=0.003)
    """
    if value is None or isinstance(value, Links):
        return value
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
    """Read a YAML or JSON file like this one; all keys but ``default`` may be missing::

        default: wan                                  # of all workers that are not named
        workers:
          3: dsl                                      # a name, or numbers:
          2: {mbit_per_s: 50, latency_s: 0.01, jitter_s: 0.001}
        pairs:
          0-1: lan                                    # both ways
          1->2: {mbit_per_s: 10}                      # from worker 1 to worker 2
        seed: 0                                       # of the jitter

    A list has one link for each worker; a name alone, or numbers, are for all.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read or says something that is not understood.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no file of links {str(path)!r}. Pass the path of one, or one of "
            f"{', '.join(LINKS)}."
        ) from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The file of links {str(path)!r} cannot be read: {error}") from None
    try:
        if content is None or (isinstance(content, str) and content not in LINKS):
            raise ValueError(f"there is no link in it, only {content!r}.")
        links = as_links(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{str(path)!r}: {error}") from None
    assert links is not None
    return links


_FIELDS = {field.name for field in dataclasses.fields(Link)}


def _is_path(text: str) -> bool:
    return text not in LINKS and (text.endswith(_SUFFIXES) or "/" in text)


def _as_link(value: object, where: str) -> Link:
    if isinstance(value, Link):
        return value
    if isinstance(value, str):
        if value not in LINKS:
            raise ValueError(
                f"{where} must be one of {', '.join(LINKS)}, a Link(...) or the path of a .yaml or "
                f".json file, got {value!r}."
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
        raise ValueError("link needs 'default': the link of all workers that are not named.")
    parts = {key: content.get(key) or {} for key in ("workers", "pairs")}
    for key, part in parts.items():
        if not isinstance(part, Mapping):
            raise ValueError(f"link.{key} is a map, got {part!r}.")
    workers = [
        (_number(worker), _as_link(link, f"link.workers[{worker}]"))
        for worker, link in parts["workers"].items()
    ]
    pairs: list[tuple[int, int, Link]] = []
    for name, value in parts["pairs"].items():
        found = _PAIR.fullmatch(str(name))
        if not found or found[1] == found[3]:
            raise ValueError(f"link.pairs names two workers, as in 0-1 or 0->1, got {name!r}.")
        link = _as_link(value, f"link.pairs[{name}]")
        pairs.append((int(found[1]), int(found[3]), link))
        if found[2] == "-":
            pairs.append((int(found[3]), int(found[1]), link))
    default = _as_link(content["default"], "link.default")
    return Links(default, tuple(workers), tuple(pairs), content.get("seed", 0))


def _number(worker: object) -> int:
    if not re.fullmatch(r"\d+", str(worker)):
        raise ValueError(f"link.workers has the workers' numbers from 0 on, got {worker!r}.")
    return int(str(worker))

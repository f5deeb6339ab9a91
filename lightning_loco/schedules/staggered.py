"""A schedule of fragments that are exchanged in turn, and how a model is split into fragments.

:func:`hidden_rounds` and :func:`streaming_rounds` return the schedules of async and of streaming
DiLoCo, whose rounds are hidden behind local steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from lightning_loco.schedules.every_steps import (
    SyncEvery,
    by_steps,
    check_length,
    check_sync_every,
)
from lightning_loco.schedules.schedule import Schedule, StepInfo

PATTERNS = ("strided", "contiguous", "even")

FRAGMENTS = 4
"""The number of fragments that ``"auto"`` stands for, unless there are fewer local steps."""


def hidden_rounds(
    sync_every: SyncEvery,
    fragments: int | Literal["auto"] | None = "auto",
    delay: int | None = None,
    warm_start: bool = False,
) -> Schedule:
    """Return a schedule of equal fragments that are exchanged in turn, one at a time.

    Args:
        sync_every: Local steps between the rounds of a fragment, or one number per worker.
        fragments: Number of fragments; ``"auto"`` for :data:`FRAGMENTS`, but at most the number of
            local steps. None for the whole model.
        delay: Local steps after which a result is applied. Default: until the next round begins.
        warm_start: The first round of each fragment ends at once.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or ``sync_every`` changes and there are fragments.

    Example:
        >>> hidden_rounds(100)
        Staggered(sync_every=100, fragments=4, delay=25, pattern='even', warm_start=False)
        >>> hidden_rounds(100, fragments=None)
        EverySteps(sync_every=100, overlap=True, warm_start=False)
    """
    if fragments is None and delay is None:
        return by_steps(sync_every, True, warm_start)
    if isinstance(sync_every, Mapping):
        raise ValueError(
            "Fragments and delay=... need one sync_every for the whole run, got "
            f"{dict(sync_every)}. Use fragments=None without delay, or one number."
        )
    check_sync_every(sync_every)
    if fragments is None:
        fragments = 1
    elif fragments == "auto":
        fragments = min(FRAGMENTS, _fewest_steps(sync_every))
    schedule = Staggered(sync_every, fragments, 0 if delay is None else delay, "even", warm_start)
    if delay is None:
        return dataclasses.replace(schedule, delay=schedule.shortest_gap)
    return schedule


def streaming_rounds(
    sync_every: int | Sequence[int],
    fragments: int | Literal["auto"] = "auto",
    delay: int | Literal["auto"] = "auto",
    pattern: str | Sequence[str] = "strided",
) -> Staggered:
    """Return a schedule of fragments of layers that are exchanged in turn, as in streaming DiLoCo.

    Args:
        sync_every: Local steps between the rounds of a fragment, or one number per worker.
        fragments: Number of fragments; ``"auto"`` for 3, but at most the number of local steps.
        delay: Local steps after which a result is applied; ``"auto"`` for 5, or half of
            ``sync_every`` if that is less.
        pattern: As in :class:`Staggered`.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.

    Example:
        >>> streaming_rounds(4)
        Staggered(sync_every=4, fragments=3, delay=2, pattern='strided', warm_start=False)
    """
    check_sync_every(sync_every)
    steps = _fewest_steps(sync_every)
    count = min(3, steps) if fragments == "auto" else fragments
    delay_steps = min(5, max(1, steps // 2)) if delay == "auto" else delay
    return Staggered(sync_every, count, delay_steps, pattern)


def _fewest_steps(sync_every: int | Sequence[int]) -> int:
    return sync_every if isinstance(sync_every, int) else min(sync_every, default=1)


@dataclasses.dataclass(frozen=True)
class Staggered(Schedule):
    """Starts a round of each fragment every ``sync_every`` local steps, one after the other.

    With P fragments and ``sync_every=H``, the first round of fragment p = 0 ... P - 1 begins after
    ``(p + 1) * H // P`` local steps, and the next ones every H local steps. The result is applied
    ``delay`` local steps later, so the rounds of several fragments may be pending at once. With one
    fragment and ``delay=H`` these are the rounds of :class:`EverySteps` with overlap. A shorter
    delay needs a merge policy that keeps the local steps taken meanwhile: ``Mix(...)`` or
    ``KeepProgress()``.

    Args:
        sync_every: Local steps between the rounds of one fragment, at least ``fragments``; or a
            list with one number per worker.
        fragments: Number of fragments, at least 1.
        delay: Local steps from the start of a round to its end, from 0, which waits for the result,
            to the smallest ``sync_every``.
        pattern: ``"strided"``: layer i is in fragment ``i % fragments``. ``"contiguous"``:
            neighbouring layers together, in fragments of about the same size. ``"even"``: equal
            parts of the vector of all parameters, regardless of layers. A list: one regular
            expression per fragment, searched in the names of the parameters. A layer is a numbered
            block (``blocks.3``) or, for parameters outside of one, a module.
        warm_start: The first round of each fragment ends at once.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.

    Source:
        Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512.

    Example:
        >>> schedule = Staggered(6, fragments=2, delay=1)
        >>> [schedule.due(StepInfo(3, 3, r, r, 1.0, None)) for r in (0, 1)]  # 3 local steps each
        [(True, False), (True, False)]
    """

    sync_every: int | Sequence[int] = 100
    fragments: int = 1
    delay: int = 0
    pattern: str | Sequence[str] = "strided"
    warm_start: bool = False

    def __post_init__(self) -> None:
        check_sync_every(self.sync_every)
        shortest = min(self._all_sync_every, default=2**31)
        for name, value, least, rule in (
            ("fragments", self.fragments, 1, "counts the parts of the model"),
            ("delay", self.delay, 0, "counts the local steps after which a result is applied"),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} {rule} and must be an integer, got {value!r}.")
            if not least <= value <= shortest:
                raise ValueError(
                    f"{name} {rule} and must be from {least} to sync_every={shortest}, got {value}."
                )
        self._check_pattern()

    def _check_pattern(self) -> None:
        if isinstance(self.pattern, str) or not isinstance(self.pattern, Sequence):
            if self.pattern not in PATTERNS:
                raise ValueError(
                    f"pattern must be one of {', '.join(PATTERNS)}, or a list with a regular "
                    f"expression for each fragment, got {self.pattern!r}."
                )
            return
        if len(self.pattern) != self.fragments:
            raise ValueError(
                f"pattern lists {len(self.pattern)} regular expressions for "
                f"fragments={self.fragments}. Give one for each fragment."
            )
        for pattern in self.pattern:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"pattern {pattern!r} is not a regular expression: {error}."
                ) from None

    @property
    def _all_sync_every(self) -> Sequence[int]:
        return [self.sync_every] if isinstance(self.sync_every, int) else self.sync_every

    @property
    def is_whole_phase(self) -> bool:
        """Whether every result is applied when the next round of its fragment begins."""
        return all(every == self.delay for every in self._all_sync_every)

    @property
    def num_fragments(self) -> int:  # type: ignore[override]
        """Number of fragments."""
        return self.fragments

    def fragment_slices(self, sizes: Mapping[str, int]) -> list[list[range]]:
        """Return the slices of each fragment."""
        return split_into_fragments(sizes, self.fragments, self.pattern)

    def due(self, info: StepInfo) -> tuple[bool, bool]:
        """Count local steps since the last round began, and since the pending round began.

        A round with ``delay=sync_every`` ends when the next one of its fragment begins, which may
        be later than ``delay`` local steps.
        """
        every, turn = self.sync_every_of(0), info.round_index % self.fragments
        steps = (turn + 1) * every // self.fragments - turn * every // self.fragments
        begins = info.fragment == turn and info.steps_since_round >= steps
        if info.pending is None or self.delay == every:
            return begins, begins and info.pending is not None
        return begins, info.steps - info.pending.began_at >= self.delay

    def is_overlapped(self, round_index: int) -> bool:
        """Return whether there is a delay, except for the first rounds of a warm start."""
        return self.delay > 0 and not (self.warm_start and round_index < self.fragments)

    def delay_of_round(self, worker: int, round_index: int) -> int:
        """Return the delay, or 0 if the round ends at once."""
        return self.delay if self.is_overlapped(round_index) else 0

    @property
    def shortest_gap(self) -> int:
        """The least local steps of any worker between the starts of two rounds."""
        return min(self._all_sync_every, default=0) // self.fragments

    def staleness_of(self, worker: int) -> float:
        """Return the delay as a part of ``sync_every``, from 0 to 1."""
        return self.delay / self.sync_every_of(worker)

    def shortest_run(self, worker: int) -> int:
        """Return two rounds if results are a whole round late; otherwise nothing is lost."""
        every = self.sync_every_of(worker)
        return 2 * every if self.delay == every else 0

    def sync_every_of(self, worker: int) -> int:
        """Return a worker's local steps between the rounds of a fragment."""
        return self.sync_every if isinstance(self.sync_every, int) else self.sync_every[worker]

    def of_worker(self, worker: int) -> Staggered:
        """Return the schedule with the number of this worker instead of a list."""
        return dataclasses.replace(self, sync_every=self.sync_every_of(worker))

    def check(self, num_workers: int) -> None:
        """Raise ValueError if a list does not have one number per worker."""
        check_length(self.sync_every, num_workers)

    def __str__(self) -> str:
        parts = "" if self.fragments == 1 else f" of each of {self.fragments} fragments"
        delay = f", applied {self.delay} steps later" if self.delay else ""
        return f"a round{parts} every {self.sync_every} local steps{delay}"


def split_into_fragments(
    sizes: Mapping[str, int], fragments: int, pattern: str | Sequence[str]
) -> list[list[range]]:
    """Return the slices of the flat parameter vector that each fragment consists of.

    Args:
        sizes: Number of elements by parameter name, in the order of the vector.
        fragments: Number of fragments.
        pattern: How parameters are assigned to fragments, as in :class:`Staggered`.

    Raises:
        ValueError: If there are too few layers or elements, or a parameter belongs to no fragment
            or several.

    Example:
        >>> split_into_fragments({"0.weight": 6, "0.bias": 2, "1.weight": 3}, 2, "strided")
        [[range(0, 8)], [range(8, 11)]]
    """
    if pattern == "even":
        return _even(sum(sizes.values()), fragments)
    named = [name for name, size in sizes.items() if size]
    if isinstance(pattern, str):
        numbers = _by_layer({name: sizes[name] for name in named}, fragments, pattern)
    else:
        numbers = _by_name(named, pattern)
    slices: list[list[range]] = [[] for _ in range(fragments)]
    stop = 0
    for name in named:
        own, start, stop = slices[numbers[name]], stop, stop + sizes[name]
        if own and own[-1].stop == start:
            start = own.pop().start
        own.append(range(start, stop))
    return slices


def layer_of(name: str) -> str:
    """Return the layer of a parameter: its outermost numbered block, or else its module.

    Example:
        >>> [layer_of(name) for name in ("blocks.3.mlp.0.weight", "head.bias", "scale")]
        ['blocks.3', 'head', '']
    """
    *modules, _ = name.split(".")
    numbered = [depth for depth, module in enumerate(modules) if module.isdigit()]
    return ".".join(modules[: numbered[0] + 1] if numbered else modules)


def _even(numel: int, fragments: int) -> list[list[range]]:
    """Cut the vector into parts of equally many elements, wherever layers end."""
    if fragments > numel:
        raise ValueError(
            f"fragments={fragments} is more than the {numel} trainable elements of the model. Take "
            f"at most {numel} fragments."
        )
    borders = [numel * index // fragments for index in range(fragments + 1)]
    return [[range(begin, end)] for begin, end in itertools.pairwise(borders)]


def _by_layer(sizes: Mapping[str, int], fragments: int, pattern: str) -> dict[str, int]:
    """Return the fragment of each parameter; the parameters of a layer are in the same one."""
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        layers[layer_of(name)] = layers.get(layer_of(name), 0) + size
    if fragments > len(layers):
        shown = ", ".join(repr(layer) for layer in list(layers)[:8])
        raise ValueError(
            f"fragments={fragments} is more than the {len(layers)} layers with trainable "
            f"parameters ({shown}). Take at most {len(layers)} fragments, or assign parameters to "
            "fragments by regular expressions: pattern=[...]."
        )
    chosen = _contiguous(list(layers.values()), fragments) if pattern == "contiguous" else None
    numbers = {
        layer: index % fragments if chosen is None else chosen[index]
        for index, layer in enumerate(layers)
    }
    return {name: numbers[layer_of(name)] for name in sizes}


def _contiguous(sizes: list[int], fragments: int) -> list[int]:
    """Return the fragment of each layer: neighbours together, of about the same size."""
    total, numbers, before, end = sum(sizes), [0] * len(sizes), 0, 0
    for fragment in range(fragments - 1):
        wanted = total * (fragment + 1) / fragments
        last = len(sizes) - (fragments - fragment - 1)  # leaves a layer for each that follows
        begin = end
        while end < last and (
            end == begin or abs(before + sizes[end] - wanted) <= abs(before - wanted)
        ):
            numbers[end] = fragment
            before += sizes[end]
            end += 1
    return [*numbers[:end], *[fragments - 1] * (len(sizes) - end)]


def _by_name(names: list[str], patterns: Sequence[str]) -> dict[str, int]:
    """Return the fragment of each parameter, whose pattern is the only one found in its name."""
    numbers: dict[str, int] = {}
    for name in names:
        found = [i for i, pattern in enumerate(patterns) if re.search(pattern, name)]
        if len(found) != 1:
            which = "none" if not found else " and ".join(repr(patterns[i]) for i in found)
            raise ValueError(
                f"Parameter {name!r} must match one pattern and matches {which} of "
                f"{list(patterns)}. Every trainable parameter belongs to one fragment."
            )
        numbers[name] = found[0]
    for fragment, pattern in enumerate(patterns):
        if fragment not in numbers.values():
            raise ValueError(f"No trainable parameter matches the pattern {pattern!r}.")
    return numbers

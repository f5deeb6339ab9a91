"""Rounds of fragments that take turns, whose results land some local steps later."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from lightning_loco.schedules.base import Now, Schedule
from lightning_loco.schedules.every_steps import check_length, check_sync_every
from lightning_loco.schedules.fragments import stretches

PATTERNS = ("strided", "contiguous", "even")


@dataclasses.dataclass(frozen=True)
class Staggered(Schedule):
    """A round of each fragment of the model every so many local steps, one after the other.

    Of P fragments and H local steps, the rounds of fragment p = 0 ... P - 1 begin after
    ``(p + 1) * H // P`` local steps and every H from then on. The result lands ``delay`` local
    steps later; several fragments may be under way at once. With one fragment and ``delay=H`` these
    are the rounds of :class:`EverySteps` with overlap. To a shorter delay belongs a landing that
    counts the local steps made meanwhile: ``Mix(...)`` or ``KeepProgress()``.

    Args:
        sync_every: Local steps between the rounds of one fragment, at least ``fragments``; or a
            list with one number per worker.
        fragments: In how many parts the parameters are exchanged, at least 1.
        delay: Local steps between the begin of a round and its end: 0, which waits for it, up to
            the smallest ``sync_every``.
        pattern: ``"strided"`` deals the layers out in turns; ``"contiguous"`` keeps neighbours
            together, in fragments of about the same size; ``"even"`` cuts the vector of all
            parameters into equal parts, whatever the layers are; or a list with a regular
            expression for each fragment, which is searched in the names of the parameters. A layer
            is a numbered block (``blocks.3``) or, outside of such, a module.
        warm_start: The first round of each fragment ends at once.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.

    Source:
        Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512.

    Example:
        >>> schedule = Staggered(6, fragments=2, delay=1)
        >>> [schedule.due(Now(3, 3, r, r, 1.0, None)) for r in (0, 1)]  # 3 local steps each
        [(True, False), (True, False)]
    """

    sync_every: int | Sequence[int] = 100
    fragments: int = 1
    delay: int = 0
    pattern: str | Sequence[str] = "strided"
    warm_start: bool = False

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_sync_every(self.sync_every)
        shortest = min(self._all_sync_every, default=2**31)
        for name, value, least, rule in (
            ("fragments", self.fragments, 1, "counts the parts of the model"),
            ("delay", self.delay, 0, "counts the local steps after which a result lands"),
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
                    f"pattern {pattern!r} is no regular expression: {error}."
                ) from None

    @property
    def _all_sync_every(self) -> Sequence[int]:
        return [self.sync_every] if isinstance(self.sync_every, int) else self.sync_every

    @property
    def is_whole_phase(self) -> bool:
        """Whether every result lands when the next round of its fragment begins."""
        return all(every == self.delay for every in self._all_sync_every)

    @property
    def num_fragments(self) -> int:  # type: ignore[override]
        """The fragments."""
        return self.fragments

    def fragment_slices(self, sizes: Mapping[str, int]) -> list[list[range]]:
        """The stretches of each fragment."""
        return stretches(sizes, self.fragments, self.pattern)

    def due(self, now: Now) -> tuple[bool, bool]:
        """By the local steps since the round before began, and since this pending round did.

        One that is a whole phase late ends with the begin of the next one, which may come later.
        """
        every, turn = self.sync_every_of(0), now.round_index % self.fragments
        steps = (turn + 1) * every // self.fragments - turn * every // self.fragments
        begins = now.fragment == turn and now.steps_since_round >= steps
        if now.pending is None or self.delay == every:
            return begins, begins and now.pending is not None
        return begins, now.steps - now.pending.began_at >= self.delay

    def is_overlapped(self, round_index: int) -> bool:
        """With a delay, but for the first rounds of a warm start."""
        return self.delay > 0 and not (self.warm_start and round_index < self.fragments)

    def steps_under_way(self, worker: int, round_index: int) -> int:
        """The delay, or 0 if the round ends at once."""
        return self.delay if self.is_overlapped(round_index) else 0

    @property
    def shortest_gap(self) -> int:
        """The least local steps of any worker between the begins of two rounds."""
        return min(self._all_sync_every, default=0) // self.fragments

    def staleness_of(self, worker: int) -> float:
        """A part of a round: from 0 for none to 1 for the whole of it."""
        return self.delay / self.sync_every_of(worker)

    def shortest_run(self, worker: int) -> int:
        """Two rounds of results that are a whole phase late; otherwise nothing is lost."""
        every = self.sync_every_of(worker)
        return 2 * every if self.delay == every else 0

    def sync_every_of(self, worker: int) -> int:
        """Local steps of one worker between the rounds of a fragment."""
        return self.sync_every if isinstance(self.sync_every, int) else self.sync_every[worker]

    def of_worker(self, worker: int) -> Staggered:
        """The number of this worker instead of a list."""
        return dataclasses.replace(self, sync_every=self.sync_every_of(worker))

    def check(self, num_workers: int) -> None:
        """Refuse a list of another length."""
        check_length(self.sync_every, num_workers)

    def __str__(self) -> str:
        parts = "" if self.fragments == 1 else f" of each of {self.fragments} fragments"
        late = f", which lands {self.delay} steps later" if self.delay else ""
        return f"a round{parts} every {self.sync_every} local steps{late}"

"""The saved state of an earlier run: one with other settings, or other workers."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class EarlierRun:
    """The state of an earlier run.

    Attributes:
        state: State that this worker has saved; that of worker 0 if this worker is new.
        algorithm: Name of the class of its algorithm.
        settings: Its settings, as plain values.
        has_same_workers: Whether it had as many workers, and each has its own state.
    """

    state: dict[str, Any]
    algorithm: str
    settings: dict[str, Any]
    has_same_workers: bool

    def is_of(self, algorithm: object) -> bool:
        """Return whether it was written by an algorithm of the same class."""
        return self.algorithm == type(algorithm).__name__

    @property
    def has_pending(self) -> bool:
        """Whether a round was pending."""
        return any(fragment["pending"] for fragment in self.state.get("fragments", ()))

    def dropped_by(self, algorithm: object) -> list[str]:
        """Describe what is dropped if all workers start from the consensus, one note each."""
        notes = ["all workers start from the consensus"]
        states = [shared["state"] for shared in self.state.get("shared", ())]
        names = sorted(set().union(*states))
        if names and not self.is_of(algorithm):
            notes.append(f"the state of {self.algorithm} ({', '.join(names)}) is dropped")
        return notes + ["a pending round is dropped"] * self.has_pending

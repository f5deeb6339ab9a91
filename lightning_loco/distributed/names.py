"""Names of ranks in messages."""

from __future__ import annotations


def worker_names(num_workers: int) -> list[str]:
    """Return ``["worker 0", "worker 1", ...]``."""
    return [f"worker {number}" for number in range(num_workers)]


def capitalized(name: str) -> str:
    """Return a name as it starts a sentence; ``str.capitalize`` would change the other letters."""
    return name[0].upper() + name[1:]

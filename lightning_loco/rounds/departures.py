"""When the messages of the others have left, as they tell it beside an exchange."""

from __future__ import annotations

import re
from collections.abc import Collection

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.store import publish

_SLOTS = 1024


class Departures:
    """Every worker notes in the job's store when each of its messages leaves, before it does.

    So whoever has received a message finds there when it left, without waiting. Times are those of
    the clock's ``wall_time``, which is one clock on one machine. Notes are overwritten
    after 1024 messages.

    Args:
        group: The workers; at least two.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._store = group.own_store("departures")
        self._worker = group.worker

    def note(self, number: int, at: float) -> None:
        """Message ``number`` of this worker leaves then."""
        publish(self._store, self._key(self._worker, number), f"{number} {at!r}")

    def latest(self, number: int, workers: Collection[int], own: float) -> float:
        """When the last of these workers' messages ``number`` has left, or one's own has.

        Args:
            number: As in :meth:`note`; the same message has the same number on all workers.
            workers: The others; those who have noted nothing are left out.
            own: When one's own has left.
        """
        keys = [self._key(worker, number) for worker in workers]
        if not keys or not self._store.check(keys):
            return own
        noted = [_read(note, number) for note in self._store.get_all(keys)]
        return max([own, *(at for at in noted if at is not None)])

    def _key(self, worker: int, number: int) -> str:
        return f"{worker}/{number % _SLOTS}"


def _read(note: bytes, number: int) -> float | None:
    """When the message of this number has left, if the note says so."""
    found = re.fullmatch(rb"(\d{1,18}) (\d{1,12}(?:\.\d{1,12})?)", note)
    return float(found[2]) if found and int(found[1]) == number else None

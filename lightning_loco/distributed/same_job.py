"""Whether the ranks at a key-value store belong to one job, before they wait for each other."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import NamedTuple

from lightning_loco.distributed.notes import read
from lightning_loco.distributed.rendezvous import explain_missing, wait_until_others_know
from lightning_loco.distributed.store import TimeoutStore
from lightning_loco.distributed.watchdog import WorkerFailure

_JOB = "job"
_REFUSED = "refused"
_PAUSE_S = 0.02
_LONGEST = 400


class JobName(NamedTuple):
    """What all ranks of a job have in common.

    Attributes:
        launched: Who has started it, and under which name: ``"SLURM job 17"``; empty if nobody
            says.
        num_ranks: How many ranks there are.
    """

    launched: str
    num_ranks: int


class SameJob:
    """Rank 0 writes its job's name down, and the others compare theirs.

    Args:
        store: The job's key-value store, with keys of its own for this.
        rank: This rank.
        job: Which it believes to belong to.
        timeout_s: Longest wait for rank 0, in seconds.
    """

    def __init__(self, store: TimeoutStore, rank: int, job: JobName, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._job = job
        self._timeout_s = timeout_s

    def check(self, place: str, host: str) -> None:
        """Compare this rank's job with that of rank 0.

        Args:
            place: Address and port of the store.
            host: What to call rank 0 in messages.

        Raises:
            WorkerFailure: If rank 0 does not come in time.
            RuntimeError: If the store is another job's, which goes on.
            ValueError: If the ranks of one job count differently; the others raise it as well.
        """
        if self._rank == 0:
            self._store.delete_key(_REFUSED, self._timeout_s)  # of an attempt before this one
            self._store.set(_JOB, json.dumps(self._job), self._timeout_s)
            return
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([_JOB], self._timeout_s):
            if time.monotonic() > deadline:
                raise WorkerFailure(explain_missing(host, self._timeout_s))
            time.sleep(_PAUSE_S)
        match read(self._store.get(_JOB, self._timeout_s), f"Rank 0 at {place}"):
            case [str(launched), int(num_ranks)]:
                there = JobName(launched[:_LONGEST], num_ranks)
            case other:
                raise RuntimeError(
                    f"What is in the key-value store at {place} is not of this program: "
                    f"{str(other)[:100]!r}. Does another program use the port of this job?"
                )
        if there.launched != self._job.launched:
            raise RuntimeError(
                f"This process belongs to {_words(self._job)}, but rank 0 at {place} to "
                f"{_words(there)}, which goes on without it. Give each job a MASTER_PORT of its "
                "own, and see that MASTER_ADDR is the machine of this job's rank 0."
            )
        if there.num_ranks != self._job.num_ranks:
            text = (
                f"Rank {self._rank} counts {self._job.num_ranks} ranks in all, and rank 0 "
                f"{there.num_ranks}. Use the same number of devices and of machines for all "
                "(Trainer(devices=..., num_nodes=...))."
            )
            self._store.set(_REFUSED, text, self._timeout_s)
            self._store.check([_REFUSED], self._timeout_s)  # it has been read by now
            raise ValueError(text)

    def raise_if_refused(self) -> None:
        """Tell this rank, which waits for others, that one of them has been refused.

        Raises:
            ValueError: If one has.
        """
        if self._store.check([_REFUSED], self._timeout_s):
            text = self._store.get(_REFUSED, self._timeout_s).decode(errors="replace")[:_LONGEST]
            with suppress(RuntimeError):
                wait_until_others_know(self._store, self._rank, self._job.num_ranks)
            raise ValueError(text)


def _words(job: JobName) -> str:
    return job.launched or "a job without a name"

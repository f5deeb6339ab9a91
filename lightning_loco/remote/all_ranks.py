"""All ranks of a job: those that train, in the default process group, and those that serve them."""

from __future__ import annotations

import atexit
import json
import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch.distributed import PrefixStore, Store

from lightning_loco.comm.arrivals import lost_store
from lightning_loco.comm.job import Job
from lightning_loco.comm.messages import read, read_error, write_error
from lightning_loco.comm.store import publish
from lightning_loco.comm.watchdog import Watchdog, WorkerFailure
from lightning_loco.remote.service_group import ServiceGroup

log = logging.getLogger(__name__)

_groups_made: Counter[Store] = Counter()
_files_written: Counter[Store] = Counter()
_ENDED = "lightning_loco/rank 0 has ended"
_PAUSE_S = 0.02

_to_be_told: set[Store] = set()
"""Stores in which rank 0 leaves a note when it ends, for torchrun's are there for longer."""


class AllRanks:
    """Where the ranks of a job find each other before any process group exists.

    The default process group can then hold exactly the ranks that train, so that metrics, samplers
    and collectives of users know nothing of the others.

    Args:
        job: Of all these ranks; :meth:`close` closes it.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_awaited = True
        if job.rank == 0 and job.raw_store not in _to_be_told:
            _to_be_told.add(job.raw_store)
            atexit.register(_say_ended, job.raw_store)

    def init_default_group(self, ranks: Sequence[int], backend: str, device: torch.device) -> None:
        """Make the default process group of some ranks, as :meth:`Job.init_default_group`."""
        self._job.init_default_group(ranks, backend, device)

    def new_group(self, *, is_patient: bool = False) -> ServiceGroup:
        """Connect all ranks; call it on every one, as often.

        Args:
            is_patient: Whether this rank waits for those that come late, as :class:`ServiceGroup`.
        """
        keys = self._next_group_keys()
        store, for_gloo = self._job.store, PrefixStore(f"{keys}/gloo", self._job.raw_store)
        return ServiceGroup(
            store.under(keys),
            for_gloo,
            self._job.rank,
            self._job.names,
            self._job.timeout_s,
            is_patient,
            self._job.raise_if_refused,
        )

    def report(self, error: BaseException) -> None:
        """Tell the ranks that wait in :meth:`new_group` why this one does not come.

        Does nothing if this rank has come already.
        """
        if self._is_awaited:
            notes = self._job.store.under(f"{self._next_group_keys()}/watchdog")
            watchdog = Watchdog(notes, self._job.rank, len(self._job.names), self._job.names)
            watchdog.report("".join(traceback.format_exception(error)))

    def say_written(self, error: BaseException | None) -> None:
        """Let those go on that wait in :meth:`wait_until_written`; for rank 0, as often as they.

        Args:
            error: Why it could not be written, or None.
        """
        with suppress(RuntimeError):
            publish(self._job.store, self._next_file_key(), json.dumps(write_error(error)))

    def wait_until_written(self) -> None:
        """Wait until rank 0 has written the file that all ranks have asked for, however late.

        Raises:
            WorkerFailure: If rank 0 ends without, or the job's key-value store does not answer.
            Exception: Its error, if it could not write the file.
        """
        key, store, host = self._next_file_key(), self._job.store, self._job.names[0]
        warn_at = time.monotonic() + self._job.timeout_s
        try:
            while not store.check([key], self._job.timeout_s):
                if store.check([_ENDED], self._job.timeout_s) and not store.check([key]):
                    raise WorkerFailure(
                        f"{host} has ended without a checkpoint that this rank waits for. Call "
                        "trainer.save_checkpoint on all ranks, or on none."
                    )
                if time.monotonic() > warn_at:
                    warn_at = math.inf
                    log.warning("Still waiting for %s to save a checkpoint.", host)
                time.sleep(_PAUSE_S)
            told = store.get(key)
        except WorkerFailure:
            raise
        except RuntimeError as error:
            text = f"No checkpoint was saved by {lost_store(host, error)}."
            raise WorkerFailure(text) from error
        found = read_error(read(told, host), host[0].upper() + host[1:])
        if found is not None:
            raise found

    def close(self) -> None:
        """Let go of this connection to the job's key-value store; twice does no harm."""
        self._job.close()

    def _next_file_key(self) -> str:
        _files_written[self._job.raw_store] += 1
        return f"lightning_loco/file{_files_written[self._job.raw_store]}"

    def _next_group_keys(self) -> str:
        self._is_awaited = False
        _groups_made[self._job.raw_store] += 1
        return f"lightning_loco/group{_groups_made[self._job.raw_store]}"


def _say_ended(store: Store) -> None:
    with suppress(RuntimeError):
        store.set(_ENDED, "")

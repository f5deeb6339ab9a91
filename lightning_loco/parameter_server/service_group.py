"""All ranks of a job, those that train and those that serve: connected, they agree on errors."""

from __future__ import annotations

import atexit
import json
import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from lightning_loco.distributed.notes import read, read_error, write_error
from lightning_loco.distributed.rendezvous import Job, explain_lost_store
from lightning_loco.distributed.store import publish, with_timeout
from lightning_loco.distributed.watchdog import Watchdog, WorkerFailure
from lightning_loco.fault_points import reach
from lightning_loco.parameter_server.protocol import Unreachable

log = logging.getLogger(__name__)

_groups_made: Counter[Store] = Counter()
_files_written: Counter[Store] = Counter()
_ENDED = "lightning_loco/rank 0 has ended"
_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.1

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
        return ServiceGroup(self._job, self._next_group_keys(), is_patient)

    def report(self, error: BaseException) -> None:
        """Tell the ranks that wait in :meth:`new_group` why this one does not come.

        Does nothing if this rank has come already.
        """
        if self._is_awaited:
            notes = self._job.store.with_prefix(f"{self._next_group_keys()}/watchdog")
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
            text = f"No checkpoint was saved by {explain_lost_store(host, error)}."
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


class ServiceGroup:
    """All ranks, connected pair by pair, with a thread that tells who has failed.

    Args:
        job: Of these ranks; the caller closes it. Its ``timeout_s`` is the longest wait for an
            agreement, and the longest silence of a rank or the store.
        keys: Of this group in the job's key-value store.
        is_patient: Whether this rank waits for an agreement as long as no other one has failed or
            fallen silent, however late they come: for ranks that serve those who come.

    Attributes:
        group: gloo, for messages between two ranks.
        watchdog: Tells of failed ranks.

    Raises:
        WorkerFailure: If a rank does not come; the message says which.
        Exception: If one has reported an error instead.
    """

    def __init__(self, job: Job, keys: str, is_patient: bool = False) -> None:
        self._store = job.store.with_prefix(keys)
        self._look = job.raise_if_refused
        self._rank = job.rank
        self._names = names = job.names
        self._timeout_s = job.timeout_s
        self._patience_s = math.inf if is_patient else job.timeout_s
        self._agreements = 0
        self.group: dist.ProcessGroup | None = None
        notes = self._store.with_prefix("watchdog")
        self.watchdog = Watchdog(notes, job.rank, len(names), names, job.timeout_s, monitor=True)
        self.watchdog.start()
        try:
            self.raise_together(None)  # says who is missing, unlike gloo
            self.group = self._connected_by_gloo(PrefixStore(f"{keys}/gloo", job.raw_store))
        except BaseException as error:
            self.report_failure(error)
            self.close()
            raise
        self.watchdog.label = "training"

    def _connected_by_gloo(self, store: Store) -> dist.ProcessGroup:
        size, timeout = len(self._names), timedelta(seconds=self._timeout_s)
        began = time.monotonic()

        def connect() -> Any:
            reach("connecting the ranks")
            return ProcessGroupGloo(store, self._rank, size, timeout)

        try:
            group: dist.ProcessGroup = with_timeout(connect, self._timeout_s + 1)
        except RuntimeError as error:
            waited_s = time.monotonic() - began
            raise self.watchdog.blame("the set-up", waited_s) from error
        return group

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank when any rank has found an error.

        Args:
            error: What this rank found, or None.

        Raises:
            WorkerFailure: If a rank does not come; the message says which.
            Exception: This rank's error, or else the first other one's type and text.
        """
        try:
            found = self.gather(write_error(error))
        except RuntimeError as missing:
            raise (error or missing) from missing
        if error is not None:
            raise error
        for name, told in zip(self._names, found, strict=True):
            if (other := read_error(told, f"{name[0].upper()}{name[1:]}")) is not None:
                raise other

    def gather(self, value: Any) -> list[Any]:
        """Collect a value from every rank, in order.

        Args:
            value: What JSON can hold.

        Raises:
            WorkerFailure: If a rank does not come, or has failed; the message says which.
        """
        return self._gather(value, self._patience_s)

    def wait_for_all(self) -> None:
        """Wait until all ranks have come, however late, unless one has failed or fallen silent."""
        self._gather(None, math.inf)

    def _gather(self, value: Any, patience_s: float) -> list[Any]:
        self._agreements += 1
        keys = [f"agreement{self._agreements}/{rank}" for rank in range(len(self._names))]
        try:
            self._store.set(keys[self._rank], json.dumps(value), self._timeout_s)
        except RuntimeError as error:
            self.watchdog.raise_if_failed()
            raise self._late(explain_lost_store(self._names[0], error), 0.0) from error
        found = self._wait_for(keys, patience_s)
        return [read(text, who) for text, who in zip(found, self._names, strict=True)]

    def _wait_for(self, keys: Sequence[str], patience_s: float) -> list[bytes]:
        """The values of all ranks, as soon as they are there."""
        began, waited_s, pause_s, said = time.monotonic(), 0.0, _PAUSE_S, False
        try:
            while not self._store.check(keys, self._timeout_s):
                self.watchdog.raise_if_failed()
                self._look()
                waited_s = time.monotonic() - began
                lost = self.watchdog.lost(self._timeout_s)
                if lost or waited_s > patience_s:
                    who = ", ".join(lost) or self._missing(keys)
                    break
                if waited_s > self._timeout_s and not said:
                    said = True
                    missing = self._missing(keys)
                    log.warning("Still waiting for %s, after %.0f s.", missing, waited_s)
                time.sleep(pause_s)
                pause_s = min(1.1 * pause_s, _LONGEST_PAUSE_S)
            else:
                return self._store.get_all(keys, self._timeout_s)
        except WorkerFailure:
            raise
        except RuntimeError as error:
            self.watchdog.raise_if_failed()  # what rank 0 has told before the store ended with it
            who = explain_lost_store(self._names[0], error)
        raise self._late(who, waited_s)

    def _late(self, who: str, waited_s: float) -> WorkerFailure:
        return WorkerFailure(
            f"No message in the set-up after {waited_s:.0f} s from {who}. Check that all ranks run "
            "the same script, or raise timeout_s."
        )

    def _missing(self, keys: Sequence[str]) -> str:
        pairs = zip(self._names, keys, strict=True)
        missing = [name for name, key in pairs if not self._store.check([key])]
        return ", ".join(missing) or "a rank that came too late"

    @contextmanager
    def naming(self, place: str) -> Iterator[None]:
        """Let an error of PyTorch inside name whoever has failed or gives no sign of life.

        Args:
            place: What is being waited for, in words.
        """
        try:
            yield
        except WorkerFailure:
            raise
        except RuntimeError as error:
            silent = self.watchdog.silent()
            if self.watchdog.failure is not None:
                raise WorkerFailure(self.watchdog.failure) from error
            if not silent:
                raise
            raise WorkerFailure(
                f"No message in {place} from {', '.join(silent)} (no sign of life). Look into its "
                "output first."
            ) from error

    def report_failure(self, error: BaseException, hint: str | None = None) -> None:
        """Tell the other ranks that this one has failed, and whom it has not heard of lately.

        Args:
            error: What has happened here.
            hint: What to do about it.
        """
        text = "".join(traceback.format_exception(error)) + (hint or "")
        names_who = isinstance(error, (WorkerFailure, Unreachable))
        is_named = names_who or not isinstance(error, RuntimeError)
        silent = [] if is_named else self.watchdog.silent()
        if silent:
            text = f"No sign of life from {', '.join(silent)}.\n{text}"
            log.error(text.split("\n")[0])
        self.watchdog.report(text)

    def wait_for_store(self) -> None:
        """Wait until the store owes no answer.

        Raises:
            WorkerFailure: If it has been silent for too long.
        """
        while self._store.silent_s > 0:
            self.watchdog.raise_if_failed()
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """End the thread and let go of the connections."""
        self.watchdog.end()
        self.group = None

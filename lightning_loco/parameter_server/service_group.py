"""All ranks of a job, those that train and those that serve: they connect and agree on errors."""

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

from lightning_loco.distributed.job import Job
from lightning_loco.distributed.notes import read, read_error, write_error
from lightning_loco.distributed.rendezvous import explain_lost_store
from lightning_loco.distributed.store import publish, with_timeout
from lightning_loco.distributed.watchdog import Watchdog, WorkerFailure
from lightning_loco.fault_points import reach
from lightning_loco.parameter_server.protocol import Unreachable

log = logging.getLogger(__name__)

_num_groups: Counter[Store] = Counter()
_num_files: Counter[Store] = Counter()
_ENDED_KEY = "lightning_loco/rank 0 has ended"
_PAUSE_S = 0.01
_MAX_PAUSE_S = 0.1

_stores_marked_at_exit: set[Store] = set()
"""Stores in which rank 0 sets ``_ENDED_KEY`` when it ends, as torchrun's store outlives it."""


class AllRanks:
    """The ranks of a job, connected by its key-value store before any process group exists.

    The default process group can then hold exactly the ranks that train, so that metrics, samplers
    and collectives of users do not involve the others.

    Args:
        job: The job of all these ranks; :meth:`close` closes it.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._has_joined = False
        if job.rank == 0 and job.raw_store not in _stores_marked_at_exit:
            _stores_marked_at_exit.add(job.raw_store)
            atexit.register(_mark_ended, job.raw_store)

    def init_default_group(self, ranks: Sequence[int], backend: str, device: torch.device) -> None:
        """Make the default process group of some ranks, as :meth:`Job.init_default_group`."""
        self._job.init_default_group(ranks, backend, device)

    def new_group(self, *, waits_indefinitely: bool = False) -> ServiceGroup:
        """Connect all ranks; call it on every rank, equally often.

        Args:
            waits_indefinitely: As for :class:`ServiceGroup`.
        """
        return ServiceGroup(self._job, self._next_group_keys(), waits_indefinitely)

    def report(self, error: BaseException) -> None:
        """Report to the ranks that wait in :meth:`new_group` why this one does not join.

        Does nothing if this rank has joined already.
        """
        if not self._has_joined:
            store = self._job.store.with_prefix(f"{self._next_group_keys()}/watchdog")
            watchdog = Watchdog(store, self._job.rank, len(self._job.names), self._job.names)
            watchdog.report("".join(traceback.format_exception(error)))

    def report_written(self, error: BaseException | None) -> None:
        """End the :meth:`wait_until_written` of all other ranks; rank 0 calls it as often as they.

        Args:
            error: Why the file could not be written, or None.
        """
        with suppress(RuntimeError):
            publish(self._job.store, self._next_file_key(), json.dumps(write_error(error)))

    def wait_until_written(self) -> None:
        """Wait, without a timeout, until rank 0 has written a file.

        Raises:
            WorkerFailure: If rank 0 ends first, or the job's key-value store does not respond.
            Exception: Rank 0's error, if it could not write the file.
        """
        key, store, name = self._next_file_key(), self._job.store, self._job.names[0]
        warn_at = time.monotonic() + self._job.timeout_s
        try:
            while not store.check([key], self._job.timeout_s):
                if store.check([_ENDED_KEY], self._job.timeout_s) and not store.check([key]):
                    raise WorkerFailure(
                        f"{name} has ended without a checkpoint that this rank waits for. Call "
                        "trainer.save_checkpoint on all ranks, or on none."
                    )
                if time.monotonic() > warn_at:
                    warn_at = math.inf
                    log.warning("Still waiting for %s to save a checkpoint.", name)
                time.sleep(_PAUSE_S)
            value = store.get(key)
        except WorkerFailure:
            raise
        except RuntimeError as error:
            text = f"No checkpoint was saved by {explain_lost_store(name, error)}."
            raise WorkerFailure(text) from error
        found = read_error(read(value, name), name[0].upper() + name[1:])
        if found is not None:
            raise found

    def close(self) -> None:
        """Close the connection to the job's key-value store; may be called twice."""
        self._job.close()

    def _next_file_key(self) -> str:
        _num_files[self._job.raw_store] += 1
        return f"lightning_loco/file{_num_files[self._job.raw_store]}"

    def _next_group_keys(self) -> str:
        self._has_joined = True
        _num_groups[self._job.raw_store] += 1
        return f"lightning_loco/group{_num_groups[self._job.raw_store]}"


def _mark_ended(store: Store) -> None:
    with suppress(RuntimeError):
        store.set(_ENDED_KEY, "")


class ServiceGroup:
    """A gloo group of all ranks, with a watchdog that reports which one has failed.

    Args:
        job: The job of these ranks; the caller closes it. Its ``timeout_s`` is the longest wait for
            an agreement, and the longest time without a sign of life of a rank or the store.
        keys: Prefix of this group's keys in the job's key-value store.
        waits_indefinitely: Whether this rank waits for agreements without a timeout, as long as no
            other rank has failed or gives no sign of life; for service ranks.

    Attributes:
        group: gloo, for messages between two ranks.
        watchdog: Reports failed ranks.

    Raises:
        WorkerFailure: If a rank does not join; the message says which.
        Exception: If one has reported an error instead.
    """

    def __init__(self, job: Job, keys: str, waits_indefinitely: bool = False) -> None:
        self._store = job.store.with_prefix(keys)
        self._raise_if_refused = job.raise_if_refused
        self._rank = job.rank
        self._names = names = job.names
        self._timeout_s = job.timeout_s
        self._agreement_timeout_s = math.inf if waits_indefinitely else job.timeout_s
        self._num_agreements = 0
        self.group: dist.ProcessGroup | None = None
        store = self._store.with_prefix("watchdog")
        self.watchdog = Watchdog(store, job.rank, len(names), names, job.timeout_s, monitor=True)
        self.watchdog.start()
        try:
            self.raise_together(None)  # names missing ranks, unlike gloo
            self.group = self._connect_by_gloo(PrefixStore(f"{keys}/gloo", job.raw_store))
        except BaseException as error:
            self.report_failure(error)
            self.close()
            raise
        self.watchdog.label = "training"

    def _connect_by_gloo(self, store: Store) -> dist.ProcessGroup:
        size, timeout = len(self._names), timedelta(seconds=self._timeout_s)
        start = time.monotonic()

        def connect() -> Any:
            reach("connecting the ranks")
            return ProcessGroupGloo(store, self._rank, size, timeout)

        try:
            group: dist.ProcessGroup = with_timeout(connect, self._timeout_s + 1)
        except RuntimeError as error:
            waited_s = time.monotonic() - start
            raise self.watchdog.blame("the set-up", waited_s) from error
        return group

    # --------------------------------------------------------------- agreements

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank if any rank has an error.

        Args:
            error: This rank's error, or None.

        Raises:
            WorkerFailure: If a rank does not take part; the message says which.
            Exception: This rank's error, or else type and text of the first other one.
        """
        try:
            found = self.gather(write_error(error))
        except RuntimeError as missing:
            raise (error or missing) from missing
        if error is not None:
            raise error
        for name, value in zip(self._names, found, strict=True):
            if (other := read_error(value, f"{name[0].upper()}{name[1:]}")) is not None:
                raise other

    def gather(self, value: Any) -> list[Any]:
        """Collect a value from every rank, in order.

        Args:
            value: A value that JSON supports.

        Raises:
            WorkerFailure: If a rank does not take part, or has failed; the message says which.
        """
        return self._gather(value, self._agreement_timeout_s)

    def wait_for_all(self) -> None:
        """Wait for all ranks without a timeout, unless one has failed or gives no sign of life."""
        self._gather(None, math.inf)

    def _gather(self, value: Any, timeout_s: float) -> list[Any]:
        self._num_agreements += 1
        keys = [f"agreement{self._num_agreements}/{rank}" for rank in range(len(self._names))]
        try:
            self._store.set(keys[self._rank], json.dumps(value), self._timeout_s)
        except RuntimeError as error:
            self.watchdog.raise_if_failed()
            raise self._missing_error(explain_lost_store(self._names[0], error), 0.0) from error
        found = self._wait_for(keys, timeout_s)
        return [read(text, name) for text, name in zip(found, self._names, strict=True)]

    def _wait_for(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of all ranks as soon as they are set."""
        start, waited_s, pause_s, has_warned = time.monotonic(), 0.0, _PAUSE_S, False
        try:
            while not self._store.check(keys, self._timeout_s):
                self.watchdog.raise_if_failed()
                self._raise_if_refused()
                waited_s = time.monotonic() - start
                lost = self.watchdog.lost(self._timeout_s)
                if lost or waited_s > timeout_s:
                    missing = ", ".join(lost) or self._missing_names(keys)
                    break
                if waited_s > self._timeout_s and not has_warned:
                    has_warned = True
                    names = self._missing_names(keys)
                    log.warning("Still waiting for %s, after %.0f s.", names, waited_s)
                time.sleep(pause_s)
                pause_s = min(1.1 * pause_s, _MAX_PAUSE_S)
            else:
                return self._store.get_all(keys, self._timeout_s)
        except WorkerFailure:
            raise
        except RuntimeError as error:
            # Rank 0 may have reported an error before the store ended with it.
            self.watchdog.raise_if_failed()
            missing = explain_lost_store(self._names[0], error)
        raise self._missing_error(missing, waited_s)

    def _missing_error(self, names: str, waited_s: float) -> WorkerFailure:
        return WorkerFailure(
            f"No message in the set-up after {waited_s:.0f} s from {names}. Check that all ranks "
            "run the same script, or raise timeout_s."
        )

    def _missing_names(self, keys: Sequence[str]) -> str:
        pairs = zip(self._names, keys, strict=True)
        missing = [name for name, key in pairs if not self._store.check([key])]
        return ", ".join(missing) or "a rank that joined too late"

    # ------------------------------------------------------------------ failures

    @contextmanager
    def explain_errors(self, label: str) -> Iterator[None]:
        """Turn an error of PyTorch into one that names a rank that has failed or is silent.

        Args:
            label: What is being waited for.
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
                f"No message in {label} from {', '.join(silent)} (no sign of life). Check its "
                "output first."
            ) from error

    def report_failure(self, error: BaseException, hint: str | None = None) -> None:
        """Report to the other ranks that this one has failed, and which ranks are silent.

        Args:
            error: The error on this rank.
            hint: What to do about it.
        """
        text = "".join(traceback.format_exception(error)) + (hint or "")
        names_rank = isinstance(error, (WorkerFailure, Unreachable))
        is_explained = names_rank or not isinstance(error, RuntimeError)
        silent = [] if is_explained else self.watchdog.silent()
        if silent:
            text = f"No sign of life from {', '.join(silent)}.\n{text}"
            log.error(text.split("\n")[0])
        self.watchdog.report(text)

    def wait_for_store(self) -> None:
        """Wait until the store has responded to all requests.

        Raises:
            WorkerFailure: If it does not respond within the timeout.
        """
        while self._store.silent_s > 0:
            self.watchdog.raise_if_failed()
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """End the watchdog and drop the connections."""
        self.watchdog.end()
        self.group = None

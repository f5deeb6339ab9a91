"""All ranks of a job, connected: they agree on errors, and know who has failed."""

from __future__ import annotations

import json
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, Store

from lightning_loco.comm.arrivals import lost_store
from lightning_loco.comm.messages import read
from lightning_loco.comm.store import PromptStore, in_time
from lightning_loco.comm.watchdog import Watchdog, WorkerFailure
from lightning_loco.fault_points import reach
from lightning_loco.remote.wire import Unreachable

log = logging.getLogger(__name__)

_ERRORS = {kind.__name__: kind for kind in (ValueError, TypeError, OSError)}
_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.1


class ServiceGroup:
    """All ranks, connected pair by pair, with a thread that tells who has failed.

    Args:
        store: Key-value store with keys of its own; the caller closes it.
        for_gloo: The same, used by nothing but the set-up of gloo.
        rank: This rank.
        names: What to call the ranks in messages.
        timeout_s: Longest wait for an agreement, and longest silence of a rank or the store, in
            seconds.
        is_patient: Whether this rank waits for an agreement as long as no other one has failed or
            fallen silent, however late they come: for ranks that serve those who come.
        look: Called again and again during an agreement; it may raise why to end that.

    Attributes:
        group: gloo, for messages between two ranks.
        watchdog: Tells of failed ranks.

    Raises:
        WorkerFailure: If a rank does not come; the message says which.
        Exception: If one has reported an error instead.
    """

    def __init__(
        self,
        store: PromptStore,
        for_gloo: Store,
        rank: int,
        names: Sequence[str],
        timeout_s: float,
        is_patient: bool = False,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._look = look
        self._rank = rank
        self._names = names
        self._timeout_s = timeout_s
        self._patience_s = math.inf if is_patient else timeout_s
        self._agreements = 0
        self.group: dist.ProcessGroup | None = None
        notes = store.under("watchdog")
        self.watchdog = Watchdog(notes, rank, len(names), names, timeout_s, follows=True)
        self.watchdog.start()
        try:
            self.raise_together(None)  # says who is missing, unlike gloo
            self.group = self._connected_by_gloo(for_gloo)
        except BaseException as error:
            self.report_failure(error)
            self.close()
            raise
        self.watchdog.place = "training"

    def _connected_by_gloo(self, store: Store) -> dist.ProcessGroup:
        size, timeout = len(self._names), timedelta(seconds=self._timeout_s)
        began = time.monotonic()

        def connect() -> Any:
            reach("connecting the ranks")
            return ProcessGroupGloo(store, self._rank, size, timeout)

        try:
            group: dist.ProcessGroup = in_time(connect, self._timeout_s + 1)
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
        kind = None if error is None else type(error).__name__
        try:
            found = self.gather([kind, str(error)])
        except RuntimeError as missing:
            raise (error or missing) from missing
        if error is not None:
            raise error
        for name, told in zip(self._names, found, strict=True):
            match told:
                case [None, _]:
                    continue
                case [str(kind), text]:
                    raise _ERRORS.get(kind, RuntimeError)(f"{name[0].upper()}{name[1:]}: {text}")
                case _:
                    raise RuntimeError(f"{name} has told something else than what it has found.")

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
            raise self._late(lost_store(self._names[0], error), 0.0) from error
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
            who = lost_store(self._names[0], error)
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

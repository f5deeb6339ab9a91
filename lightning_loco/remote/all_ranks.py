"""All ranks of a job: those that train, in the default process group, and those that serve them."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.rendezvous import rendezvous

from lightning_loco.comm.watchdog import Watchdog

log = logging.getLogger(__name__)

_stores: dict[tuple[str, int, int], Store] = {}
_groups_made: Counter[Store] = Counter()
_ERRORS = {kind.__name__: kind for kind in (ValueError, TypeError, OSError)}


class AllRanks:
    """Where the ranks of a job find each other before any process group exists.

    The default process group can then hold exactly the ranks that train, so that metrics, samplers
    and collectives of users know nothing of the others.

    Args:
        address: Of the machine of rank 0.
        port: A free one there.
        rank: This rank.
        size: All ranks.
        timeout_s: Longest wait, in seconds.

    Attributes:
        store: The job's key-value store; made once per process.
    """

    def __init__(self, address: str, port: int, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._is_awaited = True
        key = (address, port, size)
        if key not in _stores:
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
            timeout = timedelta(seconds=timeout_s)
            _stores[key], _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
        self.store = _stores[key]

    def init_default_group(
        self, ranks: Sequence[int], backend: str, device: torch.device | None
    ) -> None:
        """Make the default process group of some ranks; the others must not call it.

        Raises:
            RuntimeError: If there is one with other ranks.
        """
        if not dist.is_initialized():
            dist.init_process_group(
                backend,
                store=PrefixStore(f"lightning_loco/training{len(ranks)}", self.store),
                rank=ranks.index(self.rank),
                world_size=len(ranks),
                timeout=timedelta(seconds=self._timeout_s),
                device_id=device,
            )
        elif dist.get_world_size() != len(ranks):
            raise RuntimeError(
                f"The default process group has {dist.get_world_size()} ranks already, but should "
                f"have the {len(ranks)} that train. Do not initialise torch.distributed before, "
                "and use one number of workers per process."
            )

    def new_group(self, names: Sequence[str]) -> ServiceGroup:
        """Connect all ranks; call it on every one, as often.

        Args:
            names: What to call the ranks in messages.
        """
        store = self._next_group_store()
        return ServiceGroup(store, self.rank, self.size, names, self._timeout_s)

    def report(self, error: BaseException, hint: str | None = None) -> None:
        """Tell the ranks that wait in :meth:`new_group` why this one does not come.

        Does nothing if this rank has come already.

        Args:
            error: What has happened here.
            hint: What to do about it.
        """
        if self._is_awaited:
            text = f"{error} {hint}" if hint else str(error)
            found = json.dumps([type(error).__name__, text])
            self._next_group_store().set(f"{_agreement(1)}/{self.rank}", found)

    def _next_group_store(self) -> Store:
        self._is_awaited = False
        _groups_made[self.store] += 1
        return PrefixStore(f"lightning_loco/group{_groups_made[self.store]}", self.store)


class ServiceGroup:
    """All ranks, connected pair by pair, with a thread that tells who has failed.

    Args:
        store: Key-value store with keys of its own.
        rank: This rank.
        size: All ranks.
        names: What to call them in messages.
        timeout_s: Longest wait for an agreement, in seconds.

    Attributes:
        group: gloo, for messages between two ranks.
        watchdog: Tells of failed ranks.
    """

    def __init__(
        self, store: Store, rank: int, size: int, names: Sequence[str], timeout_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._timeout = timedelta(seconds=timeout_s)
        self._agreements = 0
        self.raise_together(None)  # says who is missing, unlike gloo
        gloo: Any = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, self._timeout)
        self.group: dist.ProcessGroup | None = gloo
        own = store.clone() if hasattr(store, "clone") else store
        self.watchdog = Watchdog(PrefixStore("watchdog", own), rank, size, names)
        self.watchdog.start()

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every rank when any rank has found an error.

        Args:
            error: What this rank found, or None.

        Raises:
            Exception: This rank's error, or else the first other one's type and text.
        """
        kind = None if error is None else type(error).__name__
        found = self.gather([kind, str(error)])
        if error is not None:
            raise error
        for name, (kind, text) in zip(self._names, found, strict=True):
            if kind is not None:
                raise _ERRORS.get(kind, RuntimeError)(f"{name[0].upper()}{name[1:]}: {text}")

    def gather(self, value: Any) -> list[Any]:
        """Collect a value from every rank, in order.

        Args:
            value: What JSON can hold.

        Raises:
            RuntimeError: If a rank does not come; the message names it.
        """
        self._agreements += 1
        prefix = _agreement(self._agreements)
        self._store.set(f"{prefix}/{self._rank}", json.dumps(value))
        keys = [f"{prefix}/{rank}" for rank in range(len(self._names))]
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as late:
            missing = [
                name
                for name, key in zip(self._names, keys, strict=True)
                if not self._store.check([key])
            ]
            raise RuntimeError(
                f"No word before the start after {self._timeout.total_seconds():g} s from "
                f"{', '.join(missing)}. Check that all ranks run the same script, or raise "
                "timeout_s."
            ) from late
        return [json.loads(self._store.get(key)) for key in keys]

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, and whom it has not heard of lately."""
        text = "".join(traceback.format_exception(error))
        silent = self.watchdog.silent() if isinstance(error, RuntimeError) else []
        if silent:
            text = f"No sign of life from {', '.join(silent)}.\n{text}"
            log.error(text.split("\n")[0])
        self.watchdog.report(text)

    def close(self) -> None:
        """End the thread and let go of the connections."""
        self.watchdog.end()
        self.group = None


def _agreement(number: int) -> str:
    return f"agreement{number}"


def forget_all_ranks() -> None:
    """Let go of the stores, so that another job can begin in this process."""
    _stores.clear()
    _groups_made.clear()

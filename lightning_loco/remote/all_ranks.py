"""All ranks of a job: those that train, in the default process group, and those that serve them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_loco.comm.arrivals import Arrivals
from lightning_loco.comm.store import PromptStore, StoreSilent, in_time
from lightning_loco.comm.watchdog import WorkerFailure
from lightning_loco.remote.service_group import ServiceGroup, agreement_key

_stores: dict[tuple[str, int, int], Store] = {}
_groups_made: Counter[Store] = Counter()
_LAST_WORD_S = 1.0


class AllRanks:
    """Where the ranks of a job find each other before any process group exists.

    The default process group can then hold exactly the ranks that train, so that metrics, samplers
    and collectives of users know nothing of the others.

    Args:
        address: Of the machine of rank 0.
        port: A free one there.
        rank: This rank.
        names: What to call the ranks in messages.
        timeout_s: Longest wait, in seconds.

    Raises:
        WorkerFailure: If rank 0, which hosts the job's key-value store, does not answer in time.
    """

    def __init__(
        self, address: str, port: int, rank: int, names: Sequence[str], timeout_s: float
    ) -> None:
        self.rank = rank
        self._names = names
        self._timeout_s = timeout_s
        self._place = f"{address}:{port}"
        self._is_awaited = True
        key = (address, port, len(names))
        with self._named():
            if key not in _stores:
                os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
                timeout = timedelta(seconds=timeout_s)
                meeting = rendezvous("env://", rank, len(names), timeout=timeout)
                _stores[key], _, _ = in_time(lambda: next(meeting), timeout_s + 1)
            self._job_store = _stores[key]
            self._store = PromptStore.beside(self._job_store, timeout_s)

    def init_default_group(
        self, ranks: Sequence[int], backend: str, device: torch.device | None
    ) -> None:
        """Make the default process group of some ranks; the others must not call it.

        Raises:
            RuntimeError: If there is one with other ranks, or a rank does not come in time.
        """
        if dist.is_initialized():
            if dist.get_world_size() != len(ranks):
                raise RuntimeError(
                    f"The default process group has {dist.get_world_size()} ranks already, but "
                    f"should have the {len(ranks)} that train. Do not initialise torch.distributed "
                    "before, and use one number of workers per process."
                )
            return
        own, keys = ranks.index(self.rank), f"lightning_loco/training{len(ranks)}"
        names = [self._names[rank] for rank in ranks]

        def connect() -> None:
            dist.init_process_group(
                backend,
                store=PrefixStore(keys, self._job_store),
                rank=own,
                world_size=len(ranks),
                timeout=timedelta(seconds=self._timeout_s),
                device_id=device,
            )

        with self._named():
            arrivals = Arrivals(self._store.under(f"{keys}/came"), own, names, self._timeout_s)
            try:
                in_time(connect, self._timeout_s + 1)
            except RuntimeError as error:
                raise WorkerFailure(arrivals.explain()) from error

    def new_group(self) -> ServiceGroup:
        """Connect all ranks; call it on every one, as often."""
        keys = self._next_group_keys()
        store = PrefixStore(f"{keys}/gloo", self._job_store)
        return ServiceGroup(self._store.under(keys), store, self.rank, self._names, self._timeout_s)

    def report(self, error: BaseException, hint: str | None = None) -> None:
        """Tell the ranks that wait in :meth:`new_group` why this one does not come.

        Does nothing if this rank has come already.

        Args:
            error: What has happened here.
            hint: What to do about it.
        """
        if self._is_awaited:
            text = f"{error} {hint}" if hint else str(error)
            store = self._store.under(self._next_group_keys())
            found = json.dumps([type(error).__name__, text])
            with suppress(RuntimeError):
                store.set(agreement_key(1, self.rank), found, _LAST_WORD_S)

    def close(self) -> None:
        """Let go of this connection to the job's key-value store; twice does no harm."""
        self._store.close()

    def _next_group_keys(self) -> str:
        self._is_awaited = False
        _groups_made[self._job_store] += 1
        return f"lightning_loco/group{_groups_made[self._job_store]}"

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let a store that is silent inside be an error that names its host."""
        try:
            yield
        except StoreSilent as silent:
            raise WorkerFailure(
                f"No message in the set-up within {self._timeout_s:g} s from {self._names[0]}, "
                f"which hosts the job's key-value store at {self._place} and is unreachable. "
                "Check that it runs and that nothing holds it or the network to it up, or raise "
                "timeout_s."
            ) from silent

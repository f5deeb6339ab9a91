"""The process group of the present members: torchft's, which can be made anew for others."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions
from torchft.process_group import ProcessGroupGloo

from lightning_loco.elastic.gathering import assemble, check_alive, connected
from lightning_loco.elastic.plan import Plan

CONNECT_S = 20.0
"""Longest wait for the members of a new group: one of them may have died meanwhile."""


_RUN, _FINISHED = "run", "finished"
_GOODBYE_S = 1.0


class Groups:
    """This worker's part in the group of those who exchange at present.

    Args:
        host: Under which the other members reach this machine.
        timeout_s: Longest wait for what another member sends, in seconds.

    Attributes:
        name: Of the open group; empty if there is none.
        address: ``"host:port"`` of the store that this worker serves.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self.name = ""
        self._timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"
        self._group: ProcessGroupGloo | None = None
        self._plan: Plan | None = None

    def describe(self, run: str) -> None:
        """Keep what this worker's run is, for those who want to know why theirs is another."""
        self._store.set(_RUN, run)

    def ask(self, store: str) -> str:
        """What another worker's run is; RuntimeError if it does not say."""
        asked = connected(store, min(CONNECT_S, self._seconds))
        return asked.get(_RUN).decode()

    @property
    def finished(self) -> int:
        """How many of those who took part with this worker have finished since."""
        return self._store.add(_FINISHED, 0)

    def say_finished(self) -> None:
        """Tell those who took part last that this worker has finished, if they are there still."""
        plan = self._plan
        for place, store in enumerate(plan.stores if plan is not None else ()):
            if plan is not None and place != plan.own:
                with suppress(RuntimeError):
                    check_alive(plan, place)
                    connected(store, _GOODBYE_S).add(_FINISHED, 1)

    def open(self, plan: Plan) -> None:
        """Have the group of a plan; made anew if it is another one.

        Raises:
            RuntimeError: If a member does not come.
        """
        if not plan.is_new:
            return
        self.drop()
        patience_s = min(CONNECT_S, self._seconds)
        assemble(plan, patience_s)
        group = ProcessGroupGloo(timeout=timedelta(seconds=patience_s))
        store = f"{plan.stores[plan.donor]}/{plan.group}"
        group.configure(store, plan.names[plan.own], plan.own, len(plan.names))
        self._group, self._plan, self.name = group, plan, plan.group

    @property
    def _seconds(self) -> float:
        return self._timeout.total_seconds()

    def sum(self, flat: Tensor) -> None:
        """Add a flat tensor up over all members, in place."""
        options = AllreduceOptions()
        options.timeout = self._timeout
        self._open.allreduce([flat], options).wait()

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all members, of shape ``(members, width)``."""
        group = self._open
        table = row.new_empty(group.size(), len(row))
        options = AllgatherOptions()
        options.timeout = self._timeout
        group.allgather([list(table)], [row], options).wait()
        return table

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send tensors to one member, one after the other; empty ones do not travel."""
        for tag, tensor in enumerate(tensors):
            if not tensor.numel():
                continue
            self._open.send([tensor.view(torch.uint8)], to, tag).wait(self._timeout)

    def receive(self, tensors: Sequence[Tensor], source: int, first: int = 0) -> None:
        """Receive what a member sends, into tensors; ``first`` is the number of the first one."""
        for tag, tensor in enumerate(tensors, first):
            if not tensor.numel():
                continue
            self._open.recv([tensor.view(torch.uint8)], source, tag).wait(self._timeout)

    def swap(self, message: Tensor, receivers: Sequence[int], inbox: Mapping[int, Tensor]) -> None:
        """Send one message to several members while theirs arrive, each in its place of an inbox.

        Raises:
            RuntimeError: If one of them is lost.
        """
        if not message.numel():
            return
        wire = [message.view(torch.uint8)]
        works = [self._open.recv([inbox[one].view(torch.uint8)], one, 0) for one in inbox]
        works += [self._open.send(wire, one, 0) for one in receivers]
        try:
            while works:
                works.pop().wait(self._timeout)
        finally:
            works.clear()  # or those that have not ended would keep the group's connections open

    @property
    def _open(self) -> ProcessGroupGloo:
        if self._group is None:
            raise RuntimeError("There is no open group.")
        return self._group

    def drop(self) -> None:
        """Leave the open group without waiting for what is under way."""
        group, self._group, self.name = self._group, None, ""
        if group is not None:
            last = [group]
            del group
            last[0].abort(errored=False)
            threading.Thread(target=last.clear, name="loco-left-group").start()

    def close(self) -> None:
        """Leave the group, and stop serving the store."""
        self.drop()
        del self._store

"""A model of gloo: process groups whose messages arrive when the scheduler says so.

What is like gloo, and can be seen in ``test_model_groups.py``:

- A collective that has begun continues by itself. It ends on one worker before another.
- A buffer is read when its message leaves, and not when the call returns.
- A worker that ends closes its connections. Those that are connected to it notice that one after
  the other: their works with it, and all later ones, fail with "Connection closed by peer". In a
  ring of four a worker has no connection to the one opposite: it waits until its neighbour ends.
- A work that takes longer than the timeout closes all connections of its worker in that group.
- ``Work.is_completed`` of a single send or receive is False until it was waited for.
- A number of seconds passed to ``Work.wait`` ends the wait and not the work.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.exploration.scheduler import Scheduler

_CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
_LATE = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
    "for recv operation to complete"
)


class DifferentCalls(AssertionError):
    """Workers call different collectives at the same time; with gloo anything may happen then."""


class ModelWork(dist.Work):
    """A work of a group; it is over once it is ``done`` or has an ``error``.

    Attributes:
        peers: Ranks without which it cannot end.
    """

    def __init__(self, group: ModelGroup, label: str, peers: set[int], limit_s: float) -> None:
        super().__init__()
        self.group, self.label, self.peers = group, label, peers
        self.done = False
        self.error = ""
        self.deadline = limit_s

    @property
    def is_over(self) -> bool:
        return self.done or bool(self.error)

    def fail(self, error: str) -> None:
        """End with an error, unless it is over."""
        if not self.is_over:
            self.error = error
            self.group.pending.remove(self)

    def finish(self) -> None:
        """End without an error, unless it is over."""
        if not self.is_over:
            self.done = True
            self.group.pending.remove(self)

    def is_completed(self) -> bool:
        scheduler = self.group.scheduler
        if not self.is_over and scheduler.now >= self.deadline:
            self.group.close(_LATE)
        return self.is_over

    def wait(self, timeout: timedelta | None = None) -> bool:
        scheduler, deadline = self.group.scheduler, self._deadline()
        given_s = deadline if timeout is None else scheduler.now + timeout.total_seconds()
        left_s = max(0.0, min(deadline, given_s) - scheduler.now)
        if not scheduler.wait(self.label, lambda: self.is_over, left_s):
            if given_s < deadline:
                raise RuntimeError("Operation timed out!")
            self.group.close(_LATE)
        if self.error:
            raise RuntimeError(self.error)
        self._was_waited_for()
        return True

    def _deadline(self) -> float:
        return self.deadline

    def _was_waited_for(self) -> None:
        """Called when a wait has ended without an error."""


class Collective(ModelWork):
    """One worker's part in a collective; ``missing`` are the ranks that it waits for."""

    def __init__(
        self,
        group: ModelGroup,
        number: int,
        kind: str,
        own: Tensor,
        outputs: Sequence[Tensor],
        root: int,
    ) -> None:
        others = set(range(group.size())) - {group.own_rank}
        needs = {root} if kind == "broadcast" and group.own_rank != root else others
        limit_s = group.scheduler.now + group.timeout_s
        super().__init__(group, f"{kind} {number} of {group.name}", needs, limit_s)
        self.number, self.kind, self.own, self.outputs, self.root = number, kind, own, outputs, root
        self.missing = set(needs)
        self.parts: dict[int, Tensor] = {}
        self._sent: Tensor | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """What must be equal on all workers."""
        return self.kind, self.own.numel(), self.own.dtype, self.root

    def sent(self) -> Tensor:
        """The message, as it was when it left."""
        if self._sent is None:
            self._sent = self.own.detach().clone()
        return self._sent

    def fail(self, error: str) -> None:
        self.sent()  # what is on its way does not change any more
        super().fail(error)

    def receive(self, other: Collective) -> None:
        """Receive the part of another worker."""
        rank = other.group.own_rank
        if self.is_over or rank not in self.missing:
            return
        self.parts[rank] = other.sent()
        self.missing.discard(rank)
        if not self.missing:
            self.parts[self.group.own_rank] = self.sent()
            self._write([self.parts[r] for r in sorted(self.parts)])
            self.finish()

    @torch.no_grad()
    def _write(self, parts: list[Tensor]) -> None:
        if self.kind == "all_reduce":
            self.own.copy_(functools.reduce(operator.add, parts))
        elif self.kind == "all_gather":
            for output, part in zip(self.outputs, parts, strict=True):
                output.copy_(part)
        elif self.group.own_rank != self.root:
            self.own.copy_(self.parts[self.root])


class SingleWork(ModelWork):
    """A send or a receive; gloo's timeout begins when it is waited for."""

    def __init__(self, group: ModelGroup, label: str, peer: int, tensor: Tensor) -> None:
        super().__init__(group, label, {peer}, float("inf"))
        self.tensor = tensor
        self.in_flight: Tensor | None = None
        self._is_known = False

    def is_completed(self) -> bool:
        return self._is_known

    def _deadline(self) -> float:
        return self.group.scheduler.now + self.group.timeout_s

    def _was_waited_for(self) -> None:
        self._is_known = True

    def arrive(self) -> None:
        """Write what is on its way into the memory of a receive."""
        if self.in_flight is not None and not self.is_over:
            self.tensor.detach().copy_(self.in_flight)
            self.finish()


@dataclass
class Meetings:
    """What the groups of one name on all workers have in common."""

    groups: list[ModelGroup] = field(default_factory=list)
    collectives: dict[int, list[Collective]] = field(default_factory=dict)
    sends: dict[tuple[int, int, int], list[SingleWork]] = field(default_factory=dict)
    receives: dict[tuple[int, int, int], list[SingleWork]] = field(default_factory=dict)


class ModelGroup(dist.ProcessGroup):
    """One worker's process group.

    Attributes:
        name: Its name in events.
        pending: Works that are not over.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        own_rank: int,
        hosts: Sequence[str],
        timeout_s: float,
        meetings: Meetings,
    ) -> None:
        super().__init__(own_rank, len(hosts))
        self.scheduler, self.name, self.own_rank, self.hosts = scheduler, name, own_rank, hosts
        self.timeout_s = timeout_s
        self.pending: list[ModelWork] = []
        self._meetings = meetings
        self._num_collectives = 0
        self._closed_peers: set[int] = set()
        self._why_closed = ""
        meetings.groups.append(self)

    # ---------------------------------------------------------- called by PyTorch

    @property
    def group_name(self) -> str:
        return f"{self.name}/{self.own_rank}"

    def size(self) -> int:
        return len(self.hosts)

    def rank(self) -> int:
        return self.own_rank

    def getBackendName(self) -> str:
        return "gloo"

    def _get_backend(self, device: torch.device) -> Any:
        raise RuntimeError(f"No backend for {device}.")

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._begin("all_reduce", tensors[0])

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], _: Any) -> dist.Work:
        return self._begin("all_gather", tensors[0], outputs[0])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._begin("broadcast", tensors[0], root=opts.rootRank)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        key = (self.own_rank, peer, tag)
        return self._begin_single(self._meetings.sends, key, peer, f"send to {peer}", tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        key = (peer, self.own_rank, tag)
        return self._begin_single(
            self._meetings.receives, key, peer, f"message of {peer}", tensors[0]
        )

    def shutdown(self) -> None:
        """Close the group, as gloo's destructor does."""
        self.close(_CLOSED)

    abort = shutdown

    # ------------------------------------------------------------------ messages

    def _begin(
        self, kind: str, own: Tensor, outputs: Sequence[Tensor] = (), root: int = 0
    ) -> Collective:
        _ = self.scheduler.current  # a killed worker sends nothing
        number, self._num_collectives = self._num_collectives, self._num_collectives + 1
        work = Collective(self, number, kind, own, outputs, root)
        self.pending.append(work)
        present = self._meetings.collectives.setdefault(number, [])
        for other in present:
            if other.form != work.form:
                raise DifferentCalls(
                    f"{self.group_name} calls {work.form} and {other.group.group_name} {other.form}"
                )
        if self._why_closed or self._closed_peers & self._connected():
            work.fail(self._why_closed or _CLOSED)
            return work
        for other in present:
            self._post_part(work, other)
            self._post_part(other, work)
        present.append(work)
        return work

    def _post_part(self, source: Collective, target: Collective) -> None:
        if source.group.own_rank in target.missing and not (source.is_over or target.is_over):
            name = f"{self.name} {source.number}: {source.group.host} to {target.group.host}"
            self.scheduler.post(name, lambda: target.receive(source), target.group.host)

    def _begin_single(
        self,
        works: dict[tuple[int, int, int], list[SingleWork]],
        key: tuple[int, int, int],
        peer: int,
        label: str,
        tensor: Tensor,
    ) -> SingleWork:
        _ = self.scheduler.current
        work = SingleWork(self, f"{label} in {self.name}", peer, tensor)
        self.pending.append(work)
        if self._why_closed or peer in self._closed_peers:
            work.fail(self._why_closed or _CLOSED)
            return work
        works.setdefault(key, []).append(work)
        number = len(works[key]) - 1
        sends, receives = (getattr(self._meetings, n).get(key, []) for n in ("sends", "receives"))
        if number < min(len(sends), len(receives)):
            self._post_message(key, number, sends[number], receives[number])
        return work

    def _post_message(
        self, key: tuple[int, int, int], number: int, sent: SingleWork, received: SingleWork
    ) -> None:
        source, target = self.hosts[key[0]], self.hosts[key[1]]
        name = f"{self.name} message {number}: {source} to {target}"

        def leave() -> None:
            if not sent.is_over and not received.is_over:
                received.in_flight = sent.tensor.detach().clone()
                sent.finish()
                self.scheduler.post(f"{name} arrives", received.arrive, target)

        self.scheduler.post(f"{name} leaves", leave, source)

    # --------------------------------------------------------------- connections

    @property
    def host(self) -> str:
        """The name of the worker."""
        return self.hosts[self.own_rank]

    def _connected(self) -> set[int]:
        """The ranks whose end ends a collective here: the neighbours in a ring."""
        size = self.size()
        return {(self.own_rank - 1) % size, (self.own_rank + 1) % size}

    def close(self, why: str) -> None:
        """Close all connections; the others notice it later."""
        if self._why_closed:
            return
        self._why_closed = why
        has_sent_all = not self.pending
        for work in list(self.pending):
            work.fail(why)
        for other in self._meetings.groups:
            if other is not self:
                name = f"{self.name}: {other.host} notices the end of {self.host}"
                self.scheduler.post(
                    name, functools.partial(other._notice, self, has_sent_all), other.host
                )

    def _notice(self, peer: ModelGroup, has_sent_all: bool) -> None:
        """See that a connection was closed; what had left before has arrived before."""
        rank = peer.own_rank
        for work in list(self.pending):
            if isinstance(work, SingleWork):
                work.arrive()
            elif isinstance(work, Collective) and has_sent_all:
                for other in self._meetings.collectives.get(work.number, ()):
                    if other.group is peer and other.done:
                        work.receive(other)
        self._closed_peers.add(rank)
        for work in list(self.pending):
            is_single = isinstance(work, SingleWork)
            if rank in (work.peers if is_single else work.peers & self._connected()) and (
                is_single or rank in work.missing
            ):
                work.fail(_CLOSED)


class _DefaultGroup(dist.ProcessGroup):
    """Stands for the default group; nothing may be sent in it."""

    def __init__(self) -> None:
        super().__init__(0, 1)


class Groups:
    """Makes the groups of a run, and registers them with PyTorch.

    ``timeout_s`` is the longest wait in a group, and ``suffix`` ends all names.
    """

    def __init__(self, scheduler: Scheduler, timeout_s: float, suffix: str = "") -> None:
        self._scheduler, self._timeout_s, self._suffix = scheduler, timeout_s, suffix
        self._meetings: dict[str, Meetings] = {}
        self._all: list[ModelGroup] = []

    def make(self, name: str, rank: int, hosts: Sequence[str]) -> ModelGroup:
        """Make one worker's group of this name; all workers use the same names."""
        meetings = self._meetings.setdefault(name, Meetings())
        name += self._suffix
        group = ModelGroup(self._scheduler, name, rank, hosts, self._timeout_s, meetings)
        world = dist.distributed_c10d._world
        world.pg_map[group] = ("gloo", None)
        world.pg_names[group] = group.group_name
        world.pg_group_ranks[group] = {r: r for r in range(len(hosts))}
        world.pg_backend_config[group] = "gloo"
        world.pg_to_tag[group] = ""
        self._all.append(group)
        return group

    def end(self, host: str) -> None:
        """Close all connections of a worker whose process has ended."""
        for group in self._all:
            if group.host == host:
                group.close(_CLOSED)


@dataclass
class _World:
    """What PyTorch keeps of the groups of a process."""

    default_pg: Any = field(default_factory=_DefaultGroup)
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, str] = field(default_factory=dict)
    pg_group_ranks: dict[Any, dict[int, int]] = field(default_factory=dict)
    pg_backend_config: dict[Any, str] = field(default_factory=dict)
    group_count: int = 0
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, str] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, Any] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)


@contextmanager
def registered() -> Iterator[None]:
    """Let PyTorch know only the groups of a model, until the end of the context."""
    module = dist.distributed_c10d
    before, module._world = module._world, _World()
    try:
        yield
    finally:
        module._world = before

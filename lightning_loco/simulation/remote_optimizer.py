"""Training with a remote optimizer in one process: many workers, and servers that step for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from lightning_loco.compression import Codec
from lightning_loco.costs import ServerTimes
from lightning_loco.links import Array, LinkLike, LinkTimes, as_links
from lightning_loco.parameter_server import Transport
from lightning_loco.parameter_server.buckets import BUCKET_BYTES
from lightning_loco.parameter_server.protocol import GradientClipping
from lightning_loco.parameter_server.tiers import check_ranks
from lightning_loco.simulation.checks import check_length, copy_first
from lightning_loco.simulation.failures import Failure
from lightning_loco.simulation.server import MakeOptimizer, SimulatedServer
from lightning_loco.simulation.simulation import LocalStep, make_step_times
from lightning_loco.simulation.timeline import LossPoint, Timeline, TimelineEvent, WorkerCosts
from lightning_loco.values import check_bytes
from lightning_loco.worker import exchanged_parameters


class RemoteOptimizerSimulation:
    """Runs workers and servers of a remote optimizer in one process, on a virtual clock.

    Buckets, codec, shards, the mean and the optimizer's step are those of a real run, and so are
    the numbers, bit for bit. A step ends when the gradients of all workers are there, so the
    slowest one determines its time. Servers and their links are those of
    :class:`~lightning_loco.costs.ServerTimes`: each server has a link like that of worker 0, which
    the messages of all workers share. The optimizer's step takes no time, and nothing is sent
    before the backward pass has ended.

    Args:
        models: One module per worker; all start from the parameters of the first one.
        make_optimizer: Makes a server's optimizer. It is called with a copy of the first model for
            each server, whose parameters are then the server's.
        num_servers: Shards of the parameters, each with its own server.
        num_tiers: 2, or 3 if a server averages, and another one beside it has the optimizer.
        min_workers: Continue with so many workers when some die. Default: the run ends.
        compression: How gradients and parameters are encoded, as in
            :class:`~lightning_loco.RemoteOptimizerStrategy`.
        bucket_bytes: Size of a bucket in bytes.
        gradient_clip_val: Clip the mean gradient, as ``Trainer`` does. Default: not.
        gradient_clip_algorithm: ``"norm"``, of all gradients, or ``"value"``, of each element.
        speeds: Gradients per second of each worker. Default: they take no time.
        jitter: As in :class:`~lightning_loco.Simulation`.
        links: Links of the workers, as in :class:`~lightning_loco.Simulation`. Default: messages
            take no time.
        failures: When workers die, for ever; needs ``min_workers``.
        seed: Of the jitter.

    Attributes:
        optimizers: That of each server, for learning-rate schedules.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If there is no model, the models differ, or a setting is invalid for them.

    Source:
        As :class:`~lightning_loco.RemoteOptimizerStrategy`.

    Example:
        >>> import torch
        >>> models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        >>> _ = [model.weight.data.zero_() for model in models]
        >>> simulation = RemoteOptimizerSimulation(
        ...     models, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), speeds=[1.0, 0.5]
        ... )
        >>> def local_step(worker):
        ...     models[worker].weight.grad = torch.full((1, 1), float(worker))
        >>> simulation.run(local_step, num_steps=3)
        >>> [model.weight.item() for model in models]
        [-1.5, -1.5]
        >>> [costs.utilisation for costs in simulation.costs]
        [0.5, 1.0]
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        make_optimizer: MakeOptimizer,
        *,
        num_servers: int = 1,
        num_tiers: int = 2,
        min_workers: int | None = None,
        compression: str | Codec | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        speeds: Sequence[float] | None = None,
        jitter: float = 0.0,
        links: LinkLike | None = None,
        failures: Sequence[Failure] = (),
        seed: int = 0,
    ) -> None:
        n = len(models)
        if not models:
            raise ValueError("A simulation needs at least one model, one per worker; got none.")
        check_ranks(n, num_servers, 1, min_workers)
        check_bytes("bucket_bytes", bucket_bytes)
        if isinstance(num_tiers, bool) or not isinstance(num_tiers, int):
            raise TypeError(f"num_tiers must be an integer, got {num_tiers!r}.")
        if num_tiers not in (2, 3):
            raise ValueError(f"num_tiers must be 2 or 3, got {num_tiers!r}.")
        self._min_workers = n if min_workers is None else min_workers
        self._deaths = _deaths_of(failures, n, min_workers)
        self._clip = _as_clipping(gradient_clip_val, gradient_clip_algorithm)
        self._step_times = make_step_times(speeds, n, jitter, seed)
        copy_first(models)
        self._models = models
        transport = Transport(bucket_bytes=bucket_bytes, compression=compression)
        exchange = self._exchange_norms if num_servers > 1 else None
        self._servers = [
            SimulatedServer(
                models, make_optimizer, transport, number, num_servers, num_tiers == 3, exchange
            )
            for number in range(num_servers)
        ]
        self._norms: list[Tensor] | None = None
        self._server_times = self._times_of(links, num_tiers, bucket_bytes)
        self._timeline = Timeline(n)
        self._time_s, self._made, self._bytes = [0.0] * n, [0] * n, [0] * n
        self._alive, self._sent = set(range(n)), set[int]()
        self._lost: list[int] = []
        self._steps, self._ended_s = 0, 0.0

    def _times_of(
        self, links: LinkLike | None, num_tiers: int, bucket_bytes: int
    ) -> ServerTimes | None:
        if (known := as_links(links)) is None:
            return None
        known.check(self.num_workers)
        return ServerTimes(
            LinkTimes(known, self.num_workers),
            [server.message_bytes for server in self._servers],
            [server.relayed_bytes for server in self._servers] if num_tiers == 3 else (),
            bucket_bytes,
            all(server.adds_to_first for server in self._servers),
        )

    @property
    def num_workers(self) -> int:
        """Number of workers N."""
        return len(self._models)

    @property
    def round_index(self) -> int:
        """Number of steps that the servers have made."""
        return self._steps

    @property
    def time_s(self) -> list[float]:
        """The time of each worker, in seconds from the start."""
        return list(self._time_s)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer of each server, which steps the parameters of its shard only."""
        return [server.optimizer for server in self._servers]

    # ----------------------------------------------------------------------- training

    def run(
        self,
        local_step: LocalStep,
        num_steps: int | None = None,
        *,
        seconds: float | None = None,
        after_step: Callable[[], object] = lambda: None,
    ) -> None:
        """Let the workers compute gradients, and the servers make steps with them.

        Args:
            local_step: Called with the index of a worker; must compute the gradients of its model
                (``zero_grad`` and ``backward``), without an optimizer's step. It may return the
                loss, for :attr:`losses`.
            num_steps: Steps of the servers.
            seconds: Instead of steps, time that passes; gradients that would be ready later are not
                computed.
            after_step: Called after each step of the servers, to step a schedule for instance.

        Raises:
            TypeError: If ``num_steps`` is not an integer.
            ValueError: If both or neither are given, ``seconds`` without speeds, or not finite.
            RuntimeError: If too few workers are left, a gradient is not finite, or workers have
                changed parameters in different ways.
        """
        check_length("steps", num_steps, seconds, self._step_times.step_s)
        last = math.inf if num_steps is None else self._steps + num_steps
        end_s = math.inf if seconds is None else self._ended_s + seconds
        while self._steps < last and self._compute(local_step, end_s):
            self._make_step()
            after_step()
        self._ended_s = end_s if seconds is not None else max(self._time_s)

    def _compute(self, local_step: LocalStep, end_s: float) -> bool:
        """Compute the gradients of a step in order of time; return whether all are ready in time.

        Workers that die before their gradient is ready are lost.
        """
        dues = []
        for worker in self._alive - self._sent:
            ready_s = self._time_s[worker] + self._step_times.seconds(worker, self._made[worker])
            dues.append((min(ready_s, self._death_s(worker)), worker, ready_s))
        for due_s, worker, ready_s in sorted(dues):
            if due_s > end_s:
                return False
            if due_s < ready_s:
                self._lose(worker)
                continue
            self._timeline.add(worker, "compute", self._time_s[worker], ready_s)
            self._time_s[worker] = ready_s
            loss = local_step(worker)
            self._made[worker] += 1
            self._timeline.add_loss(worker, self._made[worker], ready_s, loss)
            self._sent.add(worker)
        return True

    @torch.no_grad()
    def _make_step(self) -> None:
        """Average the gradients that were sent, make the step, and send the parameters back."""
        self._check_enough()
        senders = sorted(self._sent)
        sent_s = np.array([self._time_s[worker] for worker in senders])
        arrived_s = self._arrived_s(sent_s, senders)
        died_s = np.array([self._death_s(worker) for worker in senders])
        has_arrived = died_s >= arrived_s.max(1)
        self._lose_senders(senders, sent_s, ~has_arrived)
        self._check_enough()
        noticed_s = max((self._noticed_s(worker) for worker in self._lost), default=0.0)
        known_s = np.maximum(arrived_s[has_arrived].max(0), noticed_s)
        is_noticed = [self._noticed_s(worker) <= known_s.max() for worker in senders]
        self._lose_senders(senders, sent_s, has_arrived & is_noticed)
        self._check_enough()
        self._lost.clear()
        members = [worker for worker in senders if worker in self._alive]
        self._step_servers(members)
        back_s = self._back_s(known_s, members)
        for worker, began_s, there_s in zip(
            senders, sent_s.tolist(), arrived_s.max(1).tolist(), strict=True
        ):
            self._bytes[worker] += sum(server.message_bytes for server in self._servers)
            self._timeline.add(worker, "send", began_s, min(there_s, self._death_s(worker)))
        for worker, received_s in zip(members, back_s.tolist(), strict=True):
            self._timeline.add(worker, "send", float(known_s.min()), received_s)
            self._wait(worker, self._time_s[worker], received_s)
        self._sent.clear()
        self._steps += 1

    def _step_servers(self, members: Sequence[int]) -> None:
        """Make the step of all servers, with the gradients of some workers."""
        requests = [server.average(members, self._clip) for server in self._servers]
        self._norms = None
        for server, request in zip(self._servers, requests, strict=True):
            server.backend.finish_step(request)
        for server in self._servers:
            server.send_parameters(members)

    def _exchange_norms(self, own: list[Tensor]) -> list[Tensor]:
        """Return the norms of all servers' gradients in order, before any of them is clipped."""
        if self._norms is None:
            norm_of: dict[int, Tensor] = {}
            for server in self._servers:
                norms = torch.stack(server.backend.gradient_norms(server.missing)).double()
                norm_of.update(zip(server.indices, norms, strict=True))
            self._norms = [norm_of[index] for index in sorted(norm_of)]
        return [norm.to(own[0].dtype) for norm in self._norms]

    # ------------------------------------------------------------------- virtual time

    def _arrived_s(self, sent_s: Array, senders: Sequence[int]) -> Array:
        """Return when the gradient of each sender is at each server, ``(senders, servers)``."""
        if self._server_times is None:
            return np.repeat(sent_s[:, None], len(self._servers), 1)
        return self._server_times.gradients(sent_s, self._steps, senders)

    def _back_s(self, known_s: Array, members: Sequence[int]) -> Array:
        """Return when each worker has the parameters of all servers, ``(members,)``."""
        if self._server_times is None:
            return np.full(len(members), known_s.max())
        if self._clip is not None and self._clip.by == "norm" and len(self._servers) > 1:
            known_s = np.full_like(known_s, known_s.max() + self._server_times.between_s)
        return self._server_times.parameters(known_s, self._steps, members)

    def _wait(self, worker: int, began_s: float, until_s: float) -> None:
        """Let a worker wait, or die while it waits."""
        died_s = self._death_s(worker)
        self._timeline.add(worker, "wait", began_s, min(until_s, died_s))
        self._time_s[worker] = until_s
        if died_s <= until_s:
            self._lose(worker)

    # ----------------------------------------------------------------------- failures

    def _death_s(self, worker: int) -> float:
        found = self._deaths.get(worker)
        return math.inf if found is None else found.at_s

    def _noticed_s(self, worker: int) -> float:
        found = self._deaths.get(worker)
        return math.inf if found is None else found.at_s + found.noticed_after_s

    def _lose(self, worker: int) -> None:
        """A worker dies; the servers wait for it until they have noticed."""
        self._time_s[worker] = self._death_s(worker)
        self._alive.discard(worker)
        self._lost.append(worker)

    def _lose_senders(self, senders: Sequence[int], sent_s: Array, chosen: Array) -> None:
        """Some senders die before the servers make the step, which is without their gradients."""
        for place in np.flatnonzero(chosen).tolist():
            worker = senders[place]
            self._wait(worker, float(sent_s[place]), self._death_s(worker))

    def _check_enough(self) -> None:
        if len(self._alive) < self._min_workers:
            worker = self._lost[-1]
            raise RuntimeError(
                f"Worker {worker} has died at {self._death_s(worker):g} s, and fewer than "
                f"min_workers={self._min_workers} are left."
            )

    # ------------------------------------------------------------------------ results

    @property
    def losses(self) -> list[LossPoint]:
        """What ``local_step`` has returned, if it was a loss, in order of the virtual time."""
        return self._timeline.losses

    @property
    def timeline(self) -> list[TimelineEvent]:
        """What each worker did and when; ``"send"`` is a gradient or parameters on their way."""
        return list(self._timeline.events)

    @property
    def costs(self) -> list[WorkerCosts]:
        """What each worker has done so far, and sent; its rounds are its steps."""
        return [
            self._timeline.costs_of(
                worker,
                self._made[worker],
                self._made[worker],
                self._bytes[worker],
                self._time_s[worker],
            )
            for worker in range(self.num_workers)
        ]

    def params(self) -> list[Tensor]:
        """Return a flat copy of each worker's trainable parameters, ``(P,)``."""
        return [_flat(exchanged_parameters(model).values()) for model in self._models]

    def consensus(self) -> Tensor:
        """Return the servers' parameters ``(P,)``, which are not rounded by compression."""
        found = dict(exchanged_parameters(self._models[0]))
        for server in self._servers:
            found.update(zip(server.names, server.params, strict=True))
        return _flat(found.values())


def _as_clipping(value: float | None, algorithm: str) -> GradientClipping | None:
    if algorithm not in ("norm", "value"):
        raise ValueError(f"gradient_clip_algorithm must be 'norm' or 'value', got {algorithm!r}.")
    if value is None or value == 0:
        return None
    if not 0 < value < math.inf:
        raise ValueError(f"gradient_clip_val must be positive and finite, got {value!r}.")
    return GradientClipping("norm" if algorithm == "norm" else "value", float(value))


def _deaths_of(
    failures: Sequence[Failure], num_workers: int, min_workers: int | None
) -> dict[int, Failure]:
    """Return the first failure of each worker; ValueError if one cannot be simulated."""
    if failures and min_workers is None:
        raise ValueError(
            "A run with a remote optimizer ends when a worker dies. Give min_workers to continue "
            "with the others, or drop failures."
        )
    found: dict[int, Failure] = {}
    for failure in sorted(failures, key=lambda one: one.at_s):
        if failure.worker >= num_workers:
            raise ValueError(
                f"A failure is of worker {failure.worker}, but there are {num_workers} workers, "
                f"numbered 0 to {num_workers - 1}."
            )
        if failure.back_s is not None:
            raise ValueError(
                "With a remote optimizer a worker that has died does not come back, got "
                f"back_s={failure.back_s:g} of worker {failure.worker}. Leave it out."
            )
        found.setdefault(failure.worker, failure)
    return found


def _flat(params: Iterable[Tensor]) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in params])

"""DiLoCo on hivemind: its averager finds the group and makes the mean of pseudo-gradients.

hivemind has the averager, not DiLoCo, so the outer step is torch's SGD on a copy of the parameters,
as in OpenDiLoCo. The search for a group is begun a phase ahead, as hivemind's own optimizer does,
and is over as soon as all workers are together; a round waits for what is left of it. Workers that
find no group in time end the run.
"""

from __future__ import annotations

import time

import torch
from harness import TIMEOUT_S, Worker
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.utils import get_dht_time
from torch import nn
from torch.optim import Optimizer

from libraries.library import Job, Library

MATCHMAKING_S = 1.0


class HivemindDiLoCo(Library):
    """An averager in its own process, and the outer optimizer in this one."""

    needs_group = False

    def __init__(self, job: Job, worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(job, worker, model, optimizer)
        self._every, self._steps = job.sync_every, 0
        self._params = [p.detach() for p in model.parameters()]
        self._outer = [nn.Parameter(p.clone()) for p in self._params]
        self._outer_optimizer = torch.optim.SGD(
            self._outer, lr=job.outer_lr, momentum=job.outer_momentum, nesterov=True
        )
        listen = [f"/ip4/{worker.host}/tcp/0"]
        dht = DHT(host_maddrs=listen, start=True) if worker.rank == 0 else None
        first = worker.gather(dht and [str(address) for address in dht.get_visible_maddrs()])[0]
        self._dht = dht or DHT(initial_peers=first, host_maddrs=listen, start=True)
        self._averager = DecentralizedAverager(
            [torch.zeros_like(p) for p in self._params],
            self._dht,
            start=True,
            prefix="benchmark",
            target_group_size=worker.num_workers,
            min_group_size=worker.num_workers,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=MATCHMAKING_S / 2,
        )
        worker.wait_for_all()
        self._phase_s, self._began = MATCHMAKING_S, time.monotonic()
        self._look_for_group()

    def _look_for_group(self) -> None:
        self._control = self._averager.step(
            scheduled_time=get_dht_time() + max(self._phase_s, MATCHMAKING_S),
            timeout=TIMEOUT_S,
            require_trigger=True,
            wait=False,
        )

    def step(self, loss: float) -> None:
        """The local step, and a round if one is due."""
        self.optimizer.step()
        self._steps += 1
        if self._steps % self._every == 0:
            self._phase_s = time.monotonic() - self._began
            self._make_round()
            self._began = time.monotonic()
            self._look_for_group()

    @torch.no_grad()
    def _make_round(self) -> None:
        with self._averager.get_tensors() as tensors:
            for gradient, outer, local in zip(tensors, self._outer, self._params, strict=True):
                torch.sub(outer, local, out=gradient)
        self._control.allow_allreduce()
        self._control.result(TIMEOUT_S)
        with self._averager.get_tensors() as tensors:
            for outer, gradient in zip(self._outer, tensors, strict=True):
                outer.grad = gradient
            self._outer_optimizer.step()
        torch._foreach_copy_(self._params, self._outer)

    def close(self) -> None:
        """Nothing: its processes are ended with the run."""

"""dpwa: every worker blends in the parameters of a random other one, in every round.

It is gossip, not DiLoCo: workers stay different, and its loss is the mean of theirs. The fetch runs
behind the last local step of a phase, as dpwa means it: publish and ask before the batch, wait and
blend after it. A checkout is needed (``--dpwa``), since it has no package. It reads its settings
with a call that PyYAML 6 refuses, so this process gives it one that works. Its server cannot be
stopped, so the process has to be ended.
"""

from __future__ import annotations

import os
import sys
import types

import yaml
from harness import Worker, free_port
from torch import nn
from torch.optim import Optimizer

from libraries.library import Job, Library

FACTOR = 0.5
TIMEOUT_MS = 60_000


class DpwaGossip(Library):
    """dpwa's adapter for PyTorch, with its constant interpolation."""

    needs_group = False

    def __init__(self, job: Job, worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(job, worker, model, optimizer)
        self._every, self._steps = job.sync_every, 0
        sys.path.append(str(job.dpwa))
        import dpwa.dpwa
        from dpwa.adapters.pytorch import DpwaPyTorchAdapter

        dpwa.dpwa.yaml = types.SimpleNamespace(load=yaml.safe_load)
        here = (worker.host, free_port(worker.host))
        nodes = [
            {"name": f"worker{rank}", "host": host, "port": port}
            for rank, (host, port) in enumerate(worker.gather(here))
        ]
        settings = [
            {"nodes": nodes},
            {"fetch_probability": 1},
            {"timeout_ms": TIMEOUT_MS},
            {"interpolation": "constant"},
            {"divergence_threshold": 0},
            {"constant": {"value": FACTOR}},
        ]
        path = os.path.join(job.folder, f"dpwa-{worker.rank}.yaml")
        with open(path, "w") as file:
            yaml.safe_dump(settings, file)
        self._adapter = DpwaPyTorchAdapter(model, f"worker{worker.rank}", path)
        worker.wait_for_all()

    def step(self, loss: float) -> None:
        """The local step; before the last one of a phase: send, after it: wait and blend."""
        self.optimizer.step()
        self._steps += 1
        if (self._steps + 1) % self._every == 0:
            self._adapter.update_send(loss)
        if self._steps % self._every == 0:
            self._adapter.update_wait(loss)

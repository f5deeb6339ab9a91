"""torchft's DiLoCo, one all-reduce per parameter (its default) or with buckets.

Each worker is a replica group of one rank, as in its examples, and the lighthouse runs in the first
worker's process, outside of Python. ``init_sync=False`` is what its documentation asks for when all
models begin equal. The size of a bucket stays at its default: with a smaller one, of a model that
does not fit, torchft 0.2.0 leaves the last tensors out of the mean.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from harness import TIMEOUT_S, Worker, free_port
from torch import nn
from torch.optim import Optimizer
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from libraries.library import Job, Library


class TorchftDiLoCo(Library):
    """A manager, and hooks of torchft on the optimizer."""

    needs_group = False
    use_bucketization = False

    def __init__(self, job: Job, worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(job, worker, model, optimizer)
        address = f"{worker.host}:{free_port(worker.host)}"
        if worker.rank == 0:
            self._lighthouse = LighthouseServer(bind=address, min_replicas=worker.num_workers)
        patience = timedelta(seconds=TIMEOUT_S)
        self._store = dist.TCPStore(worker.host, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=patience),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=worker.num_workers,
            use_async_quorum=False,
            timeout=patience,
            quorum_timeout=patience,
            rank=0,
            world_size=1,
            store_addr=worker.host,
            store_port=self._store.port,
            lighthouse_addr=f"http://{worker.gather(address)[0]}",
            replica_id=f"worker{worker.rank}",
            hostname=worker.host,
            init_sync=False,
        )
        outer = torch.optim.SGD(
            model.parameters(), lr=job.outer_lr, momentum=job.outer_momentum, nesterov=True
        )
        self._diloco = DiLoCo(
            self._manager,
            [model],
            optimizer,
            outer,
            sync_every=job.sync_every,
            use_bucketization=self.use_bucketization,
        )
        self._diloco.__enter__()

    def step(self, loss: float) -> None:
        """The local step; torchft's hook counts it and runs the round."""
        self.optimizer.step()

    def close(self) -> None:
        """Stop the manager."""
        self._diloco.__exit__(None, None, None)
        self._manager.shutdown(wait=False)


class TorchftDiLoCoInBuckets(TorchftDiLoCo):
    """The same with its bucketised all-reduce."""

    use_bucketization = True

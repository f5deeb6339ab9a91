"""What the training and the adapter of a library know of each other."""

from __future__ import annotations

from dataclasses import dataclass

from harness import Worker
from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Job:
    """One run of a library.

    Attributes:
        entry: Key of the library in the table.
        interface: Of the network between the workers.
        is_shared: Whether what all workers send passes this one interface.
        size: Arguments of ByteGPT.
        rounds: That are counted; one more comes before them.
        sync_every: Local steps of a round.
        batch_size: Windows of a local step.
        seed: Of the model and of the order of the data.
        outer_lr: DiLoCo's.
        outer_momentum: DiLoCo's, Nesterov's.
        folder: For files of this run.
        dpwa: A checkout of dpwa, or None.
    """

    entry: str
    interface: str
    is_shared: bool
    size: dict[str, int]
    rounds: int
    sync_every: int
    batch_size: int
    seed: int
    outer_lr: float
    outer_momentum: float
    folder: str
    dpwa: str | None


class Library:
    """A library in one worker, from its set-up to the end of its training.

    An adapter is made with a model and an AdamW that are equal on all workers. It has to use this
    optimizer for the local steps, because the training takes the time with a hook of it.

    Attributes:
        needs_group: Whether there has to be a default process group.
        extra_steps: Local steps by which this library's first phase is longer than the others.
        every_step: Whether it communicates in every backward pass instead of in rounds.
        module: What is called to compute the logits: the model, or a wrapper of it.
    """

    needs_group = True
    extra_steps = 0
    every_step = False
    module: nn.Module

    def __init__(self, job: Job, worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
        self.module, self.optimizer = model, optimizer

    def step(self, loss: float) -> None:
        """Take the local step with the present gradients, and run the round if one is due."""
        self.optimizer.step()

    def close(self) -> None:
        """End what would keep the process from ending."""

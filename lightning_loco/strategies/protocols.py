"""What checkpoints and external updates use of a strategy, which imports them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from torch import nn
from torch.optim import Optimizer

from lightning_loco.compression import Codec
from lightning_loco.distributed import WorkerGroup
from lightning_loco.elastic.member_connection import MemberConnection
from lightning_loco.model.participant import LocalParticipant, Participant
from lightning_loco.parameter_server import RemoteParticipant
from lightning_loco.schedules import Schedule


class HasParticipant(Protocol):
    """A strategy of this package, also one for another loop than the Trainer's."""

    @property
    def participant(self) -> Participant | None: ...


class TrainingStrategy(HasParticipant, Protocol):
    """A strategy of this package; its properties have docstrings where they are implemented."""

    @property
    def lightning_module(self) -> pl.LightningModule | None: ...
    @property
    def checkpoint_io(self) -> CheckpointIO: ...
    @property
    def is_fitting(self) -> bool: ...
    @property
    def is_global_zero(self) -> bool: ...

    def sync_point(self, purpose: str) -> None: ...


class StrategyWithEngine(TrainingStrategy, Protocol):
    """A strategy whose workers have an engine each."""

    group: WorkerGroup | None
    model: nn.Module | None
    optimizers: list[Optimizer]

    @property
    def engine(self) -> LocalParticipant | None: ...
    @property
    def failed_engine(self) -> LocalParticipant | None: ...
    @property
    def member_connection(self) -> MemberConnection | None: ...
    @property
    def is_connected(self) -> bool: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def replica_size(self) -> int: ...
    @property
    def worker(self) -> int: ...
    @property
    def place(self) -> int: ...
    @property
    def schedule(self) -> Schedule | None: ...
    @property
    def data_shares(self) -> list[int]: ...
    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]: ...

    def wait_inside(self, purpose: str) -> None: ...
    def show_consensus(self, purpose: str) -> None: ...


class StrategyWithRemoteOptimizer(TrainingStrategy, Protocol):
    """A strategy whose optimizer is on service ranks."""

    remote: RemoteParticipant | None
    service: WorkerGroup | None

    @property
    def compression(self) -> Codec | None: ...
    @property
    def is_training(self) -> bool: ...
    @property
    def serves(self) -> bool: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def training_ranks(self) -> WorkerGroup: ...
    def waiting_in(self, label: str) -> AbstractContextManager[object]: ...

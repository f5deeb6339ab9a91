"""LocoStrategy: any low-communication algorithm under Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_loco.algorithms import Algorithm
from lightning_loco.distributed import WorkerGroup
from lightning_loco.elastic.member_connection import MemberConnection
from lightning_loco.engine import Engine, RoundSettings
from lightning_loco.engine.settings import RoundOptions
from lightning_loco.schedules import Schedule, SyncEvery, by_steps
from lightning_loco.strategies.arguments import RoundArguments
from lightning_loco.strategies.elastic_members import TrainerPosition, shard_dataloader
from lightning_loco.strategies.engine_strategy import EngineStrategy


class RoundStrategy(EngineStrategy):
    """Runs rounds by a schedule, over any strategy of Lightning."""

    settings: RoundSettings
    engine: Engine | None

    @property
    def schedule(self) -> Schedule:
        """When rounds start and end, in local steps."""
        return self.settings.schedule

    def engine_of(
        self, model: nn.Module, group: WorkerGroup, optimized: Sequence[Tensor] | None
    ) -> Engine:
        """Make an engine of a model from the settings."""
        return Engine.from_settings(model, self.settings, group, optimized)

    # ----------------------------------------------------------------- members

    @property
    def member_connection(self) -> MemberConnection | None:
        """The connection to members that join and leave; None if the workers are fixed."""
        exchange = None if self.engine is None else self.engine.exchange
        return exchange if isinstance(exchange, MemberConnection) else None

    def process_dataloader(self, dataloader: object) -> object:
        """Divide the training data among the workers, or among the present members."""
        connection, membership = self.member_connection, self.settings.membership
        if connection is None or membership is None or not self._trainer.training:
            return super().process_dataloader(dataloader)
        reader = self.distributed_sampler_kwargs
        connection.data_shard.set_reader(reader["rank"], reader["num_replicas"])
        parts = membership.min_workers * connection.data_shard.num_readers
        return shard_dataloader(dataloader, connection.data_shard, parts, self._join)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Raise if another worker has failed; StopIteration if the run to join is over."""
        self._join()
        trainer = self._trainer
        if self.member_connection is not None and -1 < trainer.max_steps <= trainer.global_step:
            raise StopIteration
        super().on_train_batch_start(batch, batch_idx)

    def _join(self) -> None:
        """Join the other members, once hooks have written their weights."""
        connection, engine = self.member_connection, self.engine
        if connection is None or connection.has_joined or engine is None:
            return
        self._external_updates.on_batch_start()
        connection.loop = TrainerPosition(self._trainer, lambda: engine.worker.steps)
        engine.start()
        if (members := engine.statistics.members) is not None:
            rank_zero_info(f"One of {members} members, from round {engine.worker.round_index} on.")

    @contextmanager
    def _end_training(self) -> Iterator[None]:
        with super()._end_training():
            if self.member_connection is not None:
                self.member_connection.leave()  # now, because the hooks that follow may take long
            yield

    def on_exception(self, exception: BaseException) -> None:
        """Save or report, see the base class; a member that is asked to stop also leaves."""
        if self.member_connection is not None and isinstance(exception, SIGTERMException):
            self.member_connection.leave()
        super().on_exception(exception)


class LocoStrategy(RoundStrategy, DDPStrategy):
    """Train one model on workers that exchange rarely, sparsely or late.

    Each rank, or each group of ``replica_size`` ranks, is a worker with its own copy of the model
    and its own share of the data. Gradients are not reduced between workers; every ``sync_every``
    optimizer steps they run a round of the algorithm. Validation, checkpoints and the model after
    ``fit`` are the mean of the workers' local parameters.

    Args:
        algorithm: What a round computes: ``LocalSGD()``, ``DiLoCo()``, ``GASLoC()`` or your own.
        sync_every: Local (optimizer) steps between rounds, at least 1; or a list with one number
            per worker, whose share of the data and of ``max_steps`` is then in proportion; or a
            dictionary: ``{0: 10, 1000: 50}`` is 10 up to step 1000, then 50.
        overlap: Apply a round's result one round later and hide its communication. With DiLoCo the
            parameters restart from the result; with GASLoC, ModelAverage and NeighborAverage the
            progress made meanwhile is added to it.
        warm_start: With overlap, wait for the result of the first round.
        topology: Who exchanges with whom, for gossip: a name such as ``"ring"``, a ``Topology``, a
            networkx graph, an ``(N, N)`` mixing matrix or an edge-list file.
        common: The arguments that strategies with rounds share: compression, membership, what is
            validated, how long to wait and so on; :class:`RoundArguments` lists them.

    Raises:
        ValueError: If a value is out of range, at construction or before training starts.
        TypeError: If a value has the wrong type or an argument is unknown.

    Example::

        strategy = LocoStrategy(GASLoC(momentum=0.3), topology="ring", sync_every=50)
        trainer = Trainer(strategy=strategy, devices=4, num_nodes=8)
    """

    def _init_rounds(self, settings: RoundSettings, /, **common: Unpack[RoundArguments]) -> None:
        """Set the arguments of every strategy whose rounds start by local steps."""
        given: dict[str, Any] = {**common}
        options = {name: given.pop(name) for name in RoundOptions.__annotations__ if name in given}
        self._init_with(settings.with_options(**options), **given)

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        sync_every: SyncEvery = 100,
        overlap: bool = False,
        warm_start: bool = True,
        topology: Any | None = None,
        **common: Unpack[RoundArguments],
    ) -> None:
        schedule = by_steps(sync_every, overlap, warm_start)
        self._init_rounds(RoundSettings(algorithm, schedule, topology), **common)

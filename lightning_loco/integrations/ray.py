"""Ray Train: strategies of this package on Ray's workers, and checkpoints that Ray keeps."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_loco._util.background import BackgroundThread
from lightning_loco.distributed.store import TimeoutStore
from lightning_loco.strategies import (
    AsyncModelAverageStrategy,
    DecoupledDiLoCoStrategy,
    LocoStrategy,
    PairwiseGossipStrategy,
    RemoteOptimizerStrategy,
)
from lightning_loco.strategies.model_parallel import ShardedWorkers
from lightning_loco.strategies.worker_strategy import WorkerStrategy, runs_on_ray

try:
    import ray.train
    import ray.train.collective
    import ray.util
    from ray.train import CheckpointUploadMode
    from ray.train.lightning import (
        RayDDPStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
    )
except ImportError as missing:
    raise ImportError(
        f"lightning_loco.integrations.ray needs Ray Train ({missing}). Install it in a "
        "checkout of lightning_loco: pip install -c constraints.txt -e '.[ray]'"
    ) from missing

CHECKPOINT_NAME: str = RayTrainReportCallback.CHECKPOINT_NAME
"""Name of the main file in the folder of a report; its side files are beside it."""

_REPORTS = "reports"
_POLL_INTERVAL_S = 0.2
_LAST_REPORT_S = 60.0


class RayLocoStrategy(WorkerStrategy, RayDDPStrategy):
    """Train with a method of this package on the workers of Ray Train.

    It is made in the function that ``TorchTrainer`` runs on its workers, and ``prepare_trainer``
    accepts it. Ranks, nodes and devices are Ray's. It has the class of the method's family as a
    base class as well: ``RayLocoStrategy(AsyncModelAverageStrategy())`` is an
    ``AsyncModelAverageStrategy``, and so on.

    Args:
        method: A strategy of this package, whose arguments are used: ``DiLoCoStrategy()``,
            ``PairwiseGossipStrategy()``, ``RemoteOptimizerStrategy()`` and so on. With
            ``membership`` each of Ray's workers is a member; use torchft's ``TorchftConfig``.

    Raises:
        TypeError: If ``method`` is no strategy of this package.
        ValueError: For a method that does not work under Ray Train; the message says why.

    Example::

        strategy = RayLocoStrategy(DiLoCoStrategy(sync_every=50))
        trainer = Trainer(strategy=strategy, plugins=[RayLightningEnvironment()])
        trainer = prepare_trainer(trainer)
    """

    def __new__(cls, method: WorkerStrategy) -> RayLocoStrategy:
        """Make a strategy of the family of ``method``."""
        _check(method)
        families = (kind for family, kind in _FAMILIES.items() if isinstance(method, family))
        return super().__new__(next(families) if cls is RayLocoStrategy else cls)

    def __init__(self, method: WorkerStrategy) -> None:
        self._init_like(method)

    @property
    def ranks_per_node(self) -> int:
        """Number of Ray's workers on this node."""
        return ray.train.get_context().get_local_world_size()

    def check_launcher(self) -> None:
        """Raise if this is no worker of Ray Train, or the Trainer does not know of it."""
        if not runs_on_ray():
            raise RuntimeError(
                "RayLocoStrategy works in the function that ray.train.torch.TorchTrainer runs on "
                "its workers. Without Ray pass the method itself: Trainer(strategy="
                "DiLoCoStrategy(...))."
            )
        if not isinstance(self.cluster_environment, RayLightningEnvironment):
            raise MisconfigurationException(
                "The Trainer does not know the ranks of Ray's workers. Use Trainer(strategy="
                "RayLocoStrategy(...), plugins=[ray.train.lightning.RayLightningEnvironment()])."
            )

    def setup_environment(self) -> None:
        """Connect the ranks. Raises ValueError for nodes of different sizes that are workers."""
        if self.arguments.get("replica_size") == "node" and dist.is_initialized():
            own = torch.tensor(self.ranks_per_node, device=self.root_device)
            found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(found, own)
            sizes = [int(size) for size in found]
            if len(set(sizes)) > 1:
                raise ValueError(
                    "replica_size='node' needs equally many of Ray's workers on every node, and "
                    f"from rank 0 on their nodes have {', '.join(map(str, sizes))}. Choose "
                    "ScalingConfig(resources_per_worker=...) such that workers fill nodes, or give "
                    "replica_size a number."
                )
        super().setup_environment()

    def setup_distributed(self) -> None:
        """Check the process group that Ray has made."""
        if dist.is_initialized() and dist.get_world_size() not in (self.num_ranks, self.world_size):
            raise ValueError(
                f"The default process group has {dist.get_world_size()} of Ray's {self.num_ranks} "
                "workers. With TorchTrainer(torch_config=TorchftConfig(...)) each worker is a "
                "member of its own: use DiLoCoStrategy(membership=Elastic(os.environ["
                "'TORCHFT_LIGHTHOUSE'])). Without membership use Ray's default torch_config."
            )
        super().setup_distributed()

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up training. Raises ValueError for Ray's callback, which loses side files."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, RayTrainReportCallback) for callback in callbacks):
            raise ValueError(
                "RayTrainReportCallback reports a folder of each rank by itself, without the state "
                "of the workers that are on other nodes. Use callbacks=[lightning_loco.integrations"
                ".ray.RayReportCallback()]."
            )
        super().setup(trainer)


class RayRoundStrategy(RayLocoStrategy, LocoStrategy):
    """What :class:`RayLocoStrategy` makes of a strategy with rounds."""

    def set_world_ranks(self) -> None:
        """Set the ranks; a member of an elastic group is a job of its own."""
        is_member = self.settings.membership is not None
        if is_member and isinstance(self.cluster_environment, RayLightningEnvironment):
            self.cluster_environment = MemberEnvironment()
        super().set_world_ranks()

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of this node in the same job."""
        return 1 if self.settings.membership is not None else super().ranks_per_node

    def setup_distributed(self) -> None:
        """Check that Ray has not connected the members, which come and go."""
        connected = dist.get_world_size() if dist.is_initialized() else 1
        if self.settings.membership is not None and connected > 1:
            raise ValueError(
                "membership is for workers that Ray restarts one by one, and the present "
                f"torch_config has connected all {connected} of them. Use TorchTrainer("
                "torch_config=ray.train.v2.torch.torchft_config.TorchftConfig(lighthouse_kwargs="
                "{'min_replicas': 1})), or leave membership out."
            )
        super().setup_distributed()


class MemberEnvironment(RayLightningEnvironment):
    """The environment of a member of an elastic group, a job of one rank.

    A replica group of Ray, which Ray restarts alone, is one worker.
    """

    def world_size(self) -> int:
        """One: the others are other jobs."""
        return 1

    def global_rank(self) -> int:
        """The first rank."""
        return 0

    def local_rank(self) -> int:
        """The first rank."""
        return 0

    def node_rank(self) -> int:
        """The first node."""
        return 0


class RayModelAverageStrategy(RayLocoStrategy, AsyncModelAverageStrategy):
    """What :class:`RayLocoStrategy` makes of an ``AsyncModelAverageStrategy``."""


class RayPairwiseGossipStrategy(RayLocoStrategy, PairwiseGossipStrategy):
    """What :class:`RayLocoStrategy` makes of a ``PairwiseGossipStrategy``."""


class RayDecoupledDiLoCoStrategy(RayLocoStrategy, DecoupledDiLoCoStrategy):
    """What :class:`RayLocoStrategy` makes of a ``DecoupledDiLoCoStrategy``."""


class RayRemoteOptimizerStrategy(RayLocoStrategy, RemoteOptimizerStrategy):
    """What :class:`RayLocoStrategy` makes of a ``RemoteOptimizerStrategy``.

    The last of Ray's workers serve.
    """

    def setup_distributed(self) -> None:
        """Replace Ray's default process group by one that holds only the ranks that train."""
        if dist.is_initialized() and dist.get_world_size() == self.num_ranks:
            dist.destroy_process_group()
            own = [ray.util.get_node_ip_address(), str(_free_port())]
            address, port = ray.train.collective.broadcast_from_rank_zero(own)
            os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
        super().setup_distributed()


_FAMILIES: dict[type[WorkerStrategy], type[RayLocoStrategy]] = {
    AsyncModelAverageStrategy: RayModelAverageStrategy,  # before its base class
    DecoupledDiLoCoStrategy: RayDecoupledDiLoCoStrategy,
    LocoStrategy: RayRoundStrategy,
    PairwiseGossipStrategy: RayPairwiseGossipStrategy,
    RemoteOptimizerStrategy: RayRemoteOptimizerStrategy,
}


def _check(method: Any) -> None:
    """Check the argument of :class:`RayLocoStrategy`."""
    if isinstance(method, ShardedWorkers):
        raise ValueError(
            f"{type(method).__name__} does not work under Ray Train, whose prepare_trainer knows "
            "no ModelParallelStrategy of Lightning. Use a method with replica_size=..., whose "
            "workers hold the whole model on each rank, or start the ranks with torchrun."
        )
    is_ours = isinstance(method, tuple(_FAMILIES))
    if not is_ours or isinstance(method, RayLocoStrategy):
        raise TypeError(
            "method must be a strategy of lightning_loco such as DiLoCoStrategy(sync_every=100), "
            f"got {method!r}."
        )
    given = method.arguments
    if given["start_method"] != "popen":
        raise ValueError(
            f"The method has start_method={given['start_method']!r}, but Ray has started the "
            "workers. Leave it out."
        )
    if given.get("checkpoint_folder") == "private":
        raise ValueError(
            "checkpoint_folder='private' does not work under Ray Train, which may restart a worker "
            "on another machine than the one that has its files. Leave it out: RayReportCallback "
            "brings the files of all machines to Ray's storage."
        )
    membership = getattr(getattr(method, "settings", None), "membership", None)
    if membership is not None and given["replica_size"] != 1:
        raise ValueError(
            f"replica_size={given['replica_size']!r} does not work with membership under Ray "
            "Train, which restarts workers one by one, and not the ranks of a replica. Use "
            "replica_size=1, or leave membership out."
        )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
    return port


# --------------------------------------------------------------------------------- reports


class RayReportCallback(pl.Callback):
    """Report metrics and a checkpoint to Ray Train, from which a run resumes exactly.

    The checkpoint has the main file ``checkpoint.ckpt`` and the side files of all workers, on
    whichever node they are. On each node one rank brings the files that are there to Ray's storage.
    :func:`last_report` finds them when Ray has started the workers again. The metrics are those of
    rank 0, with ``epoch`` and ``step``.

    Args:
        every_n_train_steps: Local steps between reports. Default: one at the end of each epoch.
        checkpoint_upload_mode: Whether a report waits until its files are in Ray's storage, as in
            ``ray.train.report``. With ``ASYNC`` training goes on while they are copied.

    Raises:
        ValueError: If ``every_n_train_steps`` is not positive.
        TypeError: When training starts, if the strategy is no :class:`RayLocoStrategy`.
    """

    def __init__(
        self,
        every_n_train_steps: int | None = None,
        *,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    ) -> None:
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps must be positive, got {every_n_train_steps}.")
        self._every = every_n_train_steps
        self._upload_mode = checkpoint_upload_mode
        self._last_step = 0
        self._serving: BackgroundThread | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the strategy; service ranks take part in the reports from here on."""
        strategy = trainer.strategy
        if not isinstance(strategy, RayLocoStrategy):
            raise TypeError(
                "RayReportCallback reports the state of workers of RayLocoStrategy, and the "
                f"Trainer has {type(strategy).__name__}. Use strategy=RayLocoStrategy("
                "DiLoCoStrategy(...)), or RayTrainReportCallback of ray.train.lightning."
            )
        if stage != "fit":
            return
        if isinstance(strategy.cluster_environment, MemberEnvironment):
            raise ValueError(
                "RayReportCallback does not work with membership: a report of Ray waits for all "
                "workers, and members come, go and take steps by themselves. A member that Ray "
                "restarts gets the state of the others; to keep files use ModelCheckpoint."
            )
        if isinstance(strategy, RayRemoteOptimizerStrategy) and strategy.serves:
            assert strategy.service is not None
            store = strategy.service.own_store(_REPORTS)
            self._serving = BackgroundThread("loco-reports", lambda: _join_reports(store))
            self._serving.start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report no step again from which a run resumes."""
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Report after every so many steps."""
        step = trainer.global_step
        if self._every is not None and step != self._last_step and step % self._every == 0:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report at the end of an epoch."""
        if self._every is None:
            self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        strategy, purpose = trainer.strategy, "a report to Ray"
        assert isinstance(strategy, WorkerStrategy)
        self._last_step = trainer.global_step
        strategy.sync_point(purpose)
        node = ray.get_runtime_context().get_node_id()
        folder = tempfile.mkdtemp(prefix="ray_report_") if strategy.is_global_zero else ""
        ranks = strategy.gather([node, folder], purpose)
        folder, first_here = ranks[0][1], [one[0] for one in ranks].index(node)
        try:
            trainer.save_checkpoint(os.path.join(folder, CHECKPOINT_NAME), weights_only=False)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if isinstance(strategy, RayRemoteOptimizerStrategy) and strategy.is_global_zero:
            assert strategy.service is not None
            strategy.service.own_store(_REPORTS).add("count", 1)
        has_files = strategy.global_rank == first_here and os.path.isdir(folder)
        ray.train.report(
            {name: value.item() for name, value in trainer.callback_metrics.items()}
            | {"epoch": trainer.current_epoch, "step": trainer.global_step},
            checkpoint=ray.train.Checkpoint.from_directory(folder) if has_files else None,
            checkpoint_upload_mode=self._upload_mode,
            delete_local_checkpoint_after_upload=True,
        )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wait for the last report of a service rank."""
        if self._serving is not None and not trainer.interrupted:
            self._serving.join(_LAST_REPORT_S)
        self._serving = None


def _join_reports(store: TimeoutStore) -> None:
    """Take part in each report of the ranks that train, without files, until the store closes."""
    joined = 0
    with suppress(RuntimeError):
        while True:
            while store.add("count", 0) > joined:
                joined += 1
                ray.train.report({})
            time.sleep(_POLL_INTERVAL_S)


@contextmanager
def last_report() -> Iterator[str | None]:
    """A context with the checkpoint that was reported last; None if there is none.

    Example::

        with last_report() as path:
            trainer.fit(model, data, ckpt_path=path)
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        yield None
    else:
        with checkpoint.as_directory() as folder:
            yield os.path.join(folder, CHECKPOINT_NAME)

"""Strategies whose workers shard the model over their ranks, with FSDP2 or tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_loco._util.checks import (
    check_parallel_sizes,
    parallel_ranks_per_worker,
    parallel_size,
)
from lightning_loco.distributed import WorkerGroup
from lightning_loco.distributed.worker_group import set_timeout
from lightning_loco.model.gradient_clipping import GradientClipping
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.model.replica import reshard
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.main_file import ShardedMainFile, path_on_file_system
from lightning_loco.strategies.decoupled_diloco import DecoupledDiLoCoStrategy, LearnerStrategy
from lightning_loco.strategies.engine_strategy import EngineStrategy
from lightning_loco.strategies.loco import LocoStrategy, RoundStrategy
from lightning_loco.strategies.named import DiLoCoStrategy


class ShardedWorkers(EngineStrategy, lightning_compat.ModelParallelPart):
    """Trains workers whose ranks hold shards of the model; a method adds how they exchange."""

    def _init_sharded(
        self,
        method: EngineStrategy,
        data_parallel_size: int | Literal["auto"],
        tensor_parallel_size: int,
        saves_folders: bool,
    ) -> None:
        _check(method, data_parallel_size, tensor_parallel_size)
        self._sizes = data_parallel_size, tensor_parallel_size
        self._saves_folders = saves_folders
        self._init_like(method)
        self._save_to(ShardedMainFile(self, saves_folders=saves_folders))

    def _init_base(
        self,
        parts: dict[str, Any],
        backend: str | None,
        timeout: timedelta,
        ddp_arguments: Mapping[str, Any],
    ) -> None:
        data, tensor = self._sizes
        ModelParallelStrategy.__init__(self, data, tensor, self._saves_folders, backend, timeout)
        ParallelStrategy.__init__(self, **parts)

    # ------------------------------------------------------------------- ranks

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks of a worker that train on different data."""
        return parallel_size(*self._sizes, self.ranks_per_node)

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that tensor parallelism splits a layer over."""
        return self._sizes[1]

    @property
    def replica_size(self) -> int:
        """Number of ranks of a worker, which are consecutive."""
        return self.data_parallel_size * self.tensor_parallel_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of samplers: ranks of the same tensor-parallel group read the same data."""
        size, number = self.data_parallel_size, self.place // self.tensor_parallel_size
        return {"num_replicas": self.num_workers * size, "rank": self.worker * size + number}

    @property
    def replica_arguments(self) -> str:
        """The arguments that make workers of several ranks, for messages."""
        tensor = self.tensor_parallel_size
        return f"data_parallel_size={self.data_parallel_size}, tensor_parallel_size={tensor}"

    def check_ranks(self) -> None:
        """Raise ValueError if the ranks cannot be divided into workers."""
        parallel_ranks_per_worker(*self._sizes, self.ranks_per_node, self.num_ranks)

    # ------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The consensus for a checkpoint, of the whole model on rank 0; it is empty on others."""
        assert self.lightning_module is not None
        reshard(self.lightning_module.modules())  # of copies the optimizers have no state
        read = partial(ModelParallelStrategy.lightning_module_state_dict, self)
        return self.checkpoints.model_state(read if self.worker == 0 else dict[str, Any])

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of an optimizer of worker 0 on rank 0; it is empty on others."""
        return super().optimizer_state(optimizer) if self.worker == 0 else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; ValueError for a path that is not on a file system."""
        super().save_checkpoint(checkpoint, path_on_file_system(filepath), storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint into the model and, to resume training, this worker's own state."""
        loaded = super().load_checkpoint(path_on_file_system(checkpoint_path), weights_only)
        if self.checkpoints.is_resuming:
            self._external_updates.start_fit()
        return loaded

    # ------------------------------------------------------------------- setup

    def setup_environment(self) -> None:
        """Connect the ranks, and make the device mesh of each worker."""
        if self.is_fitting:
            _check_callbacks(self._trainer)
        super().setup_environment()
        shape = self.num_workers, self.data_parallel_size, self.tensor_parallel_size
        names = "worker", "data_parallel", "tensor_parallel"
        with self.waiting_in("the set-up of the device mesh"):
            mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self.set_device_mesh(mesh[names[1:]])
        for name in names[1:]:
            set_timeout(self.device_mesh.get_group(name), self.timeout_s)

    def connect_ranks(self) -> None:
        """Make the default process group; errors name ranks that are missing or do not fit."""
        self.set_world_ranks()
        self._init_default_group()

    def setup(self, trainer: pl.Trainer) -> None:
        """Make the engine; ValueError for features that do not work with shards."""
        if self.is_fitting:
            _check_no_copies(trainer)
            assert self.lightning_module is not None
            reshard(self.lightning_module.modules())  # a validation has gathered the parameters
        super().setup(trainer)

    def make_engine(self, group: WorkerGroup) -> LocalParticipant:
        """Make an engine whose checkpoints hold the shards of each rank."""
        with group.errors_shared("the set-up"):
            self._check_averaged()
        self._set_timeouts()
        engine = super().make_engine(group)
        engine.worker.replica.use_held_vectors(group)
        return engine

    def _set_timeouts(self) -> None:
        """Set the longest wait in the meshes that ``configure_model`` has made, too."""
        assert self.lightning_module is not None
        parameters: Iterator[Tensor] = self.lightning_module.parameters()
        for mesh in {p.device_mesh for p in parameters if isinstance(p, DTensor)}:
            for group in mesh.get_all_groups():
                set_timeout(group, self.timeout_s)

    def _check_averaged(self) -> None:
        """Raise ValueError for parameters whose gradients ``configure_model`` does not average."""
        assert self.lightning_module is not None
        siblings = set(self.device_mesh["data_parallel"].mesh.tolist())
        for name, parameter in self.lightning_module.named_parameters():
            shard: Tensor = parameter
            ranks = shard.device_mesh.mesh.flatten().tolist() if isinstance(shard, DTensor) else ()
            if parameter.requires_grad and len(siblings) > 1 and not siblings <= set(ranks):
                raise ValueError(
                    f"Parameter {name!r} is not sharded over the data_parallel ranks, so nothing "
                    "averages its gradients over them. Apply fully_shard to the whole model in "
                    "configure_model, with mesh=self.device_mesh['data_parallel']."
                )

    def _connect_gradients(self, group: WorkerGroup) -> None:
        """Count each element once in the norm of the gradients.

        FSDP averages them over the ranks, as ``configure_model`` asks it to.
        """
        assert self.lightning_module is not None
        clipping = GradientClipping(self.lightning_module.named_parameters(), group)
        plugin = self.precision_plugin
        self._added.callback(lightning_compat.clip_gradients_by(plugin, clipping))


class LocoModelParallelStrategy(ShardedWorkers, RoundStrategy):
    """Train workers that exchange rarely, each of which shards the model over its ranks.

    Consecutive ranks are a worker. Inside it FSDP2 and tensor parallelism work as with Lightning's
    ``ModelParallelStrategy``: ``LightningModule.configure_model`` applies them with
    ``self.device_mesh["data_parallel"]`` and ``["tensor_parallel"]``, which hold the ranks of this
    worker only. Between workers the rounds of ``method`` exchange the shards: every rank with those
    that hold the same shards in the other workers.

    Args:
        method: A strategy with rounds, whose arguments are used: its algorithm and schedule,
            compression, ``timeout_s`` and so on. Default: ``DiLoCoStrategy()``.
        data_parallel_size: Ranks of a worker that train on different data, over which FSDP2 shards.
            ``"auto"``: the ranks of a node, divided by ``tensor_parallel_size``.
        tensor_parallel_size: Ranks that tensor parallelism splits a layer over.
        save_distributed_checkpoint: Whether the main file of a checkpoint is a folder, to which
            each rank of worker 0 writes its shards, instead of one file that rank 0 writes.

    Raises:
        TypeError: If ``method`` is no strategy with rounds, or a value has the wrong type.
        ValueError: If a value is out of range, at construction or before training starts; if the
            number of ranks is no multiple of the ranks of a worker.

    Example::

        method = DiLoCoStrategy(sync_every=100)
        strategy = LocoModelParallelStrategy(method, data_parallel_size=8)
        Trainer(strategy=strategy, devices=8, num_nodes=4)  # 4 workers
    """

    def __init__(
        self,
        method: LocoStrategy | None = None,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
    ) -> None:
        method = DiLoCoStrategy() if method is None else method
        if not isinstance(method, LocoStrategy):
            raise TypeError(
                "method must be a strategy with rounds such as DiLoCoStrategy(sync_every=100), got "
                f"{method!r}. For decoupled learners use DecoupledModelParallelStrategy."
            )
        sizes = data_parallel_size, tensor_parallel_size
        self._init_sharded(method, *sizes, save_distributed_checkpoint)


class DecoupledModelParallelStrategy(ShardedWorkers, LearnerStrategy):
    """Train learners of a syncer, each of which shards the model over its ranks.

    Inside a learner FSDP2 and tensor parallelism work as in :class:`LocoModelParallelStrategy`. Its
    first rank exchanges whole fragments with the syncer: it gathers one at a time from the others.
    So learners of one run may shard the model in different ways, or hold it as a whole.

    Args:
        method: A :class:`DecoupledDiLoCoStrategy`, whose arguments are used. Default: one with its
            defaults.
        data_parallel_size: As in :class:`LocoModelParallelStrategy`.
        tensor_parallel_size: As in :class:`LocoModelParallelStrategy`.
        save_distributed_checkpoint: As in :class:`LocoModelParallelStrategy`.

    Raises:
        TypeError: If ``method`` is another strategy, or a value has the wrong type.
        ValueError: If a value is out of range, at construction or before training starts.

    Example::

        method = DecoupledDiLoCoStrategy(syncer="node7:29600", key_file="run.pem")
        Trainer(strategy=DecoupledModelParallelStrategy(method, data_parallel_size=8), devices=8)
    """

    def __init__(
        self,
        method: DecoupledDiLoCoStrategy | None = None,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
    ) -> None:
        method = DecoupledDiLoCoStrategy() if method is None else method
        if not isinstance(method, DecoupledDiLoCoStrategy):
            raise TypeError(
                f"method must be a DecoupledDiLoCoStrategy(), got {method!r}. For methods with "
                "rounds use LocoModelParallelStrategy."
            )
        sizes = data_parallel_size, tensor_parallel_size
        self._init_sharded(method, *sizes, save_distributed_checkpoint)


def _check_callbacks(trainer: pl.Trainer) -> None:
    """Raise ValueError for callbacks of Lightning that do not work with shards."""
    for saving in trainer.checkpoint_callbacks:
        path_on_file_system(getattr(saving, "dirpath", None) or trainer.default_root_dir)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, lightning_compat.OF_WHOLE_MODELS):
            raise _needs_whole_model(callback)
        if isinstance(callback, LearningRateFinder):
            raise ValueError(
                "LearningRateFinder and Tuner.lr_find cannot restore shards and their optimizers "
                "with a ModelParallelStrategy of Lightning. Find the learning rate with a strategy "
                "with replica_size=..., such as DiLoCoStrategy, or with a smaller model."
            )


def _check_no_copies(trainer: pl.Trainer) -> None:
    """Raise ValueError for callbacks with an averaged copy of the model."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if any(isinstance(value, AveragedModel) for value in vars(callback).values()):
            raise _needs_whole_model(callback)


def _needs_whole_model(callback: pl.Callback) -> ValueError:
    return ValueError(
        f"{type(callback).__name__} needs the whole model on every rank, and each holds a shard of "
        "it. Leave the callback out, or use a strategy with replica_size=..., such as "
        "DiLoCoStrategy, whose ranks each hold the whole model."
    )


def _check(method: Any, data_parallel_size: Any, tensor_parallel_size: Any) -> None:
    """Check arguments of strategies that shard the model."""
    check_parallel_sizes(data_parallel_size, tensor_parallel_size)
    if unused := lightning_compat.ddp_arguments_of(method):
        raise ValueError(
            f"The method has {', '.join(unused)}, which only DDP uses. Leave it out: there is no "
            "DDP in a worker that shards the model, and Lightning starts its processes by popen."
        )
    if method.has_replica_size:
        raise ValueError(
            "The method has a replica_size, but the ranks of a worker are data_parallel_size times "
            "tensor_parallel_size. Leave replica_size out."
        )
    if method.checkpoint_folder != "shared":
        raise ValueError(
            "checkpoint_folder='private' is not supported with shards, whose ranks write into one "
            "folder. Use checkpoint_folder='shared'."
        )

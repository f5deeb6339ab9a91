"""FabricLocoStrategy: the methods in a training loop of Lightning Fabric."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_loco._util.checks import ranks_per_worker
from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.distributed.devices import CPU, device_of_messages
from lightning_loco.distributed.job import init_workers
from lightning_loco.distributed.worker_group import ExplainErrors
from lightning_loco.integrations.worker_files import WorkerFiles
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO
from lightning_loco.strategies.checkpoint.reader import READING, check_same_save, read_main
from lightning_loco.strategies.checkpoint.side_files import KEY
from lightning_loco.strategies.data import share_data
from lightning_loco.strategies.engine_strategy import EngineStrategy, check_has_outer
from lightning_loco.strategies.local_training import (
    LocalModel,
    LocalSteps,
    check_not_wrapped,
    clear_non_finite,
    leave_shared_memory,
    loss_in,
    optimized_by,
)
from lightning_loco.strategies.model_parallel import ShardedWorkers
from lightning_loco.strategies.named import DiLoCoStrategy
from lightning_loco.strategies.registry import METHODS
from lightning_loco.strategies.remote_optimizer import RemoteOptimizerStrategy
from lightning_loco.strategies.replica_group import ReplicaGroup
from lightning_loco.strategies.summary import show_settings
from lightning_loco.strategies.worker_strategy import check_mpi, job_name


class FabricLocoStrategy(lightning_compat.FabricPart):
    """Train with a low-communication method in a loop of Lightning Fabric.

    Gradients stay local. Every step of the optimizer is a local step, and a round that is due runs
    right before the next forward pass with gradients. Barriers, broadcasts, reductions and saves
    wait until all workers have reached them; a worker that waits takes part in the rounds of the
    others.

    ``fabric.save`` saves the consensus, and beside it the state of every worker, from which
    ``fabric.load`` resumes exactly: also its own optimizers, and whatever else is in ``state``. A
    loop of Fabric has no hooks for validation and its end, so that it says them: see
    :meth:`consensus` and :meth:`finish`.

    Args:
        method: A strategy whose method and arguments are used, such as
            ``GASLoCStrategy(topology="ring")``, with rounds, asynchronous averaging or pairwise
            gossip; or its name. Default: ``DiLoCoStrategy()``.
        accelerator: As in Fabric's ``DDPStrategy``.
        parallel_devices: As in ``DDPStrategy``.
        cluster_environment: As in ``DDPStrategy``.
        checkpoint_io: As in ``DDPStrategy``. Default: one that writes whole files or none.
        precision: As in ``DDPStrategy``.
        start_method: As in ``DDPStrategy``.

    Attributes:
        engine: This worker's part in the training of all, from ``setup`` to :meth:`finish`.

    Raises:
        TypeError: If ``method`` is neither a strategy of lightning_loco nor a name.
        ValueError: If the method does not work in a loop of Fabric.

    Example::

        fabric = Fabric(strategy=FabricLocoStrategy(DiLoCoStrategy(sync_every=100)), devices=2)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        for batch in fabric.setup_dataloaders(loader):
            loss = model(batch)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        fabric.strategy.finish()  # now the model is the mean of all workers
    """

    def __init__(
        self,
        method: EngineStrategy | str | None = None,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        self._method = _checked(method)
        plugins = {
            "accelerator": accelerator,
            "parallel_devices": parallel_devices,
            "cluster_environment": cluster_environment,
            "checkpoint_io": checkpoint_io,
            "precision": precision,
        }
        super().__init__(
            plugins,
            self._method.process_group_backend,
            timedelta(seconds=self._method.timeout_s),
            start_method=start_method,
            **lightning_compat.ddp_options_of(self._method),
        )
        self.engine: LocalParticipant | None = None
        self._group: WorkerGroup | None = None
        self._replica_group: ReplicaGroup | None = None
        self._modules: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._module: nn.Module | None = None
        self._steps = LocalSteps(self)
        self._may_be_due = self._has_warned = False

    # ----------------------------------------------------------------------- ranks

    @property
    def participant(self) -> LocalParticipant | None:
        """This worker's part in the training of all; None before ``setup`` and after the end."""
        return self.engine

    @property
    def statistics(self) -> Statistics:
        """Bytes, seconds and rounds of communication so far."""
        return Statistics() if self.engine is None else self.engine.statistics

    @property
    def replica_size(self) -> int:
        """Number of ranks of a worker, which are consecutive."""
        size = self._method.asked_replica_size
        return max(1, self.num_processes) if size == "node" else size

    def connect_ranks(self, backend: str) -> None:
        """Make the default process group; errors name ranks that are missing or do not fit."""
        environment = self.cluster_environment
        assert environment is not None
        check_mpi(environment)
        init_workers(
            lambda: (environment.main_address, environment.main_port),
            (self.global_rank, self.world_size),
            backend,
            self.root_device,
            self._method.timeout_s,
            job_name(environment),
            self.replica_size,
        )

    # ----------------------------------------------------------------------- setup

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # or DDP
        """Wrap a module; it is exchanged if an optimizer of its parameters is set up.

        Raises:
            ValueError: If it is wrapped already, as in DDP.
        """
        check_not_wrapped(module, "fabric.setup(model.module, optimizer)")
        if self._group is None:
            self._connect()
        wrapped: nn.Module = _Wrapped(module)
        if self._replica_group is not None and any(p.requires_grad for p in module.parameters()):
            assert self._group is not None
            wrapped = self.wrap_in_ddp(module, self._group.whole_inside)
        before_forward = torch.compiler.disable(self._before_forward)
        wrapped.register_forward_pre_hook(lambda *_: before_forward(module))
        self._modules.append(module)
        return wrapped

    def _connect(self) -> None:
        """Make the groups of the workers."""
        size = self.replica_size
        ranks_per_worker(self._method.asked_replica_size, self.num_processes, self.world_size)
        self._group = WorkerGroup.start(timeout_s=self._method.timeout_s, replica_size=size)
        self._replica_group = ReplicaGroup(self._group) if size > 1 else None
        settings = self._method.settings
        self._group.connect(device_of_messages(settings.outer_device, self.root_device))

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Note an optimizer, whose steps are local steps."""
        if self.engine is not None:
            raise ValueError(
                "An optimizer was set up after training has started. Set up the model and all its "
                "optimizers before the first forward pass."
            )
        self._optimizers.append(optimizer)
        return optimizer

    def _start(self) -> LocalParticipant | None:
        """Make the engine, unless it exists or there is nothing to train; all ranks must call it.

        This happens right before the first forward pass: until then the loop may load or initialize
        weights, of which those of worker 0 are used.
        """
        if self.engine is not None or not self._optimizers:
            return self.engine
        assert self._group is not None
        optimized = optimized_by(self._optimizers) or []
        ids = {id(parameter) for parameter in optimized}
        trained = [m for m in self._modules if any(id(p) in ids for p in m.parameters())]
        if len(trained) != 1:
            raise ValueError(
                f"The optimizers train {len(trained)} modules that were set up by themselves, and "
                "workers exchange one. Set up one module that holds them, such as "
                "torch.nn.ModuleDict, with all optimizers: fabric.setup(module, *optimizers)."
            )
        (self._module,) = trained
        leave_shared_memory(self._module)
        engine = self._method.engine_of(self._module, self._group, optimized)
        if self._method.evaluate == "outer":
            check_has_outer(engine)
            engine.shows_outer = True
        engine.start()
        self.engine = engine
        self._steps.start_fit()
        steps = self._steps
        self._unwatch = steps.watch(optimized, lambda one: steps.prepare(one)(), self._count)
        show_settings(engine, self._method.schedule)
        self._unfinished = weakref.finalize(self, _warn_of_no_finish)
        return engine

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divide the data in proportion to ``sync_every`` if that is a list."""
        if self._method.schedule is None:
            return dataloader
        shares = self._method.schedule.shares(self.world_size // self.replica_size)
        of_ranks = [share for share in shares for _ in range(self.replica_size)]
        return share_data(dataloader, of_ranks, self.global_rank)

    # -------------------------------------------------------------------- training

    def _before_forward(self, module: nn.Module) -> None:
        """Run the round that is due, before a forward pass whose gradients are computed."""
        if torch.is_grad_enabled():
            engine = self._start()
            is_local = engine is not None and not engine.worker.replica.shows_consensus
            if engine is not None and is_local and module is self._module:
                self._make_due_round(engine)
        elif self.engine is not None and module is self._module and not module.training:
            self._warn_of_local_parameters(self.engine)

    def _make_due_round(self, engine: LocalParticipant) -> None:
        engine.worker.group.raise_if_failed()
        may_be_due, self._may_be_due = self._may_be_due, False  # while gradients accumulate
        if may_be_due and engine.worker.steps and engine.check_due():
            engine.worker.last_loss = self._steps.loss
            engine.make_round()
            if not engine.worker.was_finite:
                clear_non_finite(self._optimizers)
        engine.worker.replica.copy_on_write.hold()

    def _warn_of_local_parameters(self, engine: LocalParticipant) -> None:
        if self._has_warned or engine.worker.replica.shows_consensus or not engine.worker.steps:
            return
        self._has_warned = True
        if self._method.evaluate != "local":
            rank_zero_warn(
                "This evaluates the parameters of each worker, which differ. Use `with "
                "fabric.strategy.consensus():` around it to evaluate their mean, which checkpoints "
                "hold."
            )

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients; in a worker of several ranks, their mean."""
        self._steps.loss = loss_in(tensor)
        super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, and count the local step."""
        if optimizer not in self._optimizers:
            return super().optimizer_step(optimizer, **kwargs)
        closure = kwargs.get("closure")
        engine = self._start() if closure is not None else self.engine
        if engine is not None and engine.worker.replica.shows_consensus:
            raise RuntimeError(
                "An optimizer steps the consensus, which is in the model only to be evaluated. "
                "Leave `with fabric.strategy.consensus():` before the next step."
            )
        skips_forward = closure is None and self._may_be_due and self._steps.is_next(optimizer)
        if engine is None or skips_forward:
            raise RuntimeError(
                "An optimizer steps, but no forward pass went through the module that fabric.setup "
                "has returned, which runs the rounds. Call that module, and not the original one; "
                "name its other methods with model.mark_forward_method."
            )
        engine.worker.last_loss = self._steps.loss
        if closure is None:
            self._steps.prepare(optimizer)()
        else:
            kwargs["closure"] = self._steps.prepare(optimizer, closure)
        with self._steps.through_lightning():
            output = super().optimizer_step(optimizer, **kwargs)
        engine.worker.replica.copy_on_write.release()
        self._count(optimizer)
        return output

    def _count(self, optimizer: Optimizer) -> None:
        self._steps.count(optimizer)
        self._may_be_due = True

    # ------------------------------------------------------------- validation, end

    @contextlib.contextmanager
    def consensus(self, purpose: str = "validation") -> Iterator[None]:
        """A context with the consensus in the model, to evaluate it; all ranks must enter it.

        That is the mean of the workers' parameters, or the outer parameters with
        ``evaluate="outer"``; with ``evaluate="local"`` each worker keeps its own. Afterwards the
        local parameters are back.

        Args:
            purpose: What it is for, in words that are equal on all ranks.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        engine = self._start()
        if engine is None or self._method.evaluate == "local":
            yield
            return
        with self._shown(engine, purpose):
            yield

    @contextlib.contextmanager
    def _shown(self, engine: LocalParticipant, purpose: str) -> Iterator[None]:
        if engine.worker.replica.shows_consensus:
            yield
            return
        self.sync_point(purpose)
        engine.write_consensus(f"{purpose} of the consensus")
        try:
            yield
        finally:
            engine.worker.show_local()

    def finish(self) -> None:
        """Leave the consensus in the model, and stop; all ranks must call it after the last step.

        The model is the mean of the workers' parameters, or this worker's with ``finalize="keep"``.

        Raises:
            RuntimeError: If a worker is missing or has failed, or no worker is finite.
        """
        if (engine := self.engine) is not None:
            self.sync_point("the end of training")
            engine.finish_at_sync_point()
            if self._method.finalize == "keep":
                engine.worker.show_local()
        if self._group is not None:
            self._group.end_together("the end of training")
        self._close()

    def teardown(self) -> None:
        """Close the connections."""
        self._close()
        super().teardown()

    def _close(self) -> None:
        group, self._group = self._group, None
        if self.engine is not None:
            self._unfinished.detach()
            self._unwatch()
            self.engine.close()
            self.engine = self._module = None
        if group is not None:
            group.close()
            if self._replica_group is not None:
                self._replica_group.close(self, has_failed=group.failed)
                self._replica_group = None
        self._modules.clear()
        self._optimizers.clear()

    # ----------------------------------------------------------------- collectives

    def sync_point(self, purpose: str) -> None:
        """Wait until all ranks have reached the same sync point; take part in rounds until then.

        Args:
            purpose: What it is for, in words that are equal on all ranks.
        """
        if (engine := self.engine) is not None:
            if self._replica_group is not None:
                self._replica_group.meet(purpose, engine.worker.steps)
            engine.sync_point(purpose)

    def _together(self, label: str) -> AbstractContextManager[object]:
        """Wait for all ranks; return a context in which an error names the rank that is missing."""
        self.sync_point(label)
        if self._group is None:
            return contextlib.nullcontext()
        self._group.announce_wait(label)
        return ExplainErrors(self._group, label)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        with self._together(f"barrier {args[0] if args else kwargs.get('name', '')}"):
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one rank to all."""
        with self._together("a broadcast"):
            return super().broadcast(obj, src)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks."""
        with self._together("all_reduce"):
            return super().all_reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all ranks."""
        with self._together("all_gather"):
            return super().all_gather(tensor, group, sync_grads)

    # ----------------------------------------------------------------- checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads files; the default one writes a file atomically."""
        self.set_default_checkpoint_io(WholeFileIO())
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        lightning_compat.FabricPart.checkpoint_io.fset(self, io)  # type: ignore[attr-defined]

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write the consensus and worker 0's state to a file, and every worker's beside it.

        Raises:
            OSError: On every rank if one cannot write; the checkpoint before is still complete.
        """
        engine = self._start()
        if engine is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        with self._shown(engine, "checkpoint"):
            found = self.as_plain_values(state, filter or {})
            models = {name for name, value in state.items() if isinstance(value, nn.Module)}
            main = {
                name: _copied(value) if name in models else value for name, value in found.items()
            }
        loop = {name: value for name, value in main.items() if name not in models}

        def write_main(where: str, entry: dict[str, Any]) -> None:
            self.checkpoint_io.save_checkpoint({**main, **entry}, where, storage_options)

        WorkerFiles(engine, self.checkpoint_io).save(path, loop, write_main)

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint into ``state``, and resume this worker from its own state.

        Raises:
            ValueError: On every rank, if a file is missing or damaged.
        """
        engine = self._start() if isinstance(state, dict) and state else None
        if engine is None:
            loaded = super().load_checkpoint(path, state, strict, weights_only)
            if state:
                loaded.pop(KEY, None)
            return loaded
        assert isinstance(state, dict)
        group, io = engine.worker.group, self.checkpoint_io
        with group.errors_shared(READING):
            read = partial(io.load_checkpoint, path, weights_only=weights_only)
            loaded = read_main(read, path)
            lightning_compat.check_keys(state, loaded, strict)
        check_same_save(group, loaded, path)
        models = {name for name, value in state.items() if isinstance(value, nn.Module)}
        for name in models & loaded.keys():
            super().load_module_state_dict(state[name], loaded.pop(name), strict)
        if (entry := loaded.pop(KEY, None)) is None:
            engine.reset()
        else:
            loaded |= WorkerFiles(engine, io).load(path, entry, weights_only)
        for name in state.keys() & loaded.keys():
            value = loaded.pop(name)
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(value)
            else:
                state[name] = value
        self._may_be_due = True
        return loaded

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Load weights, from which the rounds then start; all ranks must load the same ones."""
        super().load_module_state_dict(module, state_dict, strict)
        if self.engine is not None:
            self.engine.reset()


class _Wrapped(LocalModel):
    """A wrapper that is not equal to its module: Fabric then calls its methods through forward."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _copied(state: Any) -> Any:
    """Copy tensors: the local parameters come back before the file is written."""
    return apply_to_collection(state, Tensor, lambda one: one.detach().to(CPU, copy=True))


def _checked(method: EngineStrategy | str | None) -> EngineStrategy:
    if method is None:
        return DiLoCoStrategy()
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"There is no method {method!r}. Choose one of {', '.join(METHODS)}.")
        method = METHODS[method]()  # type: ignore[assignment]
    if isinstance(method, RemoteOptimizerStrategy):
        raise ValueError(
            "RemoteOptimizerStrategy steps the optimizer on other ranks, which in a loop of Fabric "
            "would run the loop as well. Use it with Trainer, or lightning_loco.RemoteOptimizer in "
            "a plain loop."
        )
    if not isinstance(method, EngineStrategy) or isinstance(method, ShardedWorkers):
        raise TypeError(
            "method must be a strategy of lightning_loco such as DiLoCoStrategy(sync_every=100), "
            f"or its name, got {method!r}."
        )
    if getattr(method.settings, "membership", None) is not None:
        raise ValueError(
            "Members that join and leave need the Trainer's position in its loop, which a loop of "
            "Fabric does not tell. Leave membership out, or use Trainer."
        )
    if method.checkpoint_folder != "shared":
        raise ValueError(
            "checkpoint_folder='private' is not supported in a loop of Fabric. Save to a folder "
            "that all workers see."
        )
    return method


def _warn_of_no_finish() -> None:
    """Warn when a loop that has had no error ends, and its workers still have own parameters."""
    if sys.exc_info()[0] is None and not hasattr(sys, "last_type"):
        rank_zero_warn(
            "The loop has ended without fabric.strategy.finish(): the model of each process is its "
            "own worker's, and not their mean. Call it after the last step."
        )


def register_strategies() -> None:
    """Register every method by its name: ``Fabric(strategy="diloco")``."""
    for name in METHODS:
        if name not in STRATEGY_REGISTRY and name != "remote_optimizer":
            description = f"FabricLocoStrategy({name!r})"
            STRATEGY_REGISTRY.register(name, FabricLocoStrategy, description, method=name)

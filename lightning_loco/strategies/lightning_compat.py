"""The only module that uses private names of Lightning or depends on its version.

Lightning broadcasts a termination flag before every batch, which makes every
worker wait for the slowest one, and its signal handlers call collectives at any point of the
program. Here signals only set a flag; the workers then agree on a step at which to stop.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from types import FrameType
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.strategy import (
    _BackwardSyncControl,
    _validate_keys_for_strict_loading,
)
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    StrategyRegistry,
)
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.exceptions import (
    MisconfigurationException,
    SIGTERMException,
)
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Sampler

from lightning_loco.model.gradient_clipping import GradientClipping

log = logging.getLogger(__name__)

Surrounding = Callable[[], AbstractContextManager[object]]
"""Makes a context to enter around a method."""

REQUEUE = "requeue"
"""Reason to stop: SLURM is about to end the job, and it should be queued again."""

TERMINATE = "SIGTERM"
"""Reason to stop: the process was asked to terminate."""

OF_WHOLE_MODELS = tuple(
    getattr(callbacks, name)
    for name in ("StochasticWeightAveraging", "ModelPruning", "WeightAveraging")
    if hasattr(callbacks, name)
)
"""Callbacks that need the whole model on every rank; the last one is new in Lightning 2.6."""

BEFORE_SETUP = "pre_setup"
"""Name of the barrier between the hooks ``prepare_data`` and ``setup``."""


# ------------------------------------------------------------------ signals and stopping


def remove_lockstep(trainer: pl.Trainer, request_stop: Callable[[str], None]) -> None:
    """Replace Lightning's per-batch broadcast and its signal handlers on this trainer alone.

    Must be called before the trainer registers its signal handlers, that is in ``Strategy.setup``.
    They call ``request_stop`` with :data:`REQUEUE` or :data:`TERMINATE`.
    """
    loop = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    signals = trainer._signal_connector
    signals._sigterm_notifier_fn = functools.partial(  # type: ignore[method-assign]
        _on_sigterm, trainer, request_stop
    )
    signals._slurm_sigusr_handler_fn = functools.partial(  # type: ignore[method-assign]
        _on_requeue, request_stop
    )


def _on_sigterm(
    trainer: pl.Trainer, request_stop: Callable[[str], None], signum: int, _: FrameType | None
) -> None:
    log.info("Received signal %s: stopping all workers at the next common step.", signum)
    if (launcher := trainer.strategy.launcher) is not None:
        launcher.kill(signum)
    request_stop(TERMINATE)


def _on_requeue(request_stop: Callable[[str], None], signum: int, _: FrameType | None) -> None:
    log.info("Received signal %s: saving and requeueing at the next common step.", signum)
    request_stop(REQUEUE)


def raise_in_loop(trainer: pl.Trainer) -> None:
    """Make the training loop raise ``SIGTERMException`` at the end of the present batch."""
    trainer._signal_connector.received_sigterm = True


def stop_after_batch(
    trainer: pl.Trainer, at_teardown: ExitStack, at_epoch_end: Callable[[], None] | None = None
) -> None:
    """Make the training loop raise ``SIGTERMException`` right after the present batch.

    A validation that is due at this point runs when training is resumed: here it would draw
    random numbers and be interrupted. Until then the counters of the batch are as in
    ``on_train_batch_end``. ``at_teardown`` cancels the stop, in case an error is raised before it.
    After the last batch of an epoch nothing is raised, but ``at_epoch_end`` is called.
    """
    loop = trainer.fit_loop.epoch_loop
    if "on_advance_end" in vars(loop):
        return

    def on_advance_end(data_fetcher: Any) -> None:
        del loop.on_advance_end
        if loop._is_training_done:
            if at_epoch_end is not None:
                at_epoch_end()
            loop.on_advance_end(data_fetcher)
            return
        for counts in (loop.batch_progress.current, loop.batch_progress.total):
            counts.completed -= 1
        raise SIGTERMException

    loop.on_advance_end = on_advance_end  # type: ignore[method-assign]
    at_teardown.callback(vars(loop).pop, "on_advance_end", None)


def close_failed_fit(trainer: pl.Trainer, error: BaseException) -> None:
    """Report and close a failed fit, which Lightning does not do if a callback raises then."""
    trainer.strategy.on_exception(error)
    trainer._teardown()


def requeue(trainer: pl.Trainer) -> None:
    """Save the checkpoint for the next SLURM job and queue the job again."""
    signals = trainer._signal_connector
    type(signals)._slurm_sigusr_handler_fn(signals, signal.SIGUSR1, None)  # type: ignore[arg-type]


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """Return the trainer of a module or None; the public attribute raises if there is none."""
    return module._trainer


# ------------------------------------------------------------------------------- data


def with_sampler(loader: DataLoader, sampler: Sampler) -> DataLoader:
    """Return a copy of a data loader with another sampler."""
    return _update_dataloader(loader, sampler)


def sampler_of(loader: DataLoader) -> object:
    """Return the sampler of single samples; Lightning may have put it into a batch sampler."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def set_sampler_epoch(trainer: pl.Trainer, dataloader: object) -> None:
    """Set the epoch of the samplers before the first iterator is made.

    Lightning sets it only afterwards: a loader that draws its order at once, as torchdata's does,
    would then resume an epoch in the order of the first one.
    """
    _set_sampler_epoch(dataloader, trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]


def start_epoch_data(trainer: pl.Trainer) -> None:
    """Start a new pass over the training data, as at the start of an epoch."""
    loop = trainer.fit_loop
    assert loop._combined_loader is not None
    for dataloader in loop._combined_loader.flattened:
        set_sampler_epoch(trainer, dataloader)
    iter(loop._data_fetcher)  # type: ignore[arg-type]


def load_loader_states(trainer: pl.Trainer) -> None:
    """Load the states of the training loaders from a checkpoint, if that was not done yet.

    Lightning loads them when it makes the loaders. If ``configure_optimizers`` reads
    ``trainer.estimated_stepping_batches``, these are made before the checkpoint is loaded.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is not None and loop._combined_loader_states_to_load:
        loop._load_combined_loader_states()
        start_epoch_data(trainer)


def forget_batches_read(trainer: pl.Trainer, states: list[Any]) -> None:
    """Undo that a resumed run has read a batch of the next epoch in advance.

    It does so if the length of the data is not known. The next pass over the data then begins from
    these states of the loaders.
    """
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    if isinstance(fetcher, _PrefetchDataFetcher) and fetcher.batches:
        assert loop._combined_loader is not None
        fetcher.batches = []
        loop._combined_loader._load_state_dicts(states)


def skip_batches(trainer: pl.Trainer, count: int) -> None:
    """Read the first batches of an epoch that has started, without training on them."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    assert fetcher.iterator is not None
    for _ in range(count):
        next(fetcher.iterator)


def load_validation_data(trainer: pl.Trainer) -> None:
    """Make the validation loaders, if there are any, as the sanity check before training does.

    A resumed run skips that check, and loaders that are made later draw random numbers that the
    uninterrupted run has not drawn.
    """
    if trainer.enable_validation and trainer.val_dataloaders is None:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


_RELOADED = {"fit": "_last_train_dl_reload_epoch", "val": "_last_val_dl_reload_epoch"}


def _loops_with_data(trainer: pl.Trainer) -> dict[str, Any]:
    return {"fit": trainer.fit_loop, "val": trainer.fit_loop.epoch_loop.val_loop}


def epochs_of_data(trainer: pl.Trainer) -> dict[str, float] | None:
    """Return since when Lightning counts the epochs until it makes the loaders again.

    None if they are made only once; minus infinity if it does not count yet.
    """
    if not trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        return None
    return {of: getattr(loop, _RELOADED[of]) for of, loop in _loops_with_data(trainer).items()}


def make_data_as_in(trainer: pl.Trainer, epochs: dict[str, float]) -> None:
    """Let a resumed run make its loaders as in these epochs, see :func:`epochs_of_data`.

    Otherwise ``reload_dataloaders_every_n_epochs`` would count from the epoch that is resumed.
    Loaders that are due to be made again are made as in the present epoch.
    """
    every = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    for of, loop in _loops_with_data(trainer).items() if every else ():
        _change_next_data(trainer, of, loop, epochs[of], every)


def _change_next_data(trainer: pl.Trainer, of: str, loop: Any, epoch: float, every: int) -> None:
    setup_data = loop.setup_data

    def changed() -> None:
        del loop.setup_data
        progress: Any = trainer.fit_loop.epoch_progress.current
        present = progress.completed  # trainer.current_epoch
        reads_now = of == "fit" or trainer.fit_loop.epoch_loop._should_check_val_epoch()
        if present - epoch >= every and reads_now:
            setup_data()
            return
        progress.completed = int(epoch) if epoch >= 0 else present
        try:
            setup_data()
        finally:
            progress.completed = present
        setattr(loop, _RELOADED[of], epoch)

    loop.setup_data = changed


def save_states_of_read_batches(trainer: pl.Trainer) -> Callable[[], None]:
    """Let checkpoints hold the states of the training loaders after the batches that were used.

    If the length of the data is not known, Lightning reads one batch in advance, and saves states
    that include it: a resumed run would skip it. Returns a function that undoes this.
    """
    loop = trainer.fit_loop
    save, load = loop.on_save_checkpoint, loop.on_load_checkpoint
    kept: list[Any] = []
    of: list[Any] = [None]  # the fetcher that the kept states belong to; None after a load

    @contextmanager
    def before_fetch() -> Iterator[None]:
        fetcher, loader = loop._data_fetcher, loop._combined_loader
        if isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None:
            assert loader is not None
            kept[:], of[:] = copy.deepcopy(loader._state_dicts()), [fetcher]
        yield

    def on_save_checkpoint() -> dict[str, Any]:
        state = save()
        fetcher = loop._data_fetcher
        if isinstance(fetcher, _PrefetchDataFetcher) and fetcher.batches:
            state.pop("combined_loader", None)
            if kept and of[0] in (None, fetcher):
                state["combined_loader"] = list(kept)
        return state

    def on_load_checkpoint(state: dict[str, Any]) -> None:
        kept[:], of[:] = state.get("combined_loader", []), [None]
        load(state)

    stack = ExitStack()
    stack.callback(surround(loop.epoch_loop, "_on_before_fetch", before_fetch))
    for name, method in (
        ("on_save_checkpoint", on_save_checkpoint),
        ("on_load_checkpoint", on_load_checkpoint),
    ):
        setattr(loop, name, method)
        stack.callback(delattr, loop, name)
    return stack.close


# --------------------------------------------------------------------- loops, logging


def resume_loop_at(
    trainer: pl.Trainer,
    phase: Literal["batch end", "validation end", "next batch", "next epoch"],
) -> None:
    """Make a resumed loop continue once after this phase, instead of where Lightning guesses.

    The loops must have been restored, with the last batch counted as completed.
    """
    loop = trainer.fit_loop.epoch_loop
    loop.val_loop._has_run = False  # or an epoch at its last batch counts as over

    def advance(data_fetcher: Any) -> None:
        del loop.advance
        resumed, loop.restarting = loop.restarting, False
        if not resumed or phase in ("next batch", "next epoch"):
            loop.advance(data_fetcher)
        else:
            loop._skip_next_val = phase == "validation end"

    loop.advance = advance  # type: ignore[method-assign]


def choose_checkpoint(trainer: pl.Trainer, choose: Callable[[Any], Any]) -> None:
    """Let ``choose`` replace the path, or None, from which the next run resumes, once."""
    connector = trainer._checkpoint_connector
    resume_start = functools.partial(_resume_from_chosen, connector, choose)  # pickled by "spawn"
    connector.resume_start = resume_start  # type: ignore[method-assign]


def _resume_from_chosen(
    connector: _CheckpointConnector, choose: Callable[[Any], Any], path: Any = None, **options: Any
) -> None:
    del connector.resume_start
    connector.resume_start(choose(path), **options)


def is_logging_step(trainer: pl.Trainer) -> bool:
    """Return whether the loggers are written after this batch (``log_every_n_steps``)."""
    return trainer._logger_connector.should_update_logs


def logged_step(trainer: pl.Trainer) -> int:
    """Return the step that is passed to the loggers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def set_logged_step(trainer: pl.Trainer, step: int) -> None:
    """Set the step that is passed to the loggers."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def current_metrics(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """Return the metrics logged in the present epoch of training or validation, for callbacks."""
    return trainer._logger_connector.metrics["callback"]


def expect_no_step(optimizer: torch.optim.Optimizer) -> None:
    """Disable the warning of schedulers that this optimizer takes no steps: another one does."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def is_no_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this is Lightning's placeholder for None from ``configure_optimizers``."""
    return isinstance(optimizer, _MockOptimizer)


def replace_loops(trainer: pl.Trainer, fit: Callable[[], None]) -> None:
    """Replace the loops and the profiler of this trainer alone: ``fit`` is called in its ``fit``.

    Validation, test and prediction do nothing.
    """
    trainer.num_sanity_val_steps = 0
    trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
    trainer.fit_loop.run = fit  # type: ignore[method-assign]
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.run = list  # type: ignore[method-assign]


def set_callback_metrics(trainer: pl.Trainer, metrics: dict[str, torch.Tensor]) -> None:
    """Add the metrics of another rank to ``trainer.callback_metrics``."""
    trainer._logger_connector._callback_metrics.update(metrics)


def found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors in which ``GradScaler.unscale_`` records that gradients are not finite."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


# ---------------------------------------------------------- checkpoints, strategies, callbacks


def load_checkpoint(io: CheckpointIO, path: str, weights_only: bool) -> dict[str, Any]:
    """Read a file with a ``CheckpointIO``; before Lightning 2.6 they have no ``weights_only``."""
    innermost: CheckpointIO | None = io
    while isinstance(innermost, _WrappingCheckpointIO):
        innermost = innermost.checkpoint_io
    assert innermost is not None
    kinds = inspect.signature(innermost.load_checkpoint).parameters
    takes_any = any(kind.kind is inspect.Parameter.VAR_KEYWORD for kind in kinds.values())
    if takes_any or "weights_only" in kinds:
        return io.load_checkpoint(path, weights_only=weights_only)
    return io.load_checkpoint(path)


def average_of(callback: StochasticWeightAveraging) -> list[pl.LightningModule]:
    """Return the averaged copy of the model, in a list that is empty before there is one."""
    return [] if callback._average_model is None else [callback._average_model]


def syncs_batch_norm(strategy: ParallelStrategy) -> bool:
    """Return whether ``Trainer(sync_batchnorm=True)`` was set."""
    return strategy._layer_sync is not None


def backend_of(strategy: DDPStrategy) -> str:
    """Return the backend of the default process group: the user's, or the device's default."""
    return strategy._get_process_group_backend()


def set_default_checkpoint_io(strategy: DDPStrategy, io: CheckpointIO) -> None:
    """Set how a strategy, or a wrapper such as AsyncCheckpointIO, writes files by default."""
    if strategy._checkpoint_io is None:
        strategy._checkpoint_io = io
    elif isinstance(strategy._checkpoint_io, _WrappingCheckpointIO):
        strategy._checkpoint_io.checkpoint_io = io  # has no effect if one is set


def average_gradients_in(strategy: DDPStrategy, group: dist.ProcessGroup | None) -> None:
    """Set the group over which DDP will average gradients; None for all ranks."""
    strategy._ddp_kwargs["process_group"] = group


def wrap_in_ddp(strategy: DDPStrategy, model: torch.nn.Module) -> torch.nn.Module:
    """Return the model in DDP, with the arguments that the strategy was given."""
    return strategy._setup_model(model)


def ddp_options_of(strategy: DDPStrategy) -> dict[str, Any]:
    """Return the arguments for DDP that are not the default."""
    return {name: value for name, value in strategy._ddp_kwargs.items() if value}


def ddp_arguments_of(strategy: DDPStrategy) -> list[str]:
    """Return the arguments for DDP and the launcher that are not the default, in words."""
    given = ddp_options_of(strategy)
    if strategy._start_method != "popen":
        given["start_method"] = strategy._start_method
    return [f"{name}={value!r}" for name, value in given.items()]


def check_start_method(strategy: ParallelStrategy) -> None:
    """Raise MisconfigurationException if this process cannot start the workers of the strategy.

    Lightning's own error in notebooks, a moment later, names a strategy of DDP. Nothing is checked
    in processes that have been started.
    """
    if strategy.launcher is not None:
        return
    start_method = getattr(strategy, "_start_method", None)
    if start_method == "fork" and dist.is_initialized():
        raise MisconfigurationException(
            "start_method='fork' copies this process, whose process group from an earlier run the "
            "copies cannot use. Restart the notebook's kernel, or run it in a new process."
        )
    if start_method == "fork" or not (hasattr(sys, "ps1") or sys.flags.interactive):
        return
    kind = type(strategy)
    names = [
        name
        for name, entry in StrategyRegistry.items()
        if entry["strategy"] is kind and entry["init_params"].get("start_method") == "fork"
    ]
    advice = f"Use {kind.__name__}(start_method='fork')"
    advice += f", or Trainer(strategy={names[0]!r})." if names else "."
    raise MisconfigurationException(
        f"{kind.__name__} starts its workers by running the script again, and a notebook or an "
        "interactive interpreter has none. "
        + ("Run it as a script." if start_method is None else advice)
    )


def check_keys(state: dict[str, Any], loaded: dict[str, Any], strict: bool) -> None:
    """Raise KeyError if a checkpoint of Fabric lacks something that it is to restore."""
    _validate_keys_for_strict_loading(state.keys(), loaded.keys(), strict)


class FabricPart(FabricDDPStrategy):
    """The part of a strategy of Fabric that has private names."""

    def __init__(
        self, plugins: dict[str, Any], backend: str | None, timeout: timedelta, **ddp: Any
    ) -> None:
        super().__init__(**plugins, process_group_backend=backend, timeout=timeout, **ddp)
        self._backward_sync_control = _NoSync()

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        self.connect_ranks(self._process_group_backend)

    def connect_ranks(self, backend: str) -> None:
        """Make the default process group."""

    def wrap_in_ddp(self, module: torch.nn.Module, group: ProcessGroup | None) -> torch.nn.Module:
        """Return a module in DDP over a group, with the arguments that the strategy was given."""
        devices = self._determine_ddp_device_ids()
        return DistributedDataParallel(
            module, device_ids=devices, process_group=group, **self._ddp_kwargs
        )

    def set_default_checkpoint_io(self, io: CheckpointIO) -> None:
        """Set what writes files, unless the user has set it."""
        self._checkpoint_io = self._checkpoint_io or io

    def as_plain_values(self, state: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        """Return the states of modules, optimizers and others; ``kept`` filters their entries."""
        return self._convert_stateful_objects_in_state(state, kept)


class _NoSync(_BackwardSyncControl):
    """Between workers no gradients are synchronized; within one DDP can leave it out."""

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool
    ) -> AbstractContextManager[Any]:
        no_sync = getattr(module, "no_sync", None)
        return no_sync() if enabled and no_sync is not None else nullcontext()


class ModelParallelPart(ModelParallelStrategy):
    """A ``ModelParallelStrategy`` whose device mesh holds only a part of the ranks of the job."""

    def connect_ranks(self) -> None:
        """Make the default process group."""

    def setup_environment(self) -> None:
        """Connect the ranks; :meth:`set_device_mesh` follows."""
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()

    def _setup_distributed(self) -> None:
        self.connect_ranks()
        super()._setup_distributed()

    def set_device_mesh(self, mesh: DeviceMesh) -> None:
        """Set the mesh, which ``LightningModule.configure_model`` sees."""
        self._device_mesh = mesh
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = mesh


def clip_gradients_by(plugin: Precision, clipping: GradientClipping) -> Callable[[], None]:
    """Let a precision plugin clip gradients in another way; return a function that undoes it."""

    def by_norm(optimizer: Optimizer, clip_val: float) -> None:
        clipping.by_norm(plugin.main_params(optimizer), clip_val)

    def by_value(optimizer: Optimizer, clip_val: float) -> None:
        clipping.by_value(plugin.main_params(optimizer), clip_val)

    plugin.clip_grad_by_norm = by_norm  # type: ignore[method-assign]
    plugin.clip_grad_by_value = by_value  # type: ignore[method-assign]

    def undo() -> None:
        del plugin.clip_grad_by_norm, plugin.clip_grad_by_value

    return undo


def skips_backward(trainer: pl.Trainer) -> bool:
    """Return whether the present epoch only updates BatchNorm statistics of averaged weights."""
    return trainer.fit_loop._skip_backward


# -------------------------------------------------------------------------- added hooks


def _nothing() -> None:
    pass


def add_hooks(
    trainer: pl.Trainer,
    *,
    end: Surrounding,
    sync_point: Callable[[str], None],
    batches_end: Callable[[], None] = _nothing,
    saving: Surrounding = nullcontext,
    validation_start: Callable[[], None] = _nothing,
    validation_end: Callable[[], None] = _nothing,
) -> ExitStack:
    """Add hooks that Lightning does not have, by wrapping methods of one trainer.

    Args:
        trainer: The trainer to change; other trainers are not affected.
        end: Context around all hooks of the end of training. The strategy's own hook is the last
            of them, where it would overwrite what callbacks and the module write into the model.
        sync_point: Waits for all workers; called with a label before a collective of user code in
            the hooks at the start and the end of training epochs.
        batches_end: Called after the batches of a training epoch, before all hooks of its end.
        saving: Context from before a checkpoint is collected until it is written.
        validation_start: Called before all hooks of the start of a validation, so that what they
            write into the model is validated.
        validation_end: Called after all hooks of its end, which may undo what they wrote.

    Returns:
        A stack that restores the trainer's own methods when it is closed.
    """
    stack = ExitStack()
    stack.callback(save_states_of_read_batches(trainer))
    for one in _loops_with_data(trainer).values():
        stack.callback(vars(one).pop, "setup_data", None)
    loop, collectives = trainer.fit_loop, SyncBeforeCollectives(sync_point)

    @contextmanager
    def epoch_start() -> Iterator[None]:
        loop.setup_data()  # first: loader processes must not inherit the dispatch mode
        with collectives:
            yield

    @contextmanager
    def epoch_end() -> Iterator[None]:
        batches_end()
        with collectives:
            yield

    @contextmanager
    def around(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
        before()
        yield
        after()

    validation = loop.epoch_loop.val_loop
    for owner, name, surrounding in (
        (loop, "on_run_end", end),
        (trainer, "save_checkpoint", saving),
        (loop, "on_advance_start", epoch_start),
        (loop, "on_advance_end", epoch_end),
        (validation, "on_run_start", lambda: around(validation_start, _nothing)),
        (validation, "on_run_end", lambda: around(_nothing, validation_end)),
    ):
        stack.callback(surround(owner, name, surrounding))
    return stack


def surround(owner: object, name: str, surrounding: Surrounding) -> Callable[[], None]:
    """Enter a context around a method of one object; return a function that undoes it."""
    method, had_own = getattr(owner, name), name in vars(owner)

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        with surrounding():
            return method(*args, **kwargs)

    def undo() -> None:
        if had_own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)

    setattr(owner, name, surrounded)
    return undo


class SyncBeforeCollectives(TorchDispatchMode):
    """A mode in which each collective of the default process group starts with a sync point.

    A worker with fewer batches reaches the end of its epoch, and the hooks there, while others
    still run rounds. At a sync point it takes part in these rounds; inside a collective that does
    not go through the strategy it could not. ``sync_point`` gets a label.
    """

    def __init__(self, sync_point: Callable[[str], None]) -> None:
        super().__init__()
        self._sync_point = sync_point

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, after a sync point if it is such a collective."""
        if func.namespace == "c10d" and any(map(_is_default_group, args)):
            name = func.name().removeprefix("c10d::").strip("_")
            self._sync_point(f"{name} in a hook of an epoch")
        return func(*args, **(kwargs or {}))


def _is_default_group(argument: object) -> bool:
    if not isinstance(argument, torch.ScriptObject):
        return False
    try:
        return ProcessGroup.unbox(argument) is dist.group.WORLD
    except RuntimeError:  # another C++ object, such as an option
        return False

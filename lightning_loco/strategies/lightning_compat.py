"""The only place that touches private names of Lightning, or asks what its versions differ in.

Lightning (2.5.2 and later) broadcasts a termination flag before every batch, which makes every
worker wait for the slowest one, and its signal handlers call collectives at any point of the
program. Here signals only leave a note; the workers then agree on where to stop.
"""

from __future__ import annotations

import functools
import inspect
import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.data import DataLoader, Sampler

log = logging.getLogger(__name__)

REQUEUE = "requeue"
"""Reason to stop: SLURM is about to take the machines away and the job should be queued again."""

TERMINATE = "SIGTERM"
"""Reason to stop: the process was asked to terminate."""

BEFORE_SETUP = "pre_setup"
"""Name of the barrier between the hooks ``prepare_data`` and ``setup``."""


def remove_lockstep(trainer: pl.Trainer, request_stop: Callable[[str], None]) -> None:
    """Replace Lightning's per-batch broadcast and its signal handlers on this trainer.

    Must be called before the trainer registers its signal handlers, that is in ``Strategy.setup``.

    Args:
        trainer: The trainer to change; only the instance is touched.
        request_stop: Called from the signal handler with :data:`REQUEUE` or :data:`TERMINATE`.
    """
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    signals = trainer._signal_connector
    signals._sigterm_notifier_fn = functools.partial(  # type: ignore[method-assign]
        _on_sigterm, trainer, request_stop
    )
    signals._slurm_sigusr_handler_fn = functools.partial(  # type: ignore[method-assign]
        _on_requeue, request_stop
    )


def raise_in_loop(trainer: pl.Trainer) -> None:
    """Make the training loop raise ``SIGTERMException`` at the end of the present batch."""
    trainer._signal_connector.received_sigterm = True


def stop_after_batch(trainer: pl.Trainer, at_teardown: ExitStack) -> None:
    """Make the training loop raise ``SIGTERMException`` right after the present batch.

    A validation that is due there comes when the run is resumed: begun here, it would draw random
    numbers and be cut off. Until then the batch counts as it does in ``on_train_batch_end``.

    Args:
        trainer: Whose loop it is.
        at_teardown: Takes the stop back, if an error comes before it.
    """
    loop = trainer.fit_loop.epoch_loop
    if "on_advance_end" in vars(loop):
        return

    def on_advance_end(data_fetcher: Any) -> None:
        del loop.on_advance_end
        if loop._is_training_done:
            loop.on_advance_end(data_fetcher)
            return
        for counts in (loop.batch_progress.current, loop.batch_progress.total):
            counts.completed -= 1
        raise SIGTERMException

    loop.on_advance_end = on_advance_end  # type: ignore[method-assign]
    at_teardown.callback(vars(loop).pop, "on_advance_end", None)


def requeue(trainer: pl.Trainer) -> None:
    """Save the checkpoint for the next SLURM job and put the job back into the queue."""
    signals = trainer._signal_connector
    type(signals)._slurm_sigusr_handler_fn(signals, signal.SIGUSR1, None)  # type: ignore[arg-type]


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The trainer that a module is attached to; its public name raises when there is none."""
    return module._trainer


def with_sampler(loader: DataLoader, sampler: Sampler) -> DataLoader:
    """The same data loader with another sampler."""
    return _update_dataloader(loader, sampler)


def sampler_of(loader: DataLoader) -> object:
    """The sampler that chooses single samples; Lightning may have put it into a batch sampler."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def set_present_epoch(trainer: pl.Trainer, dataloader: object) -> None:
    """Tell the sampler its epoch before the first iterator is made.

    Lightning does so only afterwards; loaders that draw their order at once, as torchdata's do,
    would then resume an epoch in the order of the first one.
    """
    _set_sampler_epoch(dataloader, trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]


def start_epoch_data(trainer: pl.Trainer) -> None:
    """Begin a new pass over the training data, as an unbroken run does at the start of an epoch."""
    loop = trainer.fit_loop
    assert loop._combined_loader is not None
    for dataloader in loop._combined_loader.flattened:
        set_present_epoch(trainer, dataloader)
    iter(loop._data_fetcher)  # type: ignore[arg-type]


def go_on_in_data(trainer: pl.Trainer) -> None:
    """Take up the places of the training loaders that a checkpoint holds, if that is still to do.

    Lightning does so when it makes the loaders. Where ``configure_optimizers`` asks for
    ``trainer.estimated_stepping_batches``, they are made before the checkpoint is read.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is not None and loop._combined_loader_states_to_load:
        loop._load_combined_loader_states()
        start_epoch_data(trainer)


def leave_out_batches(trainer: pl.Trainer, count: int) -> None:
    """Read the first batches of an epoch that has begun, without training on them."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    assert fetcher.iterator is not None
    for _ in range(count):
        next(fetcher.iterator)


def load_validation_data(trainer: pl.Trainer) -> None:
    """Make the loaders of validation, if there is one, as the check before training does.

    That check is left out when a run is resumed; who makes them later draws random numbers that an
    unbroken run has not drawn.
    """
    if trainer.enable_validation:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


def skip_to(
    trainer: pl.Trainer,
    place: Literal["batch end", "validation end", "next batch", "next epoch"],
) -> None:
    """Let a resumed loop go on from where this was done last, once, instead of where it guesses.

    The loops must have been restored, with the last batch counted as completed.
    """
    loop = trainer.fit_loop.epoch_loop
    loop.val_loop._has_run = False  # or an epoch at its last batch counts as over

    def advance(data_fetcher: Any) -> None:
        del loop.advance
        resumed, loop.restarting = loop.restarting, False
        if not resumed or place in ("next batch", "next epoch"):
            loop.advance(data_fetcher)
        else:
            loop._skip_next_val = place == "validation end"

    loop.advance = advance  # type: ignore[method-assign]


def choose_checkpoint(trainer: pl.Trainer, choose: Callable[[Any], Any]) -> None:
    """Let ``choose`` say what the coming run resumes from, once; it gets Lightning's choice."""
    connector = trainer._checkpoint_connector

    def resume_start(path: Any = None, **options: Any) -> None:
        del connector.resume_start
        connector.resume_start(choose(path), **options)

    connector.resume_start = resume_start  # type: ignore[assignment, method-assign]


def is_logging_step(trainer: pl.Trainer) -> bool:
    """Whether ``log_every_n_steps`` lets this batch write to the loggers."""
    return trainer._logger_connector.should_update_logs


def logged_step(trainer: pl.Trainer) -> int:
    """The step that loggers are told."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def log_from(trainer: pl.Trainer, step: int) -> None:
    """Let loggers be told this step from now on."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def metrics_of_this_loop(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """What was logged in the present epoch of training or validation, as callbacks see it."""
    return trainer._logger_connector.metrics["callback"]


def expect_no_step(optimizer: torch.optim.Optimizer) -> None:
    """Schedulers of this optimizer need not warn that it makes no steps: another one makes them."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def is_no_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it only stands where ``configure_optimizers`` has returned None."""
    return isinstance(optimizer, _MockOptimizer)


def replace_loops(trainer: pl.Trainer, fit: Callable[[], None]) -> None:
    """Take training, validation, test and prediction out of a trainer, and what profiles them.

    Args:
        trainer: The trainer to change; only the instance is touched.
        fit: What to do in ``trainer.fit`` instead.
    """
    trainer.num_sanity_val_steps = 0
    trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]
    trainer.fit_loop.run = fit  # type: ignore[method-assign]
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.run = list  # type: ignore[method-assign]


def set_callback_metrics(trainer: pl.Trainer, metrics: dict[str, torch.Tensor]) -> None:
    """Let ``trainer.callback_metrics`` show what another rank has logged."""
    trainer._logger_connector._callback_metrics.update(metrics)


def found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Where a gradient scaler notes, after ``unscale_``, whether a gradient is not finite."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def load_checkpoint(io: CheckpointIO, path: str, weights_only: bool) -> dict[str, Any]:
    """Read a file with a ``CheckpointIO``; before 2.6 Lightning's do not know ``weights_only``."""
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
    """The averaged copy of the model, if there is one already."""
    return [] if callback._average_model is None else [callback._average_model]


def syncs_batch_norm(strategy: ParallelStrategy) -> bool:
    """Whether ``Trainer(sync_batchnorm=True)`` was asked for."""
    return strategy._layer_sync is not None


def backend_of(strategy: DDPStrategy) -> str:
    """The backend of the default process group: what the user has said, or what fits the device."""
    return strategy._get_process_group_backend()


def write_files_by(strategy: DDPStrategy, io: CheckpointIO) -> None:
    """Let a strategy write its checkpoints so, or what wraps this, unless the user has said how."""
    if strategy._checkpoint_io is None:
        strategy._checkpoint_io = io
    elif isinstance(strategy._checkpoint_io, _WrappingCheckpointIO):
        strategy._checkpoint_io.checkpoint_io = io  # does nothing where there is one


def average_gradients_in(strategy: DDPStrategy, group: dist.ProcessGroup | None) -> None:
    """Let DDP average gradients over this group, None for all ranks, once it wraps a model."""
    strategy._ddp_kwargs["process_group"] = group


def only_measures(trainer: pl.Trainer) -> bool:
    """Whether the present epoch trains nothing: it renews statistics for averaged weights."""
    return trainer.fit_loop._skip_backward


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

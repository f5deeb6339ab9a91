"""RemoteOptimizerStrategy: workers compute gradients, service ranks average them and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_loco._util.checks import check_bytes
from lightning_loco.compression import Codec, ErrorFeedback
from lightning_loco.costs.server_times import BUCKET_BYTES
from lightning_loco.model.same_model import broadcast_model, check_model
from lightning_loco.parameter_server import (
    RemoteOptimizer,
    RemoteParticipant,
    Serving,
    Transport,
)
from lightning_loco.parameter_server.backends import check_optimizer
from lightning_loco.parameter_server.protocol import as_codec
from lightning_loco.parameter_server.roles import check_ranks
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.arguments import WorkerArguments
from lightning_loco.strategies.checkpoint.checkpoints import Checkpoints
from lightning_loco.strategies.checkpoint.remote_state import RemoteState
from lightning_loco.strategies.local_training import leave_shared_memory
from lightning_loco.strategies.service_ranks import ServiceRankStrategy
from lightning_loco.strategies.summary import (
    NOT_SHOWN,
    bytes_of_ddp,
    errors_as_warnings,
    summarize,
)

_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")


class RemoteOptimizerStrategy(ServiceRankStrategy):
    """Compute gradients on the workers; average them and step on service ranks.

    All ranks run the same script. The first ``W = num_workers * replica_size`` train. The others,
    the service ranks, serve them during ``fit`` and skip validation, test and prediction. With
    ``W + num_servers`` ranks (2 tiers) each service rank averages and has the optimizer; with
    ``W + 2 * num_servers`` (3 tiers) the first half of them averages and the other half has the
    optimizer. Results are the same as with DDP on the workers alone.

    Learning-rate schedulers run on the workers, which know the epochs and metrics; the optimizer
    uses their values in the same step. Gradient clipping set on the Trainer, or by
    ``self.clip_gradients``, clips the mean gradient where the optimizer is. Checkpoints are
    ordinary ones with the optimizer's state: a run can be resumed with other tiers, another number
    of workers, or DDP.

    Args:
        num_workers: Number of workers, at least 1. Default: 2 tiers, all ranks but the servers.
        num_servers: Number of shards of the parameters, each with its own server (and optimizer).
        replica_size: Ranks per worker; they average their gradients like DDP, and the first one is
            the client of the servers.
        compression: How gradients and parameters are encoded when they are sent: ``"bf16"``,
            ``"fp16"``, ``"int8"`` or such a codec; servers sum and step in full precision. Default:
            not encoded.
        overlap: Send gradients while the backward pass computes them.
        bucket_bytes: Size of a bucket in bytes; smaller parameters share a bucket.
        common: The arguments that all strategies share, :class:`WorkerArguments`. The backend is
            used by the ranks that train.

    Raises:
        ValueError: If a value is out of range, at construction or before training starts.
        TypeError: If a value has the wrong type or an argument is unknown.

    Source:
        The hierarchical training example of tt-train.

    Example::

        Trainer(strategy=RemoteOptimizerStrategy(num_workers=2), devices=3)  # 2 tiers
        Trainer(strategy=RemoteOptimizerStrategy(num_workers=2), devices=4)  # 3 tiers
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        num_servers: int = 1,
        replica_size: int = 1,
        compression: Codec | ErrorFeedback | str | None = None,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        **common: Unpack[WorkerArguments],
    ) -> None:
        check_ranks(num_workers, num_servers, replica_size)
        check_bytes("bucket_bytes", bucket_bytes)
        self._init_worker(**common)
        self.counts = (num_workers, num_servers, replica_size)
        self.compression = as_codec(compression)
        self.overlap = overlap
        self.bucket_bytes = bucket_bytes
        self._stop_reason: str | None = None
        self._precision: RemotePrecision | None = None
        self._shows_mean = self._is_in_step = False
        self._run_state = RemoteState(self)
        self.checkpoints = Checkpoints(self, self._run_state)

    def _init_like(self, method: RemoteOptimizerStrategy) -> None:
        num_workers, num_servers, replica_size = method.counts
        RemoteOptimizerStrategy.__init__(
            self,
            num_workers,
            num_servers=num_servers,
            replica_size=replica_size,
            compression=method.compression,
            overlap=method.overlap,
            bucket_bytes=method.bucket_bytes,
            **method.arguments,
        )

    # ------------------------------------------------------------------- setup

    def setup(self, trainer: pl.Trainer) -> None:
        """Make the optimizer on service ranks, and clients of it on the workers."""
        if not self.is_fitting:
            super().setup(trainer)
            return
        assert self.lightning_module is not None
        lightning_compat.remove_lockstep(trainer, self.request_stop)
        self._stop_reason = None
        self.checkpoints.start_fit()
        service = self.service
        assert service is not None
        with service.errors_shared("the set-up"):
            leave_shared_memory(self.lightning_module)
            check_arguments(trainer, self.lightning_module)
            super().setup(trainer)
            check_optimizers(self.optimizers, self.lightning_module)
        self.check_same_models(service)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        reading = service.gather_objects(reads_gradients(self.lightning_module, callbacks))
        self._shows_mean = any(reading[: self.tiers.num_training])
        if self.serves:
            lightning_compat.replace_loops(trainer, self._serve_fit)
        else:
            self._connect()
        service.announce_wait("training")

    def _transport(self) -> Transport:
        assert self.service is not None
        group, watchdog = self.service.data, self.service.watchdog
        return Transport(group, self.bucket_bytes, self.compression, self.timeout_s, watchdog)

    def _connect(self) -> None:
        """Replace the optimizer of this worker by a client of the servers."""
        assert self.lightning_module is not None
        with self.waiting_in("the set-up"):
            broadcast_model(self.lightning_module, self.training_ranks())
        (local,) = self.optimizers
        lightning_compat.expect_no_step(local)
        optimizer = RemoteOptimizer(
            local.param_groups,
            self.tiers.aggregators,
            transport=self._transport(),
            replica_group=self.replica_group,
        )
        optimizer.set_local_optimizer(local)
        self.optimizers = [optimizer]
        self.remote = RemoteParticipant(optimizer)
        self.statistics = self.remote.statistics
        self._steps.start_fit()
        parameters = list(self.lightning_module.parameters())
        self._added.callback(self._steps.watch(parameters, self._check_raw_step, self._count))
        self._precision = RemotePrecision(self.precision_plugin, optimizer)
        self._is_in_step = False
        around_hooks = lightning_compat.surround(
            self.precision_plugin, "post_backward", self._mean_shown
        )
        self._added.callback(around_hooks)
        self.remote.shows_mean = self._shows_mean
        self.remote.streams = (
            self.overlap
            and self.tiers.replica_size == 1
            and not self._precision.scales
            and not self._shows_mean
        )
        self.remote.start()
        if self._stop_reason is not None:
            self.remote.request_stop(self._stop_reason)
        numel = sum(p.numel() for p in self.lightning_module.parameters() if p.requires_grad)
        rank_zero_info(f"{self.tiers.describe()}; {numel:,} trainable parameters.")

    def _serve_fit(self) -> None:
        self._serve_workers(self._transport(), Serving(stop_reason=lambda: self._stop_reason))

    # ---------------------------------------------------------------- training

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop after the same step; safe to call from a signal handler."""
        self._stop_reason = reason
        if self.remote is not None:
            self.remote.request_stop(reason)

    def on_train_start(self) -> None:
        """Restore this worker's random state from the checkpoint."""
        self.checkpoints.resume(self._trainer)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Let the servers step; gradients are sent while the closure computes them."""
        assert self.remote is not None
        closure = self._steps.prepare(optimizer, closure)
        self._is_in_step = True
        try:
            with self._steps.through_lightning(), self.remote.counting_bytes():
                output = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._is_in_step = False
        self._count(optimizer)
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Show hooks no mean gradient while gradients accumulate."""
        with self.model.no_sync():  # type: ignore[operator, union-attr]
            yield

    @contextmanager
    def _mean_shown(self) -> Iterator[None]:
        """Show the mean gradient between a backward pass and the step.

        Hooks may read it there. If the backward pass is not within the step, as with manual
        optimization or in an ``optimizer_step`` of the module, so may the code between them.
        """
        assert self.remote is not None
        is_last = self.model.require_backward_grad_sync  # type: ignore[union-attr]
        if is_last and not self._is_in_step:
            with self.remote.counting_bytes():
                self.remote.average_gradients()
        elif is_last and self._shows_mean:
            self.remote.average_gradients()
        yield

    def _check_raw_step(self, optimizer: Optimizer) -> None:
        if self.remote is None or optimizer is not self.remote.optimizer:
            raise RuntimeError(
                f"{type(optimizer).__name__} is about to step here, but the optimizer is on "
                "another rank: the workers would end with different parameters. Call the step of "
                "self.optimizers(), not of an optimizer made by configure_optimizers."
            )

    def _count(self, optimizer: Optimizer) -> None:
        self._steps.count(optimizer)
        assert self.remote is not None
        if self.remote.stop_agreed is not None:
            lightning_compat.stop_after_batch(self._trainer, self._added)

    # ------------------------------------------------------------- checkpoints

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer on its rank; only worker 0 needs it."""
        return self._run_state.optimizer_state()

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizer's state on its rank; on workers, only its hyper-parameters."""
        if self.remote is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self._run_state.load_param_groups(self.remote.optimizer, checkpoint)

    # --------------------------------------------------------------------- end

    def on_train_end(self) -> None:
        """Keep the optimizer's state for checkpoints after ``fit``, and leave the servers."""
        assert self.remote is not None
        self._run_state.finish_fit(self.remote)
        if self.summary:
            with errors_as_warnings(NOT_SHOWN):
                assert self.lightning_module is not None
                parameters = [p for p in self.lightning_module.parameters() if p.requires_grad]
                num_bytes, steps = sum(p.nbytes for p in parameters), self.statistics.rounds
                of_ddp = bytes_of_ddp(self.tiers.num_training, num_bytes, steps)
                rank_zero_info(summarize(self.statistics, steps, of_ddp))
        self._finished = True
        self._leave(self.remote)

    def _leave(self, remote: RemoteParticipant) -> None:
        remote.optimizer.leave(self._farewell() if self.is_global_zero else None)

    def on_exception(self, exception: BaseException) -> None:
        """Save a checkpoint after an agreed stop; report a failure to the other ranks."""
        remote = self.remote
        is_stop = isinstance(exception, SIGTERMException) and not self._finished
        if is_stop and remote is not None and remote.stop_agreed is not None:
            self.checkpoints.save_interrupted(self._trainer, remote.stop_agreed)
            self._finished = True
            self._leave(remote)
        else:
            self.report_failure(exception)

    def teardown(self) -> None:
        """Leave the servers."""
        remote = self.remote
        if remote is not None and not self._is_alone:
            if not self._finished:  # a fit without steps has no end of training
                self._run_state.finish_fit(remote)
            self._leave(remote)
        self._end_together(self.service or self.group)
        if remote is not None:
            remote.optimizer.remove_hooks()
            self.remote = None
        if self._precision is not None:
            self._precision.close()
            self._precision = None
        super().teardown()
        if remote is not None:
            remote.close()  # last: the servers regard it as the end of this rank


def check_arguments(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise ValueError if the learning rate is searched for, or a parameter cannot be sent."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, LearningRateFinder) for callback in callbacks):
        raise ValueError(
            "LearningRateFinder and Tuner.lr_find do not work with RemoteOptimizerStrategy: they "
            "take steps before training, and then go back to a checkpoint. Search with "
            'strategy="ddp" or on one device, which gives the same numbers.'
        )
    check_model(module)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise ValueError(
                f"Parameter {name!r} is complex, which cannot be sent to another rank. Store it as "
                "real numbers (torch.view_as_real), and use torch.view_as_complex in forward."
            )


def check_optimizers(optimizers: list[Optimizer], module: pl.LightningModule) -> None:
    """Raise ValueError unless there is exactly one optimizer, which needs no closure."""
    count = sum(not lightning_compat.is_no_optimizer(optimizer) for optimizer in optimizers)
    if count != 1:
        raise ValueError(
            "RemoteOptimizerStrategy needs exactly one optimizer, but configure_optimizers of "
            f"{type(module).__name__} gives {count or 'none'}. Put all parameters into one "
            "optimizer, in several parameter groups if need be."
        )
    check_optimizer(optimizers[0])


def reads_gradients(module: pl.LightningModule, callbacks: list[pl.Callback]) -> bool:
    """Return whether the module or a callback may read gradients before the optimizer's step.

    With manual optimization the module may do so at any point of its ``training_step``.
    """
    return (
        not module.automatic_optimization
        or any(_overrides(module, pl.LightningModule, hook) for hook in _GRADIENT_HOOKS)
        or any(_overrides(one, pl.Callback, hook) for one in callbacks for hook in _GRADIENT_HOOKS)
        or _overrides(module, pl.LightningModule, "configure_gradient_clipping")
    )


def _overrides(owner: object, base: type, hook: str) -> bool:
    return getattr(getattr(owner, hook), "__func__", None) is not getattr(base, hook)


class RemotePrecision:
    """Makes a precision plugin clip and scale through a remote optimizer, until :meth:`close`."""

    def __init__(self, plugin: Any, remote: RemoteOptimizer) -> None:
        self._plugin = plugin
        self._remote = remote
        self._plugin.clip_gradients = self._clip_gradients
        self._scaler = getattr(plugin, "scaler", None)
        if isinstance(self._scaler, torch.amp.GradScaler):
            self._plugin.scaler = AgreedGradScaler(self._scaler)

    @property
    def scales(self) -> bool:
        """Whether gradients are scaled, so that they must be unscaled before they are sent."""
        return self._scaler is not None

    def close(self) -> None:
        """Restore the plugin."""
        del self._plugin.clip_gradients
        if self.scales:
            self._plugin.scaler = self._scaler

    def _clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        if clip_val > 0 and gradient_clip_algorithm == "value":
            self._remote.clip_grad_value_(clip_val)
        elif clip_val > 0:
            self._remote.clip_grad_norm_(clip_val)


class AgreedGradScaler:
    """A gradient scaler that skips a step on all workers if a gradient of any is infinite."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, and record if any worker's are not finite."""
        assert isinstance(optimizer, RemoteOptimizer)
        self.scaler.unscale_(optimizer)
        found_inf = lightning_compat.found_inf(self.scaler, optimizer)
        if not optimizer.are_finite(not any(bool(value) for value in found_inf)):
            for value in found_inf:
                value.fill_(1.0)

    def __getattr__(self, name: str) -> Any:
        """Delegate every other attribute to the wrapped scaler."""
        return getattr(self.scaler, name)

"""RemoteOptimizerStrategy: workers compute gradients, other ranks average them and step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_loco.compression import Codec, ErrorFeedback
from lightning_loco.distributed.statistics import Statistics
from lightning_loco.parameter_server import RemoteOptimizer, Serving, Transport
from lightning_loco.parameter_server.buckets import BUCKET_BYTES
from lightning_loco.parameter_server.protocol import as_codec
from lightning_loco.parameter_server.tiers import check_ranks
from lightning_loco.parameters.schema import broadcast_model
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.remote import RemoteCheckpoints
from lightning_loco.strategies.local_training import LocalSteps, leave_shared_memory
from lightning_loco.strategies.remote_arguments import (
    check_before_setup,
    check_optimizers,
    sees_gradients,
)
from lightning_loco.strategies.remote_precision import RemotePrecision
from lightning_loco.strategies.service_rank import farewell_of, serve_fit
from lightning_loco.strategies.service_ranks import ServedStrategy
from lightning_loco.strategies.summary import bytes_of_ddp, summarize
from lightning_loco.values import check_bytes, check_common_arguments


class RemoteOptimizerStrategy(ServedStrategy):
    """Compute gradients on the workers; average them and make the steps on other ranks.

    All ranks run the same script. The first ``W = num_workers * replica_size`` train; the others
    serve them during ``fit`` and skip validation, test and prediction. With ``W + num_servers``
    ranks (2 tiers) each server averages and has the optimizer; with ``W + 2 * num_servers`` (3
    tiers) the ranks from ``W`` on average and the last ones have the optimizer. Results are those
    of DDP on the workers alone.

    Learning-rate schedulers run in the workers' loops, which have the epochs and metrics that they
    need; the optimizer uses their values in the same step. Gradient clipping set on the Trainer, or
    by ``self.clip_gradients``, clips the mean gradient where the optimizer is. Checkpoints are
    ordinary ones with the optimizer's state: a run can go on with other tiers, workers or DDP.

    Args:
        num_workers: Workers, at least 1. Default: 2 tiers, with all ranks but the servers.
        num_servers: Shares of the parameters, each with a server (and an optimizer) of its own.
        replica_size: Ranks of one worker; they average their gradients like DDP, and the first one
            talks to the servers.
        compression: Of gradients and parameters on the wire: ``"bf16"``, ``"fp16"``, ``"int8"`` or
            such a codec; servers sum and step in full precision. Default: as they are.
        min_workers: Go on with the mean over those that are left while there are so many. Default:
            the end of one worker ends the run, with an error that names it.
        overlap: Send gradients while the backward pass computes them.
        timeout_s: Longest wait for another rank, in seconds.
        bucket_bytes: Longest message, in bytes; smaller parameters travel together.
        summary: Whether fit ends with a short table of steps, bytes and seconds.
        accelerator: As in ``DDPStrategy``; usually set by the Trainer.
        parallel_devices: As in ``DDPStrategy``.
        cluster_environment: As in ``DDPStrategy``.
        checkpoint_io: As in ``DDPStrategy``.
        precision_plugin: As in ``DDPStrategy``.
        process_group_backend: As in ``DDPStrategy``, for the ranks that train.
        start_method: How Lightning starts processes: ``"popen"``, ``"spawn"``, ``"fork"`` or
            ``"forkserver"``.

    Raises:
        ValueError: If a value is out of range, at construction or before training starts.
        TypeError: If a value has the wrong type or an argument is unknown.

    Source:
        The hierarchical training example of tt-train.

    Example::

        Trainer(strategy=RemoteOptimizerStrategy(num_workers=2), devices=3)  # 2 tiers
        Trainer(strategy=RemoteOptimizerStrategy(num_workers=2), devices=4)  # 3 tiers
    """

    checkpoints: RemoteCheckpoints

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        num_servers: int = 1,
        replica_size: int = 1,
        compression: Codec | ErrorFeedback | str | None = None,
        min_workers: int | None = None,
        overlap: bool = True,
        timeout_s: float = 600.0,
        bucket_bytes: int = BUCKET_BYTES,
        summary: bool = True,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        check_ranks(num_workers, num_servers, replica_size, min_workers)
        check_common_arguments(timeout_s, start_method)
        check_bytes("bucket_bytes", bucket_bytes)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
            start_method=start_method,
        )
        self.counts = (num_workers, num_servers, replica_size)
        self.compression = as_codec(compression)
        self.min_workers = min_workers
        self.overlap = overlap
        self.timeout_s = timeout_s
        self.bucket_bytes = bucket_bytes
        self.summary = summary
        self.statistics = Statistics()
        self._added = ExitStack()
        self._steps = LocalSteps()
        self._stop_reason: str | None = None
        self._precision: RemotePrecision | None = None
        self._can_stream = False
        self.checkpoints = RemoteCheckpoints(self)

    # ------------------------------------------------------------------- setup

    def setup(self, trainer: pl.Trainer) -> None:
        """Make the optimizer here or a connection to it."""
        if not self.is_fitting:
            super().setup(trainer)
            return
        assert self.lightning_module is not None
        lightning_compat.remove_lockstep(trainer, self.request_stop)
        self._stop_reason = None
        self.checkpoints.begin_fit()
        service = self.service
        assert service is not None
        error: Exception | None = None
        try:
            leave_shared_memory(self.lightning_module)
            check_before_setup(trainer, self.lightning_module)
            super().setup(trainer)
            check_optimizers(self.optimizers, self.lightning_module)
        except Exception as found:
            error = found
        service.raise_together(error)
        self.check_same_models(service)
        if self.serves:
            lightning_compat.replace_loops(trainer, self._serve)
        else:
            self._connect(trainer)

    def _transport(self) -> Transport:
        assert self.service is not None
        group, watchdog = self.service.group, self.service.watchdog
        return Transport(group, self.bucket_bytes, self.compression, self.timeout_s, watchdog)

    def _connect(self, trainer: pl.Trainer) -> None:
        """Replace the optimizer of this worker by a connection to the real one."""
        assert self.lightning_module is not None
        with self.waiting_in("the set-up"):
            broadcast_model(self.lightning_module, self.present_workers())
        (local,) = self.optimizers
        lightning_compat.expect_no_step(local)
        self.remote = RemoteOptimizer(
            local.param_groups,
            self.tiers.aggregators,
            transport=self._transport(),
            replica_group=self.replica_group,
        )
        self.remote.stand_for(local)
        self.optimizers = [self.remote]
        self.statistics = Statistics()
        self._steps = LocalSteps()
        parameters = list(self.lightning_module.parameters())
        self._added.callback(self._steps.watch(parameters, self._check_raw_step, self._count))
        self._precision = RemotePrecision(self.precision_plugin, self.remote)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._can_stream = (
            self.overlap
            and self.tiers.replica_size == 1
            and not self._precision.scales
            and not sees_gradients(self.lightning_module, callbacks)
        )
        self.remote.receive_weights()
        if self._stop_reason is not None:
            self.remote.request_stop(self._stop_reason)
        numel = sum(p.numel() for p in self.lightning_module.parameters() if p.requires_grad)
        rank_zero_info(f"{self.tiers.describe()}; {numel:,} trainable parameters.")

    # ----------------------------------------------------------------- service

    def _serve(self) -> None:
        serving = Serving(min_workers=self.min_workers, stop_reason=lambda: self._stop_reason)
        serve_fit(self._trainer, self.tiers, self.global_rank, self._transport(), serving)

    # ---------------------------------------------------------------- training

    def request_stop(self, reason: str) -> None:
        """Ask all workers to stop at a common step; safe to call from a signal handler."""
        self._stop_reason = reason
        if self.remote is not None:
            self.remote.request_stop(reason)

    def on_train_start(self) -> None:
        """Go on from this worker's own random state."""
        self.checkpoints.resume(self._trainer)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Have the step made, with gradients that leave while the closure computes them."""
        remote = self.remote
        assert remote is not None

        def streamed() -> Any:
            remote.expect_backward()
            return closure()

        sent, saved = remote.bytes_sent, remote.bytes_saved
        chosen = streamed if self._can_stream else closure
        with self._steps.through_lightning():
            output = super().optimizer_step(optimizer, chosen, model, **kwargs)
        self.statistics.bytes_sent += remote.bytes_sent - sent
        self.statistics.bytes_saved += remote.bytes_saved - saved
        self._count(remote)
        return output

    def _check_raw_step(self, optimizer: Optimizer) -> None:
        if optimizer is not self.remote:
            raise RuntimeError(
                f"{type(optimizer).__name__} is about to step here, but the optimizer is on "
                "another rank: the workers would end with different parameters. Call the step of "
                "self.optimizers(), not that of an optimizer which configure_optimizers has made."
            )

    def _count(self, optimizer: Optimizer) -> None:
        remote = self.remote
        assert remote is not None
        self.statistics.rounds += 1
        self.statistics.wait_s = remote.wait_s
        if remote.stop_agreed is not None:
            lightning_compat.stop_after_batch(self._trainer, self._added)

    # ------------------------------------------------------------- checkpoints

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state that the optimizer has on its rank; only worker 0 needs it."""
        return self.checkpoints.optimizer_state()

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """The rank of the optimizer loads its state; a worker, its hyper-parameters only."""
        if self.remote is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self.checkpoints.load_param_groups(self.remote, checkpoint)

    # --------------------------------------------------------------------- end

    def on_train_end(self) -> None:
        """Fetch the optimizer's state for checkpoints after ``fit``, and leave the servers."""
        assert self.remote is not None
        self.checkpoints.end_fit(self.remote)
        if self.summary:
            assert self.lightning_module is not None
            parameters = [p for p in self.lightning_module.parameters() if p.requires_grad]
            num_bytes, steps = sum(p.nbytes for p in parameters), self.statistics.rounds
            of_ddp = bytes_of_ddp(self.num_workers, num_bytes, steps)
            rank_zero_info(summarize(self.statistics, steps, of_ddp))
        self._finished = True
        self._leave(self.remote)

    def _leave(self, remote: RemoteOptimizer) -> None:
        remote.leave(farewell_of(self._trainer) if self.is_global_zero else None)

    def on_exception(self, exception: BaseException) -> None:
        """Save once more after an agreed stop; tell the other ranks of a failure."""
        if self._finished:
            return
        remote, is_stop = self.remote, isinstance(exception, SIGTERMException)
        if is_stop and remote is not None and remote.stop_agreed is not None:
            self.checkpoints.save_interrupted(self._trainer, remote.stop_agreed)
            self._finished = True
            self._leave(remote)
        elif self.min_workers is None or self.serves or remote is None:
            self.report_failure(exception)

    def teardown(self) -> None:
        """Leave the servers."""
        remote = self.remote
        if remote is not None:
            if not self._is_alone:
                self._leave(remote)
            remote.forget_parameters()
            self.remote = None
        if self._precision is not None:
            self._precision.end()
            self._precision = None
        super().teardown()
        if remote is not None:
            remote.let_go()  # last: to the servers it is the end of this rank

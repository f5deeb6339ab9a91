"""Weights that callbacks and hooks write: restarts from them, and averaged copies of the model.

The algorithm copies its start (outer parameters) when the engine is made, but Lightning calls hooks
afterwards, and between two epochs: these may load a backbone, or initialize all parameters again.
Weights that are written within a batch belong to the local step, like a clipping of weights.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_loco.distributed import WorkerGroup
from lightning_loco.model.fingerprint import fingerprints
from lightning_loco.model.flat import local_tensor
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.model.same_model import broadcast_model
from lightning_loco.model.worker import Worker
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.checkpoints import Checkpoints
from lightning_loco.strategies.protocols import StrategyWithEngine

_RESTART = "a new start from weights that a hook has set on this worker"


class ExternalUpdates:
    """Detects weights that were written between batches, and restarts all workers from them.

    Before the first batch the weights of worker 0 are used, as when the model is made. Between two
    later epochs all workers must have written the same ones. Without such writes this costs three
    reads of the parameters per epoch, and no message; a batch costs nothing.

    It also detects an epoch that has changed the parameters without a counted step.
    """

    def __init__(self, strategy: StrategyWithEngine) -> None:
        self._strategy = strategy
        self._is_before_start = False
        self._written: dict[str, Tensor] = {}
        self._last_prints: list[int] | None = None
        self._epoch_start: tuple[int, int, list[int]] | None = None

    @property
    def _engine(self) -> LocalParticipant:
        assert self._strategy.engine is not None
        return self._strategy.engine

    @property
    def _worker(self) -> Worker:
        return self._engine.worker

    @property
    def _model(self) -> pl.LightningModule:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module

    def _fingerprints(self) -> list[int]:
        self._worker.replica.reshard()
        trained = self._worker.replica.layout.tensors
        if not self._is_before_start:
            return fingerprints(trained)
        others = [*self._model.parameters(), *self._model.buffers()]
        return fingerprints([*trained, *map(local_tensor, others)])

    # ---------------------------------------------------------- before the first batch

    def start_fit(self) -> None:
        """Start watching, once the engine has copied the parameters; hooks follow."""
        self._written, self._is_before_start = {}, True
        self._last_prints = self._fingerprints()

    def resume_from(self, checkpoints: Checkpoints) -> None:
        """Resume from the checkpoint that was loaded, if there is one.

        ValueError on all workers if a hook has set weights after it was loaded.
        """
        if not checkpoints.is_resuming:
            self._is_before_start, self._last_prints = True, self._last_prints or []
            return
        with self._worker.group.errors_shared():
            self._check_loaded()
        checkpoints.resume(self._model.trainer)
        self._is_before_start = False
        self._last_prints = self._fingerprints()

    def _check_loaded(self) -> None:
        last, num_trained = self._last_prints, len(self._worker.replica.layout.tensors)
        if last is not None and self._fingerprints()[:num_trained] != last[:num_trained]:
            raise ValueError(
                "A hook (on_fit_start, on_train_start, ...) has set weights after the checkpoint "
                "was loaded, which would be lost. Set them only if trainer.ckpt_path is None; or "
                "fit without ckpt_path to start a new run with them."
            )

    def broadcast_start(self) -> None:
        """Before the first batch: if a hook has changed the model, restart from worker 0's.

        All workers must call it at the same point of the program. Later it does nothing.
        """
        if not self._is_before_start:
            return
        group = self._worker.group
        is_changed = self._fingerprints() != self._last_prints
        if any(group.gather_from_ranks(is_changed, "the first batch")):
            self._worker.checksum = broadcast_model(self._model, group)
            self._engine.reset()
            self._last_prints = self._fingerprints()

    def take_present(self) -> None:
        """Take the present model, into which the engine has written, as not changed by hooks."""
        if self._last_prints is not None:
            self._last_prints = self._fingerprints()

    # ---------------------------------------------------------- between two epochs

    def on_batches_end(self) -> None:
        """Start watching at the end of the batches of an epoch; its hooks follow."""
        self._worker.replica.copy_on_write.release()
        self.on_batch_start()
        self._last_prints = self._fingerprints()
        self._check_steps(self._last_prints)

    def _check_steps(self, now: list[int]) -> None:
        start, self._epoch_start = self._epoch_start, None
        counts = self._worker.steps, self._worker.round_index
        if start is not None and start[:2] == counts and start[2] != now:
            raise RuntimeError(
                "The parameters have changed in this epoch, but no step of a torch optimizer was "
                "seen, and local steps are counted by those: no round would ever run. Change "
                "parameters by the step() of an optimizer that has them."
            )

    def before_sync_point(self) -> None:
        """Copy weights that hooks have written, before a round of other workers changes them."""
        if self._is_between_epochs:
            self._record_writes()

    def after_sync_point(self) -> None:
        """Take the present parameters, which rounds may have changed, as not written by hooks."""
        if self._is_between_epochs:
            self._last_prints = self._fingerprints()

    @property
    def _is_between_epochs(self) -> bool:
        if self._last_prints is None or self._strategy.engine is None or self._is_before_start:
            return False
        return not self._worker.replica.shows_consensus

    def _record_writes(self) -> None:
        layout, last = self._worker.replica.layout, self._last_prints or ()
        pairs = zip(layout.names, layout.tensors, self._fingerprints(), last, strict=True)
        self._written |= {name: p.detach().clone() for name, p, now, then in pairs if now != then}

    def on_batch_start(self) -> None:
        """Before a batch: restart if weights were written since the last one.

        RuntimeError on all workers if not all have written the same ones.
        """
        if self._last_prints is None:
            return
        self.broadcast_start()
        if self._is_between_epochs:
            self._record_writes()
        self._stop_watching()
        if lightning_compat.skips_backward(self._model.trainer):
            self._written = {}
            return
        if self._are_any_written():
            self._restart()
        self._epoch_start = self._worker.steps, self._worker.round_index, self._fingerprints()

    def _are_any_written(self) -> bool:
        """Whether a rank of this worker has seen writes; then each has a copy of its own part."""
        self._strategy.wait_inside("the start of an epoch")
        names = set().union(*self._worker.group.gather_inside(list(self._written), _RESTART))
        layout = self._worker.replica.layout
        for name, parameter in zip(layout.names, layout.tensors, strict=True):
            if name in names and name not in self._written:
                self._written[name] = parameter.detach().clone()
        return bool(names)

    def on_training_end(self) -> None:
        """Stop watching; workers that had no batch at all get the weights of worker 0."""
        self.broadcast_start()
        self._written = {}
        self._stop_watching()

    def _stop_watching(self) -> None:
        self._is_before_start, self._last_prints = False, None

    def _restart(self) -> None:
        """Restart from the written parameters, and from the consensus of all others."""
        written, self._written = self._written, {}
        self._strategy.sync_point(_RESTART)
        worker = self._worker
        with worker.group.errors_shared(_RESTART):
            self._check_same(written)
        layout = worker.replica.layout
        if len(written) < len(layout.names):
            self._strategy.show_consensus(_RESTART)
            worker.replica.discard_local()
        for name, parameter in zip(layout.names, layout.tensors, strict=True):
            if name in written:
                parameter.detach().copy_(written[name])
        self._engine.reset()

    def _check_same(self, written: dict[str, Tensor]) -> None:
        """Raise RuntimeError on all workers if they have written different weights."""
        own = dict(zip(written, fingerprints(list(written.values())), strict=True))
        first, *_ = everyone = self._worker.group.gather_objects(own, _RESTART)
        for other, theirs in enumerate(everyone):
            for name in {**theirs, **first}:
                if theirs.get(name) != first.get(name):
                    raise RuntimeError(
                        f"A hook has set weights between two epochs, and {name!r} is not the same "
                        f"on workers 0 and {other}. Set the same weights on all workers; changes "
                        "of each worker's own weights belong into a batch (training_step, "
                        f"on_train_batch_end).{self._schedule_free_hint()}"
                    )

    def _schedule_free_hint(self) -> str:
        """Return a hint for optimizers that move the weights outside of their steps."""
        if not any(hasattr(one, "eval") for one in self._strategy.optimizers):
            return ""
        return (
            " Call the eval() of a schedule-free optimizer in on_validation_model_eval and its "
            "train() in on_validation_model_train: what they change is then undone after the "
            "validation."
        )


# -------------------------------------------------------- averaged copies of the model


def averaged_models(trainer: pl.Trainer) -> list[nn.Module]:
    """Return every ``AveragedModel`` that is an attribute of a callback, and the average of SWA."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found: list[nn.Module] = []
    for callback in callbacks:
        found += [value for value in vars(callback).values() if isinstance(value, AveragedModel)]
        if isinstance(callback, StochasticWeightAveraging):
            found += lightning_compat.average_of(callback)
    return found


def share_complete_averages(trainer: pl.Trainer, group: WorkerGroup) -> None:
    """Broadcast the averages of the worker with the most updates, if they differ.

    For workers whose parameters are the same: a worker with fewer batches has missed some updates.
    """
    models = averaged_models(trainer)
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    updates = [int(getattr(model, "n_averaged", 0)) for model in models]
    everyone = group.gather_objects([updates, fingerprints(tensors)], "the averaged models")
    if all(one == everyone[0] for one in everyone):
        return
    source = max(range(group.num_workers), key=lambda worker: everyone[worker][0])
    for tensor in tensors:
        sent = tensor.detach().to(trainer.strategy.root_device).contiguous()
        dist.broadcast(sent, group.ranks[source], group.data)
        tensor.detach().copy_(sent)


def finish_with_averages(
    engine: LocalParticipant, trainer: pl.Trainer, *, keeps_local: bool
) -> None:
    """Finish the training of an engine, before callbacks write their final weights into the model.

    All workers must be at the same sync point. If the model already holds an average, the mean of
    all workers' averages replaces it: SWA writes it there one epoch early, to update the statistics
    of BatchNorm with it. ``keeps_local`` leaves this worker's own parameters in the model.
    """
    averages = _swa_averages_in_model(trainer)
    if averages:
        engine.write_consensus("the averaged model")
        engine.worker.show_local()
        _write_to_model(averages, trainer)
    engine.finish_at_sync_point()
    if keeps_local:
        engine.worker.show_local()
    _write_to_model(averages, trainer)


def _swa_averages_in_model(trainer: pl.Trainer) -> list[pl.LightningModule]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        average
        for callback in callbacks
        if isinstance(callback, StochasticWeightAveraging) and callback.momenta
        for average in lightning_compat.average_of(callback)
    ]


def _write_to_model(averages: list[pl.LightningModule], trainer: pl.Trainer) -> None:
    for average in averages:
        StochasticWeightAveraging.transfer_weights(average, trainer.lightning_module)

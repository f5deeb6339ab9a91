"""Weights that callbacks and hooks keep or write: averaged copies of the model, and new starts.

The algorithm takes its start (outer parameters) when the engine is made, but Lightning calls hooks
afterwards, and at every border of two epochs: a backbone may be loaded there, or all be drawn anew.
What is written within a batch is a part of the local step, like a clipping of weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_loco.distributed import WorkerGroup
from lightning_loco.parameters.fingerprint import fingerprints
from lightning_loco.parameters.schema import share_from_worker_0
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.driven import Engine
from lightning_loco.worker import Worker

if TYPE_CHECKING:
    from lightning_loco.strategies.base import EngineStrategy
    from lightning_loco.strategies.checkpoint.workers import WorkerCheckpoints

_PLACE = "a new start from weights that a hook has set on this worker"


class WrittenWeights:
    """Notices weights that were written between batches, and lets all workers begin anew with them.

    Before the first batch those of worker 0 count, as when the model is made. At later borders of
    epochs all workers must have written the same ones. A border without such writes costs three
    reads of the parameters, and no message; a batch costs nothing.

    It also notices when an epoch has moved the parameters without a step that was counted.

    Args:
        strategy: Whose worker's weights they are.
    """

    def __init__(self, strategy: EngineStrategy) -> None:
        self._strategy = strategy
        self._is_before_start = False
        self._written: dict[str, Tensor] = {}
        self._seen: list[int] | None = None
        self._epoch_start: tuple[int, int, list[int]] | None = None

    def begin_fit(self) -> None:
        """The engine has taken its start; hooks follow."""
        self._written, self._is_before_start = {}, True
        self._seen = self._look()

    @property
    def _worker(self) -> Worker:
        assert self._strategy.engine is not None
        return self._strategy.engine.worker

    @property
    def _model(self) -> pl.LightningModule:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module

    def _look(self) -> list[int]:
        trained = self._worker.replica.layout.tensors
        if not self._is_before_start:
            return fingerprints(trained)
        return fingerprints([*trained, *self._model.parameters(), *self._model.buffers()])

    def share_start(self) -> None:
        """Before the first batch: if a hook has changed the model, begin anew with worker 0's.

        All workers must call it, at the same place; later it does nothing.
        """
        if not self._is_before_start:
            return
        group = self._worker.group
        if any(group.gather_objects(self._look() != self._seen, "the first batch")):
            self._worker.checksum = share_from_worker_0(self._model, group)
            self._strategy.reset()
            self._seen = self._look()

    def resume(self, checkpoints: WorkerCheckpoints) -> None:
        """Go on from a checkpoint, if one was loaded.

        Raises:
            ValueError: On all workers, if a hook has set weights after it was loaded.
        """
        if not checkpoints.is_resuming:
            self._is_before_start, self._seen = True, self._seen or []
            return
        with self._worker.group.errors_shared():
            self._check_loaded()
        checkpoints.resume(self._model.trainer)
        self._is_before_start = False
        self._seen = self._look()

    def _check_loaded(self) -> None:
        num_trained = len(self._worker.replica.layout.tensors)
        if self._seen is not None and self._look()[:num_trained] != self._seen[:num_trained]:
            raise ValueError(
                "A hook (on_fit_start, on_train_start, ...) has set weights after the checkpoint "
                "was loaded, which would be lost. Set them only if trainer.ckpt_path is None; or "
                "fit without ckpt_path to begin a new run with them."
            )

    def end_batches(self) -> None:
        """The batches of an epoch have ended; its hooks follow."""
        self._worker.replica.copy_on_write.release()
        self.begin_batches()
        self._seen = self._look()
        self._check_steps(self._seen)

    def _check_steps(self, now: list[int]) -> None:
        start, self._epoch_start = self._epoch_start, None
        counts = self._worker.steps, self._worker.round_index
        if start is not None and start[:2] == counts and start[2] != now:
            raise RuntimeError(
                "The parameters have changed in this epoch, but no step of a torch optimizer was "
                "seen, and local steps are counted by those: no round would ever be made. Change "
                "parameters by the step() of an optimizer that has them."
            )

    def note(self) -> None:
        """Keep what was written since the batches ended, before a round of others changes it."""
        if not self._is_between_epochs:
            return
        layout, seen = self._worker.replica.layout, self._seen or ()
        pairs = zip(layout.names, layout.tensors, self._look(), seen, strict=True)
        self._written |= {name: p.detach().clone() for name, p, now, then in pairs if now != then}

    def expect(self) -> None:
        """What the model holds now is not a hook's work."""
        if self._is_between_epochs:
            self._seen = self._look()

    @property
    def _is_between_epochs(self) -> bool:
        if self._seen is None or self._strategy.engine is None or self._is_before_start:
            return False
        return not self._worker.replica.shows_consensus

    def begin_batches(self) -> None:
        """The next batch follows: begin anew if weights were written since the last one.

        Raises:
            RuntimeError: On all workers, if not all have written the same ones.
        """
        if self._seen is None:
            return
        self.share_start()
        self.note()
        self._forget()
        if lightning_compat.only_measures(self._model.trainer):
            self._written = {}
            return
        if self._written:
            self._take_over()
        self._epoch_start = self._worker.steps, self._worker.round_index, self._look()

    def _forget(self) -> None:
        """Look at nothing until the batches of an epoch have ended."""
        self._is_before_start, self._seen = False, None

    def end_fit(self) -> None:
        """There are no more batches; those who had none at all begin with worker 0's weights."""
        self.share_start()
        self._written = {}
        self._forget()

    def _of_switching_optimizers(self) -> str:
        """What to do with optimizers that move the weights themselves, in words."""
        if not any(hasattr(one, "eval") for one in self._strategy.optimizers):
            return ""
        return (
            " Call the eval() of a schedule-free optimizer in on_validation_model_eval and its "
            "train() in on_validation_model_train: what they change then ends with the validation."
        )

    def _take_over(self) -> None:
        """Begin anew with what was written, and with the consensus of all other parameters."""
        written, self._written = self._written, {}
        self._strategy.sync_point(_PLACE)
        engine, worker = self._strategy.engine, self._worker
        assert engine is not None
        prints = fingerprints(list(written.values()))
        own = dict(zip(written, prints, strict=True))
        for other, theirs in enumerate(everyone := worker.group.gather_objects(own, _PLACE)):
            for name in {**theirs, **everyone[0]}:
                if theirs.get(name) != everyone[0].get(name):
                    raise RuntimeError(
                        f"A hook has set weights between two epochs, and {name!r} is not the same "
                        f"on workers 0 and {other}. Set the same weights on all workers; what "
                        "each worker does to its own belongs into a batch (training_step, "
                        f"on_train_batch_end).{self._of_switching_optimizers()}"
                    )
        layout = worker.replica.layout
        if len(written) < len(layout.names):
            engine.show_consensus(_PLACE)
            worker.replica.forget_local()
        for name, parameter in zip(layout.names, layout.tensors, strict=True):
            if name in written:
                parameter.detach().copy_(written[name])
        self._strategy.reset()


def averaged_models(trainer: pl.Trainer) -> list[nn.Module]:
    """Every ``AveragedModel`` that is an attribute of a callback, and the average of SWA."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found: list[nn.Module] = []
    for callback in callbacks:
        found += [value for value in vars(callback).values() if isinstance(value, AveragedModel)]
        if isinstance(callback, StochasticWeightAveraging):
            found += lightning_compat.average_of(callback)
    return found


def share_complete_averages(trainer: pl.Trainer, group: WorkerGroup) -> None:
    """Give all workers the averages of the one that has updated them most often, if they differ.

    For workers whose parameters are the same: who has had fewer batches has missed some of them.
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
        dist.broadcast(sent, source, group.data)
        tensor.detach().copy_(sent)


def finish_with_averages(engine: Engine, trainer: pl.Trainer, *, keeps_local: bool) -> None:
    """End the training of an engine, before callbacks write their final weights into the model.

    An average that is in the model already stays there, as that of all workers: SWA puts it there
    one epoch early, to renew the statistics of BatchNorm with it.

    Args:
        engine: Of this worker.
        trainer: With the callbacks and the module.
        keeps_local: Whether to leave this worker's own parameters in the model.
    """
    in_place = _averages_in_place(trainer)
    if in_place:
        engine.show_consensus("the averaged model")
        engine.worker.show_local()
        _put_in_place(in_place, trainer)
    engine.finish()
    if keeps_local:
        engine.worker.show_local()
    _put_in_place(in_place, trainer)


def _averages_in_place(trainer: pl.Trainer) -> list[pl.LightningModule]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        average
        for callback in callbacks
        if isinstance(callback, StochasticWeightAveraging) and callback.momenta
        for average in lightning_compat.average_of(callback)
    ]


def _put_in_place(averages: list[pl.LightningModule], trainer: pl.Trainer) -> None:
    for average in averages:
        StochasticWeightAveraging.transfer_weights(average, trainer.lightning_module)

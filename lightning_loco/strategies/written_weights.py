"""Weights that hooks and callbacks write, and what becomes of them.

The algorithm takes its start (outer parameters) when the engine is made, but Lightning calls hooks
afterwards, and at every border of two epochs: a backbone may be loaded there, or all be drawn anew.
What is written within a batch is a part of the local step, like a clipping of weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from torch import Tensor

from lightning_loco.comm import Worker
from lightning_loco.comm.checks import share_from_worker_0
from lightning_loco.comm.fingerprint import fingerprints
from lightning_loco.strategies import lightning_private

if TYPE_CHECKING:
    from lightning_loco.strategies.checkpoint.workers import WorkerCheckpoints
    from lightning_loco.strategies.engine_strategy import EngineStrategy

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
            self._strategy.begin_anew()
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
        self._worker.replica.stand_in.release()
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
        if lightning_private.only_measures(self._model.trainer):
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
        self._strategy.meet(_PLACE)
        worker = self._worker
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
            worker.show_consensus(_PLACE)
            worker.replica.forget_local()
        for name, parameter in zip(layout.names, layout.tensors, strict=True):
            if name in written:
                parameter.detach().copy_(written[name])
        self._strategy.begin_anew()

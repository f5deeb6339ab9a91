"""DecoupledDiLoCoStrategy: workers that never wait for each other, and a syncer between them."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import Unpack

from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.algorithms.outer_momentum import OuterMomentum
from lightning_loco.algorithms.outer_optimizer import OuterOptimizer
from lightning_loco.algorithms.stale_correction import StaleCorrection
from lightning_loco.compression import Codec
from lightning_loco.costs import LinkLike
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.arguments import CommonArguments
from lightning_loco.strategies.elastic_members import TrainerPosition
from lightning_loco.strategies.engine_strategy import EngineStrategy
from lightning_loco.syncer.engine import LearnerEngine
from lightning_loco.syncer.settings import DecoupledSettings, decoupled_diloco


class LearnerStrategy(EngineStrategy):
    """Trains learners of a syncer, over any strategy of Lightning."""

    settings: DecoupledSettings
    engine: LearnerEngine | None

    def engine_of(
        self, model: nn.Module, group: WorkerGroup, optimized: Sequence[Tensor] | None
    ) -> LearnerEngine:
        """Make an engine of a model from the settings."""
        return LearnerEngine.from_settings(model, self.settings, group, optimized)

    @property
    def _learner(self) -> LearnerEngine:
        assert isinstance(self._engine, LearnerEngine)
        return self._engine

    # ------------------------------------------------------------------------ data

    def process_dataloader(self, dataloader: object) -> object:
        """Shuffle the training data by the name of the learner, if there are other jobs."""
        if self.settings.syncer is not None and self._trainer.training:
            sampler: object = None
            if isinstance(dataloader, DataLoader):
                sampler = lightning_compat.sampler_of(dataloader)
            if isinstance(sampler, DistributedSampler):
                sampler.seed += zlib.crc32(self._learner.name.encode())
            else:
                rank_zero_warn(
                    "The learners of this run can only read different data by themselves if the "
                    "data are read by index with Lightning's own sampler. Each of them reads all "
                    "of these data in the order of its loader, unless that differs."
                )
        return super().process_dataloader(dataloader)

    # -------------------------------------------------------------------- training

    def on_train_start(self) -> None:
        """Resume, and take the parameters of the run."""
        super().on_train_start()
        self._external_updates.broadcast_start()
        self._start()

    def _start(self) -> None:
        self._learner.start()
        self._external_updates.take_present()
        if self._learner.worker.steps == 0 and self._learner.run_steps > 0:
            self._take_position(self._learner.run_steps)

    def _take_position(self, steps: int) -> None:
        """Begin after the local steps of the others: a new learner of a run that is under way."""
        trainer, worker = self._trainer, self._learner.worker
        configs = trainer.lr_scheduler_configs
        by_step = [one for one in configs if one.interval == "step" and not one.reduce_on_plateau]
        if trainer.max_steps < 0 or len(by_step) < len(configs):
            if configs:
                rank_zero_warn(
                    f"The others have made about {steps:,} local steps, and the schedules of this "
                    "learner begin at 0. Give all learners the same max_steps and schedules with "
                    "interval='step', so that it can begin where they are."
                )
            return
        rank_zero_info(f"Training begins after {steps:,} local steps, about where the others are.")
        worker.steps = steps
        position = TrainerPosition(trainer, lambda: worker.steps)
        position.count_steps()
        lightning_compat.set_logged_step(trainer, steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of schedulers that step before an optimizer
            for config in by_step:
                for _ in range(steps // config.frequency):
                    config.scheduler.step()  # type: ignore[call-arg]

    def _resume(self) -> None:
        super()._resume()
        if self._learner.has_ended:  # such as a learning rate finder, which trains to the end
            self._start()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step, and count the tokens of the batch."""
        count = self.settings.count_tokens or count_samples
        share = self.distributed_sampler_kwargs["num_replicas"] / self.num_ranks
        self._learner.add_tokens(count(args[0] if args else None) * share)
        return super().training_step(*args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        """Save or report, see the base class; a learner that is asked to stop also leaves."""
        super().on_exception(exception)
        if self.engine is None or not isinstance(exception, SIGTERMException):
            return
        if self.replica_size == 1 or self.engine.stop_agreed:  # all ranks of the worker leave
            self.engine.leave()


class DecoupledDiLoCoStrategy(LearnerStrategy, DDPStrategy):
    """Decoupled DiLoCo: a syncer merges what learners push, and no learner waits for another.

    The model is divided into ``fragments`` of equal length, which take turns: the syncer asks the
    learners for one of them every ``sync_every / fragments`` local steps, merges what has arrived,
    and each learner takes the result between two of its local steps. See
    :class:`~lightning_loco.algorithms.DecoupledDiLoCo` for the formula and the outer arguments.

    The learners are the workers of one job, whose worker 0 also runs the syncer; validation and the
    end of training wait for all of them, and a worker that dies ends the job. Or each learner is a
    job of its own (``syncer``), and joins, dies and comes back at any time: the others do not wait
    for a learner that is killed. Then validation, checkpoints and the model after ``fit`` are
    the syncer's parameters as this learner has received them last.

    How many local steps a learner makes until a result arrives depends on the clock, so two runs
    are never equal bit for bit; a resumed run starts from the exact states.

    Args:
        sync_every: Local steps between two merges of a fragment that the syncer aims at: the mean
            over the learners.
        fragments: Number of fragments; fewer if the model has fewer elements.
        delay: Local steps that a learner may take until it gets what it has pushed for. In what is
            left of them the syncer waits for more learners than the quorum.
        min_quorum: Number of learners whose pushes every merge has at least.
        outer_lr: Outer learning rate, or a schedule of rates.
        outer_momentum: Outer momentum in [0, 1), or ``"auto"``. With ``mix=0`` a positive
            number gives a warning.
        nesterov: Nesterov momentum.
        outer_optimizer: Another outer optimizer; only without ``syncer``.
        aggregate: ``"radial"`` keeps the length of the learners' steps, ``"mean"`` averages them.
        weight: Of a push: ``"tokens"`` squared by steps, ``"steps"``, or ``"equal"``.
        mix: Share in [0, 1] of the local parameters when a fragment arrives; with 0 it replaces
            them.
        correction: Of stale pushes, such as :class:`~lightning_loco.algorithms.HeLoCo`.
        grace: Share in [0, 1] of what is left of ``delay`` that the syncer waits.
        keep_late: Whether a push that comes too late for its merge is in the next one. False is the
            paper's rule, with which learners that are much slower than others are in fewer merges.
        syncer: ``"HOST:PORT"`` of the syncer, which ``lightning-loco syncer`` runs; equal in all
            jobs. Default: worker 0 of this job runs it.
        key_file: Key file of the run: only learners that have it can take part. Write one with
            ``lightning-loco keys FILE``.
        name: Unique name of this learner, with ``syncer``: its data are shuffled by it. Give it one
            that stays the same when the job starts again. Default: host name and process id.
        count_tokens: Returns the number of tokens in a batch, for ``weight``. Default: the number
            of samples.
        compression: Codec of pushes on the wire: ``"bf16"``, ``"int8"``, ``"e3m0"`` or another that
            sends every value. Default: no compression.
        link: A slower link to the syncer to emulate, as in :class:`LocoStrategy`.
        common: The arguments that strategies with workers share, :class:`CommonArguments`.

    Raises:
        ValueError: If a value is out of range, at construction or before training starts.
        TypeError: If a value has the wrong type or an argument is unknown.

    Source:
        "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv:2604.21428.

    Example::

        Trainer(strategy=DecoupledDiLoCoStrategy(), devices=4)
        Trainer(strategy=DecoupledDiLoCoStrategy(syncer="node7:29600", key_file="run.pem"))
    """

    def __init__(
        self,
        sync_every: int = 24,
        fragments: int = 24,
        delay: int = 2,
        min_quorum: int = 1,
        outer_lr: OuterLR = 0.7,
        outer_momentum: OuterMomentum = "auto",
        nesterov: bool = True,
        outer_optimizer: OuterOptimizer | None = None,
        aggregate: Literal["radial", "mean"] = "radial",
        weight: Literal["tokens", "steps", "equal"] = "tokens",
        mix: float = 0.0,
        correction: StaleCorrection | None = None,
        grace: float = 0.8,
        keep_late: bool = True,
        syncer: str | None = None,
        key_file: str | Path | None = None,
        name: str | None = None,
        *,
        count_tokens: Callable[[Any], float] | None = None,
        compression: Codec | str | None = None,
        link: LinkLike | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        settings = decoupled_diloco(
            sync_every,
            fragments,
            delay,
            min_quorum,
            outer_lr,
            outer_momentum,
            nesterov,
            outer_optimizer,
            aggregate,
            weight,
            mix,
            correction,
            grace,
            keep_late,
            syncer,
            key_file,
            name,
            count_tokens,
            compression,
            link,
        )
        self._init_with(settings, **common)


def count_samples(batch: Any) -> float:
    """Return the number of samples in a batch; 1 if it is not known.

    Example:
        >>> import torch
        >>> count_samples([torch.zeros(8, 3), torch.zeros(8)])
        8.0
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ambiguous batches, whose first size is taken
        try:
            return float(extract_batch_size(batch))
        except Exception:
            return 1.0

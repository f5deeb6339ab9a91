"""LocoTrainerMixin: the methods in the ``Trainer`` of transformers, and in those built on it."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_loco.distributed import Statistics, WorkerGroup
from lightning_loco.distributed.devices import device_of_messages
from lightning_loco.integrations.worker_files import WorkerFiles
from lightning_loco.model.participant import LocalParticipant
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.checkpoint.atomic_io import WholeFileIO, damage_of
from lightning_loco.strategies.checkpoint.side_files import KEY, Manifest, SideFiles
from lightning_loco.strategies.engine_strategy import EngineStrategy, check_has_outer
from lightning_loco.strategies.local_training import (
    check_not_wrapped,
    check_untracked,
    clear_non_finite,
    leave_shared_memory,
    optimized_by,
)
from lightning_loco.strategies.model_parallel import ShardedWorkers
from lightning_loco.strategies.remote_optimizer import RemoteOptimizerStrategy
from lightning_loco.strategies.summary import (
    measure_distance,
    round_metrics,
    show_settings,
    show_summary,
)

try:
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as missing:
    raise ImportError(
        f"lightning_loco.integrations.huggingface needs transformers and accelerate ({missing}). "
        "Install them in a checkout of lightning_loco: pip install -c constraints.txt -e "
        "'.[huggingface]'"
    ) from missing

if TYPE_CHECKING:
    # Every Trainer that is a base class beside the mixin offers what is used here.
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

MAIN_FILE = "workers.pt"
"""The file of a checkpoint's folder that names the files of all workers, beside it."""

_STATE = "trainer_state.json"
_IO = WholeFileIO()
_CHOICE = "the choice of a checkpoint"
_END = "the end of training"
_OF_LIGHTNING = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
)
"""Arguments of strategies that only Lightning's Trainer uses."""

_CLASS = "class MyTrainer(LocoTrainerMixin, Trainer): pass"
_LINES = (
    f"Write `{_CLASS}`, with the Trainer that you use, and "
    "`MyTrainer(..., loco=DiLoCoStrategy(sync_every=100))`."
)


class LocoTrainerMixin(_Trainer):
    """Makes a ``Trainer`` of transformers train with a low-communication method.

    Put it before the Trainer: ``class MyTrainer(LocoTrainerMixin, Trainer): pass``. Trainers that
    are built on it, such as ``SFTTrainer`` of TRL, work as well, and so do adapters of PEFT: only
    parameters that are trained are exchanged.

    Each process is one worker. Gradients, their norm and their clipping, and what is logged are a
    worker's own; each optimizer step is a local step, and a round that is due runs right before the
    next one. Evaluation, ``save_model``, checkpoints, the best model and the model after ``train``
    are the consensus of all workers. A checkpoint's folder also has the state of every worker, from
    which ``train(resume_from_checkpoint=...)`` continues exactly.

    Args:
        loco: A strategy whose method and arguments are used, such as
            ``DiLoCoStrategy(sync_every=100)``, with rounds, asynchronous averaging or pairwise
            gossip.

    Attributes:
        loco: This worker's part in the training of all, a :class:`LocoCallback`.

    Raises:
        TypeError: If ``loco`` is not such a strategy, or the mixin is not before the Trainer.
        ValueError: If the method or an argument does not work with this Trainer.

    Example::

        class MyTrainer(LocoTrainerMixin, Trainer):
            pass

        trainer = MyTrainer(model, args, ..., loco=DiLoCoStrategy(sync_every=100))
        trainer.train()
    """

    loco: LocoCallback

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(LocoTrainerMixin)]
        if any(issubclass(o, Trainer) and not issubclass(o, LocoTrainerMixin) for o in before):
            raise TypeError(f"LocoTrainerMixin must be before the Trainer. Write `{_CLASS}`.")

    def __init__(
        self,
        *args: Any,
        loco: EngineStrategy | None = None,
        callbacks: list[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = [one for one in callbacks or () if isinstance(one, LocoCallback)]
        if len(given) + (loco is not None) > 1:
            raise ValueError(
                "There are several LocoCallbacks, and each would count every step. Leave "
                "LocoCallback out of callbacks: loco=... makes one."
            )
        self.loco = given[0] if given else LocoCallback(loco)
        self.loco.trainer = self
        if callbacks is not None:
            kwargs["callbacks"] = [one for one in callbacks if one is not self.loco]
        super().__init__(*args, **kwargs)
        # First: other callbacks see what it has done, such as the consensus at the end.
        self.callback_handler.callbacks.insert(0, self.loco)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; ValueError for what does not work with workers like these."""
        check_not_wrapped(self.model, "MyTrainer(model.module, ...)")
        check_arguments(self.args, self.loco.method)
        # Each worker reads the stream, and takes its part: else rank 0 would send every batch.
        self.args.accelerator_config.dispatch_batches = False
        # Or all workers would wait for each other in each step, to count their tokens.
        self.args.average_tokens_across_devices = False
        super().create_accelerator_and_postprocess()
        check_accelerator(self)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train; all workers must call it."""
        with self.loco.training(self, resume_from_checkpoint) as checkpoint:
            return super().train(checkpoint, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of a batch, and note the loss."""
        loss = super().training_step(*args, **kwargs)
        self.loco.add_loss(loss)
        return loss

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log; evaluate and save with the same consensus."""
        control = self.control
        both = control.should_evaluate or control.should_save
        is_shown = both and self.loco.method.evaluate != "local"
        with self.loco.shown("evaluation") if is_shown else nullcontext():
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate the consensus; during ``train`` all workers must call it."""
        with self.loco.evaluated("evaluation"):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict with the consensus; during ``train`` all workers must call it."""
        with self.loco.evaluated("prediction"):
            return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the consensus; during ``train`` all workers must call it."""
        with self.loco.shown("save_model"), self.loco.errors_shared("saving the model"):
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Save the consensus, and the state of every worker."""
        with self.loco.shown("checkpoint"):
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            if self.args.should_save:  # it says that a checkpoint is complete, and is written last
                Path(self._get_output_dir(trial), name, _STATE).unlink(missing_ok=True)
            super()._save_checkpoint(model, trial, *args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save what only this worker has."""
        super()._save_rng_state(output_dir)
        self.loco.save(output_dir)

    def _load_best_model(self) -> None:
        """Load the best model in place of the final consensus."""
        self.loco.finish()
        super()._load_best_model()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log this worker's values, and those of the rounds beside its loss."""
        super().log({**logs, **self.loco.metrics()} if "loss" in logs else logs, *args, **kwargs)


class LocoCallback(TrainerCallback):
    """One worker's part in the training of all: what :class:`LocoTrainerMixin` has as ``loco``.

    The Trainer's events become calls of a participant, which decides everything else. While it
    trains, Accelerate takes this process to be alone: it wraps the model in no DDP, and no step or
    log is a collective. It knows of the other processes in evaluations, and when data are divided.

    Args:
        method: A strategy whose method and arguments are used.

    Attributes:
        method: The strategy.
        statistics: Bytes, seconds and rounds of communication of the last ``train``.
        trainer: The Trainer, which has :class:`LocoTrainerMixin`.
    """

    def __init__(self, method: EngineStrategy | None) -> None:
        check_method(method)
        assert method is not None
        self.method = method
        self.statistics = Statistics()
        self.trainer: LocoTrainerMixin | None = None
        self._group: WorkerGroup | None = None
        self._engine: LocalParticipant | None = None
        self._finished = False
        self._checkpoint: Path | None = None
        self._among_others = DistributedType.NO
        self._loss: Tensor | None = None
        self._losses: Tensor | None = None
        self._steps_before = 0
        self._requested: str | None = None

    @property
    def participant(self) -> LocalParticipant | None:
        """This worker's engine during ``train``, until the consensus is in the model."""
        return None if self._finished else self._engine

    def request_stop(self, reason: str) -> None:
        """Ask all workers to save and stop at a common step; safe to call in a signal handler."""
        self._requested = reason
        if self.participant is not None:
            self.participant.request_stop(reason)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the rounds so far; empty outside of ``train``."""
        if self.participant is None:
            return {}
        return round_metrics(self.statistics, self.participant)

    @property
    def _worker(self) -> Any:
        assert self.participant is not None
        return self.participant.worker

    # ------------------------------------------------------------- the whole of train

    @contextmanager
    def training(
        self, trainer: LocoTrainerMixin, checkpoint: str | bool | None
    ) -> Iterator[str | bool | None]:
        """A context of a ``train``, which gets the checkpoint to resume from."""
        messages = device_of_messages(self.method.settings.outer_device, trainer.args.device)
        self._group = group = WorkerGroup.create(timeout_s=self.method.timeout_s, device=messages)
        self._among_others, self._requested = trainer.accelerator.distributed_type, None
        self._finished = False
        try:
            with self._sigterm_handled():
                self._checkpoint = chosen = self._choose(trainer.args, checkpoint)
                with self._knowing_of(DistributedType.NO):
                    yield str(chosen) if chosen else checkpoint
                group.end_together(_END)
        except BaseException as error:
            group.report_error(error)
            raise
        finally:
            if self._engine is not None:
                self._engine.close()
            group.close()
            self._engine = self._group = None

    @contextmanager
    def _sigterm_handled(self) -> Iterator[None]:
        """A context in which SIGTERM lets all workers save and stop at a common step."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self.request_stop("SIGTERM"))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def _knowing_of(self, others: DistributedType) -> Iterator[None]:
        """A context in which Accelerate knows of other processes; ``NO``: this one is alone."""
        assert self.trainer is not None
        states = PartialState(), self.trainer.accelerator.state
        before = states[0].distributed_type
        for state in states:
            state.distributed_type = others
        try:
            yield
        finally:
            for state in states:
                state.distributed_type = before

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise TypeError if the Trainer lacks the mixin."""
        if self.trainer is None:
            raise TypeError(f"LocoCallback needs a Trainer with LocoTrainerMixin. {_LINES}")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the participant: check the model on all workers, broadcast worker 0's; resume."""
        assert self.trainer is not None
        assert self._group is not None
        trainer, method = self.trainer, self.method
        assert trainer.model is not None
        model: nn.Module = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        leave_shared_memory(model)
        engine = method.engine_of(model, self._group, optimized_by([trainer.optimizer]))
        self._engine, self.statistics = engine, engine.statistics
        if method.evaluate == "outer":
            check_has_outer(engine)
            engine.shows_outer = True
        if self._checkpoint is not None:
            self._resume(engine, self._checkpoint)
        engine.start()
        self._steps_before = state.global_step - engine.worker.steps
        if self._requested is not None:
            engine.request_stop(self._requested)
        show_settings(engine, method.schedule)

    def finish(self) -> None:
        """Leave the consensus in the model; a second call does nothing."""
        engine = self.participant
        if engine is None:
            return
        assert self.trainer is not None
        check_untracked(engine.worker.replica.left_out, [self.trainer.optimizer])
        engine.sync_point(_END)
        if self.method.summary:
            measure_distance(engine)
        engine.finish_at_sync_point()
        if self.method.finalize == "keep":
            engine.worker.show_local()
        if self.method.summary:
            show_summary(engine)
        self._finished = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the consensus in the model."""
        self.finish()

    # -------------------------------------------------------------------- local steps

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Run the round that is due; raise if another worker has failed."""
        engine, worker = self.participant, self._worker
        assert engine is not None
        assert self.trainer is not None
        worker.group.raise_if_failed()
        if worker.steps and engine.check_due():
            check_untracked(worker.replica.left_out, [self.trainer.optimizer])
            engine.make_round()
            if not worker.was_finite:
                clear_non_finite([self.trainer.optimizer])
        engine.before_step(self._loss)
        self._losses = None

    def add_loss(self, loss: Tensor) -> None:
        """Note the loss of a batch, whose sum over the batches is the loss of a step."""
        loss = loss.detach()
        self._losses = loss if self._losses is None else self._losses + loss

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prepare the gradients."""
        assert self.participant is not None
        assert self.trainer is not None
        self.participant.before_optimizer_step(optimized_by([self.trainer.optimizer]) or ())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the local step, and stop at the step that all workers have agreed on."""
        engine, worker = self.participant, self._worker
        assert engine is not None
        if self._losses is not None:
            worker.last_loss = self._loss = self._losses
        engine.count_step()
        if worker.steps + self._steps_before != state.global_step:
            raise RuntimeError(
                f"{worker.steps + self._steps_before} local steps were counted after "
                f"{state.global_step} steps of the optimizer. LocoTrainerMixin counts them, once "
                "for all batches of gradient_accumulation_steps: leave engine.step() and "
                "count_step() out of your own callbacks and training_step."
            )
        self._stop_if_agreed(control)

    def _stop_if_agreed(self, control: TrainerControl) -> None:
        if (reason := self._worker.stop_agreed) is not None and not control.should_training_stop:
            control.should_save = control.should_training_stop = True
            rank_zero_info(
                f"All workers save and stop after {self._worker.steps} local steps ({reason}). Go "
                "on with trainer.train(resume_from_checkpoint=True)."
            )

    # ------------------------------------------------------------ the evaluated model

    @contextmanager
    def shown(self, purpose: str, *, is_local: bool = False) -> Iterator[None]:
        """A context with the consensus in the model; during ``train`` all workers must enter it.

        With ``is_local`` they only meet, and keep their own parameters.
        """
        engine = self.participant
        if engine is None or engine.worker.replica.shows_consensus:
            yield
            return
        assert self.trainer is not None
        engine.sync_point(purpose)
        stops = engine.worker.stop_agreed is not None
        if any(engine.worker.group.gather_from_ranks(stops, purpose)) and not stops:
            engine.worker.stop.catch_up()
            self._stop_if_agreed(self.trainer.control)
        if not is_local:
            engine.write_consensus(f"{purpose} of the consensus")
        try:
            yield
        finally:
            engine.worker.show_local()

    @contextmanager
    def evaluated(self, purpose: str) -> Iterator[None]:
        """A context with the evaluated model, in which Accelerate knows of the other workers."""
        with ExitStack() as stack:
            if self.participant is not None:
                is_local = self.method.evaluate == "local"
                stack.enter_context(self.shown(purpose, is_local=is_local))
            if self._engine is not None:
                stack.enter_context(self._knowing_of(self._among_others))
            yield

    def errors_shared(self, label: str) -> AbstractContextManager[None]:
        """A context whose error all workers raise; during ``train`` all must enter it."""
        if self.participant is None:
            return nullcontext()
        context: AbstractContextManager[None] = self._worker.group.errors_shared(label)
        return context

    # -------------------------------------------------------------------- checkpoints

    def save(self, folder: str) -> None:
        """Write the state of all workers to a checkpoint's folder; all workers must call it."""
        if self.participant is None:
            return
        assert self.trainer is not None
        parts = self._parts(self.trainer)
        loop = {name: part.state_dict() for name, part in parts.items()}

        def write_main(path: str, entry: Any) -> None:
            _IO.save_checkpoint(entry, path)

        WorkerFiles(self.participant, _IO).save(Path(folder, MAIN_FILE), loop, write_main)

    def _resume(self, engine: LocalParticipant, folder: Path) -> None:
        """Resume from the state of this worker; from the model alone if a DDP run has saved it."""
        assert self.trainer is not None
        main = folder / MAIN_FILE
        if not main.exists():
            rank_zero_info(
                f"{folder} has no state of the workers, as if it was written without "
                "LocoTrainerMixin: all workers start from its model and optimizer."
            )
            return
        entry = _IO.load_checkpoint(main, weights_only=True)[KEY]
        loop = WorkerFiles(engine, _IO).load(main, entry, True)
        for name, part in self._parts(self.trainer).items():
            if name in loop:
                part.load_state_dict(loop[name])

    def _parts(self, trainer: LocoTrainerMixin) -> dict[str, Any]:
        """What each worker has of its own in its training loop."""
        parts = {"optimizer": trainer.optimizer, "lr_scheduler": trainer.lr_scheduler}
        if getattr(trainer.accelerator, "scaler", None) is not None:
            parts["scaler"] = trainer.accelerator.scaler
        return parts

    def _choose(self, args: TrainingArguments, asked: str | bool | None) -> Path | None:
        """Return the checkpoint to resume from, equal on all workers; None to leave it to Trainer.

        With True it is the newest complete one. ValueError on all workers if that which was asked
        for is not complete.
        """
        assert self._group is not None
        if not asked:
            return None
        with self._group.errors_shared(_CHOICE):
            folder = Path(args.output_dir or "") if asked is True else Path(str(asked))
            chosen = next(complete_ones(folder), None) if asked is True else folder
            if asked is not True and (missing := missing_in(folder)) is not None:
                other = next(complete_ones(folder.parent, warns=False), None)
                hint = "No other one beside it is complete." if other is None else f"Use {other}."
                raise ValueError(f"The checkpoint {folder} is not complete: {missing}. {hint}")
        first, *_ = everyone = self._group.gather_from_ranks(str(chosen), _CHOICE)
        if any(other != first for other in everyone):
            raise ValueError(
                f"The workers resume from different checkpoints: {', '.join(everyone)}. All must "
                "see the same files."
            )
        return chosen


# ------------------------------------------------------------------ complete checkpoints


def complete_ones(folder: Path, *, warns: bool = True) -> Iterator[Path]:
    """Yield the complete checkpoints in a folder, that of most steps first."""
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    names = os.listdir(folder) if folder.is_dir() else []
    found = {int(match[1]): folder / match[0] for match in map(pattern.fullmatch, names) if match}
    for _, one in sorted(found.items(), reverse=True):
        if (missing := missing_in(one)) is None:
            yield one
        elif warns:
            rank_zero_warn(f"The checkpoint {one} is not complete and is left out: {missing}.")


def missing_in(folder: Path) -> str | None:
    """Say what a checkpoint lacks to be resumed from; None if it is complete."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        json.loads((folder / _STATE).read_text())
    except (OSError, ValueError):
        return f"it was interrupted before {_STATE} was written"
    main = folder / MAIN_FILE
    if not main.exists():
        return None  # a Trainer without the mixin has written it
    if (damage := damage_of(main)) is not None:
        return f"{MAIN_FILE} is damaged ({damage})"
    files = SideFiles(_IO, main)
    try:
        manifest = Manifest.from_state_dict(_IO.load_checkpoint(main, weights_only=True)[KEY], main)
        shared = [None] if manifest.has_shared else []
        for worker in [*range(manifest.num_workers), *shared]:
            path = files.find(manifest.stamp, worker)
            if (damage := damage_of(path, reads_all=False)) is not None:
                return f"{path} is damaged ({damage})"
    except ValueError as error:
        return str(error)
    return None


# ------------------------------------------------------------------------------- checks


def check_method(method: Any) -> None:
    """Raise TypeError or ValueError for what is no method of this Trainer."""
    if method is None:
        raise TypeError(f"LocoTrainerMixin needs a method. {_LINES}")
    if isinstance(method, RemoteOptimizerStrategy):
        raise ValueError(
            "RemoteOptimizerStrategy steps the optimizer on other ranks, and Trainer of "
            "transformers steps its own. Use it with Lightning's Trainer."
        )
    if isinstance(method, ShardedWorkers):
        raise ValueError(
            f"{type(method).__name__} shards the model as Lightning's Trainer asks it to, and "
            "Trainer of transformers does not. Use it with Lightning's Trainer, or a strategy such "
            "as DiLoCoStrategy(sync_every=100) here."
        )
    if not isinstance(method, EngineStrategy):
        raise TypeError(
            "loco must be a strategy of lightning_loco such as DiLoCoStrategy(sync_every=100), or "
            f"LocoStrategy(algorithm, sync_every=100) for an algorithm, got {method!r}."
        )
    given = [name for name in _OF_LIGHTNING if method.arguments[name] is not None]
    if given or lightning_compat.ddp_arguments_of(method):
        names = ", ".join([*given, *lightning_compat.ddp_arguments_of(method)])
        raise ValueError(
            f"The strategy has {names}, which only Lightning's Trainer uses. Leave it out: "
            "TrainingArguments and the launcher choose devices, precision and backend."
        )
    for name, is_default, instead in (
        ("membership", getattr(method.settings, "membership", None) is None, "fixed workers"),
        ("nodes", not getattr(method.settings, "peers", ()), "the ranks of one job"),
        ("replica_size", not method.has_replica_size, "one rank per worker"),
        ("checkpoint_folder", method.checkpoint_folder == "shared", "a folder that all see"),
    ):
        if not is_default:
            raise ValueError(
                f"{name}=... works with Lightning's Trainer only. Leave it out: with Trainer of "
                f"transformers there is {instead}."
            )


def check_arguments(args: TrainingArguments, method: EngineStrategy) -> None:
    """Raise ValueError for training arguments that let workers wait for each other, or differ."""
    world, config = args.world_size, args.accelerator_config
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world:
        raise ValueError(
            f"The launcher has started {started} processes, but Accelerate takes each to be alone, "
            "as it does on CPUs. Use TrainingArguments(use_cpu=True)."
        )
    schedule = method.schedule
    if schedule is not None:
        schedule.check(world)
        if len(set(schedule.shares(world))) > 1:
            raise ValueError(
                "sync_every has different numbers of local steps, which needs different shares of "
                "the data, and Accelerate divides them evenly. Use one number."
            )
    for name, is_given, reason in (
        ("auto_find_batch_size", args.auto_find_batch_size, "each worker would find its own"),
        (
            "enable_jit_checkpoint",
            getattr(args, "enable_jit_checkpoint", False),
            "each worker would stop by itself; with LocoTrainerMixin all stop after SIGTERM",
        ),
        (
            "accelerator_config dispatch_batches",
            bool(config.dispatch_batches),
            "rank 0 would send every batch to all workers",
        ),
        (
            "accelerator_config use_seedable_sampler=False",
            not config.use_seedable_sampler,
            "workers would not agree on the order of the data",
        ),
    ):
        if is_given:
            raise ValueError(f"{name} does not work with LocoTrainerMixin: {reason}. Leave it out.")


def check_accelerator(trainer: LocoTrainerMixin) -> None:
    """Raise ValueError if the model is to be sharded over the ranks."""
    sharded = [
        name
        for name, is_used in (
            ("FSDP", trainer.is_fsdp_enabled or bool(trainer.args.fsdp)),
            ("DeepSpeed", trainer.is_deepspeed_enabled),
            (
                "parallelism_config",
                getattr(trainer.accelerator, "parallelism_config", None) is not None,
            ),
        )
        if is_used
    ]
    if sharded:
        raise ValueError(
            f"{sharded[0]} divides the model over the ranks, which then exchange in every step; "
            "with LocoTrainerMixin each rank is a worker with the whole model. Turn it off (also "
            "in the configuration of `accelerate launch`), or use LocoModelParallelStrategy with "
            "Lightning's Trainer, whose workers shard the model over their own ranks."
        )


__all__ = ["LocoCallback", "LocoTrainerMixin"]

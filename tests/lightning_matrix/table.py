"""The matrix: expected outcomes of Lightning's features and of its users' idioms, by strategy.

A row is a function in one of the modules of this folder, which runs with DDP and with every
strategy. The expected outcome is

- :data:`AS_DDP`: the facts of the run are the same, or it ends with the same error;
- :class:`Refused`: a clear message on all ranks;
- :class:`Better`: DDP hangs, fails or gives a wrong result; the strategy does not;
- :class:`Apart`: a result other than DDP's, which is a property of the method.

The weights after fit are always finite, and equal on all workers unless they differ with DDP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lightning_loco.strategies import METHODS
from tests.lightning_matrix import (
    callback_rows,
    data_rows,
    idiom_rows,
    optimization_rows,
    trainer_rows,
)
from tests.lightning_matrix.row_run import DDP_INSIDE, FSDP_INSIDE, REMOTE, Facts, RowRun


@dataclasses.dataclass(frozen=True)
class AsDDP:
    """The facts are equal to those with DDP."""

    sign = "="


@dataclasses.dataclass(frozen=True)
class Refused:
    """An error on every rank.

    Args:
        message: A part of its message.
    """

    message: str
    sign = "no"


@dataclasses.dataclass(frozen=True)
class Better:
    """Succeeds where DDP does not.

    Args:
        how: Explanation for readers.
        facts: Expected facts; nothing is compared with DDP.
        error: A part of the error message of all ranks, if they should fail.
    """

    how: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""
    sign = "+"


@dataclasses.dataclass(frozen=True)
class Apart:
    """Succeeds, with finite weights equal on all workers, but with another result than DDP.

    Args:
        how: Explanation for readers.
        facts: Expected facts.
    """

    how: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sign = "~"


@dataclasses.dataclass(frozen=True)
class NotTested:
    """Not run: the row's code does not work with, for example, shards."""

    sign = ""


Verdict = AsDDP | Refused | Better | Apart | NotTested
AS_DDP = AsDDP()
NOT_TESTED = NotTested()


@dataclasses.dataclass(frozen=True)
class Row:
    """One feature.

    Args:
        feature: Name for readers and tests.
        run: Runs it.
        verdict: Expected outcome with all strategies except those of ``but``.
        but: Expected outcomes with other strategies, by name.
        needs: A package without which the row is skipped.
    """

    feature: str
    run: Callable[[RowRun], Facts]
    verdict: Verdict = AS_DDP
    but: Mapping[str, Verdict] = dataclasses.field(default_factory=dict)
    needs: str = ""

    def of(self, strategy: str) -> Verdict:
        """Return the expected outcome with a strategy."""
        return self.but.get(strategy, self.verdict)


def remote(verdict: Verdict) -> dict[str, Verdict]:
    """Return another expected outcome with a remote optimizer."""
    return {REMOTE: verdict}


def sharded(verdict: Verdict) -> dict[str, Verdict]:
    """Return another expected outcome with workers of two ranks and FSDP2 inside."""
    return {FSDP_INSIDE: verdict}


def of_two_ranks(verdict: Verdict) -> dict[str, Verdict]:
    """Return another expected outcome with workers of two ranks."""
    return {DDP_INSIDE: verdict, FSDP_INSIDE: verdict}


ONE_OPTIMIZER = remote(Refused("needs exactly one optimizer"))
NO_FINDER = remote(
    Refused("LearningRateFinder and Tuner.lr_find do not work with RemoteOptimizerStrategy")
) | sharded(Refused("LearningRateFinder and Tuner.lr_find cannot restore shards"))
NO_COPY = sharded(Refused("FSDP does not support deepcopy"))
NOT_WHOLE = sharded(Refused("needs the whole model on every rank"))
UNUSED_INSIDE = {DDP_INSIDE: Refused("parameters that were not used in producing loss")}
ONE_LAYER = {"streaming_diloco": Refused("fragments=2 is more than the 1 layers")}
SERVED_BEFORE = Apart(
    "a peer may blend in parameters from before the first step; clip before training, too",
    {"training_step": 8},
)
APPLIED_AFTER = Apart(
    "a result may change the weights after the last step, on one worker only",
    {"training_step": 8},
)
UNEVEN = Better("no data is skipped, and no worker hangs", {"all data": True})

TABLE: dict[str, list[Row]] = {
    "Calls of the Trainer": [
        Row("fit with validation", trainer_rows.fit_with_sanity_check),
        Row("validate", trainer_rows.validate),
        Row("test", trainer_rows.test),
        Row("predict", trainer_rows.predict),
        Row("fit, validate, test and predict", trainer_rows.fit_and_everything),
        Row("fit twice with one Trainer", trainer_rows.fit_twice),
        Row("fit with a second Trainer", trainer_rows.another_trainer),
        Row("the order of all hooks", trainer_rows.order_of_hooks),
        Row("load_from_checkpoint", trainer_rows.load_from_checkpoint),
        Row('test with ckpt_path="best"', trainer_rows.test_the_best),
        Row("resume with ckpt_path", trainer_rows.resume),
        Row(
            "resume with weights_only=False and NumPy numbers",
            trainer_rows.resume_with_numpy,
            but=sharded(Refused("Weights only load failed")),
        ),
        Row("fast_dev_run", trainer_rows.fast_dev_run),
        Row("overfit_batches", trainer_rows.overfit_batches),
        Row("limit_train_batches, limit_val_batches", trainer_rows.limits),
        Row("max_steps", trainer_rows.max_steps),
        Row("max_time", trainer_rows.max_time),
        Row("should_stop on all workers", trainer_rows.should_stop),
        Row("should_stop before min_epochs", trainer_rows.min_epochs),
        Row(
            "should_stop on one worker",
            trainer_rows.should_stop_on_one,
            Better("the others train to the end; DDP fails in a collective"),
            of_two_ranks(NOT_TESTED),
        ),
        Row("val_check_interval", trainer_rows.val_check_interval),
        Row("val_check_interval across epochs", trainer_rows.val_steps_across_epochs),
        Row("check_val_every_n_epoch", trainer_rows.check_val_every_n_epoch),
        Row("num_sanity_val_steps=0", trainer_rows.no_sanity_check),
        Row("no validation", trainer_rows.no_validation),
        Row("barebones", trainer_rows.barebones),
        Row("detect_anomaly", trainer_rows.detect_anomaly),
    ],
    "Data": [
        Row("LightningDataModule", trainer_rows.datamodule),
        Row("reload_dataloaders_every_n_epochs", trainer_rows.reload_dataloaders),
        Row("IterableDataset", data_rows.iterable),
        Row("IterableDataset with max_steps", data_rows.iterable_with_max_steps),
        Row("CombinedLoader", data_rows.combined_loader),
        Row("dictionary of loaders", data_rows.dict_of_loaders),
        Row("loaders in sequence", data_rows.loaders_in_sequence),
        Row("several validation loaders", data_rows.validation_loaders),
        Row("custom batch sampler", data_rows.own_batch_sampler),
        Row("custom DistributedSampler", data_rows.own_distributed_sampler),
        Row("WeightedRandomSampler", data_rows.weighted_sampler),
        Row("shuffle=True", data_rows.shuffled),
        Row("drop_last with an odd number of samples", data_rows.drop_last),
        Row("loader with worker processes", data_rows.worker_processes),
        Row("workers with different numbers of batches", data_rows.uneven, UNEVEN),
        Row("torchmetrics, computed in a hook", data_rows.metric),
        Row("torchmetrics, logged", data_rows.logged_metric),
        Row("barrier in an epoch hook", data_rows.barrier),
        Row("different numbers of batches, and torchmetrics", data_rows.uneven_metric, UNEVEN),
        Row("different numbers of batches, and a barrier", data_rows.uneven_barrier, UNEVEN),
    ],
    "Optimization": [
        Row("accumulate_grad_batches", optimization_rows.accumulation),
        Row("gradient_clip_val by norm", optimization_rows.clipping_by_norm),
        Row("gradient_clip_val by value", optimization_rows.clipping_by_value),
        Row("configure_gradient_clipping", optimization_rows.own_clipping),
        Row("norm of the gradients, logged", optimization_rows.gradient_norm),
        Row("custom optimizer_step", optimization_rows.own_optimizer_step),
        Row("learning-rate schedule by step", optimization_rows.step_schedule),
        Row("ReduceLROnPlateau", optimization_rows.plateau),
        Row("OneCycleLR with estimated_stepping_batches", optimization_rows.one_cycle),
        Row("parameter groups", optimization_rows.parameter_groups),
        Row(
            "LBFGS",
            optimization_rows.lbfgs,
            but=remote(Refused("LBFGS needs a closure")) | sharded(NOT_TESTED),
        ),
        Row("no optimizer", optimization_rows.no_optimizer, but=ONE_OPTIMIZER),
        Row("training_step returns None", optimization_rows.returning_none),
        Row("manual optimization", optimization_rows.manual),
        Row("manual optimization, returning None", optimization_rows.manual_none),
        Row("manual optimization with accumulation", optimization_rows.manual_accumulation),
        Row(
            "GAN with two optimizers",
            optimization_rows.gan,
            but=ONE_OPTIMIZER | sharded(NOT_TESTED),
        ),
        Row("gradient penalty", optimization_rows.gradient_penalty, but=sharded(NOT_TESTED)),
        Row("trainer.model.no_sync()", optimization_rows.no_sync, but=sharded(NOT_TESTED)),
        Row("strategy.model.module", optimization_rows.unwrapping, but=sharded(NOT_TESTED)),
        Row("collectives in training_step", optimization_rows.collective),
        Row("precision bf16-mixed", optimization_rows.bf16_mixed),
        Row("precision bf16-true", optimization_rows.bf16_true),
        Row(
            "precision 64-true",
            optimization_rows.double,
            but=sharded(Refused("does not support `Fabric(..., precision='64-true')`")),
        ),
    ],
    "Models": [
        Row("frozen layers", optimization_rows.frozen, but=ONE_LAYER),
        Row(
            "freezing during fit",
            idiom_rows.freezing,
            Better("DDP needs find_unused_parameters", {"training_step": 8}),
            UNUSED_INSIDE,
        ),
        Row(
            "unfreezing during fit",
            idiom_rows.unfreezing,
            Refused("became trainable during fit"),
            ONE_LAYER | remote(Refused("A parameter became trainable after the start")),
        ),
        Row(
            "Parameter replaced during fit",
            idiom_rows.replaced_parameter,
            Refused("was replaced by another object during fit"),
        ),
        Row(
            "layer without gradient",
            optimization_rows.unused,
            Better("DDP needs find_unused_parameters", {"training_step": 8}),
            UNUSED_INSIDE | sharded(NOT_TESTED),
        ),
        Row("tied weights", optimization_rows.tied),
        Row("weight_norm", optimization_rows.parametrized),
        Row("configure_model", optimization_rows.configure_model, but=sharded(NOT_TESTED)),
        Row("gradient checkpointing", optimization_rows.gradient_checkpointing),
        Row("BatchNorm", optimization_rows.batch_norm),
        Row(
            "BatchNorm's statistics after fit",
            optimization_rows.averaged_statistics,
            Better("the mean over all workers; each worker's own with DDP"),
            remote(AS_DDP),
        ),
        Row(
            "sync_batchnorm",
            optimization_rows.sync_batchnorm,
            Refused("sync_batchnorm=True communicates in every forward pass"),
            remote(Refused("SyncBatchNorm expected input tensor to be on GPU")),
        ),
        Row(
            "lazy modules",
            optimization_rows.lazy,
            Refused("is not initialised yet"),
            sharded(NOT_TESTED),
        ),
        Row(
            "sparse gradients",
            optimization_rows.sparse,
            Refused("makes sparse gradients"),
            sharded(NOT_TESTED),
        ),
        Row(
            "complex parameters",
            optimization_rows.complex_parameters,
            Refused("only real floating-point values can be averaged"),
            remote(Refused("is complex, which cannot be sent to another rank"))
            | sharded(NOT_TESTED),
        ),
        Row(
            "no trainable parameters",
            optimization_rows.no_trainable_parameters,
            Refused("has no trainable parameters"),
        ),
        Row(
            "another model on one worker",
            optimization_rows.different_models,
            Refused("Build the same"),
            ONE_LAYER | of_two_ranks(NOT_TESTED),
        ),
        Row("EMA teacher without gradients", idiom_rows.teacher, but=sharded(NOT_TESTED)),
        Row(
            "DQN target network in no optimizer",
            idiom_rows.target,
            Better("DDP needs find_unused_parameters", {"target": True}),
            UNUSED_INSIDE | sharded(NOT_TESTED),
        ),
        Row(
            "buffer changed by hand",
            idiom_rows.buffer,
            Better("the mean over all workers; each worker's own with DDP"),
            remote(AS_DDP),
        ),
        Row(
            "buffer resized in place",
            idiom_rows.resized_buffer,
            but={"pairwise_gossip": Refused("peers fetch buffers of one size only")},
        ),
        Row(
            "weights clipped by hand",
            idiom_rows.clipped_weights,
            but={"pairwise_gossip": SERVED_BEFORE, "async_model_average": APPLIED_AFTER}
            | sharded(NOT_TESTED),
        ),
        Row(
            "weights clipped by hand, also before training",
            idiom_rows.always_clipped_weights,
            but={"async_model_average": APPLIED_AFTER} | sharded(NOT_TESTED),
        ),
    ],
    "Callbacks": [
        Row("EarlyStopping", callback_rows.early_stopping),
        Row("ModelCheckpoint by a metric", callback_rows.checkpoint_by_metric),
        Row("ModelCheckpoint by steps", callback_rows.checkpoint_by_steps),
        Row("ModelCheckpoint of weights only", callback_rows.checkpoint_of_weights),
        Row("ModelCheckpoint at the end of epochs", callback_rows.checkpoint_at_epoch_end),
        Row("ModelCheckpoint by time", callback_rows.checkpoint_by_time),
        Row("two ModelCheckpoints", callback_rows.two_checkpoints),
        Row("GradientAccumulationScheduler", callback_rows.accumulation_schedule),
        Row("LearningRateMonitor", callback_rows.rate_monitor),
        Row("logger, by step and by epoch", callback_rows.logger),
        Row("simple profiler", callback_rows.simple_profiler),
        Row("advanced profiler", callback_rows.advanced_profiler),
        Row("PyTorch profiler", callback_rows.pytorch_profiler),
        Row("AveragedModel in a custom callback", callback_rows.ema_by_hand, but=NO_COPY),
        Row("weights written in on_train_end", callback_rows.zeroing_at_the_end),
        Row("EMAWeightAveraging", callback_rows.weight_averaging, but=NOT_WHOLE),
        Row("EMAWeightAveraging, saved", callback_rows.saved_average, but=NOT_WHOLE),
        Row("StochasticWeightAveraging", callback_rows.stochastic_weight_averaging, but=NOT_WHOLE),
        Row("ModelPruning", callback_rows.pruning, but=NOT_WHOLE),
        Row("weights set in on_fit_start", callback_rows.filled_on_fit_start),
        Row("weights set in on_sanity_check_start", callback_rows.filled_on_sanity_check_start),
        Row("weights set in on_train_start", callback_rows.filled_on_train_start),
        Row("weights set in on_train_epoch_start", callback_rows.filled_on_train_epoch_start),
        Row(
            "weights set on one worker only",
            callback_rows.filled_on_one_worker,
            Refused("a new start from weights that a hook has set on this worker"),
            remote(Refused("Parameters were changed outside of the optimizer")),
        ),
        Row("LearningRateFinder", callback_rows.rate_finder, but=NO_FINDER),
        Row("Tuner.lr_find", callback_rows.tuner, but=NO_FINDER),
        Row("BatchSizeFinder", callback_rows.batch_size_finder),
        Row(
            "BackboneFinetuning",
            callback_rows.backbone_finetuning,
            Refused("became trainable during fit"),
            ONE_LAYER
            | remote(Refused("A parameter group was added to the optimizer after the start")),
        ),
    ],
    "Failures and other packages": [
        Row(
            "NaN on one worker",
            idiom_rows.nan_on_one,
            Better("it continues from the others' parameters; with DDP all are NaN"),
            remote(
                Better(
                    "all end with an error that names it; with DDP all are NaN",
                    error="a gradient is not finite",
                )
            )
            | {
                "sparta": Better(
                    "it receives too few parameters to continue, and all end with an error",
                    error="hold NaN or infinity",
                )
            },
        ),
        Row(
            "error on one worker",
            idiom_rows.error_on_one,
            Better("all end with that error; DDP hangs", error="a mistake of worker 1"),
        ),
        Row("error on all workers", idiom_rows.error_on_all),
        Row("LightningCLI", idiom_rows.lightning_cli),
        Row(
            "GPT-2 of Hugging Face",
            idiom_rows.gpt2,
            but=of_two_ranks(NOT_TESTED),
            needs="transformers",
        ),
        Row(
            "BERT of Hugging Face",
            idiom_rows.bert,
            but=of_two_ranks(NOT_TESTED),
            needs="transformers",
        ),
    ],
}

ROWS = {row.feature: row for rows in TABLE.values() for row in rows}
STRATEGIES = list(METHODS)
OF_TWO_RANKS = [DDP_INSIDE, FSDP_INSIDE]
FEATURES_OF_TWO_RANKS = [
    feature
    for feature, row in ROWS.items()
    if any(not isinstance(row.of(name), NotTested) for name in OF_TWO_RANKS)
]

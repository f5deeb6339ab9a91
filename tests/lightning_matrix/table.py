"""The matrix: features of Lightning and idioms of its users by strategy, and what comes of each.

A row is a function of one of the modules beside this one, which runs under DDP and under every
strategy. What should come of it is

- :data:`AS_DDP`: what the row tells of the run is the same, or it ends with the same error;
- :class:`Refused`: a clear message on all ranks;
- :class:`Better`: DDP hangs, fails or goes wrong; this does not;
- :class:`Apart`: another result than DDP's, which is in the nature of the method.

Always, the weights after fit are finite, and equal on all workers, unless DDP leaves what is
looked at each worker's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from lightning_loco.strategies import METHODS
from tests.lightning_matrix import calling_back, feeding, foreign, optimizing, running
from tests.lightning_matrix.row_run import REMOTE, Facts, RowRun


@dataclasses.dataclass(frozen=True)
class AsDDP:
    """What the row tells is equal to what it tells under DDP."""

    words = "as DDP"


@dataclasses.dataclass(frozen=True)
class Refused:
    """An error on every rank.

    Args:
        message: What is in it.
    """

    message: str
    words = "refused"


@dataclasses.dataclass(frozen=True)
class Better:
    """Works where DDP does not.

    Args:
        how: For readers.
        facts: What the row must tell; nothing is compared with DDP.
        error: What is in the error with which all ranks end, if they should.
    """

    how: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""
    words = "better"


@dataclasses.dataclass(frozen=True)
class Apart:
    """Ends well, with finite weights that are equal on all workers, but not as with DDP.

    Args:
        how: For readers.
        facts: What the row must tell.
    """

    how: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    words = "apart"


Verdict = AsDDP | Refused | Better | Apart
AS_DDP = AsDDP()


@dataclasses.dataclass(frozen=True)
class Row:
    """One feature.

    Args:
        feature: For readers, and for the names of tests.
        run: What is done with it.
        verdict: What comes of it under all strategies but those of ``but``.
        but: What comes of it under some, by their names.
        needs: A package without which the row is skipped.
    """

    feature: str
    run: Callable[[RowRun], Facts]
    verdict: Verdict = AS_DDP
    but: Mapping[str, Verdict] = dataclasses.field(default_factory=dict)
    needs: str = ""

    def of(self, strategy: str) -> Verdict:
        """What should come of it under a strategy."""
        return self.but.get(strategy, self.verdict)


def remote(verdict: Verdict) -> dict[str, Verdict]:
    """Another outcome with a remote optimizer."""
    return {REMOTE: verdict}


ONE_OPTIMIZER = remote(Refused("needs exactly one optimizer"))
NO_FINDER = remote(
    Refused("LearningRateFinder and Tuner.lr_find do not work with RemoteOptimizerStrategy")
)
ONE_LAYER = {"streaming_diloco": Refused("fragments=2 is more than the 1 layers")}
SERVED_BEFORE = Apart(
    "a peer may blend in what was served before the first step; clip before training, too",
    {"training_step": 8},
)
APPLIED_AFTER = Apart(
    "a result may move the weights once more after the last step, on one worker alone",
    {"training_step": 8},
)
UNEVEN = Better("nobody loses data, and nobody hangs", {"all data": True})

TABLE: dict[str, list[Row]] = {
    "Calls of the Trainer": [
        Row("fit with validation", running.fit_with_sanity_check),
        Row("validate", running.validate),
        Row("test", running.test),
        Row("predict", running.predict),
        Row("fit, validate, test and predict", running.fit_and_everything),
        Row("fit twice with one Trainer", running.fit_twice),
        Row("fit with a second Trainer", running.another_trainer),
        Row("the order of all hooks", running.order_of_hooks),
        Row("load_from_checkpoint", running.load_from_checkpoint),
        Row('test with ckpt_path="best"', running.test_the_best),
        Row("resume with ckpt_path", running.resume),
        Row("resume with weights_only=False and NumPy numbers", running.resume_with_numpy),
        Row("fast_dev_run", running.fast_dev_run),
        Row("overfit_batches", running.overfit_batches),
        Row("limit_train_batches, limit_val_batches", running.limits),
        Row("max_steps", running.max_steps),
        Row("max_time", running.max_time),
        Row("should_stop on all workers", running.should_stop),
        Row("should_stop before min_epochs", running.min_epochs),
        Row(
            "should_stop on one worker",
            running.should_stop_on_one,
            Better("the others go on to the end; DDP fails in a collective"),
        ),
        Row("val_check_interval", running.val_check_interval),
        Row("val_check_interval across epochs", running.val_steps_across_epochs),
        Row("check_val_every_n_epoch", running.check_val_every_n_epoch),
        Row("num_sanity_val_steps=0", running.no_sanity_check),
        Row("no validation", running.no_validation),
        Row("barebones", running.barebones),
        Row("detect_anomaly", running.detect_anomaly),
    ],
    "Data": [
        Row("LightningDataModule", running.datamodule),
        Row("reload_dataloaders_every_n_epochs", running.reload_dataloaders),
        Row("IterableDataset", feeding.iterable),
        Row("IterableDataset with max_steps", feeding.iterable_with_max_steps),
        Row("CombinedLoader", feeding.combined_loader),
        Row("dictionary of loaders", feeding.dict_of_loaders),
        Row("loaders in sequence", feeding.loaders_in_sequence),
        Row("several validation loaders", feeding.validation_loaders),
        Row("batch sampler of one's own", feeding.own_batch_sampler),
        Row("DistributedSampler of one's own", feeding.own_distributed_sampler),
        Row("WeightedRandomSampler", feeding.weighted_sampler),
        Row("shuffle=True", feeding.shuffled),
        Row("drop_last with an odd number of samples", feeding.drop_last),
        Row("loader with worker processes", feeding.worker_processes),
        Row("workers with different numbers of batches", feeding.uneven, UNEVEN),
        Row("torchmetrics, computed in a hook", feeding.metric),
        Row("torchmetrics, logged", feeding.logged_metric),
        Row("barrier in an epoch hook", feeding.barrier),
        Row("different numbers of batches, and torchmetrics", feeding.uneven_metric, UNEVEN),
        Row("different numbers of batches, and a barrier", feeding.uneven_barrier, UNEVEN),
    ],
    "Optimization": [
        Row("accumulate_grad_batches", optimizing.accumulation),
        Row("gradient_clip_val by norm", optimizing.clipping_by_norm),
        Row("gradient_clip_val by value", optimizing.clipping_by_value),
        Row("configure_gradient_clipping", optimizing.own_clipping),
        Row("norm of the gradients, logged", optimizing.gradient_norm),
        Row("optimizer_step of one's own", optimizing.own_optimizer_step),
        Row("schedule by the step", optimizing.step_schedule),
        Row("ReduceLROnPlateau", optimizing.plateau),
        Row("OneCycleLR with estimated_stepping_batches", optimizing.one_cycle),
        Row("parameter groups", optimizing.parameter_groups),
        Row("LBFGS", optimizing.lbfgs, but=remote(Refused("LBFGS needs a closure"))),
        Row("no optimizer", optimizing.no_optimizer, but=ONE_OPTIMIZER),
        Row("training_step returns None", optimizing.returning_none),
        Row("manual optimization", optimizing.manual),
        Row("manual optimization, returning None", optimizing.manual_none),
        Row("manual optimization with accumulation", optimizing.manual_accumulation),
        Row("GAN with two optimizers", optimizing.gan, but=ONE_OPTIMIZER),
        Row("gradient penalty", optimizing.gradient_penalty),
        Row("trainer.model.no_sync()", optimizing.no_sync),
        Row("strategy.model.module", optimizing.unwrapping),
        Row("collectives in training_step", optimizing.collective),
        Row("precision bf16-mixed", optimizing.bf16_mixed),
        Row("precision bf16-true", optimizing.bf16_true),
        Row("precision 64-true", optimizing.double),
    ],
    "Models": [
        Row("frozen layers", optimizing.frozen, but=ONE_LAYER),
        Row(
            "freezing in mid-fit",
            foreign.freezing,
            Better("DDP wants find_unused_parameters", {"training_step": 8}),
        ),
        Row(
            "unfreezing in mid-fit",
            foreign.thawed,
            Refused("became trainable during fit"),
            ONE_LAYER | remote(Refused("A parameter became trainable after the start")),
        ),
        Row(
            "Parameter replaced in mid-fit",
            foreign.replaced_parameter,
            Refused("was replaced by another object during fit"),
        ),
        Row(
            "layer without gradient",
            optimizing.unused,
            Better("DDP wants find_unused_parameters", {"training_step": 8}),
        ),
        Row("tied weights", optimizing.tied),
        Row("weight_norm", optimizing.parametrized),
        Row("configure_model", optimizing.configure_model),
        Row("gradient checkpointing", optimizing.gradient_checkpointing),
        Row("BatchNorm", optimizing.batch_norm),
        Row(
            "BatchNorm's statistics after fit",
            optimizing.averaged_statistics,
            Better("the mean over all workers; each worker's own with DDP"),
            remote(AS_DDP),
        ),
        Row(
            "sync_batchnorm",
            optimizing.sync_batchnorm,
            Refused("sync_batchnorm=True communicates in every forward pass"),
            remote(Refused("SyncBatchNorm expected input tensor to be on GPU")),
        ),
        Row("lazy modules", optimizing.lazy, Refused("is not initialised yet")),
        Row("sparse gradients", optimizing.sparse, Refused("makes sparse gradients")),
        Row(
            "complex parameters",
            optimizing.complex_parameters,
            Refused("only real floating-point values can be averaged"),
            remote(Refused("is complex, which cannot be sent to another rank")),
        ),
        Row(
            "no trainable parameters",
            optimizing.no_trainable_parameters,
            Refused("has no trainable parameters"),
        ),
        Row(
            "another model on one worker",
            optimizing.different_models,
            Refused("Build the same"),
            ONE_LAYER,
        ),
        Row("EMA teacher without gradients", foreign.teacher),
        Row(
            "DQN target in no optimizer",
            foreign.target,
            Better("DDP wants find_unused_parameters", {"target": True}),
        ),
        Row(
            "buffer changed by hand",
            foreign.buffer,
            Better("the mean over all workers; each worker's own with DDP"),
            remote(AS_DDP),
        ),
        Row(
            "buffer resized in place",
            foreign.resized_buffer,
            but={"pairwise_gossip": Refused("peers fetch buffers of one size only")},
        ),
        Row(
            "weights clipped by hand",
            foreign.clipped_weights,
            but={"pairwise_gossip": SERVED_BEFORE, "async_model_average": APPLIED_AFTER},
        ),
        Row(
            "weights clipped by hand, also before training",
            foreign.always_clipped_weights,
            but={"async_model_average": APPLIED_AFTER},
        ),
    ],
    "Callbacks": [
        Row("EarlyStopping", calling_back.early_stopping),
        Row("ModelCheckpoint by a metric", calling_back.checkpoint_by_metric),
        Row("ModelCheckpoint by steps", calling_back.checkpoint_by_steps),
        Row("ModelCheckpoint of weights only", calling_back.checkpoint_of_weights),
        Row("ModelCheckpoint at the end of epochs", calling_back.checkpoint_at_epoch_end),
        Row("ModelCheckpoint by time", calling_back.checkpoint_by_time),
        Row("two ModelCheckpoints", calling_back.two_checkpoints),
        Row("GradientAccumulationScheduler", calling_back.accumulation_schedule),
        Row("LearningRateMonitor", calling_back.rate_monitor),
        Row("logger, by step and by epoch", calling_back.logger),
        Row("simple profiler", calling_back.simple_profiler),
        Row("advanced profiler", calling_back.advanced_profiler),
        Row("PyTorch profiler", calling_back.pytorch_profiler),
        Row("AveragedModel in a callback of one's own", calling_back.ema_by_hand),
        Row("weights written in on_train_end", calling_back.zeroing_at_the_end),
        Row("EMAWeightAveraging", calling_back.weight_averaging),
        Row("EMAWeightAveraging, saved", calling_back.saved_average),
        Row("StochasticWeightAveraging", calling_back.stochastic_weight_averaging),
        Row("ModelPruning", calling_back.pruning),
        Row("weights set in on_fit_start", calling_back.filled_on_fit_start),
        Row("weights set in on_sanity_check_start", calling_back.filled_on_sanity_check_start),
        Row("weights set in on_train_start", calling_back.filled_on_train_start),
        Row("weights set in on_train_epoch_start", calling_back.filled_on_train_epoch_start),
        Row(
            "weights set on one worker only",
            calling_back.filled_on_one_worker,
            Refused("a new start from weights that a hook has set on this worker"),
            remote(Refused("Parameters were changed outside of the optimizer")),
        ),
        Row("LearningRateFinder", calling_back.rate_finder, but=NO_FINDER),
        Row("Tuner.lr_find", calling_back.tuner, but=NO_FINDER),
        Row("BatchSizeFinder", calling_back.batch_size_finder),
        Row(
            "BackboneFinetuning",
            calling_back.backbone_finetuning,
            Refused("became trainable during fit"),
            ONE_LAYER
            | remote(Refused("A parameter group was added to the optimizer after the start")),
        ),
    ],
    "Misfortunes and other packages": [
        Row(
            "NaN on one worker",
            foreign.nan_on_one,
            Better("its model goes on from the others'; with DDP all are NaN"),
            remote(
                Better(
                    "all end with an error that names it; with DDP all are NaN",
                    error="a gradient is not finite",
                )
            ),
        ),
        Row(
            "error on one worker",
            foreign.error_on_one,
            Better("all end with it; DDP hangs", error="a mistake of worker 1"),
        ),
        Row("error on all workers", foreign.error_on_all),
        Row("LightningCLI", foreign.lightning_cli),
        Row("GPT-2 of Hugging Face", foreign.gpt2, needs="transformers"),
        Row("BERT of Hugging Face", foreign.bert, needs="transformers"),
    ],
}

ROWS = {row.feature: row for rows in TABLE.values() for row in rows}
STRATEGIES = list(METHODS)

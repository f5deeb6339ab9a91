"""Builds a run from a composed configuration, trains, and writes the report."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ProgressBar, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from lightning_loco.app.configured_strategy import build_strategy
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.app.early_checks import SettingsError, errors_for, one_line
from lightning_loco.app.launch import outer_launch, quieten_lightning
from lightning_loco.app.result_table import RunReport, measure
from lightning_loco.callbacks import ReportCallback, WorkerLogs
from lightning_loco.strategies.engine_strategy import EngineStrategy
from lightning_loco.strategies.lightning_compat import choose_checkpoint
from lightning_loco.strategies.summary import errors_as_warnings
from lightning_loco.strategies.worker_strategy import WorkerStrategy

WAIT_FOR_RANK_0_S = 10
"""How long a rank waits before it reports a setting, so that rank 0 can report it and end all."""

CHECKPOINT_NAMES = ("last", "best", "hpc", "registry")
"""Values of ckpt_path that are not paths."""

NOT_REPORTED = ("simulate", "num_workers", "simulation", "callbacks", "logger")
"""Keys of the configuration that are of a simulation, or do not change the training."""


def run(cfg: DictConfig) -> float | None:
    """Build everything a configuration names, train, and report; return the validation loss.

    The loss is of the final model, None if nothing was validated. ``cfg`` is
    ``conf/train.yaml`` as :func:`~lightning_loco.app.early_checks.checked` returns it. A setting
    that cannot work is a SettingsError on every rank, before training.
    """
    quieten_lightning()
    seed_everything(cfg.seed, workers=True, verbose=False)
    with errors_for("model"):
        model: LightningModule = build(cfg.model, "model", LightningModule)
    with errors_for("data"):
        data: LightningDataModule = build(cfg.data, "data", LightningDataModule)
    timer = Timer()
    trainer = build_trainer(cfg, timer)
    check_before_launch(cfg, trainer, model, data)
    with errors_for("num_threads"):
        set_num_threads(cfg.num_threads, trainer)

    with late_errors_reported(trainer):
        trainer.fit(model, datamodule=data, ckpt_path=cfg.ckpt_path)
    report = measure(trainer, model, data, timer.time_elapsed("train"))
    report = dataclasses.replace(report, val_loss=validate(trainer, model, data))
    if cfg.test:
        keep_model(trainer)
        trainer.test(model, datamodule=data)
    if trainer.is_global_zero:
        with errors_as_warnings("The results of this run cannot be shown."):
            present(cfg, report, trainer, model)
    return report.val_loss


def build_trainer(cfg: DictConfig, timer: Timer) -> Trainer:
    """Build the Trainer with its strategy, callbacks and loggers, and a timer for the report."""
    strategy = build_strategy(cfg)
    with errors_for("callbacks"):
        callbacks = [timer, *build_callbacks(cfg)]  # others write files when training ends
    with errors_for("logger"):
        loggers: list[Logger] = build_all(cfg.logger, "logger", Logger)
    with errors_for("trainer"):
        make: Callable[..., Trainer] = hydra.utils.instantiate(cfg.trainer, _partial_=True)
        return make(strategy=strategy, callbacks=callbacks, logger=loggers or False)


def build_callbacks(cfg: DictConfig) -> list[Callback]:
    """Build the callbacks of the group, and the ones that top-level keys ask for."""
    callbacks: list[Callback] = build_all(cfg.callbacks, "callbacks", Callback)
    if not cfg.trainer.get("enable_progress_bar", True):
        callbacks = [one for one in callbacks if not isinstance(one, ProgressBar)]
    if not cfg.logger:
        callbacks = [one for one in callbacks if not isinstance(one, LearningRateMonitor)]
    if cfg.per_worker_logs:
        callbacks.append(WorkerLogs(dirpath=Path(cfg.run_dir) / "workers"))
    if cfg.report:
        settings: Any = OmegaConf.to_container(cfg, resolve=True)
        shown = {name: value for name, value in settings.items() if name not in NOT_REPORTED}
        callbacks.append(ReportCallback(cfg.run_dir, shown))
    return callbacks


def build_all(nodes: DictConfig, group: str, kind: type[Any]) -> list[Any]:
    """Build the objects of a group but those that are null."""
    names = [name for name in map(str, nodes) if nodes[name] is not None]
    return [build(nodes[name], f"{group}.{name}", kind) for name in names]


def build(node: DictConfig, name: str, kind: type[Any]) -> Any:
    """Build an object; ValueError if it is of another kind."""
    built = hydra.utils.instantiate(node)
    if not isinstance(built, kind):
        raise ValueError(
            f"{name}._target_ must make a {kind.__name__} of lightning.pytorch, got "
            f"{type(built).__module__}.{type(built).__qualname__}. In your code import "
            "lightning.pytorch, not pytorch_lightning."
        )
    return built


def check_before_launch(
    cfg: DictConfig, trainer: Trainer, model: LightningModule, data: LightningDataModule
) -> None:
    """Raise SettingsError before other processes are started, so that it is printed once."""
    strategy = trainer.strategy
    starts_others = trainer.num_devices > 1 and cfg.algorithm.get("start_method") == "popen"
    sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    if sweep and starts_others and outer_launch() is None:
        raise SettingsError(
            f"{trainer.num_devices} ranks on one machine cannot be swept by --multirun: each child"
            " would repeat the sweep. Use trainer.devices=1, or hydra/launcher=submitit_slurm."
        )
    check_machines(trainer)
    path, is_private = cfg.ckpt_path, cfg.algorithm.get("checkpoint_folder") == "private"
    if path and path not in CHECKPOINT_NAMES and not (is_private or Path(path).exists()):
        raise SettingsError(f"ckpt_path: there is no checkpoint at {Path(path).absolute()}.")
    if cfg.sample and not isinstance(model, ByteGPT):
        raise SettingsError(f"sample=true needs a ByteGPT, got {type(model).__name__}.")
    with errors_for("algorithm"):
        if isinstance(strategy, WorkerStrategy):
            strategy.check_ranks()
        if isinstance(strategy, EngineStrategy):
            strategy.settings.prepare(strategy.num_workers)
            check_validation(strategy, trainer)
    with errors_for("data"):
        if isinstance(data, ByteTextData):
            data.check(trainer.world_size)


def check_machines(trainer: Trainer) -> None:
    """Raise SettingsError if this process would wait for machines whose addresses are not given.

    Without MASTER_ADDR and MASTER_PORT Lightning takes this machine, and any free port.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    is_known = os.environ.keys() >= {"MASTER_ADDR", "MASTER_PORT"}
    if trainer.num_nodes > 1 and isinstance(environment, LightningEnvironment) and not is_known:
        raise SettingsError(
            f"trainer.num_nodes={trainer.num_nodes}, but this process does not know the other "
            f"machines. Start it on each with torchrun --nnodes={trainer.num_nodes} "
            f"--nproc-per-node={trainer.num_devices} --rdzv-backend=c10d "
            "--rdzv-endpoint=HOST:29500 --rdzv-id=NAME train.py ..., or with SLURM; or set "
            "MASTER_ADDR, MASTER_PORT and NODE_RANK."
        )


def check_validation(strategy: EngineStrategy, trainer: Trainer) -> None:
    """Raise ValueError if workers with different numbers of batches validate in an epoch."""
    schedule, workers = strategy.schedule, range(strategy.num_workers)
    steps = [] if schedule is None else [schedule.sync_every_of(worker) for worker in workers]
    if len(set(steps)) > 1 and not trainer.check_val_every_n_epoch:
        raise ValueError(
            f"with sync_every={steps} workers take different numbers of batches, and cannot"
            " validate together after a number of batches. Use"
            " trainer.check_val_every_n_epoch=1 trainer.val_check_interval=null."
        )


def set_num_threads(num_threads: int | None, trainer: Trainer) -> None:
    """Set torch's threads in this process and those that it starts; ValueError if below 1."""
    if num_threads is None:
        if trainer.strategy.root_device.type != "cpu" or trainer.num_devices == 1:
            return
        num_threads = 1
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}. Or use null.")
    os.environ["OMP_NUM_THREADS"] = str(num_threads)  # else Lightning chooses again
    torch.set_num_threads(num_threads)


def validate(trainer: Trainer, model: LightningModule, data: LightningDataModule) -> float | None:
    """Return the validation loss of the final model; every rank must call it.

    The last validation of ``fit`` may come before the end of the last overlapped round.
    """
    keep_model(trainer)
    with warnings.catch_warnings():
        # The number of validation windows is a multiple of the workers: none counts twice.
        warnings.filterwarnings("ignore", message="Using `DistributedSampler` with")
        metrics = trainer.validate(model, datamodule=data, verbose=False)
    return metrics[0].get("val/loss") if metrics else None


def keep_model(trainer: Trainer) -> None:
    """Make the next validation or test use the present model.

    Under SLURM Lightning would load the checkpoint with which the job was last queued again.
    """
    choose_checkpoint(trainer, no_checkpoint)


def no_checkpoint(path: object) -> None:
    """Choose none, whatever Lightning would load."""


def present(cfg: DictConfig, report: RunReport, trainer: Trainer, model: LightningModule) -> None:
    """Print and write the table and the text sample; add the final loss to the page."""
    folder = Path(cfg.run_dir)
    report.write(folder)
    print(f"\n{report.table()}")
    if cfg.sample and isinstance(model, ByteGPT):
        prompt = cfg.sample_prompt.encode()
        text = prompt + model.generate(prompt, cfg.sample_bytes, seed=cfg.seed)
        (folder / "sample.txt").write_bytes(text)
        print(f"\n{text.decode(errors='replace')}")
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, ReportCallback) and report.val_loss is not None:
            callback.add_validation("val/loss", report.val_loss)
    print(f"\nAll files are in {folder}")


@contextlib.contextmanager
def late_errors_reported(trainer: Trainer) -> Iterator[None]:
    """A context that turns errors about a setting, of this package or Lightning, into one line.

    Most of them are raised on all ranks: rank 0 reports the error for the ranks that it has
    started, and ends them. Other errors keep their traceback.
    """
    try:
        yield
    except (ValueError, TypeError, MisconfigurationException) as error:
        if not isinstance(error, MisconfigurationException) and not raised_here(error):
            raise
        if outer_launch() is None and trainer.is_global_zero and trainer.strategy.launcher:
            trainer.strategy.launcher.kill(signal.SIGKILL)
        elif outer_launch() is None:
            time.sleep(WAIT_FOR_RANK_0_S)
        raise SettingsError(one_line(error)) from error


def raised_here(error: BaseException) -> bool:
    """Return whether this package raised an error, or Lightning's check of the launcher."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return raised_in.startswith(("lightning_loco.", "lightning.fabric.plugins.environments."))

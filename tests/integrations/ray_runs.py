"""The program that tests of Ray start: a local Ray cluster, and runs of Ray Train on its workers.

Usage: python -m tests.integrations.ray_runs FOLDER RUN. Each run is a function below; its workers
write what they find to ``FOLDER/NAME.RANK.pt``.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_loco as loco
from lightning_loco.strategies.worker_strategy import WorkerStrategy
from tests.harness.programs import Program
from tests.harness.small_model import TinyModule, flat, quiet_trainer, worker_batch
from tests.harness.sources import ROOT
from tests.integrations import same_numbers

LIMIT_S = 1200.0
ENVIRON = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Ray starts many processes, which takes long on a busy machine; default: 60 and 30.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # or it writes a file to the home folder
}
SAMPLES, EPOCHS = 32, 3
BATCHES_OF_STEP = 2
MEMBER_STEPS = 1500
NUMERIC: dict[str, Callable[[], WorkerStrategy]] = {
    "diloco": lambda: loco.DiLoCoStrategy(sync_every=3),
    "async_diloco": lambda: loco.AsyncDiLoCoStrategy(sync_every=3, fragments=2),
    "gasloc": lambda: loco.GASLoCStrategy(topology="complete", sync_every=3),
}


def start(folder: Path, *arguments: str) -> None:
    """Run this program; the cluster is stopped when it returns."""
    command = [sys.executable, "-m", "tests.integrations.ray_runs", str(folder), *arguments]
    Program(command, ROOT, **ENVIRON).succeed(LIMIT_S)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Single samples, which a sampler shuffles and divides among the ranks."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = worker_batch(0, index, size=1)
        return inputs[0], target[0]


def fit(
    make_trainer: Callable[..., pl.Trainer],
    path: str | None = None,
    in_epoch: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train with accumulation and clipping; return the model and the numbers of rounds.

    With ``in_epoch`` the loader can go on within an epoch.
    """
    pl.seed_everything(1)
    trainer = make_trainer(
        max_epochs=EPOCHS,
        gradient_clip_val=0.5,
        accumulate_grad_batches=BATCHES_OF_STEP,
        **settings,
    )
    module = TinyModule(optimizer="Adam")
    shuffled = DataLoader(Samples(), batch_size=2, shuffle=True)
    loader = StatefulDataLoader(Samples(), batch_size=2) if in_epoch else shuffled
    trainer.fit(module, loader, ckpt_path=path)
    strategy = trainer.strategy
    assert isinstance(strategy, WorkerStrategy)
    return {
        "weights": flat(module),
        "losses": module.losses,
        "rounds": strategy.statistics.rounds,
        "ranks": (strategy.num_ranks, strategy.ranks_per_node, strategy.replica_size),
        "steps": trainer.global_step,
        "class": type(strategy).__name__,
        "process": os.getpid(),
    }


class KillOnce(pl.Callback):
    """Kills the process of a rank once, in the second epoch, when Ray has taken the report."""

    def __init__(self, marker: Path, victim: int) -> None:
        self.marker, self.victim = marker, victim

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        serves = getattr(trainer.strategy, "serves", False)  # such a rank takes no batches
        if serves and trainer.global_rank == self.victim and not self.marker.exists():
            threading.Thread(target=self._die, daemon=True).start()

    def _die(self) -> None:
        while not self.marker.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        import ray.train

        if trainer.current_epoch != 1 or self.marker.exists() or self.victim < 0:
            return
        if trainer.global_rank == min(self.victim, trainer.world_size - 1):
            ray.train.get_all_reported_checkpoints()  # waits until Ray has them
            self.marker.touch()
            if trainer.global_rank == self.victim:
                os.kill(os.getpid(), signal.SIGKILL)


def ray_trainer(strategy: WorkerStrategy, **settings: Any) -> pl.Trainer:
    """Make a Trainer as docs/ray.md does."""
    from ray.train.lightning import RayLightningEnvironment, prepare_trainer

    from lightning_loco.integrations.ray import RayLocoStrategy

    settings = {"plugins": [RayLightningEnvironment()], **settings}
    return prepare_trainer(quiet_trainer(strategy=RayLocoStrategy(strategy), **settings))


def write(folder: str, name: str, found: dict[str, Any]) -> None:
    """Write what this worker of Ray has found."""
    import ray.train

    torch.save(found, Path(folder) / f"{name}.{ray.train.get_context().get_world_rank()}.pt")


def fit_and_resume(folder: str, name: str, make: Callable[[], WorkerStrategy], victim: int) -> None:
    """Train with reports; one of Ray's workers is killed once, none if it is negative."""
    from ray.train import CheckpointUploadMode as Upload

    from lightning_loco.integrations.ray import RayReportCallback, last_report

    in_epoch = name == "in_epoch"
    report = RayReportCallback(
        every_n_train_steps=3 if in_epoch else None,
        checkpoint_upload_mode=Upload.ASYNC if name == "gasloc" else Upload.SYNC,
    )
    callbacks = [report, KillOnce(Path(folder, f"{name}.killed"), victim)]
    with last_report() as path:
        make_trainer = functools.partial(ray_trainer, make())
        found = fit(make_trainer, path, in_epoch, callbacks=callbacks)
    write(folder, name, {**found, "resumed": path is not None})


# -------------------------------------------------------------------------------- the runs


def smoke(config: dict[str, Any]) -> None:
    """Wrong uses; DiLoCo, which is killed and resumes; then more runs in the same processes."""
    folder = config["folder"]
    write(folder, "errors", {name: error_of(use) for name, use in WRONG_USES.items()})
    fit_and_resume(folder, "diloco", NUMERIC["diloco"], victim=1)
    for name in ("async_diloco", "gasloc"):
        write(folder, name, fit(functools.partial(ray_trainer, NUMERIC[name]())))


def numbers(config: dict[str, Any]) -> None:
    """The model and the methods that all front ends train with."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    found = {
        name: same_numbers.lightning(rank, same_numbers.WORKERS, name, ray_trainer)
        for name in same_numbers.METHODS
    }
    write(config["folder"], "numbers", found)


def resume_each(config: dict[str, Any]) -> None:
    """A run of each numeric method and of the others; one of Ray's workers is killed."""
    name = config["name"]
    fit_and_resume(config["folder"], name, FAMILIES[name], config["victim"])


FAMILIES: dict[str, Callable[[], WorkerStrategy]] = {
    **NUMERIC,
    "in_epoch": NUMERIC["gasloc"],
    "gossip": lambda: loco.PairwiseGossipStrategy(fetch_probability=0.5),
    "average": lambda: loco.AsyncModelAverageStrategy(interval_s=0.05),
    "decoupled": lambda: loco.DecoupledDiLoCoStrategy(sync_every=6, fragments=3),
    "remote": lambda: loco.RemoteOptimizerStrategy(num_workers=2),
    "of_two": lambda: loco.DiLoCoStrategy(sync_every=3, replica_size=2),
    "of_node": lambda: loco.DiLoCoStrategy(sync_every=3, replica_size="node"),
}


def members(config: dict[str, Any]) -> None:
    """An elastic run, of which one member is killed."""
    folder = config["folder"]

    def make() -> WorkerStrategy:
        elastic = loco.Elastic(os.environ["TORCHFT_LIGHTHOUSE"], min_workers=1, host="127.0.0.1")
        return loco.DiLoCoStrategy(sync_every=10, membership=elastic, timeout_s=60.0)

    killed, rejoined = Path(folder, "member.killed"), Path(folder, "member.rejoined")

    class KillMember(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            import ray.train

            is_second = ray.train.get_context().get_world_rank() == 1
            if is_second and killed.exists():
                rejoined.touch()
            elif is_second and trainer.global_step == 20:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            elif not rejoined.exists():
                time.sleep(0.1)

    pl.seed_everything(1)
    trainer = ray_trainer(make(), max_steps=MEMBER_STEPS, max_epochs=-1, callbacks=[KillMember()])
    module = TinyModule()
    trainer.fit(module, DataLoader(Samples(), batch_size=2, shuffle=True))
    assert isinstance(trainer.strategy, WorkerStrategy)
    statistics = trainer.strategy.statistics
    found = {
        "weights": flat(module),
        "members": statistics.members,
        "ranks": (trainer.world_size, trainer.global_rank),
        "process": os.getpid(),
        "steps": len(module.losses),
    }
    write(folder, "members", found)


def trial(config: dict[str, Any]) -> dict[str, float]:
    """A trial of Ray Tune without Ray Train: an ordinary Trainer in a process that Tune keeps."""
    pl.seed_everything(1)
    strategy = loco.DiLoCoStrategy(sync_every=2)
    trainer = quiet_trainer(strategy=strategy, devices=1, max_epochs=1)
    module = TinyModule(lr=config["lr"])
    trainer.fit(module, DataLoader(Samples(), batch_size=2, shuffle=True))
    return {"loss": module.losses[-1], "process": os.getpid()}


# ----------------------------------------------------------------------------- wrong uses


def error_of(use: Callable[[], Any]) -> str:
    """Return the type and the text of the error that a use raises."""
    try:
        use()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _fit_with(strategy: Any, callback: str) -> None:
    from ray.train import lightning as of_ray

    from lightning_loco.integrations import ray as ours

    one = getattr(ours if callback == "RayReportCallback" else of_ray, callback)()
    plugins = [of_ray.RayLightningEnvironment()]
    trainer = quiet_trainer(strategy=strategy, plugins=plugins, callbacks=[one], max_steps=1)
    trainer.fit(TinyModule(), DataLoader(Samples(), batch_size=2))


def _ray_strategy(method: Any) -> Any:
    from lightning_loco.integrations.ray import RayLocoStrategy

    return RayLocoStrategy(method)


def _ray_ddp() -> Any:
    from ray.train.lightning import RayDDPStrategy

    return RayDDPStrategy()


def _environment() -> Any:
    from ray.train.lightning import RayLightningEnvironment

    return RayLightningEnvironment()


WRONG_USES: dict[str, Callable[[], Any]] = {
    "the method itself": lambda: quiet_trainer(
        strategy=loco.DiLoCoStrategy(), plugins=[_environment()]
    ),
    "by name": lambda: quiet_trainer(strategy="diloco"),
    "no environment": lambda: quiet_trainer(strategy=_ray_strategy(loco.DiLoCoStrategy())),
    "DDP and our callback": lambda: _fit_with(_ray_ddp(), "RayReportCallback"),
    "our strategy and Ray's callback": lambda: _fit_with(
        _ray_strategy(loco.DiLoCoStrategy()), "RayTrainReportCallback"
    ),
    "membership without torchft": lambda: _fit_with(
        _ray_strategy(loco.DiLoCoStrategy(membership=loco.Elastic("localhost:1"))),
        "RayReportCallback",
    ),
    "shards": lambda: _ray_strategy(loco.LocoModelParallelStrategy()),
    "no method": lambda: _ray_strategy(_ray_ddp()),
}


# ------------------------------------------------------------------------------ the driver


def main(folder: str, run: str, arguments: list[str]) -> None:
    """Start a cluster, run, and stop it."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from tests.integrations import ray_runs

    settings: dict[str, Any] = {"folder": folder}
    num_workers = int(arguments[0])
    if run == "resume_each":
        settings |= {"name": arguments[1], "victim": int(arguments[2])}
    session = tempfile.mkdtemp(prefix="ray")  # short: paths of sockets are
    ray.init(num_cpus=num_workers, include_dashboard=False, _temp_dir=session)
    try:
        if run == "trial":
            _tune(ray_runs.trial, folder)
            return
        torch_config = None
        if run == "members":
            from ray.train.v2.torch.torchft_config import TorchftConfig

            lighthouse = {"bind": "127.0.0.1:0", "min_replicas": 1, "join_timeout_ms": 200}
            torch_config = TorchftConfig(lighthouse_kwargs=lighthouse)
        TorchTrainer(
            getattr(ray_runs, run),
            train_loop_config=settings,
            torch_config=torch_config,
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(
                storage_path=f"{folder}/storage", failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()
    finally:
        ray.shutdown()
        shutil.rmtree(session, ignore_errors=True)


def _tune(objective: Callable[[dict[str, Any]], dict[str, float]], folder: str) -> None:
    from ray import tune

    results = tune.Tuner(
        objective,
        param_space={"lr": tune.grid_search([0.01, 0.02, 0.01])},
        tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=f"{folder}/storage"),
    ).fit()
    assert not results.errors
    torch.save([one.metrics for one in results], Path(folder, "trials.pt"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])

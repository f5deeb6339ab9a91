"""DiLoCo on two workers of Ray Train, which resumes from Ray's checkpoint if a worker is lost.

What it shows: the strategy, the callback and ckpt_path are all that differs from Ray's own example
of Lightning. The last worker kills itself once; Ray starts both again.

Run it: pip install -c constraints.txt -e ".[ray]", then python examples/ray_train.py
"""

import os
import signal
import tempfile
from pathlib import Path

import ray
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_all_reported_checkpoints
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_loco as loco
from lightning_loco.integrations.ray import RayLocoStrategy, RayReportCallback, last_report


class Surface(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        points, heights = batch
        loss = nn.functional.mse_loss(self.net(points), heights)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class LoseOne(Callback):
    """Kills a worker once, in the third epoch."""

    def __init__(self, marker: str) -> None:
        self.marker = Path(marker)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 2 and trainer.global_rank == 1 and not self.marker.exists():
            get_all_reported_checkpoints()  # waits until Ray has the reports
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(config: dict[str, str]) -> None:
    seed_everything(0)
    points = torch.rand(2048, 2) * 4 - 2
    heights = (points[:, :1].sin() * points[:, 1:].cos()).float()
    trainer = Trainer(
        strategy=RayLocoStrategy(loco.DiLoCoStrategy(sync_every=20)),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayReportCallback(), LoseOne(config["marker"])],
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer = prepare_trainer(trainer)
    loader = DataLoader(TensorDataset(points, heights), batch_size=16, shuffle=True)
    with last_report() as path:
        print(f"from {'the start' if path is None else 'the last report'}")
        trainer.fit(Surface(), loader, ckpt_path=path)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, include_dashboard=False)
        result = TorchTrainer(
            train,
            train_loop_config={"marker": f"{folder}/killed"},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        ).fit()
        ray.shutdown()
        assert result.metrics is not None
        print(f"loss {result.metrics['loss']:.4f} after {result.metrics['step']} local steps")


if __name__ == "__main__":
    main()

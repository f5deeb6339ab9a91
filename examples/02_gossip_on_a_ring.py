"""Four workers gossip: each one sends its parameters to its neighbours only.

What it shows: a topology is a name or your own graph, here two pairs of workers with a
single link between the pairs. Such a graph mixes worse (its spectral gap is smaller), so the
workers are farther apart when a round comes: the consensus distance, measured by the
ConsensusMonitor. The model after fit is the mean of all workers.

Run it: python examples/02_gossip_on_a_ring.py
"""

from typing import Any

import networkx as nx
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_loco as loco
from lightning_loco.topology import as_topology, spectral_gap

WORKERS = 4


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        """Lightning's sampler gives each worker a share; the noise makes the shares differ."""
        generator = torch.Generator().manual_seed(1)
        plane = torch.rand(1024, 2, generator=generator) * 4 - 2
        heights = (plane[:, :1] * 2).sin() * plane[:, 1:].cos()
        heights += torch.randn(heights.shape, generator=generator)
        return DataLoader(TensorDataset(plane, heights), batch_size=16, shuffle=True)


def fit(label: str, topology: Any) -> None:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy=loco.GASLoCStrategy(topology, sync_every=8),
        callbacks=[loco.ConsensusMonitor()],
        accelerator="cpu",
        devices=WORKERS,
        max_epochs=10,
        log_every_n_steps=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression())
    if trainer.is_global_zero:
        graph = as_topology(topology)
        messages = [len(graph.receivers(worker, WORKERS)) for worker in range(WORKERS)]
        print(
            f"{label:<12}  messages per round {messages}  "
            f"spectral gap {spectral_gap(graph, WORKERS):.3f}  "
            f"consensus distance {trainer.callback_metrics['loco/consensus_distance']:.3f}"
        )


def main() -> None:
    fit("ring", "ring")
    fit("linked pairs", nx.Graph([(0, 1), (1, 2), (2, 3)]))


if __name__ == "__main__":
    main()

"""Four Trainers that are started one by one; one is killed, and comes back.

What it shows: pairwise gossip needs no common job. Every worker is a separate Trainer and finds
the others in a file. Worker w4 is killed: to the others it is a peer that does not answer. When it
is started again it takes part as before.

Run it: python examples/07_separate_peers.py
One worker by itself, on any machine: python examples/07_separate_peers.py NODES.yaml w1
"""

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_loco as loco

NAMES = ("w1", "w2", "w3", "w4")


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        return (self.net(inputs) - inputs.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(1920, 2)), batch_size=16, shuffle=True)


class StopFile(Callback):
    """Ends the training when there is a file named stop beside the list of nodes."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        time.sleep(0.01)
        trainer.should_stop = Path(trainer.strategy.settings.nodes).with_name("stop").exists()


def train(nodes: str, name: str) -> None:
    """One worker; the same seed everywhere: all start from the same parameters."""
    seed_everything(0, verbose=False)
    strategy = loco.PairwiseGossipStrategy(interpolation="clock", nodes=nodes, name=name)
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        strategy=strategy, callbacks=[StopFile()], accelerator="cpu", max_epochs=-1, **settings
    )
    trainer.fit(Regression())
    print(f"{name}: {trainer.global_step} steps, {strategy.statistics.rounds} blends", flush=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_until_served(port: int) -> None:
    refused = 1
    while refused:
        time.sleep(0.1)
        with socket.socket() as probe:
            refused = probe.connect_ex(("127.0.0.1", port))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        nodes, ports = Path(folder) / "nodes.yaml", {name: free_port() for name in NAMES}
        entries = [f"{{name: {n}, host: 127.0.0.1, port: {p}}}" for n, p in ports.items()]
        nodes.write_text(f"nodes: [{', '.join(entries)}]\n")
        command = (sys.executable, __file__, str(nodes))
        workers = {name: subprocess.Popen([*command, name]) for name in NAMES}
        wait_until_served(ports["w4"])
        workers["w4"].kill()
        workers["w4"].wait()
        print("w4 was killed", flush=True)
        workers["w4"] = subprocess.Popen([*command, "w4"])
        wait_until_served(ports["w4"])
        time.sleep(2)  # for some blends
        nodes.with_name("stop").touch()
        sys.exit(any([worker.wait() for worker in workers.values()]))


if __name__ == "__main__":
    train(*sys.argv[1:]) if len(sys.argv) == 3 else main()

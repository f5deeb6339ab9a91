"""Async DiLoCo as in PCCL's example, with a worker that joins late.

What it shows: each worker is a separate Trainer that may start at any time. A third one joins
while a round of two others is pending, receives the state, and has the result of that round as
well: all end with the same weights. It needs the extra "elastic".

Run it: python examples/10_late_joiner.py
One worker by itself, with a lighthouse: python examples/10_late_joiner.py HOST:PORT w1 FILE
"""

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_loco as loco


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
        inputs = torch.randn(1920, 2, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs), batch_size=16, shuffle=True)


class EndTogether(Callback):
    """Ends the training at a local step that the last worker writes into a file."""

    def __init__(self, file: Path) -> None:
        self.file, self.own_steps = file, 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if self.own_steps == 0:
            print("joined", flush=True)
        self.own_steps += 1
        time.sleep(0.01)
        steps = trainer.strategy.engine.worker.steps  # of the run
        if self.own_steps < steps and not self.file.exists():  # it joined late
            self.file.write_text(str(steps + 60))
        trainer.should_stop = self.file.exists() and steps >= int(self.file.read_text())


def train(lighthouse: str, name: str, end: str) -> None:
    strategy = loco.AsyncDiLoCoStrategy(
        sync_every=10,
        fragments=None,  # these four are PCCL's settings
        warm_start=False,
        outer_lr=0.7,
        outer_momentum=0.0,
        membership=loco.Elastic(lighthouse, min_workers=2, name=name, host="127.0.0.1"),
    )
    module, callback = Regression(), EndTogether(Path(end))
    settings = {"accelerator": "cpu", "max_epochs": -1, "logger": False}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=strategy, callbacks=[callback], **settings, **quiet)
    trainer.fit(module)
    weights = module.net.weight.flatten().tolist()
    print(f"{name}: took {callback.own_steps} local steps, weights {weights}", flush=True)


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    serve = [Path(sys.executable).with_name("lightning-loco"), "lighthouse", "--bind", address]
    lighthouse = subprocess.Popen(serve, stderr=subprocess.DEVNULL)
    try:
        with tempfile.TemporaryDirectory() as folder:
            names, end = ("w1", "w2", "w3"), f"{folder}/end"
            one, two, three = ([sys.executable, __file__, address, name, end] for name in names)
            first = subprocess.Popen(one, stdout=subprocess.PIPE, text=True)
            workers = [first, subprocess.Popen(two)]
            any(line == "joined\n" for line in first.stdout)  # reads on until then
            workers.append(subprocess.Popen(three))
            print(first.stdout.read(), flush=True)
            sys.exit(any([worker.wait() for worker in workers]))
    finally:
        lighthouse.terminate()


if __name__ == "__main__":
    train(*sys.argv[1:]) if len(sys.argv) == 4 else main()

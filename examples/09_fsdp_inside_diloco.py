"""Two workers of two ranks: FSDP2 shards the model inside a worker, DiLoCo joins the workers.

What it shows: configure_model is as in any FSDP2 script, with the mesh of one worker. Each rank
holds a half of the parameters, gradients and optimizer state, and of DiLoCo's outer state. In a
round it sends its half to the rank that holds the same half in the other worker.

Run it: python examples/09_fsdp_inside_diloco.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import lightning_loco as loco
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import TransformerBlock

WIDTH, CONTEXT = 64, 64


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(TransformerBlock(WIDTH, 4, 0.0) for _ in range(2))
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(nn.functional.rms_norm(hidden, (WIDTH,)))


class LanguageModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()

    def configure_model(self) -> None:
        if isinstance(self.gpt, FSDPModule):  # it is called again by validate and test
            return
        mesh = self.device_mesh["data_parallel"]  # the ranks of this worker only
        for block in self.gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.gpt, mesh=mesh)

    def loss(self, windows: Tensor) -> Tensor:
        logits = self.gpt(windows[:, :-1].long())
        return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].long().flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            total = sum(p.numel() for p in self.parameters())
            held = sum(p.to_local().numel() for p in self.parameters())
            print(f"rank 0 holds {held} of {total} parameters")


def main() -> None:
    seed_everything(0, verbose=False)
    method = loco.DiLoCoStrategy(sync_every=10)
    strategy = loco.LocoModelParallelStrategy(method, data_parallel_size=2)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4,
        max_steps=100,
        limit_val_batches=4,
        val_check_interval=100,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = ByteTextData(batch_size=8, context=CONTEXT, max_bytes=500_000)
    trainer.fit(LanguageModel(), data)
    if trainer.is_global_zero:
        cost = trainer.strategy.statistics
        print(
            f"validation loss {trainer.callback_metrics['val_loss']:.3f} after "
            f"{trainer.global_step} local steps of {strategy.num_workers} workers with "
            f"{strategy.replica_size} ranks each, {cost.rounds} rounds and "
            f"{cost.bytes_sent / 1000:.0f} kB sent by each rank"
        )


if __name__ == "__main__":
    main()

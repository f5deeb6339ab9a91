"""A small byte-level GPT that trains on a CPU."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torchmetrics.classification import MulticlassAccuracy

from lightning_loco.app.demo.optimizers import check_optimizer, make_optimizer

NUM_BYTES = 256


class TransformerBlock(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a GELU MLP, each with a residual.

    Args:
        width: Size of the residual stream; a multiple of ``num_heads``.
        num_heads: Attention heads.
        dropout: Probability of dropping an activation in training, in [0, 1).
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states (B, T, width) to hidden states (B, T, width)."""
        hidden = hidden + self._drop(self._attend(self.attention_norm(hidden)))
        mlp = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + self._drop(mlp)

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = self.attention_in(hidden).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))

    def _drop(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, self.dropout, self.training) if self.dropout else hidden


class ByteGPT(LightningModule):
    """Predicts the next byte of a text; 0.84 million parameters with the defaults.

    The loss is the mean cross-entropy ``-log p(byte[t+1] | byte[<=t])`` in nats per byte. The
    learning rate rises linearly for ``warmup_steps``, then follows a cosine down to a tenth of
    ``lr`` at ``total_steps``.

    Args:
        num_layers: Transformer blocks, at least 1.
        num_heads: Attention heads per block; divides ``width``.
        width: Size of the residual stream.
        context: Longest window the model sees, in bytes.
        dropout: In [0, 1).
        lr: Peak learning rate, positive.
        warmup_steps: Local steps of linear warm-up, at least 0.
        weight_decay: On matrices and embeddings only, at least 0.
        total_steps: Local steps of the whole schedule; None takes them from the Trainer.
        optimizer: ``"adamw"``, or ``"muon"``: Muon for the matrices of the blocks, and AdamW for
            embeddings and vectors. Muon needs PyTorch 2.9.

    Raises:
        ValueError: If a size or rate is outside its range, or an optimizer does not exist.

    Example:
        >>> model = ByteGPT(num_layers=1, num_heads=2, width=16, context=8)
        >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 256])
    """

    def __init__(
        self,
        *,
        num_layers: int = 4,
        num_heads: int = 4,
        width: int = 128,
        context: int = 128,
        dropout: float = 0.0,
        lr: float = 3e-3,
        warmup_steps: int = 50,
        weight_decay: float = 0.1,
        total_steps: int | None = None,
        optimizer: Literal["adamw", "muon"] = "adamw",
    ) -> None:
        super().__init__()
        check_optimizer(optimizer)
        for name, value, lowest in (
            ("num_layers", num_layers, 1),
            ("num_heads", num_heads, 1),
            ("width", width, 1),
            ("context", context, 1),
            ("warmup_steps", warmup_steps, 0),
            ("weight_decay", weight_decay, 0),
            ("total_steps", total_steps, 1),
        ):
            if value is not None and value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}.")
        if width % num_heads:
            raise ValueError(
                f"width must be a multiple of num_heads, got width={width} and"
                f" num_heads={num_heads}."
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout}.")
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr}.")
        self.save_hyperparameters()
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, num_heads, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.head.weight = self.embedding.weight
        self.accuracy = MulticlassAccuracy(NUM_BYTES, average="micro", validate_args=False)
        self._initialise(num_layers)

    def _initialise(self, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            # Each block adds two terms to the residual stream, whose variance should not grow.
            residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if residual else 0.02)

    def configure_model(self) -> None:
        """Shard the model over the ranks of a worker, if the strategy has a device mesh."""
        mesh = self.device_mesh
        if mesh is None or any(isinstance(p, DTensor) for p in self.parameters()):
            return
        if mesh["tensor_parallel"].size() > 1:
            plan = {"mlp_in": ColwiseParallel(), "mlp_out": RowwiseParallel()}
            for block in self.blocks:
                parallelize_module(block, mesh["tensor_parallel"], plan)
        if mesh["data_parallel"].size() > 1 or mesh.size() == 1:
            for block in self.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(self, mesh=mesh["data_parallel"])

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes (B, T), int64 with T <= context, to logits (B, T, 256)."""
        length = tokens.shape[1]
        hidden = self.embedding(tokens) + self.position.weight[:length]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of windows (B, context + 1), uint8 or int64."""
        return F.cross_entropy(*self._predict(windows))

    def _predict(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of all bytes but the first of each window, and these bytes."""
        windows = windows.long()
        return self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of one local step, logged for this worker only."""
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss and the accuracy of the next byte, reduced over all workers."""
        self._log_evaluation("val", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the same on the validation text as ``test/loss`` and ``test/accuracy``."""
        self._log_evaluation("test", batch)

    def _log_evaluation(self, name: str, batch: Tensor) -> None:
        logits, targets = self._predict(batch)
        self.log(
            f"{name}/loss",
            F.cross_entropy(logits, targets),
            on_step=False,
            on_epoch=True,
            sync_dist=True,
            prog_bar=True,
            batch_size=len(batch),
        )
        self.accuracy.update(logits, targets)
        self.log(f"{name}/accuracy", self.accuracy, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer with warm-up and cosine decay, without weight decay of vectors.

        ValueError if neither ``total_steps`` nor the Trainer says when training ends.
        """
        total_steps = self.hparams["total_steps"] or self.trainer.estimated_stepping_batches
        if math.isinf(total_steps):
            raise ValueError(
                "The cosine schedule needs to know when training ends, and the Trainer has no end."
                " Set trainer.max_steps, or model.total_steps."
            )
        name, lr, decay = (self.hparams[key] for key in ("optimizer", "lr", "weight_decay"))
        optimizer = make_optimizer(name, self.blocks, self, lr, decay)
        warmup_steps = self.hparams["warmup_steps"]
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, warmup_steps, int(total_steps))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def generate(
        self, prompt: bytes, num_bytes: int, *, temperature: float = 0.8, seed: int = 0
    ) -> bytes:
        """Continue a text, one byte at a time.

        Args:
            prompt: Text to continue, at least one byte; the model sees its last ``context`` bytes.
            num_bytes: How many bytes to add, at least 0.
            temperature: Divides the logits; 0 always takes the most likely byte.
            seed: Seed of the sampling; the same seed gives the same text.

        Returns:
            The new bytes, without the prompt.

        Raises:
            ValueError: If the prompt is empty, or a count or temperature is negative.
        """
        if not prompt:
            raise ValueError(
                "generate needs a prompt of at least one byte, got b''."
                " Use prompt=b'\\n' to start a line."
            )
        if num_bytes < 0 or temperature < 0:
            raise ValueError(
                f"num_bytes and temperature must be at least 0, got {num_bytes} and {temperature}."
            )
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor(list(prompt), device=self.device)
        was_training = self.training
        self.eval()
        for _ in range(num_bytes):
            logits = self(text[None, -self.hparams["context"] :])[0, -1].float().cpu()
            if temperature == 0:
                byte = logits.argmax()[None]
            else:
                byte = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            text = torch.cat([text, byte.to(text.device)])
        self.train(was_training)
        return bytes(text[len(prompt) :].tolist())


def learning_rate_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return the factor of the peak learning rate: linear warm-up, then a cosine from 1 to 0.1.

    Example:
        >>> [round(learning_rate_factor(step, 2, 6), 2) for step in range(7)]
        [0.5, 1.0, 1.0, 0.87, 0.55, 0.23, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))

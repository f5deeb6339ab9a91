"""DiLoCo in a loop of Lightning Fabric, as LitGPT has one: validation, checkpoints and a resume.

What it shows: the strategy, `consensus()` around validation and `finish()` at the end are all that
differs from a loop with DDP. `fabric.save` and `fabric.load` keep the state of both workers.

Run it: python examples/11_fabric.py
"""

import os
import tempfile

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_loco import DiLoCoStrategy
from lightning_loco.integrations.fabric import FabricLocoStrategy

TEXT = "the cat sat on the mat, and the dog sat on the log. " * 200
CONTEXT = 16


class Model(nn.Module):
    """Predicts the next character from the last ones."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(num_characters, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, num_characters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over all positions."""
        hidden, _ = self.rnn(self.characters(tokens[:, :-1]))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def datasets() -> tuple[TensorDataset, TensorDataset, int]:
    """Return windows of the text to train and to validate on, and the number of characters."""
    alphabet = sorted(set(TEXT))
    tokens = torch.tensor([alphabet.index(letter) for letter in TEXT])
    windows = tokens.unfold(0, CONTEXT + 1, 4).clone()
    return TensorDataset(windows[100:]), TensorDataset(windows[:100]), len(alphabet)


@torch.no_grad()
def validate(fabric: Fabric, model: nn.Module, loader: DataLoader) -> float:
    """Return the loss of the mean of all workers on their shares of the validation data."""
    model.eval()
    with fabric.strategy.consensus():
        losses = torch.stack([model(tokens) for (tokens,) in loader])
        loss = fabric.all_reduce(losses.mean())
    model.train()
    return float(loss)


def main(folder: str) -> None:
    """Train, save, load what was saved, and train on."""
    strategy = FabricLocoStrategy(DiLoCoStrategy(sync_every=10))
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    fabric.seed_everything(0)
    train_data, validation_data, num_characters = datasets()
    model = Model(num_characters)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    train_loader, validation_loader = fabric.setup_dataloaders(
        DataLoader(train_data, batch_size=32, shuffle=True), DataLoader(validation_data, 25)
    )
    path = os.path.join(fabric.broadcast(folder), "last.ckpt")
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    for epoch in range(4):
        if epoch == 2:  # as a run that is started again would do
            fabric.load(path, state)
        for (tokens,) in train_loader:
            loss = model(tokens)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        state["epoch"] = epoch + 1
        loss = validate(fabric, model, validation_loader)
        fabric.print(f"epoch {epoch + 1}: validation loss {loss:.3f} of the mean of both workers")
        fabric.save(path, state)
    rounds = fabric.strategy.statistics.rounds
    fabric.strategy.finish()
    fabric.print(f"{rounds} rounds; the model is the mean of both workers")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)

"""The demo's inner optimizers: Muon and AdamW combined, and MuLoCo, which resumes exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_loco import DiLoCoStrategy
from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.app.demo.optimizers import Together, make_optimizer
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import flat

needs_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is there from PyTorch 2.9 on"
)
STEPS = 14


def small(optimizer: str = "muon", lr: float = 0.01) -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(
        num_layers=2, num_heads=2, width=16, context=12, total_steps=STEPS, lr=lr,
        warmup_steps=3, optimizer=optimizer,
    )  # fmt: skip


def windows(count: int, seed: int = 0) -> Tensor:
    """Return text in which each byte is determined by the one before."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 8, (count, 1), generator=generator)
    return ((starts + torch.arange(13)) % 8 + 97).to(torch.uint8)


def step(model: ByteGPT, optimizers: list[Any], seed: int) -> float:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = model.loss(windows(4, seed))
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


@needs_muon
def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = small()
    optimizer = model.configure_optimizers()["optimizer"]
    muon, embeddings, vectors = (
        {id(p) for p in group["params"]} for group in optimizer.param_groups
    )
    names = dict(model.named_parameters())
    assert muon == {id(p) for n, p in names.items() if n.startswith("blocks") and p.ndim == 2}
    assert embeddings == {id(names["embedding.weight"]), id(names["position.weight"])}
    assert vectors == {id(p) for p in names.values() if p.ndim == 1}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]


@needs_muon
def test_steps_are_those_of_separate_optimizers() -> None:
    together, apart = small(), small()
    one = together.configure_optimizers()
    by_hand = [
        torch.optim.Muon(
            [p for n, p in apart.named_parameters() if "blocks" in n and p.ndim == 2],
            lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": [apart.embedding.weight, apart.position.weight], "weight_decay": 0.1},
                {
                    "params": [p for p in apart.parameters() if p.ndim == 1],
                    "weight_decay": 0.0,
                },
            ],
            lr=0.01,
            betas=(0.9, 0.95),
        ),
    ]  # fmt: skip
    schedule = one["lr_scheduler"]["scheduler"]
    for seed in range(6):
        for group in [group for optimizer in by_hand for group in optimizer.param_groups]:
            group["lr"] = 0.01 * schedule.lr_lambdas[0](seed)
        assert step(together, [one["optimizer"]], seed) == step(apart, by_hand, seed)
        schedule.step()
        assert torch.equal(flat(together), flat(apart))


@needs_muon
def test_a_loaded_state_continues_exactly() -> None:
    model, again = small(), small()
    optimizer, other = (make_optimizer("muon", m.blocks, m, 0.01, 0.1) for m in (model, again))
    for seed in range(3):
        step(model, [optimizer], seed)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(3, 6):
        step(model, [optimizer], seed)
        step(again, [other], seed)
    assert torch.equal(flat(model), flat(again))


def test_a_closure_is_called_once() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = Together(*(torch.optim.SGD([w], lr=1.0, momentum=0.5) for w in weights))
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (weights[0] + 2 * weights[1]).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    assert calls == 1
    assert [w.tolist() for w in weights] == [[0.0, 0.0], [-1.0, -1.0]]
    assert set(optimizer.state) == set(weights)


# -------------------------------------------------------------------------------- MuLoCo


def train(
    rank: int, world: int, folder: str, resume: str | None = None
) -> tuple[float, Tensor, Tensor]:
    """Train with DiLoCo; return the last loss, the weights, and Muon's state of a matrix."""
    checkpoint = ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=6, save_top_k=-1
    )
    trainer = make_trainer(
        DiLoCoStrategy(sync_every=4, outer_momentum=0.5),
        max_steps=STEPS,
        callbacks=[checkpoint],
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    model = small()
    loader = StatefulDataLoader(TensorDataset(windows(32 * world)), batch_size=4, collate_fn=stack)
    trainer.fit(model, loader, ckpt_path=resume)
    (optimizer,) = trainer.optimizers
    memory = optimizer.state[model.blocks[0].mlp_in.weight]["momentum_buffer"]
    return float(trainer.callback_metrics["train/loss"]), flat(model), memory.clone()


def stack(batch: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([window for (window,) in batch])


@needs_muon
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_muloco_learns_and_resumes_within_a_round_exactly(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(train, str(tmp_path), world=2)
    resumed = pool.run(train, str(tmp_path), str(tmp_path / "step=6.ckpt"), world=2)
    for (loss, weights, memory), (loss_again, weights_again, memory_again) in zip(
        whole, resumed, strict=True
    ):
        assert loss < 3.0  # nats per byte; 5.5 at the start
        assert loss == loss_again
        assert torch.equal(weights, weights_again)
        assert torch.equal(memory, memory_again)
        assert torch.equal(weights, whole[0][1])
    assert not torch.equal(whole[0][2], whole[1][2])  # each worker keeps its own


def test_an_older_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match=r"needs torch.optim.Muon of PyTorch 2.9 or newer, got Py"):
        small("muon")
    small("adamw")

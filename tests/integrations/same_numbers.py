"""One model, one order of the data and one loop, written for each front end.

Each function below trains with local steps of several batches and with clipping, and returns the
parameters of this worker after every local step and, in the last row, at the end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

import lightning_loco as loco
from lightning_loco.engine import Engine
from lightning_loco.integrations.fabric import FabricLocoStrategy
from tests.harness.pool import PoolEnvironment, make_trainer
from tests.harness.small_model import FEATURES, flat

STEPS, BATCHES_OF_STEP, SAMPLES_OF_BATCH, CLIP, LR = 50, 2, 2, 0.5, 0.01
WORKERS = 2
# No round is due after the last step, where a plain loop would make it and a Trainer would not.
METHODS: dict[str, Callable[[], Any]] = {
    "DiLoCo": lambda: loco.DiLoCoStrategy(sync_every=7),
    "async DiLoCo": lambda: loco.AsyncDiLoCoStrategy(sync_every=12),
    "GASLoC": lambda: loco.GASLoCStrategy(topology="complete", sync_every=6, momentum=0.3),
}


class Network(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(inputs).squeeze(-1) - labels).square().mean()}


def samples() -> list[dict[str, Tensor]]:
    """Return the samples of all workers in the order in which Accelerate divides them."""
    count = STEPS * BATCHES_OF_STEP * SAMPLES_OF_BATCH * WORKERS
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    labels = inputs.sin().sum(1)
    return [{"inputs": one, "labels": other} for one, other in zip(inputs, labels, strict=True)]


def batches_of(rank: int) -> DataLoader[Any]:
    """Return a worker's batches: every second one."""
    batches = list(DataLoader(samples(), SAMPLES_OF_BATCH))  # type: ignore[arg-type]
    return DataLoader(batches[rank::WORKERS], batch_size=None)


def watched(model: nn.Module) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """Return an optimizer, and a list that gets the parameters after each of its steps."""
    seen: list[Tensor] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    optimizer.register_step_post_hook(lambda *_: seen.append(flat(model).clone()))
    return optimizer, seen


def numbers(model: nn.Module, seen: list[Tensor]) -> Tensor:
    return torch.stack([*seen, flat(model)])


# ------------------------------------------------------------------------- one per front end


def plain_loop(rank: int, world: int, name: str) -> Tensor:
    model = Network()
    optimizer, seen = watched(model)
    engine = Engine.from_settings(model, METHODS[name]().settings)
    for index, batch in enumerate(batches_of(rank), 1):
        (model(**batch)["loss"] / BATCHES_OF_STEP).backward()
        if index % BATCHES_OF_STEP == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            engine.step()
    engine.finish()
    engine.close()
    return numbers(model, seen)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()
        self.seen: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.network(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer, self.seen = watched(self.network)
        return optimizer


def lightning(
    rank: int,
    world: int,
    name: str,
    make: Callable[..., Trainer] = make_trainer,  # or another one, for Ray
) -> Tensor:
    trainer = make(
        METHODS[name](),
        max_epochs=1,
        accumulate_grad_batches=BATCHES_OF_STEP,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
    )
    module = Module()
    trainer.fit(module, batches_of(rank))
    return numbers(module, module.seen)


def fabric(rank: int, world: int, name: str) -> Tensor:
    strategy = FabricLocoStrategy(METHODS[name]())
    fabric = Fabric(
        accelerator="cpu", devices=world, strategy=strategy, plugins=[PoolEnvironment()]
    )
    fabric.launch()
    network = Network()
    optimizer, seen = watched(network)
    model, steps = fabric.setup(network, optimizer)
    loader = fabric.setup_dataloaders(batches_of(rank), use_distributed_sampler=False)
    for index, batch in enumerate(loader, 1):
        is_last = index % BATCHES_OF_STEP == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(model(**batch)["loss"] / BATCHES_OF_STEP)
        if is_last:
            fabric.clip_gradients(model, steps, max_norm=CLIP)
            steps.step()
            steps.zero_grad()
    strategy.finish()
    return numbers(network, seen)


def hugging_face(rank: int, world: int, name: str) -> Tensor:
    import transformers

    from lightning_loco.integrations.huggingface import LocoTrainerMixin
    from tests.integrations.hugging_face_runs import join, quiet

    class InOrder(LocoTrainerMixin, transformers.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    join(rank, world)
    network = Network()
    optimizer, seen = watched(network)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=SAMPLES_OF_BATCH,
            gradient_accumulation_steps=BATCHES_OF_STEP,
            max_grad_norm=CLIP,
            lr_scheduler_type="constant",
            save_strategy="no",
            **quiet(),
        )
        InOrder(
            network,
            arguments,
            train_dataset=samples(),
            optimizers=(optimizer, None),
            loco=METHODS[name](),
        ).train()
    return numbers(network, seen)


IN_POOL: dict[str, Callable[[int, int, str], Tensor]] = {
    "a plain loop": plain_loop,
    "Lightning's Trainer": lightning,
    "Fabric": fabric,
    "Hugging Face": hugging_face,
}

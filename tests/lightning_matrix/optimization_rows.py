"""Rows: optimizers, schedules, precision, and models."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.lightning_matrix.row_run import Facts, Model, RowRun, loader
from tests.lightning_matrix.trainer_rows import fit

# ------------------------------------------------------------------------ local steps


def accumulation(run: RowRun) -> Facts:
    return fit(run, accumulate_grad_batches=2)


def clipping_by_norm(run: RowRun) -> Facts:
    return fit(run, gradient_clip_val=0.1)


def clipping_by_value(run: RowRun) -> Facts:
    return fit(run, gradient_clip_val=0.1, gradient_clip_algorithm="value")


class OwnClipping(Model):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.calls["configure_gradient_clipping"] += 1
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


def own_clipping(run: RowRun) -> Facts:
    return fit(run, OwnClipping())


class GradientNorm(Model):
    """Logs the norm of the gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.calls["gradients"] += len(norms)
        self.log("norm", torch.stack(norms).norm())


def gradient_norm(run: RowRun) -> Facts:
    return fit(run, GradientNorm())


class WarmUp(Model):
    """The warm-up recipe in Lightning's documentation."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.trainer.global_step + 1) / 4)


def own_optimizer_step(run: RowRun) -> Facts:
    return fit(run, WarmUp())


class StepSchedule(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def final_rate(run: RowRun, module: Model) -> Facts:
    trainer = run.trainer()
    trainer.fit(module, loader(), loader(8, 1))
    (config,) = trainer.lr_scheduler_configs or [None]
    rate = None if config is None else config.scheduler.optimizer.param_groups[0]["lr"]
    return run.facts(trainer, module, rate=None if rate is None else round(rate, 6))


def step_schedule(run: RowRun) -> Facts:
    return final_rate(run, StepSchedule())


class Plateau(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.1, patience=0, threshold=100.0, threshold_mode="abs"
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


def plateau(run: RowRun) -> Facts:
    return final_rate(run, Plateau())


class OneCycle(Model):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        self.calls["estimated steps"] = steps
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def one_cycle(run: RowRun) -> Facts:
    return final_rate(run, OneCycle())


class ParameterGroups(Model):
    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.01}]
        return torch.optim.AdamW(groups, lr=self.lr)


def parameter_groups(run: RowRun) -> Facts:
    return fit(run, ParameterGroups())


class Closure(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


def lbfgs(run: RowRun) -> Facts:
    return fit(run, Closure())


class NoOptimizer(Model):
    def configure_optimizers(self) -> None:
        return None


def no_optimizer(run: RowRun) -> Facts:
    return fit(run, NoOptimizer())


class NoneInSomeSteps(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def returning_none(run: RowRun) -> Facts:
    return fit(run, NoneInSomeSteps())


# ------------------------------------------------------------- manual optimization


class Manual(Model):
    automatic_optimization = False

    def step(self, batch: Any) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls["training_step"] += 1
        return self.step(batch)


class ManualNone(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


class ManualAccumulation(Manual):
    """Accumulates the gradients of two batches per step."""

    def step(self, batch: Any) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        if self.calls["training_step"] % 2 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return loss


def manual(run: RowRun) -> Facts:
    return fit(run, Manual())


def manual_none(run: RowRun) -> Facts:
    return fit(run, ManualNone())


def manual_accumulation(run: RowRun) -> Facts:
    return fit(run, ManualAccumulation())


class GAN(Model):
    """Lightning's example: two optimizers alternate, and nothing is returned."""

    automatic_optimization = False

    def make_layers(self) -> nn.Module:
        return nn.ModuleDict({"generator": nn.Linear(3, 2), "critic": nn.Linear(2, 1)})

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers["generator"](inputs).sum(1, keepdim=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.calls["training_step"] += 1
        for_generator, for_critic = self.optimizers()
        made = self.layers["generator"](batch[0])
        self.toggle_optimizer(for_generator)
        self.take_step(for_generator, -self.layers["critic"](made).mean())
        self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_critic)
        real = batch[1].expand(-1, 2)
        scores = self.layers["critic"](made.detach()), self.layers["critic"](real)
        self.take_step(for_critic, scores[0].mean() - scores[1].mean())
        self.untoggle_optimizer(for_critic)

    def take_step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in self.layers.values()]


def gan(run: RowRun) -> Facts:
    module = GAN()
    trainer = run.trainer(ddp_arguments={"find_unused_parameters": True})
    trainer.fit(module, loader())
    return run.facts(trainer, module)


class NoSync(Manual):
    """Skips the gradient reduction for the first of two batches, like code for DDP."""

    def step(self, batch: Any) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        if self.calls["training_step"] % 2:
            with self.trainer.model.no_sync():
                self.manual_backward(loss)
        else:
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss


def no_sync(run: RowRun) -> Facts:
    return fit(run, NoSync())


class Unwrapping(Model):
    """Accesses the module inside DDP's wrapper."""

    def on_train_start(self) -> None:
        self.calls["is itself"] = int(self.trainer.strategy.model.module is self)


def unwrapping(run: RowRun) -> Facts:
    return fit(run, Unwrapping())


class Penalty(Model):
    """Computes gradients of the inputs, like a gradient penalty."""

    def loss(self, batch: Any) -> Tensor:
        if not self.training:
            return super().loss(batch)
        inputs = batch[0].clone().requires_grad_()
        outputs = self(inputs)
        (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return (outputs - batch[1]).square().mean() + 0.1 * slopes.square().mean()


def gradient_penalty(run: RowRun) -> Facts:
    return fit(run, Penalty())


class Collective(Model):
    """Calls collectives in ``training_step``: one of Lightning, and one of torch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.calls["gathered"] += len(self.all_gather(loss.detach()))
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.log("loss", loss, sync_dist=True)
        return loss + 0 * total


def collective(run: RowRun) -> Facts:
    return fit(run, Collective())


# ---------------------------------------------------------------------------- precision


def bf16_mixed(run: RowRun) -> Facts:
    return fit(run, precision="bf16-mixed")


def bf16_true(run: RowRun) -> Facts:
    return fit(run, precision="bf16-true")


def double(run: RowRun) -> Facts:
    return fit(run, precision="64-true")


# ------------------------------------------------------------------------------- models


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


def frozen(run: RowRun) -> Facts:
    return fit(run, Frozen())


class Unused(Model):
    """Has a layer without a gradient, which makes DDP fail."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


def unused(run: RowRun) -> Facts:
    return fit(run, Unused())


class Tied(Model):
    def make_layers(self) -> nn.Module:
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), second, nn.Linear(3, 1))


def tied(run: RowRun) -> Facts:
    module = Tied()
    facts = fit(run, module)
    return {**facts, "tied": module.layers[0].weight is module.layers[2].weight}


class Norm(Model):
    def make_layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def batch_norm(run: RowRun) -> Facts:
    return fit(run, Norm())


def averaged_statistics(run: RowRun) -> Facts:
    """Return BatchNorm statistics after fit; DDP takes them from one worker."""
    module, trainer = Norm(), run.trainer()
    trainer.fit(module, loader())
    run.models.append(torch.cat([b.reshape(-1).double() for b in module.buffers()]))
    return {}


def sync_batchnorm(run: RowRun) -> Facts:
    return fit(run, Norm(), sync_batchnorm=True)


class Normed(Model):
    def make_layers(self) -> nn.Module:
        first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 1))


def parametrized(run: RowRun) -> Facts:
    return fit(run, Normed())


class Late(Model):
    """Creates its layers in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = None

    def configure_model(self) -> None:
        if self.layers is None:
            torch.manual_seed(0)
            self.layers = self.make_layers()


def configure_model(run: RowRun) -> Facts:
    module, trainer = Late(), run.trainer()
    trainer.fit(module, loader())
    return run.facts(trainer, module)


class Recomputing(Model):
    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.layers, inputs, use_reentrant=False)


def gradient_checkpointing(run: RowRun) -> Facts:
    return fit(run, Recomputing())


class Complex(Model):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers((inputs * self.turn).real)


def complex_parameters(run: RowRun) -> Facts:
    return fit(run, Complex())


class Lazy(Model):
    def make_layers(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(1))


def lazy(run: RowRun) -> Facts:
    module, trainer = Lazy(), run.trainer()
    trainer.fit(module, loader())
    return run.facts(trainer, module)


class Sparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs + self.table((inputs[:, 0] > 0).long()))


def sparse(run: RowRun) -> Facts:
    return fit(run, Sparse())


class Untrainable(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch).requires_grad_()


def no_trainable_parameters(run: RowRun) -> Facts:
    return fit(run, Untrainable())


class Different(Model):
    """Has another model on the second worker."""

    def configure_model(self) -> None:
        if self.trainer.global_rank == 1:
            self.layers = nn.Sequential(nn.Linear(3, 1))


def different_models(run: RowRun) -> Facts:
    return fit(run, Different())

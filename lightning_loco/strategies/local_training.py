"""What a worker trains by itself: the wrapped model, its local steps, and its optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_loco.model.flat import local_tensor
from lightning_loco.model.participant import Participant
from lightning_loco.strategies import lightning_compat
from lightning_loco.strategies.protocols import HasParticipant

# ------------------------------------------------------------------------- model


class LocalModel(nn.Module):
    """A wrapper with the attributes of DDP's whose backward pass reduces no gradients.

    It is ``trainer.model`` during ``fit``: ``trainer.model.module`` is the module, and
    ``trainer.model.no_sync()`` says that gradients accumulate. All other attributes are the
    module's, and it compares equal to the module.

    Attributes:
        module: The module.
        require_backward_grad_sync: False inside of :meth:`no_sync`, as in DDP.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients accumulate, and are not averaged for hooks."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes in the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __eq__(self, other: object) -> bool:
        """Equal to its module, so that Lightning calls the module's steps directly."""
        return other is self or other is self.module

    def __hash__(self) -> int:
        """Another hash than the module's: ``parameters`` looks for modules in a set, and skips
        those that are there.
        """
        return id(self)


def check_not_wrapped(model: Any, use: str) -> None:
    """Refuse a model that would exchange gradients or parts of itself; ``use`` is the right use."""
    wrappers = DistributedDataParallel, DataParallel, FullyShardedDataParallel, FSDPModule
    if isinstance(model, wrappers):
        raise ValueError(
            f"The model is wrapped in {type(model).__name__}, which would average gradients in "
            f"every step. Pass the model itself: {use}."
        )


def check_batch_norm(strategy: DDPStrategy) -> None:
    """Refuse BatchNorm that is synchronised in every forward pass."""
    if lightning_compat.syncs_batch_norm(strategy):
        raise MisconfigurationException(
            "sync_batchnorm=True communicates in every forward pass, which low-communication "
            "training avoids. Use Trainer(sync_batchnorm=False); statistics of BatchNorm are "
            "averaged for validation and checkpoints."
        )


def leave_shared_memory(model: nn.Module) -> None:
    """Copy parameters and buffers out of shared memory: forkserver passes it to all ranks."""
    for tensor in [*model.parameters(), *model.buffers()]:
        is_shard = isinstance(tensor, DTensor)
        if tensor.device.type == "cpu" and not (is_shard or is_lazy(tensor)) and tensor.is_shared():
            tensor.data = tensor.data.clone()


# ------------------------------------------------------------------- local steps


class LocalSteps:
    """Tells a strategy's participant of local steps: the largest count of steps of an optimizer.

    The strategy calls :meth:`prepare` and :meth:`count` around steps through Lightning. User code
    may also call the ``step`` of a torch optimizer itself: between :meth:`watch` and its end, hooks
    of torch report those steps.

    Attributes:
        loss: What ``training_step`` has returned last; NaN if that was not one number.
    """

    def __init__(self, strategy: HasParticipant) -> None:
        self._strategy = strategy  # and not the participant, which is another one in every fit
        self.loss: Tensor | float = math.nan
        self.start_fit()

    def start_fit(self) -> None:
        """Count from 0; the optimizers are other ones than before."""
        self._steps: dict[int, int] = {}
        self._most = 0
        self._depth = 0

    @property
    def _participant(self) -> Participant:
        participant = self._strategy.participant
        assert participant is not None
        return participant

    @property
    def known_loss(self) -> Tensor | float | None:
        """The last loss; None if ``training_step`` has not returned one number."""
        return None if isinstance(self.loss, float) and math.isnan(self.loss) else self.loss

    def is_next(self, optimizer: Optimizer) -> bool:
        """Whether the next step of an optimizer will be a new local step."""
        return self._steps.get(id(optimizer), 0) == self._most

    def prepare(
        self, optimizer: Optimizer, closure: Callable[[], Any] = lambda: None
    ) -> Callable[[], Any]:
        """Prepare the next step of an optimizer, and return the closure to pass to it.

        A step outside Lightning has no closure: the returned one is then called right before it.
        """
        participant = self._participant
        if self.is_next(optimizer):
            participant.before_step(self.known_loss)

        def prepared() -> Any:
            output = closure()
            groups = optimizer.param_groups
            participant.before_optimizer_step(p for group in groups for p in group["params"])
            return output

        return prepared

    def count(self, optimizer: Optimizer) -> None:
        """Count one step of an optimizer, which may be a local step."""
        is_next = self.is_next(optimizer)
        self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        self._most += is_next
        if is_next:
            self._participant.count_step()

    @contextmanager
    def through_lightning(self) -> Iterator[None]:
        """A context in which steps are not reported, because Lightning takes them."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def watch(
        self,
        parameters: Iterable[Tensor],
        before: Callable[[Optimizer], object],
        after: Callable[[Optimizer], object],
    ) -> Callable[[], None]:
        """Report steps of optimizers of these parameters outside Lightning.

        ``before`` and ``after`` such a step are called with the optimizer. One that steps another
        one within its own step, as wrappers do, counts once. Returns a function that ends the
        watching.
        """
        watched = {id(parameter) for parameter in parameters}

        def is_watched(optimizer: Optimizer) -> bool:
            groups = optimizer.param_groups
            return any(id(p) in watched for group in groups for p in group["params"])

        def pre_hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not self._depth and is_watched(optimizer):
                before(optimizer)
            self._depth += 1

        def post_hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._depth -= 1
            if not self._depth and is_watched(optimizer):
                after(optimizer)

        handles = [
            register_optimizer_step_pre_hook(pre_hook),
            register_optimizer_step_post_hook(post_hook),
        ]

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def start_batch(self) -> None:
        """Reset the depth of nested steps, which a step that raised may have left above zero."""
        self._depth = 0


def loss_in(output: Any) -> Tensor | float:
    """Return the loss in the output of ``training_step``, detached; NaN if there is not one."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor):
        return loss.detach() if loss.numel() == 1 else math.nan
    return float(loss) if isinstance(loss, (int, float)) else math.nan


# -------------------------------------------------------------------- optimizers


def optimized_by(optimizers: Sequence[Optimizer]) -> list[Tensor] | None:
    """Return the parameters that optimizers step; None if there are none."""
    found = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    return found or None


def check_untracked(
    untracked: Sequence[tuple[str, Tensor]], optimizers: Sequence[Optimizer]
) -> None:
    """Raise RuntimeError if a parameter that is not exchanged was given to an optimizer.

    No optimizer had the ``untracked`` ones at the start.
    """
    optimized = {id(p) for p in optimized_by(optimizers) or ()} if untracked else set()
    for name, parameter in untracked:
        if id(parameter) in optimized:
            raise RuntimeError(
                f"Parameter {name!r} was given to an optimizer during fit, but only parameters "
                "that an optimizer has at the start of fit are exchanged. Return it from "
                "configure_optimizers, or call fit again with it."
            )


def clear_non_finite(optimizers: Sequence[Optimizer]) -> None:
    """Replace NaN and infinity in the states of optimizers by zero."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.is_floating_point():
                    local_tensor(value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

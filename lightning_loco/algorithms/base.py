"""The contract of every algorithm: what is computed in one round, on flat tensors.

One round of one worker, whoever drives it (a Trainer, a plain loop, the simulation, a test)::

    state    = algorithm.init(params)            # once
    message  = algorithm.propose(params, state)  # what leaves the worker
    received = ...                               # what the exchange makes of all messages
    algorithm.apply(params, received, state)     # the new local parameters, in place

Signs, said once: ``drift = local - start`` and ``pseudo_gradient = outer - local = -drift``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

if TYPE_CHECKING:
    from lightning_loco.topology import Topology

State = dict[str, Any]
"""What an algorithm remembers between rounds: tensors and plain numbers only, so that it can be
loaded from a checkpoint without running code. Tensors of shape (P,) belong to the parameters."""


@dataclasses.dataclass(frozen=True)
class Algorithm(ABC):
    """Hyper-parameters of a method and its functions; it holds no tensor and no process group.

    Subclasses are frozen dataclasses: cheap, picklable, comparable. Their fields are the user's
    arguments, but those with ``metadata={"prepared": True}``, which :meth:`prepare` sets. All
    tensors are flat, of shape ``(P,)`` and dtype float32 or float64. An elementwise algorithm may
    be called on any slice of the parameters with the same slice of its state; others always see
    the whole vector.
    """

    exchange: ClassVar[Literal["mean", "neighbors", "pull"]]
    """``"mean"``: the mean of the messages; ``"neighbors"``: row i of ``W @ messages``; ``"pull"``:
    the parameters of one peer at a time, without rounds."""

    consensus_key: ClassVar[str | None] = None
    """The state entry that is the consensus; None when it is the mean of the local parameters."""

    replicated: ClassVar[bool] = False
    """Whether the state is equal on all workers, so that a checkpoint needs it once."""

    supports_overlap: ClassVar[bool] = False
    """Whether a result may be applied one round after its messages were sent; :meth:`update` must
    then not read what is in ``params``."""

    @property
    def elementwise(self) -> bool:
        """Whether every element is treated alike and alone."""
        return True

    def prepare(self, num_workers: int, topology: Topology | None) -> Algorithm:
        """Check the hyper-parameters against the workers and fill in ``"auto"`` settings.

        Args:
            num_workers: Number of workers N, at least 1.
            topology: The communication graph, or None.

        Returns:
            The algorithm to run, with plain numbers only.

        Raises:
            ValueError: If the settings cannot work, before training starts.
        """
        if self.exchange == "mean" and topology is not None:
            raise ValueError(
                f"{type(self).__name__} averages over all workers and takes no topology, got "
                f"{topology!r}. Drop topology=..., or choose GASLoC (algorithm=gasloc)."
            )
        return self

    def check_overlap(self) -> None:
        """Refuse an algorithm that cannot apply results one round late.

        Raises:
            ValueError: If the algorithm has no outer parameters.
        """
        if not self.supports_overlap:
            raise ValueError(
                f"overlap=True needs an algorithm with outer parameters, got {type(self).__name__}."
                " Use DiLoCo (algorithm=async_diloco), or overlap=False."
            )

    def warn_overlap(self) -> None:  # noqa: B027
        """Warn about settings that are unstable one round late."""

    @abstractmethod
    def init(self, params: Tensor) -> State:
        """Make the state of a worker.

        Args:
            params: Start parameters ``(P,)``, equal on all workers; the state may keep them.
        """

    @abstractmethod
    def propose(self, params: Tensor, state: State) -> Tensor:
        """Turn the local parameters into the message; ``params`` may serve as its memory."""

    @abstractmethod
    def update(self, params: Tensor, received: Tensor, state: State) -> Tensor:
        """Compute the new local parameters.

        Args:
            params: What :meth:`propose` left in its argument, ``(P,)``; may serve as scratch.
            received: The result of the exchange, ``(P,)``; may serve as scratch.
            state: Updated in place.

        Returns:
            The new local parameters ``(P,)``: one of the arguments or of the state's tensors, so
            that nothing is copied in vain. The caller only reads it, and at once.
        """

    def apply(self, params: Tensor, received: Tensor, state: State) -> None:
        """Write the new local parameters into ``params``; see :meth:`update`."""
        result = self.update(params, received, state)
        if result is not params:
            params.copy_(result)

    @abstractmethod
    def restart(self, params: Tensor, state: State) -> None:
        """Write the parameters at the beginning of the round into ``params``: no progress made."""

    def outer_gradient(self, params: Tensor, received: Tensor, state: State) -> Tensor | None:
        """The tensor whose norm is ``loco/outer_grad_norm``; called right before update."""
        return None

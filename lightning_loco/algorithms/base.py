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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from lightning_loco.algorithms.merge import MergePolicy

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
    tensors are flat, of shape ``(P,)`` and dtype float32 or float64. An algorithm is called on
    slices of the parameters with the same slices of its state, as :attr:`granularity` allows: state
    entries of shape ``(P,)`` are cut along, everything else is passed whole, to each slice a copy
    of its own. Entries that are to be cut must be made by :meth:`init`.
    """

    exchange: ClassVar[Literal["mean", "neighbors", "pull"]]
    """``"mean"``: the mean of the messages; ``"neighbors"``: row i of ``W @ messages``; ``"pull"``:
    the parameters of one peer at a time, without rounds."""

    sends_parameters: ClassVar[bool] = False
    """Whether messages are parameters, of which a codec writes the difference to something that is
    known to all; otherwise they are differences themselves."""

    consensus_key: ClassVar[str | None] = None
    """The state entry with outer parameters that are the same on all workers, for
    ``evaluate="outer"``, other numbers of workers and members that come and go; None if there are
    none."""

    replicated: ClassVar[bool] = False
    """Whether the state is equal on all workers, so that a checkpoint needs it once."""

    merge_policy: ClassVar[MergePolicy | None] = None
    """What becomes of the local steps that were made while a round was under way; None: the
    algorithm cannot have results late."""

    num_scalars: ClassVar[int] = 0
    """How many numbers of its own ride in every worker's row; see :meth:`scalars`."""

    @property
    def granularity(self) -> int | None:
        """What the length of a slice must be a multiple of (the last one may be shorter).

        1: every element is treated alike and alone; None: the whole vector only.
        """
        return 1

    def default_topology(self, seed: int) -> Topology | None:
        """Who exchanges with whom when the user does not say.

        Args:
            seed: Of the run, equal on all workers; for topologies that are drawn.
        """
        return None

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
        if self.exchange == "neighbors" and topology is None:
            raise ValueError(
                f"{type(self).__name__} exchanges with neighbours and has no default topology. Say "
                'who they are: topology="ring", for instance.'
            )
        return self

    def check_overlap(self) -> None:
        """Refuse an algorithm that cannot apply results one round late.

        Raises:
            ValueError: If the algorithm does not say how a late result lands.
        """
        if self.merge_policy is None:
            raise ValueError(
                "overlap=True needs an algorithm with outer parameters, or one that keeps the"
                f" progress made meanwhile, got {type(self).__name__}. Use DiLoCo"
                " (algorithm=async_diloco), GASLoC or ModelAverage, or overlap=False."
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
        """Turn the local parameters into the message.

        Pure: it may be called more often than once a round, and leaves the state alone.

        Args:
            params: Local parameters ``(P,)``; may serve as the message's memory.
            state: Only read.

        Returns:
            The message ``(P,)``: ``params`` or a tensor of its own, never one of the state's.
        """

    @abstractmethod
    def update(self, params: Tensor, received: Tensor, state: State) -> Tensor:
        """Compute the new local parameters.

        Args:
            params: This worker's own message, ``(P,)``, if the exchange is ``"neighbors"``; with a
                mean it may be the memory of ``received``. May serve as scratch.
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

    def on_send(
        self, message: Tensor, ended: tuple[Tensor, Tensor] | None, state: State
    ) -> Tensor | None:
        """Compute where local steps begin again when a message leaves whose result comes late.

        Called once for each round that stays under way, if :attr:`merge_policy` is ``Restart()``.
        Unless said otherwise it is the result of the round before; without one, the start.

        Args:
            message: What leaves now, ``(P,)``, before it is compressed; zeros of a worker without
                valid progress. Only read.
            ended: ``params`` and ``received`` of the round before, which ends at the same time, as
                in :meth:`update`; None if none was under way.
            state: Updated in place.

        Returns:
            The new local parameters as in :meth:`update`; None to leave them as they are.
        """
        return self.restart(state) if ended is None else self.update(*ended, state)

    @abstractmethod
    def restart(self, state: State) -> Tensor | None:
        """The parameters at which the round began, ``(P,)``; None if the state does not hold them.

        A worker without valid progress goes on from there, and speaks for them to its neighbours.
        The caller only reads it.
        """

    def scalars(self, state: State) -> Sequence[float]:
        """The :attr:`num_scalars` numbers that this worker tells all others with a round."""
        return ()

    def receive_scalars(self, told: Sequence[Sequence[float]], state: State) -> None:  # noqa: B027
        """Take in what all workers have told, in order, right before :meth:`update`.

        Args:
            told: The :meth:`scalars` of every worker.
            state: Updated in place.
        """

    def metrics(self, state: State) -> dict[str, float]:
        """What is logged of the last round beside what all algorithms log, by name."""
        return {}

    def outer_gradient(self, params: Tensor, received: Tensor, state: State) -> Tensor | None:
        """The tensor whose norm is ``loco/outer_grad_norm``; called right before :meth:`update`.

        None: there is none, or it is how far the result is from the local parameters that left.
        """
        return None

"""The base class of all algorithms: what one round computes, on flat tensors.

A round of one worker, in a Trainer, a plain loop, the simulation or a test::

    state    = algorithm.init(params)            # once
    message  = algorithm.propose(params, state)  # what the worker sends
    received = ...                               # the result of the exchange of all messages
    algorithm.apply(params, received, state)     # the new local parameters, in place

Signs: ``drift = local - start`` and ``pseudo_gradient = outer - local = -drift``.
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
"""What an algorithm keeps between rounds: tensors and plain numbers only, so that a checkpoint can
be loaded with ``weights_only=True``. Tensors of shape (P,) belong to the parameters."""


@dataclasses.dataclass(frozen=True)
class Algorithm(ABC):
    """The hyper-parameters and the functions of a method, without tensors or process groups.

    Subclasses are frozen dataclasses: cheap, picklable, comparable. Their fields are the user's
    arguments, except those with ``metadata={"prepared": True}``, which :meth:`prepare` sets. All
    tensors are flat, of shape ``(P,)`` and dtype float32 or float64. An algorithm is called on
    slices of the parameters with the same slices of its state, as :attr:`granularity` allows. State
    entries of shape ``(P,)`` are sliced like the parameters; every slice gets its own copy of all
    other entries. :meth:`init` must create all entries that are to be sliced.
    """

    exchange: ClassVar[Literal["mean", "neighbors", "pull"]]
    """``"mean"``: the mean of the messages; ``"neighbors"``: row i of ``W @ messages``; ``"pull"``:
    the parameters of one peer at a time, without rounds."""

    sends_parameters: ClassVar[bool] = False
    """Whether messages are parameters instead of differences. With a mean, a codec then encodes
    their difference to the result of the last round."""

    consensus_key: ClassVar[str | None] = None
    """The state entry with outer parameters that are the same on all workers, or None. Needed for
    ``evaluate="outer"``, to resume with another number of workers, and for elastic members."""

    replicated: ClassVar[bool] = False
    """Whether the state is equal on all workers, so that a checkpoint saves it only once."""

    merge_policy: ClassVar[MergePolicy | None] = None
    """What happens to the local steps made while a round was pending. None: the algorithm does not
    support overlap."""

    num_scalars: ClassVar[int] = 0
    """How many numbers the algorithm sends with every worker's status; see :meth:`scalars`."""

    @property
    def granularity(self) -> int | None:
        """What the length of a slice must be a multiple of (the last one may be shorter).

        1 for an elementwise algorithm; None if it needs the whole vector.
        """
        return 1

    def default_topology(self, seed: int) -> Topology | None:
        """Return the topology to use if the user does not give one.

        Args:
            seed: The seed of the run, equal on all workers; for random topologies.
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
                f"{type(self).__name__} exchanges with neighbours and has no default topology. "
                'Give one, for example topology="ring".'
            )
        return self

    def check_overlap(self) -> None:
        """Check that the algorithm can apply results one round late.

        Raises:
            ValueError: If the algorithm has no :attr:`merge_policy`.
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
        """Create the state of a worker.

        Args:
            params: Start parameters ``(P,)``, equal on all workers; the state may keep the tensor.
        """

    @abstractmethod
    def propose(self, params: Tensor, state: State) -> Tensor:
        """Compute the message from the local parameters.

        Pure: it may be called more than once in a round, and must not change the state.

        Args:
            params: Local parameters ``(P,)``; may be overwritten with the message.
            state: Only read.

        Returns:
            The message ``(P,)``: ``params`` or a new tensor, never a tensor of the state.
        """

    @abstractmethod
    def update(self, params: Tensor, received: Tensor, state: State) -> Tensor:
        """Compute the new local parameters.

        Args:
            params: This worker's own message, ``(P,)``, if the exchange is ``"neighbors"``. With a
                mean it may share memory with ``received``. May be overwritten.
            received: The result of the exchange, ``(P,)``. May be overwritten.
            state: Updated in place.

        Returns:
            The new local parameters ``(P,)``: one of the arguments or a tensor of the state, to
            save a copy. The caller only reads it, and before the next call.
        """

    def apply(self, params: Tensor, received: Tensor, state: State) -> None:
        """Write the new local parameters into ``params``; see :meth:`update`."""
        result = self.update(params, received, state)
        if result is not params:
            params.copy_(result)

    def on_send(
        self, message: Tensor, ended: tuple[Tensor, Tensor] | None, state: State
    ) -> Tensor | None:
        """Compute the parameters from which local steps continue after a message is sent.

        Called once for each overlapped round, if :attr:`merge_policy` is ``Restart()``. By default
        they are the result of the previous round, or the start if there was none.

        Args:
            message: The message, ``(P,)``, before compression; zeros if the worker has no valid
                progress. Only read.
            ended: ``params`` and ``received`` of the previous round, which ends at the same time,
                as in :meth:`update`; None if no round was pending.
            state: Updated in place.

        Returns:
            The new local parameters as in :meth:`update`; None to leave them unchanged.
        """
        return self.restart(state) if ended is None else self.update(*ended, state)

    @abstractmethod
    def restart(self, state: State) -> Tensor | None:
        """Return the parameters at the start of the round, ``(P,)``; None if they are not kept.

        A worker without valid progress continues from them, and sends them to its neighbours
        instead of its own parameters. The caller only reads the tensor.
        """

    def scalars(self, state: State) -> Sequence[float]:
        """Return the :attr:`num_scalars` numbers that this worker sends to all with a round."""
        return ()

    def receive_scalars(  # noqa: B027
        self, scalars: Sequence[Sequence[float]], state: State
    ) -> None:
        """Receive the numbers of all workers, right before :meth:`update`.

        Args:
            scalars: The :meth:`scalars` of every worker, in order of the workers.
            state: Updated in place.
        """

    def metrics(self, state: State) -> dict[str, float]:
        """Return further numbers to log about the last round, by name."""
        return {}

    def outer_gradient(self, params: Tensor, received: Tensor, state: State) -> Tensor | None:
        """Return the tensor whose norm is logged as ``loco/outer_grad_norm``, or None.

        Called right before :meth:`update`.
        """
        return None

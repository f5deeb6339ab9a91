"""The base class of all algorithms: what one round computes, on flat tensors.

A round of one worker, in a Trainer, a plain loop, the simulation or a test::

    state   = algorithm.init(params)                         # once
    message = algorithm.propose(params, state, info)         # what the worker sends
    received = ...                                           # the exchange of all messages
    params  = algorithm.update(local, message, received, state, info)  # the new local parameters

Signs: ``drift = local - start`` and ``pseudo_gradient = outer - local = -drift``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from lightning_loco.algorithms.merge_policy import MergePolicy
from lightning_loco.topology import Topology

State = dict[str, Any]
"""The state of an algorithm between rounds: tensors and plain numbers only, so that a checkpoint
can be loaded with ``weights_only=True``. Tensors of shape (P,) belong to the parameters."""


@dataclasses.dataclass(frozen=True)
class RoundInfo:
    """Facts about a round besides the vectors.

    ``weights``, ``scalars``, ``steps`` and ``ages`` have one entry per worker, in order of the
    workers. They are empty in :meth:`Algorithm.propose`, and with ``exchange = "neighbors"`` unless
    the algorithm sends :meth:`Algorithm.scalars`: a worker waits for its neighbours only.

    Attributes:
        index: Number of the round, from 0.
        weights: Weight of each message in a mean, as :meth:`Algorithm.weight` gives it; 0 for a
            worker without valid progress.
        scalars: The numbers of :meth:`Algorithm.scalars`.
        steps: Local steps of each worker since its last round.
        ages: Local steps of this worker since each message was sent: 0 in a blocking round.
        start: Position of the slice in the vector of all parameters, whichever rank of the worker
            has it; of shards, where the first one begins.
        bounds: Where the tensors begin and end within the slice, as ``(begin, end)``.
    """

    index: int = 0
    weights: tuple[float, ...] = ()
    scalars: tuple[tuple[float, ...], ...] = ()
    steps: tuple[float, ...] = ()
    ages: tuple[float, ...] = ()
    start: int = 0
    bounds: tuple[tuple[int, int], ...] = ()

    @property
    def num_workers(self) -> int:
        """Number of workers of the round; 0 where the workers' numbers are not known."""
        return len(self.weights)


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
    """``"mean"``: the weighted mean of the messages; ``"neighbors"``: row i of ``W @ messages``;
    ``"pull"``: the parameters of one peer at a time, without rounds."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """What :meth:`update` reads besides what is received: ``"local"``, ``"message"`` or both. It
    gets None for the rest, for which no memory and no copy is needed."""

    sends_parameters: ClassVar[bool] = False
    """Whether messages are parameters instead of differences. With a mean, a codec then encodes
    their difference to the result of the last round."""

    start_key: ClassVar[str | None] = None
    """The state entry with the parameters at the start of the round, or None. A worker without
    valid progress continues from them, and sends them instead of its parameters."""

    consensus_key: ClassVar[str | None] = None
    """The state entry with outer parameters that are the same on all workers, or None. Needed for
    ``evaluate="outer"`` and for elastic members."""

    replicated: ClassVar[bool] = False
    """Whether the state is equal on all workers, so that a checkpoint saves it only once, and a run
    with another number of workers keeps it."""

    summed: ClassVar[frozenset[str]] = frozenset()
    """State entries that :meth:`update` sets for its slice, to tensors of shape ``()``. After the
    round each is the sum over all slices, a float."""

    merge_policy: ClassVar[MergePolicy | None] = None
    """How the local steps taken while a round was pending are kept. None: the algorithm does not
    support overlap."""

    default_topology: ClassVar[str | None] = None
    """Name of the topology to use if the user does not give one. A random one gets the seed of the
    run."""

    @property
    def granularity(self) -> int | None:
        """The length of a slice is a multiple of this number; the last one may be shorter.

        1 for an elementwise algorithm; None for one that needs the whole vector.
        """
        return 1

    whole_tensors: ClassVar[bool] = False
    """Whether no slice ends within a tensor, as methods with a norm or an angle per tensor need.
    :attr:`RoundInfo.bounds` are then those of whole tensors. Fragments consist of whole tensors,
    and no tensor may be divided among the ranks of a worker."""

    @property
    def gathers(self) -> bool:
        """Whether a mean is replaced by :meth:`combine`, which sees the messages of all workers."""
        return False

    def message_length(self, length: int) -> int:
        """Return the length of the message for a slice of ``length`` parameters.

        It is equal by default. If it is shorter, rounds are blocking and messages uncompressed.
        """
        return length

    def prepare(
        self, num_workers: int, topology: Topology | None, *, is_late: bool = False
    ) -> Algorithm:
        """Check the hyper-parameters against the workers and fill in ``"auto"`` settings.

        Args:
            num_workers: Number of workers N, at least 1.
            topology: The communication graph, or None.
            is_late: Whether local steps restart from results that are applied one round late. The
                algorithm may warn about settings that are then unstable.

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

    @abstractmethod
    def init(self, params: Tensor) -> State:
        """Create the state of a worker.

        Args:
            params: Start parameters ``(P,)``, equal on all workers; the state may keep the tensor.
        """

    @abstractmethod
    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Compute the message from the local parameters.

        Pure: it may be called more than once in a round, and must not change the state.

        Args:
            params: Local parameters ``(P,)``; may be overwritten with the message.
            state: Only read.
            info: Number of the round, and which slice this is.

        Returns:
            The message ``(P,)``, or shorter as :meth:`message_length` says: ``params`` or a new
            tensor, never a tensor of the state.
        """

    def combine(self, messages: Tensor, info: RoundInfo) -> Tensor:
        """Compute what is received from the messages of all workers; only if :attr:`gathers`.

        Args:
            messages: Those of all workers, ``(N, P)``; zeros for a worker of weight 0. May be
                overwritten.
            info: Of this round, without ages.

        Returns:
            What :meth:`update` receives, ``(P,)``: equal on all workers.
        """
        raise NotImplementedError(f"{type(self).__name__} gathers messages and has no combine.")

    @abstractmethod
    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Compute the new local parameters.

        Args:
            local: The present local parameters ``(P,)``, also with local steps taken since the
                message was sent. May be overwritten. None unless :attr:`reads` has ``"local"``.
            message: This worker's own message, as it was before encoding: the result of
                :meth:`propose`, with what error feedback adds; zeros for a worker of weight 0 in a
                mean. May be overwritten. None unless :attr:`reads` has ``"message"``.
            received: The result of the exchange, of the shape of a message. May be overwritten.
            state: Updated in place.
            info: Of this round.

        Returns:
            The new local parameters ``(P,)``: one of the arguments or a tensor of the state, to
            save a copy. The caller only reads it, and before the next call.
        """

    def on_send(
        self,
        message: Tensor,
        ended: tuple[Tensor | None, Tensor | None, Tensor] | None,
        state: State,
        info: RoundInfo,
    ) -> Tensor | None:
        """Compute the parameters from which local steps continue after a message is sent.

        Called once for each overlapped round, if :attr:`merge_policy` is ``Restart()``. By default
        they are the result of the previous round, or the start if there was none.

        Args:
            message: The message, ``(P,)``, before compression; zeros if the worker has no valid
                progress. Only read.
            ended: ``local``, ``message`` and ``received`` of the previous round, which ends at the
                same time, as in :meth:`update`; None if no round was pending.
            state: Updated in place.
            info: Of the previous round; of this one if no round was pending.

        Returns:
            The new local parameters as in :meth:`update`; None to leave them unchanged.
        """
        return self.round_start(state) if ended is None else self.update(*ended, state, info)

    def weight(self, steps: float) -> float:
        """Return the weight of this worker's message in a mean, finite and at least 0.

        It is 1 by default. A worker without valid progress has weight 0 and is not asked. A mixing
        matrix has weights of its own, and a robust mean counts all workers alike: a wrong worker
        could send any weight.

        Args:
            steps: Local steps of this worker since its last round.
        """
        return 1.0

    def scalars(self, state: State) -> Sequence[float]:
        """Return numbers that every worker sends to all others with a round, always as many.

        :attr:`RoundInfo.scalars` holds the numbers of all workers.
        """
        return ()

    def metrics(self, state: State) -> dict[str, float]:
        """Return further numbers to log about the last round, by name."""
        return {}

    def round_start(self, state: State) -> Tensor | None:
        """Return the parameters at the start of the round, ``(P,)``, which are only read.

        None if the algorithm does not keep them.
        """
        return None if self.start_key is None else state[self.start_key]


def has_own(algorithm: Algorithm, method: str) -> bool:
    """Return whether the class of an algorithm overrides an optional method of the base class."""
    return getattr(type(algorithm), method) is not getattr(Algorithm, method)

"""What a user asks for, ``compression="int8"``, and what a worker remembers because of it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_loco.algorithms import State
from lightning_loco.compression.base import Codec
from lightning_loco.compression.floats import BFloat16, Float16
from lightning_loco.compression.four_bits import E3M0, Int4
from lightning_loco.compression.int8 import Int8
from lightning_loco.compression.sparse import Sparse

CODECS: dict[str, type[Codec]] = {
    "bf16": BFloat16,
    "fp16": Float16,
    "int8": Int8,
    "int4": Int4,
    "e3m0": E3M0,
    "sparse": Sparse,
}
"""The codecs by their names."""

_RESIDUAL, _REFERENCE = "residual", "reference"


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    r"""What a codec loses of a message goes with the next one.

    .. math::
        u_t = m_t + \beta e_{t-1}, \quad e_t = u_t - Q(u_t)

    It costs one more vector ``(P,)``, which is each worker's own and is kept in checkpoints. For
    means only: gossip keeps the mean without it.

    Args:
        codec: What is fed back.
        decay: :math:`\beta` in [0, 1]; 0 for no feedback at all.

    Raises:
        TypeError: If ``codec`` is no codec or ``decay`` no number.
        ValueError: If ``decay`` is out of range.

    Example:
        >>> from lightning_loco.compression import E3M0
        >>> ErrorFeedback(E3M0())
        ErrorFeedback(codec=E3M0(block=128), decay=1.0)
    """

    codec: Codec
    decay: float = 1.0

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if not isinstance(self.codec, Codec):
            raise TypeError(f"ErrorFeedback needs a codec such as E3M0(), got {self.codec!r}.")
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)):
            raise TypeError(f"decay must be a number, got {self.decay!r}.")
        if not 0 <= self.decay <= 1:
            raise ValueError(
                f"decay says how much of what was lost is sent again and must be in [0, 1], got "
                f"{self.decay}. Use 1 to lose nothing."
            )


@dataclasses.dataclass(frozen=True)
class Compensated:
    r"""What a codec loses of a worker's progress stays in that worker's own model.

    .. math::
        u^i = \Theta - \theta^i, \quad \Theta \leftarrow \Theta - \eta\,\frac1N\sum_j Q(u^j), \quad
        \theta^i \leftarrow \Theta - \big(u^i - Q(u^i)\big)

    An :class:`ErrorFeedback` keeps what is lost beside the model: the worker does not see it, and
    makes the same progress again, until it has told more than there is. Here local steps begin
    where the worker has come to. With :math:`\eta = 1` the mean over the workers is what it would
    be without compression, and it is the consensus model, as in gossip. It costs one more vector
    ``(P,)``, and an average in float32 wherever the consensus is shown.

    For means, with rounds that end where they begin.

    Args:
        codec: How messages are written.

    Raises:
        TypeError: If it is no codec.

    Example:
        >>> from lightning_loco.compression import Sparse
        >>> Compensated(Sparse(k=32))
        Compensated(codec=Sparse(k=32, block=4096))
    """

    codec: Codec

    def __post_init__(self) -> None:
        """Check the type."""
        if not isinstance(self.codec, Codec):
            raise TypeError(f"Compensated needs a codec such as Sparse(), got {self.codec!r}.")


@dataclasses.dataclass(frozen=True)
class Compression:
    """How the messages of one algorithm are compressed, and what a worker remembers of it.

    Args:
        codec: How values are written.
        decay: Of the error feedback; None for none.
        is_relative: Whether messages are parameters, and only their difference to what the last
            round has brought, which is equal on all workers, is sent.
        stays_in_model: Whether what is lost stays in the worker's model, and so is in the next
            message without being added.
    """

    codec: Codec
    decay: float | None = None
    is_relative: bool = False
    stays_in_model: bool = False

    @property
    def has_feedback(self) -> bool:
        """Whether what is lost is remembered."""
        return self.stays_in_model or self.decay is not None

    def init(self, params: Tensor) -> State:
        """The state of a worker: tensors of shape ``(P,)``, cut along with the parameters.

        Args:
            params: Start parameters ``(P,)``, equal on all workers.
        """
        state: State = {_RESIDUAL: torch.zeros_like(params)} if self.has_feedback else {}
        return {**state, _REFERENCE: params.clone()} if self.is_relative else state

    def prepare(self, message: Tensor, state: State) -> None:
        """Replace a message by what is to be written of it; the state is only read."""
        if self.is_relative:
            message.sub_(state[_REFERENCE])
        if self.decay is not None:
            message.add_(state[_RESIDUAL], alpha=self.decay)

    def keep(self, lost: Tensor, state: State, was_prepared: bool) -> None:
        """Remember what was lost, once the round counts.

        Args:
            lost: What was to be written, without what was written.
            state: Changed in place.
            was_prepared: Whether the message held what was remembered before. A worker without
                valid progress sends zeros, and keeps its own.
        """
        if not self.has_feedback:
            return
        residual: Tensor = state[_RESIDUAL]
        residual.copy_(lost) if was_prepared else residual.add_(lost)

    def begin(self, result: Tensor, state: State, out: Tensor | None = None) -> Tensor:
        """Where this worker's local steps begin, given where the algorithm lets them.

        Args:
            result: ``(P,)``; only read.
            state: Only read.
            out: Memory for another one; may be that of ``result``.
        """
        if not self.stays_in_model:
            return result
        return torch.add(result, state[_RESIDUAL], alpha=1 if self.is_relative else -1, out=out)

    def make_absolute(self, received: Tensor, state: State) -> None:
        """Make of what was received what the algorithm expects; the state is only read."""
        if self.is_relative:
            received.add_(state[_REFERENCE])

    def land(self, received: Tensor, state: State) -> None:
        """Remember what the algorithm is about to get."""
        if self.is_relative:
            reference: Tensor = state[_REFERENCE]
            reference.copy_(received)


def shared_part(state: State) -> Tensor | None:
    """What of the state of :meth:`Compression.init` is equal on all workers, if anything is."""
    return state.get(_REFERENCE)


def as_compression(
    given: Any, exchange: Literal["mean", "neighbors", "pull"], sends_parameters: bool
) -> Compression | None:
    """What a user has asked for, as it suits an algorithm.

    Args:
        given: None or ``"none"``, the name of a codec, a codec, an :class:`ErrorFeedback` or
            :class:`Compensated`. Rough codecs get a feedback for means by themselves.
        exchange: Of the algorithm.
        sends_parameters: Whether its messages are parameters instead of differences.

    Raises:
        TypeError: If it is none of these.
        ValueError: If the name is unknown, or the codec does not work with that exchange.
    """
    check_compression(given)
    if given is None or given == "none":
        return None
    if isinstance(given, str):
        given = CODECS[given]()
    if exchange == "mean" and isinstance(given, Compensated):
        return Compression(given.codec, is_relative=sends_parameters, stays_in_model=True)
    codec = given if isinstance(given, Codec) else given.codec
    if exchange == "mean":
        decay = given.decay if isinstance(given, ErrorFeedback) else float(codec.is_rough)
        return Compression(codec, decay or None, is_relative=sends_parameters)
    if given is not codec:
        reason = (
            "Gossip keeps the mean of compressed messages without an error feedback."
            if exchange == "neighbors"
            else "Pulls take no error feedback: nobody knows which peer has read what before."
        )
        raise ValueError(f"{reason} Give the codec alone: compression={codec}.")
    if codec.is_rough:
        raise ValueError(
            f"{codec} writes parameters too roughly for gossip: neighbours would not come closer "
            'than a third of each value. Use compression="int8" or "bf16", or an algorithm that '
            "averages over all workers."
        )
    return Compression(codec)


def check_compression(given: Any) -> None:
    """Refuse what no algorithm can use; see :func:`as_compression`.

    Raises:
        TypeError: If it is nothing of the kind.
        ValueError: If the name is unknown.
    """
    if isinstance(given, str) and given not in ("none", *CODECS):
        names = ", ".join(["none", *CODECS])
        raise ValueError(f"compression must be one of {names}, or a codec; got {given!r}.")
    if given is not None and not isinstance(given, (str, Codec, ErrorFeedback, Compensated)):
        raise TypeError(
            "compression must be a name, a codec such as Int8(), ErrorFeedback(...) or "
            f"Compensated(...), got {given!r}."
        )

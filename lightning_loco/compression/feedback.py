"""The ``compression=`` setting, error feedback, and the state that a worker keeps for them."""

from __future__ import annotations

import dataclasses
import pkgutil
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_loco._util.codecs import CODEC_TABLE
from lightning_loco.algorithms import State
from lightning_loco.compression.codec import Codec

CODECS: dict[str, type[Codec]] = {
    name: pkgutil.resolve_name(row.codec) for name, row in CODEC_TABLE.items() if row.codec
}
"""The codecs by their names."""

_RESIDUAL, _REFERENCE = "residual", "reference"


@dataclasses.dataclass(frozen=True)
class ErrorFeedback:
    r"""Adds what a codec loses of a message to the next message.

    .. math::
        u_t = m_t + \beta e_{t-1}, \quad e_t = u_t - Q(u_t)

    The residual :math:`e` takes one more vector ``(P,)``. It belongs to the worker and is saved in
    checkpoints. Only for means: compressed gossip preserves the mean without error feedback.

    Args:
        codec: How messages are encoded.
        decay: :math:`\beta` in [0, 1]; 0 for no feedback at all.

    Raises:
        TypeError: If ``codec`` is not a codec or ``decay`` not a number.
        ValueError: If ``decay`` is out of range.

    Example:
        >>> from lightning_loco.compression import E3M0
        >>> ErrorFeedback(E3M0())
        ErrorFeedback(codec=E3M0(block=128), decay=1.0)
    """

    codec: Codec
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise TypeError(f"ErrorFeedback needs a codec such as E3M0(), got {self.codec!r}.")
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)):
            raise TypeError(f"decay must be a number, got {self.decay!r}.")
        if not 0 <= self.decay <= 1:
            raise ValueError(
                f"decay is the share of the residual that is sent again and must be in [0, 1], got "
                f"{self.decay}. Use 1 to lose nothing."
            )


@dataclasses.dataclass(frozen=True)
class Compensated:
    r"""Keeps what a codec loses of a worker's progress in that worker's own model.

    .. math::
        u^i = \Theta - \theta^i, \quad \Theta \leftarrow \Theta - \eta\,\frac1N\sum_j Q(u^j), \quad
        \theta^i \leftarrow \Theta - \big(u^i - Q(u^i)\big)

    An :class:`ErrorFeedback` keeps the lost part outside the model. The worker does not see it,
    makes the same progress again, and ends up sending the same update twice. Here the lost part is
    added to the local parameters before the next local steps. With :math:`\eta = 1` the mean over
    the workers is the same as without compression. The consensus model is that mean, as in gossip.
    It takes one more vector ``(P,)``, and an average in float32 whenever the consensus is shown.

    Only for means, and only for blocking rounds.

    Args:
        codec: How messages are encoded.

    Raises:
        TypeError: If it is not a codec.

    Example:
        >>> from lightning_loco.compression import Sparse
        >>> Compensated(Sparse(k=32))
        Compensated(codec=Sparse(k=32, block=4096, mean_over='workers'))
    """

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise TypeError(f"Compensated needs a codec such as Sparse(), got {self.codec!r}.")


@dataclasses.dataclass(frozen=True)
class Compression:
    """How the messages of one algorithm are compressed; its methods act on the state of a worker.

    The state holds up to two vectors of shape ``(P,)``: the *residual*, which is what the codec has
    lost, and the *reference*, the last parameters that all workers received.

    Args:
        codec: How values are encoded.
        decay: Share of the residual that is added to the next message; None for no feedback.
        is_relative: Whether messages are parameters, of which only the difference to the reference
            is sent.
        stays_in_model: Whether the residual is kept in the worker's own model, and so is part of
            the next message without being added.
    """

    codec: Codec
    decay: float | None = None
    is_relative: bool = False
    stays_in_model: bool = False

    @property
    def has_feedback(self) -> bool:
        """Whether there is a residual."""
        return self.stays_in_model or self.decay is not None

    def init(self, params: Tensor) -> State:
        """Return the state of a worker, tensors ``(P,)``; ``params`` are equal on all workers."""
        state: State = {_RESIDUAL: torch.zeros_like(params)} if self.has_feedback else {}
        return {**state, _REFERENCE: params.clone()} if self.is_relative else state

    def prepare_message(self, message: Tensor, state: State) -> None:
        """Subtract the reference and add the residual, in place; the state is only read."""
        if self.is_relative:
            message.sub_(state[_REFERENCE])
        if self.decay is not None:
            message.add_(state[_RESIDUAL], alpha=self.decay)

    def update_residual(self, lost: Tensor, state: State, was_prepared: bool) -> None:
        """Record what was lost: the prepared message minus its decoded encoding.

        Call it once the round is certain to be applied. If the message contained the old residual
        (``was_prepared``), that is replaced; a worker without valid progress sends zeros and keeps
        it.
        """
        if not self.has_feedback:
            return
        residual: Tensor = state[_RESIDUAL]
        residual.copy_(lost) if was_prepared else residual.add_(lost)

    def local_params(self, result: Tensor, state: State, out: Tensor | None = None) -> Tensor:
        """Return the local parameters: the algorithm's result plus a residual kept in the model.

        ``out`` is memory for the sum; it may be ``result``.
        """
        if not self.stays_in_model:
            return result
        return torch.add(result, state[_RESIDUAL], alpha=1 if self.is_relative else -1, out=out)

    def add_reference(self, received: Tensor, state: State) -> None:
        """Turn a received difference into parameters, in place; the state is only read."""
        if self.is_relative:
            received.add_(state[_REFERENCE])

    def update_reference(self, received: Tensor, state: State) -> None:
        """Make the received parameters the reference of the next round."""
        if self.is_relative:
            reference: Tensor = state[_REFERENCE]
            reference.copy_(received)


def shared_part(state: State) -> Tensor | None:
    """Return the part of a compression's state that is equal on all workers, or None."""
    return state.get(_REFERENCE)


def as_compression(
    given: Any,
    exchange: Literal["mean", "neighbors", "pull"],
    sends_parameters: bool,
) -> Compression | None:
    """Turn the user's ``compression=`` setting into a :class:`Compression` for an algorithm.

    Args:
        given: None or ``"none"``, the name of a codec, a codec, an :class:`ErrorFeedback` or
            :class:`Compensated`. For means, rough codecs get an error feedback automatically.
        exchange: The exchange of the algorithm.
        sends_parameters: Whether its messages are parameters instead of differences.

    Raises:
        TypeError: If ``given`` is none of these.
        ValueError: If the name is unknown, or the codec does not work with that exchange.
    """
    check_compression(given)
    if given is None or given == "none":
        return None
    if isinstance(given, str):
        given = CODECS[given]()
    codec = given if isinstance(given, Codec) else given.codec
    decay = given.decay if isinstance(given, ErrorFeedback) else float(codec.is_rough)
    if codec.averages_senders:
        _check_mean_of_senders(codec, exchange, 0 if isinstance(given, Compensated) else decay)
    if exchange == "mean" and isinstance(given, Compensated):
        return Compression(codec, is_relative=sends_parameters, stays_in_model=True)
    if exchange == "mean":
        return Compression(codec, decay or None, is_relative=sends_parameters)
    if given is not codec:
        reason = (
            "Gossip keeps the mean of compressed messages without an error feedback."
            if exchange == "neighbors"
            else "Pulls take no error feedback: the server does not track who has read what."
        )
        raise ValueError(f"{reason} Give the codec alone: compression={codec}.")
    if codec.is_rough:
        raise ValueError(
            f"{codec} encodes parameters too roughly for gossip: neighbours would not come closer "
            'than a third of each value. Use compression="int8" or "bf16", or an algorithm that '
            "averages over all workers."
        )
    return Compression(codec)


def _check_mean_of_senders(codec: Codec, exchange: str, decay: float) -> None:
    if not codec.is_sparse:
        raise ValueError(f"{codec} averages over senders, which only a sparse codec can.")
    if exchange != "mean" or not decay:
        raise ValueError(
            f"{codec} averages each value over the workers that have sent it. That needs an "
            "algorithm that averages over all workers, such as DiLoCo, and an error feedback, such "
            f"as ErrorFeedback({codec}, 0.95). Use mean_over='workers' otherwise."
        )


def check_compression(given: Any) -> None:
    """Check the type and the name of a ``compression=`` setting, as :func:`as_compression` does."""
    if isinstance(given, str) and given not in ("none", *CODECS):
        names = ", ".join(["none", *CODECS])
        raise ValueError(f"compression must be one of {names}, or a codec; got {given!r}.")
    if given is not None and not isinstance(given, (str, Codec, ErrorFeedback, Compensated)):
        raise TypeError(
            "compression must be a name, a codec such as Int8(), ErrorFeedback(...) or "
            f"Compensated(...), got {given!r}."
        )

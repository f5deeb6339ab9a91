"""Pairwise averaging: a worker averages its parameters and its clock with one peer.

There are no rounds. A worker reads the latest parameters of a peer at any time, and the peer is not
involved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_loco.algorithms.algorithm import Algorithm, RoundInfo, State

Interpolation = Callable[[float, float, float, float], float]
"""``(clock, peer_clock, loss, peer_loss) -> factor``"""

_MAX_CLOCK = 1e12
_MAX_LOSS = torch.finfo(torch.float32).max


class Tag(NamedTuple):
    """The clock and loss that are sent together with parameters.

    Attributes:
        clock: How long the parameters have been trained, in local steps. It is averaged like them.
        loss: Recent training loss of the worker that has the parameters.
    """

    clock: float
    loss: float

    @property
    def is_plausible(self) -> bool:
        """Whether a worker can have this clock (0 to 1e12) and loss (finite in float32)."""
        return 0 <= self.clock <= _MAX_CLOCK and abs(self.loss) <= _MAX_LOSS


@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant factor.

    Example:
        >>> Constant(0.25)(10, 20, 0.5, 0.1)
        0.25
    """

    value: float

    def __call__(self, clock: float, peer_clock: float, loss: float, peer_loss: float) -> float:
        """Return the constant."""
        return self.value


def by_clock(clock: float, peer_clock: float, loss: float, peer_loss: float) -> float:
    r"""Give a peer that has trained longer a larger share: :math:`f = c_j / (c_i + c_j)`.

    Example:
        >>> by_clock(10, 30, 0.5, 0.5)
        0.75
    """
    return _share(peer_clock, clock)


def by_loss(clock: float, peer_clock: float, loss: float, peer_loss: float) -> float:
    r"""Give the peer a larger share if the own loss is higher: :math:`f = l_i / (l_i + l_j)`.

    Losses are expected to be positive.

    Example:
        >>> by_loss(10, 10, 3.0, 1.0)
        0.75
    """
    return _share(loss, peer_loss)


def _share(part: float, other: float) -> float:
    total = part + other
    return part / total if total != 0 else 0.5


_BY_NAME: dict[str, Interpolation] = {"clock": by_clock, "loss": by_loss}


@dataclasses.dataclass(frozen=True)
class PairwiseAverage(Algorithm):
    r"""Averages the parameters of a worker with a random peer, which does not change.

    .. math::
        \theta_i \leftarrow f\,\theta_j + (1 - f)\,\theta_i, \qquad
        c_i \leftarrow f\,c_j + (1 - f)\,c_i

    The interpolation determines the factor f, which is clamped to [0, 1]: a constant,
    :math:`c_j / (c_i + c_j)` from the clocks, or :math:`l_i / (l_i + l_j)` from the losses (the
    worse model moves more); 0/0 is 0.5. If the loss :math:`l_i` is below the divergence threshold
    T, the worker moves less: :math:`f \leftarrow f\,\max(l_i, 0) / T`. Only the worker that reads
    changes, so the mean over the workers is kept on average, but not in each exchange.

    Args:
        fetch_probability: Probability in [0, 1] of reading from a peer in a local step.
        interpolation: ``"constant"``, ``"clock"``, ``"loss"``, or a callable
            ``(clock, peer_clock, loss, peer_loss) -> factor``.
        factor: The factor in [0, 1] of ``"constant"``.
        divergence_threshold: T, at least 0; 0 turns it off.
        keep_progress: Blend the parameters from the start of the fetch, and add the progress made
            since. Without it each blend discards the share f of the local steps taken during the
            fetch.

    The settings of dpwa's sample file are ``PairwiseAverage(fetch_probability=1, factor=0.5,
    divergence_threshold=0.2, keep_progress=False)``.

    Raises:
        ValueError: If a number is out of range or the interpolation has an unknown name.
        TypeError: If a number has another type, or the interpolation is not callable.

    Source:
        dpwa, "Distributed learning by Pair-Wise Averaging". The loss factor follows its
        code; its text has the inverse.

    Example:
        >>> import torch
        >>> average = PairwiseAverage(interpolation="loss")
        >>> factor = average.blend_factor(own=Tag(clock=5, loss=3.0), peer=Tag(clock=9, loss=1.0))
        >>> params = torch.tensor([0.0, 4.0])
        >>> average.blend(params, torch.tensor([4.0, 4.0]), factor)
        >>> factor, params, average.blended_clock(5, 9, factor)
        (0.75, tensor([3., 4.]), 8.0)
    """

    fetch_probability: float = 0.1
    interpolation: Literal["constant", "clock", "loss"] | Interpolation = "constant"
    factor: float = 0.3
    divergence_threshold: float = 0.0
    keep_progress: bool = True

    exchange = "pull"
    reads = frozenset({"local"})

    def __post_init__(self) -> None:
        """Check types and ranges."""
        for name in ("fetch_probability", "factor", "divergence_threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(
                    f"{name} must be a number, got {value!r}. Leave it out for the default."
                )
        if not 0 <= self.fetch_probability <= 1:
            raise ValueError(
                f"fetch_probability must be in [0, 1], got {self.fetch_probability}. "
                "Use 1 to read from a peer in every local step."
            )
        if not 0 <= self.factor <= 1:
            raise ValueError(
                f"factor is the peer's share and must be in [0, 1], got {self.factor}. "
                "Use 0.5 for the mean of both."
            )
        if not 0 <= self.divergence_threshold < math.inf:
            raise ValueError(
                "divergence_threshold is a loss and must be finite and at least 0, got "
                f"{self.divergence_threshold}. Use 0 to turn it off."
            )
        if not isinstance(self.keep_progress, bool):
            raise TypeError(f"keep_progress must be True or False, got {self.keep_progress!r}.")
        if isinstance(self.interpolation, str):
            if self.interpolation not in ("constant", *_BY_NAME):
                raise ValueError(
                    "interpolation must be 'constant', 'clock' or 'loss', got "
                    f"{self.interpolation!r}. For your own rule pass a callable "
                    "(clock, peer_clock, loss, peer_loss) -> factor."
                )
        elif not callable(self.interpolation):
            raise TypeError(
                "interpolation must be 'constant', 'clock', 'loss' or a callable, got "
                f"{self.interpolation!r}. For a fixed factor use factor={self.interpolation!r}."
            )

    @property
    def uses_loss(self) -> bool:
        """Whether the losses may affect the factor; assumed for every callable of the user."""
        rule = self.interpolation
        by_clocks = rule in ("constant", "clock") if isinstance(rule, str) else rule is by_clock
        return self.divergence_threshold > 0 or not (by_clocks or isinstance(rule, Constant))

    def blend_factor(self, own: Tag, peer: Tag) -> float:
        """Return the factor f in [0, 1], which is the share of the peer.

        Args:
            own: Clock and loss of this worker.
            peer: Clock and loss of the peer's parameters.

        Returns:
            The factor; 0 if the peer's clock or loss is not plausible, or the result of the
            interpolation is not finite.
        """
        if not peer.is_plausible:
            return 0.0
        factor = self._interpolate(own.clock, peer.clock, own.loss, peer.loss)
        if max(own.loss, 0.0) < self.divergence_threshold:
            factor *= max(own.loss, 0.0) / self.divergence_threshold
        if not math.isfinite(factor):
            return 0.0
        return min(max(factor, 0.0), 1.0)

    def _interpolate(self, clock: float, peer_clock: float, loss: float, peer_loss: float) -> float:
        rule = self.interpolation
        if isinstance(rule, str):
            rule = Constant(self.factor) if rule == "constant" else _BY_NAME[rule]
        return float(rule(clock, peer_clock, loss, peer_loss))

    def blended_clock(self, own_clock: float, peer_clock: float, factor: float) -> float:
        """Return the average of the clocks, with the same factor as the parameters."""
        if factor in (0, 1):
            return peer_clock if factor else own_clock
        return factor * peer_clock + (1 - factor) * own_clock

    def blend(self, params: Tensor, received: Tensor, factor: float) -> None:
        """Move ``params`` towards ``received``, in place.

        Args:
            params: This worker's parameters, flat ``(P,)``.
            received: The peer's parameters, of the same shape and dtype; not changed.
            factor: Share of the peer in [0, 1]. 0 keeps ``params`` exactly and 1 copies
                ``received`` exactly, also if the other one has NaN or infinity.
        """
        if factor == 1:
            params.copy_(received)
        elif factor != 0:
            params.lerp_(received, factor)

    def init(self, params: Tensor) -> State:
        """Return an empty state: the engine keeps the clock."""
        return {}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return the parameters that are served to peers: the local ones."""
        return params

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Call :meth:`blend` with the factor of equal clocks and losses."""
        factor = self.factor if self.interpolation == "constant" else 0.5
        assert local is not None
        self.blend(local, received, factor)
        return local

r"""The expected loss of DiLoCo relative to DDP on the same tokens.

Charles et al., "Communication-Efficient Language Model Training Scales Reliably and Robustly:
Scaling Laws for DiLoCo" (arXiv:2503.09799), trained models of P = 35M to 2.4B parameters with DDP
and with DiLoCo of N = 1, 2, 4 and 8 workers, 30 local steps per round, 20 tokens per parameter,
each with its best learning rates and batch size. Their joint law L = 19.226 P^-0.0985 N^0.0116
misses the ratios to DDP in their table of losses by up to 1.1 %, because the effect of N is smaller
for larger models. So these ratios were fitted here by least squares:

.. math::
    \ln (L_{DiLoCo} / L_{DDP}) = -0.00422 + 0.00813 \, \ln N \, (P / 10^9)^{-0.257}

Its residuals have a standard deviation of 0.21 % and are at most 0.34 %. Values that
the paper does not cover are marked, and widen the range.
"""

from __future__ import annotations

import dataclasses
import math

OFFSET, SLOPE, EXPONENT = -0.00422, 0.00813, 0.257
"""Coefficients of the fit."""

PERCENT_OF_FIT = 0.42
"""Two standard deviations of the residuals of the fit, in percent."""

FITTED_PARAMETERS = (35e6, 2.4e9)
FITTED_WORKERS = (1, 8)
FITTED_SYNC_EVERY = 30
FITTED_TOKENS_PER_PARAMETER = 20

MAX_SHORT_DELAY = 10
"""Local steps of delay up to which Streaming DiLoCo lost less than 0.2 % (arXiv:2501.18512)."""

PERCENT_OF_DELAY = 0.2


@dataclasses.dataclass(frozen=True)
class LossGap:
    """The expected loss relative to DDP's, in percent, and its range.

    Attributes:
        percent: Expected gap; negative if the loss is lower than DDP's.
        low: Lower end of the range.
        high: Upper end of the range.
        outside: What lies outside the experiments of the paper; empty if nothing does.
    """

    percent: float
    low: float
    high: float
    outside: tuple[str, ...] = ()

    def __str__(self) -> str:
        mark = "*" if self.outside else ""
        return f"{self.percent:+.1f} % ({self.low:+.1f} to {self.high:+.1f}){mark}"


NO_GAP = LossGap(0.0, 0.0, 0.0)
"""The gap of DDP, and of the remote optimizer, which takes the same steps."""


def diloco_gap(
    num_parameters: float,
    num_workers: int,
    sync_every: int,
    tokens_per_parameter: float,
    delay: int = 0,
) -> LossGap | None:
    r"""Return the expected gap of DiLoCo; None if it is not known.

    It is not known for results that are applied more than ``MAX_SHORT_DELAY`` local steps late.
    For another number of local steps H than the paper's 30, the part that depends on N is
    multiplied by :math:`\ln H / \ln 30`: an assumption, by which nothing is lost at H = 1.

    The range is the two standard deviations of the fit and, in both directions, the difference to
    the nearest experiment of the paper, in P and N, and the difference to H = 30.

    Args:
        num_parameters: Parameters P of the model.
        num_workers: Number of workers N.
        sync_every: Local steps H per round.
        tokens_per_parameter: Tokens of the whole run, over the parameters; only marked if it
            differs from the paper's 20 by more than a factor of two.
        delay: Local steps after which a result is applied.

    Example:
        >>> print(diloco_gap(1.3e9, 4, 30, 20))
        +0.6 % (+0.2 to +1.1)
    """
    if delay > MAX_SHORT_DELAY:
        return None
    outside = []
    nearest_parameters = min(max(num_parameters, FITTED_PARAMETERS[0]), FITTED_PARAMETERS[1])
    nearest_workers = min(max(num_workers, FITTED_WORKERS[0]), FITTED_WORKERS[1])
    here = _percent(num_parameters, num_workers, sync_every)
    nearest = _percent(nearest_parameters, nearest_workers, sync_every)
    fitted = _percent(num_parameters, num_workers, FITTED_SYNC_EVERY)
    if nearest_parameters != num_parameters:
        outside.append("the number of parameters")
    if nearest_workers != num_workers:
        outside.append("the number of workers")
    if sync_every != FITTED_SYNC_EVERY:
        outside.append("the local steps per round")
    if not 0.5 <= tokens_per_parameter / FITTED_TOKENS_PER_PARAMETER <= 2:
        outside.append("the tokens per parameter")
    spread = PERCENT_OF_FIT + abs(here - nearest) + abs(here - fitted)
    late = PERCENT_OF_DELAY if delay else 0.0
    return LossGap(here, here - spread, here + spread + late, tuple(outside))


def _percent(num_parameters: float, num_workers: int, sync_every: int) -> float:
    drift = SLOPE * math.log(num_workers) * (num_parameters / 1e9) ** -EXPONENT
    drift *= math.log(sync_every) / math.log(FITTED_SYNC_EVERY)
    return 100 * math.expm1(OFFSET + drift)

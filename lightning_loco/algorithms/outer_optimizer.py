"""Outer optimizers: SGD, its stability with a delay, and any torch optimizer.

The state of an outer optimizer is part of the algorithm's state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from lightning_loco.algorithms.algorithm import State
from lightning_loco.algorithms.outer_lr import OuterLR, check_outer_lr, highest_rate, next_rate
from lightning_loco.algorithms.outer_momentum import OuterMomentum, next_momentum

OuterOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""A callable from a list with one flat parameter to an optimizer of it."""

_PREFIX = "optimizer."


def check_outer_sgd(
    outer_lr: OuterLR, outer_momentum: OuterMomentum, *, may_be_auto: bool = False
) -> None:
    """Check the settings of outer SGD.

    Args:
        outer_lr: Outer learning rate.
        outer_momentum: Outer momentum.
        may_be_auto: Whether the method knows ``outer_momentum="auto"``.

    Raises:
        TypeError: If the rate is neither a number nor a schedule, or the momentum is text and the
            method knows no ``"auto"``.
        ValueError: If the rate is not positive and finite, or the momentum neither in [0, 1) nor
            ``"auto"``.
    """
    check_outer_lr(outer_lr)
    if isinstance(outer_momentum, str):
        if not may_be_auto:
            raise TypeError(
                f"outer_momentum must be a number in [0, 1) here, got {outer_momentum!r}."
            )
        if outer_momentum != "auto":
            raise ValueError(
                f'outer_momentum must be a number in [0, 1) or "auto", got {outer_momentum!r}.'
            )
    elif not 0 <= outer_momentum < 1:
        raise ValueError(
            f"outer_momentum must be in [0, 1), got {outer_momentum}. Common values are 0.9 for "
            "hundreds of local steps, 0.5 for ten, 0 for none"
            + ('; "auto" follows the rounds.' if may_be_auto else ".")
        )


def step_outer_parameters(
    outer_lr: OuterLR,
    outer_momentum: OuterMomentum,
    nesterov: bool,
    gradient: Tensor,
    state: State,
    start: int = 0,
) -> None:
    """Take one step of SGD on ``state["outer"]``, with the rate and the momentum of this round.

    Args:
        outer_lr: The setting; a schedule counts the round.
        outer_momentum: The setting.
        nesterov: Nesterov momentum; False is heavy ball.
        gradient: Mean pseudo-gradient of a slice; may be overwritten.
        state: Of the slice.
        start: Where the slice begins.
    """
    rate = next_rate(outer_lr, state)
    momentum = outer_momentum
    if momentum == "auto":
        momentum = next_momentum(max(rate, highest_rate(outer_lr)), gradient, state, start)
    step_outer_sgd(state["outer"], gradient, state.get("momentum"), rate, momentum, nesterov)


def step_outer_sgd(
    outer: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    outer_lr: float,
    outer_momentum: float,
    nesterov: bool,
) -> None:
    """Take one step of SGD on the outer parameters, in place.

    Args:
        outer: Outer parameters ``(P,)``.
        gradient: Mean pseudo-gradient ``(P,)``; may be overwritten.
        buffer: The momentum buffer ``(P,)``, changed in place; None for no momentum.
        outer_lr: Outer learning rate.
        outer_momentum: In [0, 1).
        nesterov: Nesterov momentum; False is heavy ball.
    """
    if buffer is None or outer_momentum == 0:
        if buffer is not None:  # which sgd would leave as it is, for a later round with momentum
            buffer.copy_(gradient)
        outer.add_(gradient, alpha=-outer_lr)
        return
    sgd(
        [outer],
        [gradient],
        [buffer],
        fused=True,
        weight_decay=0.0,
        momentum=outer_momentum,
        lr=outer_lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
    )


def largest_stable_contraction(
    outer_lr: float,
    momentum: float,
    nesterov: bool = True,
    delay: int = 1,
    *,
    every: int = 1,
    share: float = 0.0,
) -> float:
    r"""Compute how far local steps may move in a round for a delayed outer SGD to be stable.

    On a quadratic, the local steps of a round move a worker by a fraction :math:`k` of the way to
    its optimum, so the error follows :math:`e_{t+1} = e_t - \eta\,(\Delta_t + \mu m_{t+1})` with
    :math:`\Delta_t = k\,e_{t-d}` and :math:`m_{t+1} = \mu m_t + \Delta_t` (heavy ball: only
    :math:`m_{t+1}`). Convex problems have :math:`0 < k \le 1`; a result of at least 1 is safe.

    Args:
        outer_lr: Outer learning rate, positive.
        momentum: Outer momentum in [0, 1).
        nesterov: Whether the momentum is Nesterov's instead of heavy ball.
        delay: Rounds between sending and applying, at least 0.
        every: Number of rounds in a block, as in ``DelayedNesterov``.
        share: Share of a pseudo-gradient that is applied without delay, as in ``EagerDiLoCo``.

    Returns:
        The largest stable k, at most 2.

    Example:
        >>> round(largest_stable_contraction(0.7, 0.9), 2)
        0.36
        >>> round(largest_stable_contraction(0.7, 0.0), 2)
        1.43
        >>> round(largest_stable_contraction(0.7, 0.0, share=0.5), 2)
        2.0
    """
    low, high = 0.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        gradient = torch.zeros(delay + 3, dtype=torch.float64, device="cpu")
        gradient[delay] += middle * (1 - share)
        gradient[0] += middle * share
        if _spectral_radius(outer_lr, momentum, nesterov, gradient, every) < 1:
            low = middle
        else:
            high = middle
    return low


def warn_if_unstable_late(limit: float, settings: str, advice: str) -> None:
    """Warn of an outer optimizer that may diverge if its results are applied one round late.

    Args:
        limit: Result of :func:`largest_stable_contraction`.
        settings: The settings, in words.
        advice: What to use instead.
    """
    if limit < 1 - 1e-6:
        warnings.warn(
            f"{settings} is unstable with overlap when a local phase covers more than {limit:.0%} "
            f"of the way to its optimum. {advice}",
            stacklevel=3,
        )


def _spectral_radius(
    outer_lr: float, momentum: float, nesterov: bool, gradient: Tensor, every: int
) -> float:
    """Return the radius of the linear map of a block on (e_t, ..., e_{t-delay}, m_t, block sum).

    ``gradient`` is the pseudo-gradient of a round, as a row vector on that state.
    """
    size = len(gradient)
    buffer, block_sum = size - 2, size - 1
    block = torch.eye(size, dtype=torch.float64, device="cpu")
    for number in range(1, every + 1):
        step = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        for age in range(1, buffer):
            step[age, age - 1] = 1
        step[0, 0] = step[buffer, buffer] = step[block_sum, block_sum] = 1
        step[block_sum] += gradient
        if nesterov:
            step[0] -= outer_lr / every * gradient
        if number == every:
            step[buffer] = momentum * step[buffer] + step[block_sum] / every
            step[block_sum] = 0
            step[0] -= outer_lr * (momentum if nesterov else 1.0) * step[buffer]
        block = step @ block
    return float(torch.linalg.eigvals(block).abs().max())


def check_outer_optimizer(make_optimizer: OuterOptimizer) -> None:
    """Check an outer optimizer by two steps on a small vector.

    Raises:
        ValueError: If the optimizer cannot step on a flat vector with its state kept outside.
    """
    name = getattr(make_optimizer, "__name__", repr(make_optimizer))
    outer, state = torch.zeros(2, dtype=torch.float32, device="cpu"), State()
    try:
        probe = make_optimizer([torch.nn.Parameter(outer.clone())])
        if not isinstance(probe, torch.optim.Optimizer):
            raise TypeError(f"it returned {probe!r} instead of a torch optimizer")
        settings = _settings(probe)
        for _ in range(2):
            stepped = step_outer_optimizer(make_optimizer, outer, torch.ones_like(outer), state)
            if _settings(stepped) != settings:
                raise TypeError("it keeps numbers in param_groups, which would be lost")
    except Exception as error:
        raise ValueError(
            f"{name} cannot be an outer optimizer: {error}. It must step on one flat vector, "
            "without a closure, like torch.optim.AdamW."
        ) from error


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def step_outer_optimizer(
    make_optimizer: OuterOptimizer,
    outer: Tensor,
    gradient: Tensor,
    state: State,
) -> torch.optim.Optimizer:
    """Take one step of a torch optimizer on the outer parameters, in place.

    The optimizer is created for each step and its state restored, so its state is saved as entries
    ``optimizer.<name>`` of ``state``: tensors and numbers.

    Args:
        make_optimizer: Called with a list that holds one flat parameter.
        outer: Outer parameters ``(P,)``, updated in place.
        gradient: Mean pseudo-gradient ``(P,)``.
        state: The algorithm's state.

    Returns:
        The optimizer after its step.

    Raises:
        TypeError: If the optimizer's state contains anything but tensors and numbers.
    """
    parameter = torch.nn.Parameter(outer)
    parameter.grad = gradient
    optimizer = make_optimizer([parameter])
    known = {key.removeprefix(_PREFIX): state[key] for key in state if key.startswith(_PREFIX)}
    tensors = [value for value in known.values() if isinstance(value, Tensor)]
    if any(t.shape == parameter.shape and t.device != parameter.device for t in tensors):
        # Moves tensors from a checkpoint to the device on which this optimizer keeps them.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": {0: known}, "param_groups": groups})
    elif known:
        optimizer.state[parameter] = known
    optimizer.step()
    for key, value in optimizer.state[parameter].items():
        if value is None:
            continue
        if not isinstance(value, (Tensor, int, float)):
            raise TypeError(
                f"{type(optimizer).__name__} cannot be an outer optimizer: its state {key!r} is a "
                f"{type(value).__name__}, and only tensors and numbers can be checkpointed."
            )
        state[_PREFIX + key] = value
    return optimizer

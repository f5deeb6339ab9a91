"""A worker of an elastic run: what is known about its process, its model, and its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_loco.elastic.quorum import QuorumPlan
from lightning_loco.engine import Engine

SIZE = 8


class Blocks(nn.Module):
    """Eight numbers in two blocks, so that there can be two fragments."""

    def __init__(self, value: float) -> None:
        super().__init__()
        halves = [torch.full((SIZE // 2,), value) for _ in range(2)]
        self.blocks = nn.ModuleList(nn.ParameterDict({"value": half}) for half in halves)


@dataclass(eq=False)
class WorkerProcess:
    """A worker of the run.

    Attributes:
        host: Its name.
        total: Local steps after which it finishes.
        saved: The state that it starts with, and where its data continue.
        run: Names the run whose state it has; empty before it has one.
        is_apart: Whether it was ever cut off, suspended or asked to stop: it may then end with
            other weights than the others.
        has_drifted: Whether its outer parameters were changed, and no comparison has ended since.
        is_doubtful: Whether those of any worker were changed, and not compared by this one since.
        was_compared: Whether that was so before the comparison of the present round.
        is_outvoted: Whether others had another state, and it has not received that yet; a round may
            have counted meanwhile, in which it had no weight.
        exchange: The plan of an exchange that has not ended with a result.
        is_finishing: Whether it has made all its local steps, so that it waits for no more others.
        has_nan: Whether its next local step leads to NaN.
        had_nan: Whether one did: it may be the only member, and then nobody has sound parameters.
        equal_from: From this round on its outer parameters are equal to the others'.
        is_over: Whether its process has ended.
        bad_until_s: When it was cut off last, or had too few others.
    """

    host: str
    total: int
    saved: tuple[dict[str, Any], int] | None = None
    run: str = ""
    engine: Engine | None = None
    is_apart: bool = False
    has_drifted: bool = False
    is_doubtful: bool = False
    was_compared: bool = False
    is_outvoted: bool = False
    exchange: QuorumPlan | None = None
    is_finishing: bool = False
    has_nan: bool = False
    had_nan: bool = False
    equal_from: int = 0
    is_over: bool = False
    has_failed: bool = False
    bad_until_s: float = -1e9
    saves: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def state_of(engine: Engine) -> tuple[float, ...]:
    """The vectors that rounds keep equal: the outer state, or the parameters if there is none."""
    state = engine.fragments[0].state
    vectors = [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
    vectors = vectors or [engine.worker.replica.layout.new_flat()]
    return tuple(float(number) for vector in vectors for number in vector)

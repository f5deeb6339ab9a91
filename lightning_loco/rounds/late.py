"""A round that another run had left under way, landed where nothing stays under way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms import Algorithm
from lightning_loco.rounds.lane import Lane


@torch.no_grad()
def land_late(lane: Lane, algorithm: Algorithm, flight: dict[str, Any]) -> None:
    """Apply what has arrived; the parameters move by as much as the result moves the start.

    So the local steps made meanwhile stay, and are in the message of the next round.

    Args:
        lane: Its parameters and state are changed in place.
        algorithm: What the round computes.
        flight: What to know of it; its ``"received"``, the own ``"messages"`` if the algorithm
            needs them, and the parameters at the ``"departure"``, flat, or None.
    """
    received, departure = _cut(lane, flight["received"]), flight["departure"]
    messages = _cut(lane, flight["messages"]) if "messages" in flight else received
    for part, share, message in zip(lane.parts, received, messages, strict=True):
        local = torch.empty_like(share)
        part.read_local(local)
        before = part.start()
        if departure is not None:
            before = departure[part.chunk.start : part.chunk.stop].to(local)
        moved = None if before is None else local - before
        if flight["told"] is not None:
            algorithm.hear([tuple(numbers) for numbers in flight["told"]], part.state)
        result = algorithm.update(message, share, part.state)
        is_sound = moved is not None and bool(torch.isfinite(moved).all())
        part.unpack(moved.add_(result) if moved is not None and is_sound else result)
    if lane.has_uncut_state:
        lane.take_back_state()


def _cut(lane: Lane, flat: Tensor) -> list[Tensor]:
    """The share of each part, in memory of its own."""
    shares = torch.split_with_sizes(flat, [len(part) for part in lane.parts])
    return [share.to(lane.layout.device, copy=True) for share in shares]

"""What an engine saves of its worker's rounds, and goes on from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lightning_loco.rounds.engine import Engine


def state_of(engine: Engine) -> dict[str, Any]:
    """Everything a worker needs to go on exactly; waits for what is under way."""
    shared, own = zip(*(lane.state_dict() for lane in engine.lanes), strict=True)
    return {
        **engine.worker.state_dict(),
        "buffers_at_start": engine.buffers_at_start,
        "began_at": [lane.began_at for lane in engine.lanes],
        "shared": list(shared),
        "lanes": list(own),
    }


@torch.no_grad()
def load_state(engine: Engine, saved: dict[str, Any]) -> None:
    """Go on from what :func:`state_of` has given of the same worker."""
    engine.worker.load_state_dict(saved)
    engine.buffers_at_start = saved["buffers_at_start"]
    states = zip(saved["shared"], saved["lanes"], saved["began_at"], strict=True)
    for lane, (shared, own, began_at) in zip(engine.lanes, states, strict=True):
        lane.load_state_dict(shared, own)
        lane.began_at = lane.fresh_at = began_at

"""Rounds that begin anew, from parameters that were set by hand."""

from __future__ import annotations

import torch

from lightning_loco.rounds.engine import Engine


@torch.no_grad()
def begin_anew(engine: Engine) -> None:
    """Make what the model holds now the start of the rounds, as if there had been none before.

    Outer parameters are the present ones and momentum is zero; what a flight under way brings is
    dropped, and the next round is a whole one. All workers must call it at the same place, and hold
    the same parameters. A member of a run whose workers come and go calls it alone, and keeps in
    step with the others.
    """
    worker, settings = engine.worker, engine.settings
    start = worker.replica.layout.new_flat()
    shared = [
        {"state": settings.algorithm.init(start.clone()), "received": None} for _ in engine.lanes
    ]
    own = {"flight": None, "residual": settings.init_residual(start), "departure": start}
    engine.load_state_dict(
        {
            **worker.state_dict(),
            "steps_since_round": 0 if engine.link is None else worker.steps_since_round,
            "running": {},
            "buffers_at_start": worker.replica.buffers.new_flat(),
            "began_at": [worker.steps for _ in engine.lanes],
            "shared": shared,
            "lanes": [own for _ in engine.lanes],
        }
    )

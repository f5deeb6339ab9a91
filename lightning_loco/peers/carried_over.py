"""Pulling from peers that goes on from what another run has saved."""

from __future__ import annotations

import torch

from lightning_loco.comm.saved import Saved
from lightning_loco.peers.engine import PairwiseEngine


@torch.no_grad()
def carry_over(engine: PairwiseEngine, saved: Saved) -> list[str]:
    """Go on from what another run has saved, as far as that fits.

    With another algorithm or number of workers all begin at the consensus, with their own clocks.

    Args:
        engine: A new one, whose model holds the consensus of that run.
        saved: What it is to go on from.

    Returns:
        What is dropped or begun anew, in words.

    Raises:
        KeyError: If something is missing in what was saved.
    """
    state, replica = saved.state, engine.worker.replica
    is_of_pairs = saved.is_of(engine.algorithm)
    if is_of_pairs and saved.fits(engine.worker.group.num_workers):
        engine.load_state_dict(state)
        return []
    at_consensus = {
        **{name: value for name, value in state.items() if name != "others"},
        "params": replica.layout.set_aside(),
        "buffers": replica.buffers.set_aside(),
        "clock": state["clock"] if is_of_pairs else float(state["steps"]),
    }
    engine.load_state_dict(at_consensus)
    return ["all workers begin at the consensus"] if is_of_pairs else saved.forgotten()

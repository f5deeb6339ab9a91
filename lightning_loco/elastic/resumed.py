"""A worker that comes with what it knows from a checkpoint."""

from __future__ import annotations

import torch

from lightning_loco.algorithms import Mix
from lightning_loco.elastic.flight import Flight
from lightning_loco.rounds.engine import Engine


@torch.no_grad()
def land_saved_rounds(engine: Engine) -> None:
    """Land what was under way when it was saved, so that newcomers need not learn of it.

    The local steps made meanwhile stay, and are in the message of the next round. Where they are
    mixed with the result, all go on with what is under way: newcomers get that with the state.
    """
    if isinstance(engine.settings.landing, Mix):
        return
    for rounds in engine.lanes:
        if rounds.flight is None:
            continue
        shared, own = rounds.state_dict()
        flight = {**own["flight"], "received": shared["received"], "departure": own["departure"]}
        for handle in rounds.give_up():
            handle.release()
        rounds.land_saved(flight)


def is_ahead(engine: Engine, flight: Flight) -> bool:
    """Whether this worker knows a later round than the next one of those that it has come to.

    It then begins with that round, and the others follow. With the very next one it would meet them
    in the same round, but with another state.
    """
    state = flight.state
    return state is not None and int(state.values["round_index"]) + 1 < engine.worker.round_index

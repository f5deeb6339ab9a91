"""A worker whose parameters are no numbers: what becomes of the lanes that have no round now."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_loco.comm.flat import are_finite
from lightning_loco.rounds.rounds import Rounds


def go_back(lanes: Iterable[Rounds]) -> None:
    """Go on from where their rounds began, if they hold NaN or infinity.

    One local step spreads NaN over all parameters, so that a lane alone cannot get rid of it.
    Of a flight under way the result is taken as it is.
    """
    for rounds in lanes:
        lane = rounds.lane
        if lane.layout.chunks() is not lane.tied_to:
            lane.tie()
        if are_finite([part.chunk for part in lane.parts]):
            continue
        for part in lane.parts:
            if (start := part.start()) is not None:
                part.unpack(start)
        if rounds.flight is not None:
            rounds.flight.finite = False

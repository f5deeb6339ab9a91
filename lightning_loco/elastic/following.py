"""A worker that goes on from the state of the run: one that comes, or has been left behind."""

from __future__ import annotations

from typing import Any

from lightning_loco.elastic.carried import Carried, rows_of
from lightning_loco.elastic.flight import Flight
from lightning_loco.elastic.state import adopt_state, lane_of
from lightning_loco.rounds.engine import Engine
from lightning_loco.rounds.membership import Host
from lightning_loco.rounds.rounds import Flight as LaneFlight
from lightning_loco.rounds.rounds import Rounds


def position_of(engine: Engine, host: Host | None, round_index: int) -> dict[str, Any]:
    """Where a worker is when a round begins, as plain values."""
    return {
        "round_index": round_index,
        "steps": engine.worker.steps,
        "steps_under_way": engine.settings.schedule.steps_under_way(0, round_index),
        "began_at": [rounds.began_at for rounds in engine.lanes],
        "host": None if host is None else host.read(),
    }


def follow(engine: Engine, host: Host | None, flight: Flight, missed: int = 0) -> None:
    """Go on from the state that a flight has brought, as it was when the flight began.

    Args:
        engine: Of this worker.
        host: The program around it.
        flight: It is over.
        missed: Local steps that the others have made since.

    Raises:
        RuntimeError: If the state does not fit.
    """
    worker = engine.worker
    adopt_state(engine, flight)
    if not flight.has_drifted:  # otherwise this worker knows where it is
        assert flight.state is not None
        position = flight.state.values
        worker.steps = int(position["steps"])
        worker.round_index = int(position["round_index"])
        worker.steps_since_round = int(position.get("steps_since_round", 0))
        for rounds, began_at in zip(engine.lanes, position["began_at"], strict=True):
            rounds.began_at = int(began_at)
        if host is not None:
            assert flight.plan is not None
            host.go_on(position["host"], flight.plan.names[flight.plan.donor])
        for _ in range(missed):
            if host is not None:
                host.end_step()
            worker.steps += 1
            worker.steps_since_round += 1
        if host is not None:
            host.count()
    for rounds in engine.lanes:
        rounds.fresh_at = worker.steps


def take_part(engine: Engine, flight: Flight, handle: Carried) -> Rounds:
    """Put a flight under way whose state this worker has gone on from; it has no weight in it.

    Of such a round the message is nobody's own.

    Returns:
        The lane in which it lands, when it lands for all.
    """
    plan, state = flight.plan, flight.state
    assert plan is not None
    assert state is not None
    position = flight.values if flight.has_drifted else state.values
    index = plan.round_index
    rounds = lane_of(engine, index)
    rounds.began_at = int(position["steps"])
    rows = rows_of(flight, engine, f"round {index}")
    rounds.flight = LaneFlight(index, rows, False, rounds.began_at, [handle])
    rounds.flight.stayed = engine.settings.schedule.stays(index)
    for message in rounds.lane.messages():
        if engine.settings.algorithm.exchange == "mean" or flight.received is None:
            message.zero_()
        else:
            message.copy_(flight.received)
    return rounds

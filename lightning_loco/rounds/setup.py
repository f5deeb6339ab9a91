"""What an engine is made of, out of its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor, nn

from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.rows import Row, RowCarrier, TravellingRows
from lightning_loco.comm.worker import Worker
from lightning_loco.rounds.exchange import Exchange, make_exchange
from lightning_loco.rounds.lane import Lane
from lightning_loco.rounds.link_emulator import LinkEmulator
from lightning_loco.rounds.mean_exchange import RidingRows
from lightning_loco.rounds.membership import Link
from lightning_loco.rounds.rounds import Rounds
from lightning_loco.rounds.settings import RoundSettings


class Made(NamedTuple):
    """The parts of an engine: its lanes, how rows travel with each, and the exchange of all.

    ``link`` connects it with members that come and go.
    """

    worker: Worker
    settings: RoundSettings
    lanes: list[Rounds]
    carriers: list[RowCarrier]
    exchange: Exchange
    link: Link | None


def set_up(
    model: nn.Module,
    make_settings: Callable[[], RoundSettings],
    group: WorkerGroup,
    optimized: Iterable[Tensor] | None,
) -> Made:
    """Join the other workers and make the lanes; the group is closed if that fails."""
    try:
        worker, settings = Worker.join(model, make_settings, group, optimized)
        return Made(worker, settings, *make_lanes(worker, settings))
    except BaseException as error:
        group.close(error)
        raise


def make_lanes(
    worker: Worker, settings: RoundSettings
) -> tuple[list[Rounds], list[RowCarrier], Exchange, Link | None]:
    """The last parts of :class:`Made`.

    Rows ride with a round's first parcel where the exchange can carry them and somebody attends to
    the round until it ends: those at a meeting must be called when it is late.
    """
    group, layout, algorithm = worker.group, worker.replica.layout, settings.algorithm
    membership = settings.membership
    link = None if membership is None else membership.connect(settings, group)
    exchange = link or make_exchange(
        algorithm,
        group,
        worker.statistics,
        settings.topology,
        settings.compression,
        settings.stays,
    )
    if settings.link is not None and group.num_workers > 1:
        slow = settings.link, group, worker.statistics, settings.topology
        exchange = LinkEmulator(exchange, *slow)
    is_attended = not settings.stays or settings.schedule.lands_at_meetings
    rides = exchange.can_carry_rows and is_attended
    width = Row.width(algorithm.num_scalars)
    rows_elements = group.num_workers * width if rides else 0
    longest = settings.parcel_elements(layout.numel, layout.dtype.itemsize)
    start = layout.new_flat()
    residual = settings.init_residual(start)
    state = algorithm.init(start)
    lanes: list[Rounds] = []
    carriers: list[RowCarrier] = []
    for stretches in settings.schedule.lanes(layout.sizes):
        departure = lanes[0].lane.departure if lanes else None
        lane = Lane(layout, stretches, settings, state, residual, longest, rows_elements, departure)
        rounds = Rounds(lane, settings, exchange)
        lanes.append(rounds)
        table = lane.rows_memory.view(-1, width)
        rider = RidingRows(group, table, rounds.send_first, settings.stays) if rides else None
        carriers.append(link or rider or TravellingRows(group))
    return lanes, carriers, exchange, link

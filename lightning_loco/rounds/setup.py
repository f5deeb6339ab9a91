"""What happens once, before the first local step: checks, equal start, the machinery of rounds."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable

from torch import nn

from lightning_loco.comm.checks import (
    check_model,
    check_same_schema,
    check_same_settings,
    share_from_worker_0,
)
from lightning_loco.comm.groups import WorkerGroup
from lightning_loco.comm.replica import Replica
from lightning_loco.comm.stats import Statistics
from lightning_loco.rounds.exchange import MeanExchange, make_exchange
from lightning_loco.rounds.mean_rounds import MeanRounds
from lightning_loco.rounds.overlapped_rounds import OverlappedRounds
from lightning_loco.rounds.rounds import BlockingRounds
from lightning_loco.rounds.settings import RoundSettings

CHUNK_ELEMENTS = 2**20
"""Elements that are worked on at once: 4 MiB of float32, which a processor's cache can hold."""

WHOLE_MODEL_BYTES = 2**40
"""A bucket that holds any model: for engines whose message is the whole model."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A worker that is ready to start.

    Attributes:
        settings: Checked against the number of workers, without ``"auto"``.
        replica: The model's parameters and buffers.
        parcel_elements: Longest parcel.
        checksum: Of the initial model, equal on all workers.
    """

    settings: RoundSettings
    replica: Replica
    parcel_elements: int
    checksum: int


def prepare_worker(
    model: nn.Module,
    make_settings: Callable[[], RoundSettings],
    bucket_bytes: int,
    group: WorkerGroup,
) -> Prepared:
    """Check model and settings, compare them between all workers, and share the start of worker 0.

    Args:
        model: The module to train.
        make_settings: Makes the user's settings; may raise.
        bucket_bytes: Memory for messages under way, in bytes.
        group: The workers.

    Raises:
        ValueError: On every worker, if anything does not fit on one of them.
        TypeError: Likewise.
    """
    error: Exception | None = None
    try:
        check_model(model)
        with warnings.catch_warnings():
            if group.worker != 0:
                warnings.simplefilter("ignore")
            settings = make_settings().prepare(group.num_workers)
        parcel = settings.parcel_elements(model, bucket_bytes, group.num_workers)
        replica = Replica(model, _chunk_elements(model, parcel, settings.algorithm.elementwise))
    except (ValueError, TypeError, OSError) as found:
        error = found
    group.raise_together(error)
    check_same_settings({**settings.describe(), "bucket_bytes": bucket_bytes}, group)
    check_same_schema(replica.layout, group)
    return Prepared(settings, replica, parcel, share_from_worker_0(model, group))


def _chunk_elements(model: nn.Module, parcel_elements: int, elementwise: bool) -> int:
    """About :data:`CHUNK_ELEMENTS`, without a short chunk at the end of a small model."""
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not elementwise or numel > parcel_elements:
        return parcel_elements if not elementwise else min(parcel_elements, CHUNK_ELEMENTS)
    return math.ceil(numel / max(1, round(numel / CHUNK_ELEMENTS)))


def make_rounds(prepared: Prepared, group: WorkerGroup, statistics: Statistics) -> BlockingRounds:
    """The kind of rounds that the settings ask for."""
    settings, layout, parcel = prepared.settings, prepared.replica.layout, prepared.parcel_elements
    algorithm = settings.algorithm
    exchange = make_exchange(algorithm, group, statistics, settings.topology)
    state = algorithm.init(layout.new_flat())
    rounds: BlockingRounds
    if settings.overlap:
        rounds = OverlappedRounds(layout, algorithm, exchange, state, parcel, settings.warm_start)
    elif isinstance(exchange, MeanExchange) and algorithm.elementwise and layout.numel:
        rounds = MeanRounds(layout, algorithm, exchange, state, parcel, group.num_workers)
    else:
        rounds = BlockingRounds(layout, algorithm, exchange, state, parcel)
    statistics.staleness = rounds.staleness
    return rounds

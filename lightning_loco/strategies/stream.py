"""How far the workers of a run have come in the stream of samples that members share.

The samples of an epoch come in the same order from the sampler that Lightning puts in for several
workers and from that of members, who take what follows it.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import lightning.pytorch as pl
from torch.utils.data import DistributedSampler

from lightning_loco.rounds import Engine
from lightning_loco.rounds.membership import Link
from lightning_loco.strategies import lightning_private
from lightning_loco.strategies.driven import Engine as AnyEngine
from lightning_loco.strategies.positions import Place, deals_out, train_loaders


def link_of(engine: AnyEngine) -> Link | None:
    """The connection with members that come and go; None if the workers stay."""
    return engine.link if isinstance(engine, Engine) else None


def stream_position(
    engine: AnyEngine, trainer: pl.Trainer, place: Place, shares: list[int]
) -> int | None:
    """The first sample that no worker has taken; None if there is no such stream.

    Args:
        engine: Of this worker.
        trainer: Within ``fit``.
        place: Where its loops are.
        shares: In what proportion the workers share the data, one number each.
    """
    if (link := link_of(engine)) is not None:
        return link.share.reach
    loaders = train_loaders(trainer)
    if len(loaders) != 1 or not deals_out(trainer):
        return None
    (loader,) = loaders
    sampler = lightning_private.sampler_of(loader)
    batch_size = getattr(loader.batch_sampler, "batch_size", None)
    assert isinstance(sampler, DistributedSampler)
    if batch_size is None:
        return None
    size, loop = len(cast(Sized, sampler.dataset)), trainer.fit_loop
    batches = 0 if place == "next epoch" else loop.epoch_loop.batch_progress.current.ready
    own = shares[engine.worker.group.worker]
    taken = min(batches * batch_size * sum(shares) // own, size)
    epochs: Any = loop.epoch_progress.current
    return int(epochs.processed) * size + taken


def go_on_in_stream(link: Link, position: int | None) -> list[str]:
    """Let a member go on from a position, and say what it cannot go on from."""
    if position is None:
        return ["the members begin at the first of the data"]
    link.share.begin_at(position)
    return []

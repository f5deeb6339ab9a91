"""Links of workers, and what the messages of a method cost on them, without PyTorch."""

from lightning_loco.costs.link import LINKS, NETWORKS, Link, Links
from lightning_loco.costs.read_links import LinkLike, as_links, read_links
from lightning_loco.costs.transfer_times import (
    Array,
    Indices,
    LinkQueue,
    LinkTimes,
    Route,
    TransferTime,
    TransferTimes,
    draw,
    messages_of,
)

__all__ = [
    "LINKS",
    "NETWORKS",
    "Array",
    "Indices",
    "Link",
    "LinkLike",
    "LinkQueue",
    "LinkTimes",
    "Links",
    "Route",
    "TransferTime",
    "TransferTimes",
    "as_links",
    "draw",
    "messages_of",
    "read_links",
]

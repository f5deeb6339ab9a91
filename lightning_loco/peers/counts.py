"""What is counted of fetches and of serving."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class FetchCounts:
    """What has become of the fetches.

    Attributes:
        fetches: Fetches that brought parameters.
        timeouts: Peers that were silent for too long, or too slow.
        refused: Peers that did not listen, closed the connection or have another model or key.
        empty: Peers that had not published anything yet.
        not_finite: Fetches whose parameters held NaN or infinity, or that came with a clock or
            loss that no worker has.
        too_far: Fetches whose parameters were further away than ``max_peer_distance`` allows.
        errors: Other errors; each kind has a line in the log.
        malformed: Replies that were dropped.
        bytes_received: Bytes of parameters, those of failed fetches included.
    """

    fetches: int = 0
    timeouts: int = 0
    refused: int = 0
    empty: int = 0
    not_finite: int = 0
    too_far: int = 0
    errors: int = 0
    malformed: int = 0
    bytes_received: int = 0


@dataclasses.dataclass
class PeerStatistics(FetchCounts):
    """Counters of a node from its start on; see also :class:`FetchCounts`.

    Attributes:
        malformed: Messages that were dropped, requests and replies.
        bytes_sent: Bytes of parameters handed out to peers.
        wait_s: Seconds spent in :meth:`~lightning_loco.peers.PeerNode.wait`.
        scores: Scores of the peers in [10, 1000], by name.
    """

    bytes_sent: int = 0
    wait_s: float = 0.0
    scores: dict[str, int] = dataclasses.field(default_factory=dict)

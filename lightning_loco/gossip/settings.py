"""What a user says about pairwise gossip, checked before any thread or socket exists."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

from lightning_loco.algorithms.pairwise import PairwiseAverage
from lightning_loco.compression import Codec
from lightning_loco.gossip.model import codec_of_peers
from lightning_loco.gossip.nodes_file import read_nodes
from lightning_loco.gossip.outlier_filter import MAX_PEER_DISTANCE
from lightning_loco.gossip.peer_selection import NodeDirectory, Peer, as_peer
from lightning_loco.links.links import Links
from lightning_loco.parameters.flat import Cuts
from lightning_loco.transport import read_certificate
from lightning_loco.values import plain


@dataclasses.dataclass(frozen=True)
class PairwiseSettings:
    """How a worker pulls from its peers.

    Args:
        algorithm: How much of a peer's parameters to take.
        nodes: All peers if workers are started one by one, as a list or the path of a file; None
            for the ranks of one job.
        name: Which of the nodes this worker is.
        fetch_timeout_s: Longest time for a fetch, in seconds.
        compression: How parameters are written on the wire: a codec or its name. Default: as they
            are.
        key_file: Certificate and key of the job.
        max_peer_distance: How many times as far as usual a peer's parameters may be from one's own,
            more than 1; None for no limit.
        link: Links that fetches are to take as long as on. Default: those that there are.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or the nodes do not fit.
        FileNotFoundError: If a file does not exist.
    """

    algorithm: PairwiseAverage
    nodes: str | Path | Sequence[Peer | Mapping[str, object]] | None = None
    name: str | None = None
    fetch_timeout_s: float = 2.5
    compression: Any | None = None
    key_file: str | Path | None = None
    max_peer_distance: float | None = MAX_PEER_DISTANCE
    link: Links | None = None

    outer_device: ClassVar[None] = None
    """There is nothing outer: a peer's parameters move the local ones where those are."""

    def __post_init__(self) -> None:
        """Check types and ranges."""
        algorithm: object = self.algorithm
        if not isinstance(algorithm, PairwiseAverage):
            raise TypeError(f"algorithm must be a PairwiseAverage(), got {algorithm!r}.")
        timeout = self.fetch_timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"fetch_timeout_s must be a number of seconds, got {timeout!r}.")
        if not 0 < timeout < math.inf:
            raise ValueError(f"fetch_timeout_s must be positive and finite, got {timeout!r}.")
        distance = self.max_peer_distance
        if isinstance(distance, bool) or not isinstance(distance, (int, float, NoneType)):
            raise TypeError(f"max_peer_distance must be a number or None, got {distance!r}.")
        if distance is not None and not 1 < distance < math.inf:
            raise ValueError(
                "max_peer_distance is a multiple of the usual distance and must be finite and more "
                f"than 1, got {distance!r}. Use None for no limit."
            )
        codec_of_peers(self.compression)
        if self.name is not None and self.nodes is None:
            raise ValueError(f"name={self.name!r} says which of the nodes this is; give nodes=...")
        if self.nodes is not None:
            if self.name is None:
                raise ValueError("nodes needs name: which of them is this worker?")
            NodeDirectory(self.peers, self.name)
        if self.key_file is not None:
            read_certificate(self.key_file)
        if not isinstance(self.link, Links | None):
            raise TypeError(f"link must be as_links('wan') or None, got {self.link!r}.")

    @functools.cached_property
    def peers(self) -> list[Peer]:
        """All nodes, this one among them; empty for the ranks of one job."""
        if self.nodes is None:
            return []
        if isinstance(self.nodes, (str, Path)):
            return read_nodes(self.nodes)[0]
        return [as_peer(node) for node in self.nodes]

    @property
    def codec(self) -> Codec | None:
        """How parameters are written on the wire; None if they travel as they are."""
        return codec_of_peers(self.compression)

    @property
    def consensus_key(self) -> str | None:
        """The entry of the state that is the consensus: none, since it is the ranks' mean."""
        return self.algorithm.consensus_key

    @property
    def node_number(self) -> int:
        """Number of this worker among the nodes; 0 without nodes."""
        return [peer.name for peer in self.peers].index(self.name) if self.name else 0

    def prepare(self, num_workers: int, seed: int = 0) -> PairwiseSettings:
        """Check the algorithm against the number of ranks of this job.

        Args:
            num_workers: Ranks of this job.
            seed: Of the run; nothing is drawn.

        Returns:
            The settings to run with.

        Raises:
            ValueError: If something does not fit; before training starts.
        """
        if self.link is not None:
            self.link.check(len(self.peers) or num_workers)
        algorithm = self.algorithm.prepare(num_workers, None)
        assert isinstance(algorithm, PairwiseAverage)
        return dataclasses.replace(self, algorithm=algorithm)

    def cuts(self, sizes: Mapping[str, int], itemsize: int, longest: int) -> Cuts:
        """Chunks of the ``longest`` length: nothing is exchanged in rounds."""
        return Cuts(longest)

    def describe(self) -> dict[str, Any]:
        """Everything that is equal on all workers, as plain values.

        Workers compare them, and checkpoints hold them: two workers with the same values train
        alike. Which node a worker is, and where its key file lies, is its own.
        """
        hyper_parameters = {
            field.name: plain(getattr(self.algorithm, field.name))
            for field in dataclasses.fields(self.algorithm)
        }
        return {
            "algorithm": type(self.algorithm).__name__,
            **hyper_parameters,
            "nodes": [list(peer) for peer in self.peers],
            "fetch_timeout_s": self.fetch_timeout_s,
            "max_peer_distance": self.max_peer_distance,
            "compression": plain(self.codec),
        }

"""Settings of pairwise gossip, checked before any thread or socket is created."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_loco._util.plain import plain
from lightning_loco.algorithms.pairwise_average import Interpolation, PairwiseAverage
from lightning_loco.compression import Codec
from lightning_loco.costs import LinkLike, Links, as_links
from lightning_loco.gossip.nodes_file import read_nodes
from lightning_loco.gossip.peer_selection import NodeListDiscovery, Peer, as_peers
from lightning_loco.gossip.protocol import pull_codec
from lightning_loco.model.flat import Cuts
from lightning_loco.transport import read_certificate


@dataclasses.dataclass(frozen=True)
class PairwiseSettings:
    """How a worker fetches and averages the parameters of its peers.

    Arguments and errors as in :class:`~lightning_loco.gossip.PairwiseEngine`, except for
    ``link``: the links to emulate, or None. The contents of ``config_file`` go to the other fields.
    """

    algorithm: PairwiseAverage
    nodes: str | Path | Sequence[Peer | Mapping[str, object]] | None = None
    name: str | None = None
    fetch_timeout_s: float = 2.5
    compression: Any | None = None
    key_file: str | Path | None = None
    link: Links | None = None
    config_file: str | Path | None = None

    topology: ClassVar[None] = None
    outer_device: ClassVar[None] = None
    granularity: ClassVar[int] = 1
    """There are no outer parameters: local ones are averaged with a peer's on their own device."""

    def __post_init__(self) -> None:
        algorithm: object = self.algorithm
        if not isinstance(algorithm, PairwiseAverage):
            raise TypeError(f"algorithm must be a PairwiseAverage(), got {algorithm!r}.")
        if self.config_file is not None:
            self._take_config_file(self.config_file)
        timeout = self.fetch_timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"fetch_timeout_s must be a number of seconds, got {timeout!r}.")
        if not 0 < timeout < math.inf:
            raise ValueError(f"fetch_timeout_s must be positive and finite, got {timeout!r}.")
        pull_codec(self.compression)
        if self.name is not None and self.nodes is None:
            raise ValueError(
                f"name={self.name!r} says which of the nodes this is; pass nodes=... or "
                "config_file=..."
            )
        if self.nodes is not None:
            if self.name is None:
                raise ValueError("nodes needs name: which of them is this worker?")
            if isinstance(self.nodes, (str, Path)) and (unused := read_nodes(self.nodes)[1]):
                raise ValueError(
                    f"{str(self.nodes)!r} has also {', '.join(unused)}, but nodes=... uses its "
                    "nodes only. Pass it as config_file=..., or remove the unused settings."
                )
            NodeListDiscovery(self.peers, self.name)
        if self.key_file is not None:
            read_certificate(self.key_file)
        if not isinstance(self.link, Links | None):
            raise TypeError(f"link must be as_links('wan') or None, got {self.link!r}.")

    def _take_config_file(self, path: str | Path) -> None:
        """Take the nodes and settings of the file; ValueError if other ones were given."""
        if self.nodes is not None:
            raise ValueError(f"config_file={str(path)!r} has the nodes: leave out nodes.")
        nodes, settings = read_nodes(path)
        algorithm: dict[str, Any] = dict(settings)
        for name, value in settings.items():
            owner = self if name == "fetch_timeout_s" else self.algorithm
            given, default = getattr(owner, name), getattr(type(owner), name)
            if given not in (default, value):
                raise ValueError(
                    f"{name} is {given!r} here and {value!r} in config_file={str(path)!r}. Leave "
                    "it out here, or change the file."
                )
        timeout = algorithm.pop("fetch_timeout_s", self.fetch_timeout_s)
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "fetch_timeout_s", timeout)
        object.__setattr__(self, "algorithm", dataclasses.replace(self.algorithm, **algorithm))
        object.__setattr__(self, "config_file", None)

    @functools.cached_property
    def peers(self) -> list[Peer]:
        """All nodes including this one; empty for the ranks of one job."""
        if self.nodes is None:
            return []
        if isinstance(self.nodes, (str, Path)):
            return read_nodes(self.nodes)[0]
        return as_peers(self.nodes)

    @property
    def codec(self) -> Codec | None:
        """Codec of the parameters on the wire; None for no compression."""
        return pull_codec(self.compression)

    @property
    def consensus_key(self) -> str | None:
        """None: the consensus is the mean of the ranks, not an entry of the state."""
        return self.algorithm.consensus_key

    @property
    def node_number(self) -> int:
        """Index of this worker in the list of nodes; 0 without nodes."""
        return [peer.name for peer in self.peers].index(self.name) if self.name else 0

    def prepare(self, num_workers: int, seed: int = 0) -> PairwiseSettings:
        """Check algorithm and links against the number of ranks, or raise ValueError."""
        if self.link is not None:
            self.link.check(len(self.peers) or num_workers)
        algorithm = self.algorithm.prepare(num_workers, None)
        assert isinstance(algorithm, PairwiseAverage)
        return dataclasses.replace(self, algorithm=algorithm)

    def fragment_slices(self, sizes: Mapping[str, int]) -> list[list[range]]:
        """The whole vector: there are no rounds."""
        return [[range(sum(sizes.values()))]]

    def cuts(
        self, numel: int, itemsize: int, longest: int, boundaries: tuple[int, ...] = ()
    ) -> Cuts:
        """Cut the parameters into chunks of ``longest`` elements, since there are no rounds."""
        return Cuts(longest)

    def describe(self) -> dict[str, Any]:
        """Return all settings that must be equal on all workers, as plain values.

        Workers compare these values when they start, and checkpoints hold them. The name of the
        node and the path of the key file may differ.
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
            "compression": plain(self.codec),
        }


def pairwise_gossip(
    fetch_probability: float,
    interpolation: Literal["constant", "clock", "loss"] | Interpolation,
    factor: float,
    divergence_threshold: float,
    fetch_timeout_s: float,
    nodes: str | Path | Sequence[Peer | Mapping[str, object]] | None,
    name: str | None,
    key_file: str | Path | None,
    compression: Codec | str | None,
    keep_progress: bool,
    config_file: str | Path | None,
    link: LinkLike | None,
) -> PairwiseSettings:
    """Return the settings of :class:`~lightning_loco.PairwiseGossipStrategy`."""
    algorithm = PairwiseAverage(
        fetch_probability, interpolation, factor, divergence_threshold, keep_progress
    )
    return PairwiseSettings(
        algorithm,
        nodes=nodes,
        name=name,
        fetch_timeout_s=fetch_timeout_s,
        compression=compression,
        key_file=key_file,
        link=as_links(link),
        config_file=config_file,
    )

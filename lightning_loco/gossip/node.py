"""A node: serves the parameters of this worker and fetches parameters of its peers."""

from __future__ import annotations

import dataclasses
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_loco._util.clock import REAL_CLOCK, Clock
from lightning_loco._util.fault_points import reach
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.costs import LinkTimes
from lightning_loco.distributed.devices import has_streams
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.gossip.fetch_decisions import FetchCounts, FetchDecisions, FetchDuration
from lightning_loco.gossip.fetcher import Fetcher, FetchingThread, Received
from lightning_loco.gossip.peer_selection import (
    NodeListDiscovery,
    Peer,
    PeerDiscovery,
    PeerSelector,
    StoreDiscovery,
    worker_name,
)
from lightning_loco.gossip.protocol import WireFormat, pull_codec
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.gossip.snapshot_server import SnapshotServer
from lightning_loco.gossip.snapshots import Snapshots
from lightning_loco.model.fingerprint import schema_checksum
from lightning_loco.model.flat import FlatLayout
from lightning_loco.transport import address_towards, read_certificate, text_without_key_file

_ANY_FREE_PORT = 0


@dataclasses.dataclass
class PeerStatistics(FetchCounts):
    """Statistics of a node since its start; see also :class:`FetchCounts`.

    Attributes:
        malformed: Requests and replies that violated the protocol.
        bytes_sent: Bytes of parameters that were sent to peers.
        wait_s: Seconds spent in :meth:`PeerNode.wait`.
        scores: Scores of the peers in [10, 1000], by name.
    """

    bytes_sent: int = 0
    wait_s: float = 0.0
    scores: dict[str, int] = dataclasses.field(default_factory=dict)


class PeerNode:
    """Serves the latest parameters of this worker and fetches parameters of random peers.

    Serving and fetching happen in background threads. The training thread only publishes its
    parameters, starts fetches and waits for them. The threads are daemons, so a node that is never
    closed does not keep its process alive.

    Args:
        numel: Number of parameters P.
        dtype: Their dtype, float32 or float64.
        discovery: Names and addresses of the peers.
        schema_checksum: Checksum of the model, 64 bits, equal on all peers; see
            :func:`~lightning_loco.model.fingerprint.schema_checksum`.
        compression: Codec of the parameters on the wire, equal on all peers: a name such as
            ``"int8"`` or a codec. Default: no compression.
        fetch_timeout_s: Longest duration of a fetch, and so of :meth:`wait`, in seconds.
        seed: Seed of the choice of peers. Use another one on each worker.
        pinned: Whether to use pinned memory, for a model on a GPU.
        key_file: Only peers that have this file can connect. Write one with
            ``lightning-loco keys FILE``.
        host: Address to listen on. Default: 127.0.0.1 if all peers are there, else 0.0.0.0.
        port: Port to listen on. Default: the one of the discovery, or any free one.
        emulated_duration: Duration of a fetch on an emulated link. Default: no emulation.
        clock: Clock of the deadlines.

    Raises:
        TypeError: If ``compression`` has the wrong type.
        ValueError: If an argument is out of range or the key file cannot be used.
        FileNotFoundError: If the key file does not exist.
        RuntimeError: If the port is taken.

    Attributes:
        wire_format: How the parameters are encoded.
        snapshots: The published parameters.

    Example:
        >>> from lightning_loco.gossip import StoreDiscovery
        >>> store = torch.distributed.HashStore()
        >>> here, there = (
        ...     PeerNode(3, torch.float32, StoreDiscovery(store, worker, 2), schema_checksum=7)
        ...     for worker in range(2)
        ... )
        >>> there.publish(torch.tensor([1.0, 2.0, 3.0]), Tag(clock=5, loss=0.5))
        True
        >>> here.start_fetch()
        >>> received = here.wait()
        >>> received.params, received.tag.clock, received.peer
        (tensor([1., 2., 3.]), 5.0, 'worker1')
        >>> here.close()
        >>> there.close()
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        discovery: PeerDiscovery,
        *,
        schema_checksum: int,
        compression: Any | None = None,
        fetch_timeout_s: float = 2.5,
        seed: int = 0,
        pinned: bool = False,
        key_file: str | Path | None = None,
        host: str | None = None,
        port: int | None = None,
        emulated_duration: FetchDuration | None = None,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}.")
        self.wire_format = WireFormat(schema_checksum, numel, dtype, pull_codec(compression))
        certificate = None if key_file is None else read_certificate(key_file)
        if certificate is None and not discovery.is_local:
            warnings.warn(text_without_key_file(), stacklevel=2)
        if host is None:
            host = "127.0.0.1" if discovery.is_local else "0.0.0.0"
        if port is None:
            port = discovery.port or _ANY_FREE_PORT
        self._clock = clock
        self._wait_s = 0.0
        self._counted_bytes = 0
        self.snapshots = Snapshots(self.wire_format, pinned=pinned)
        self._selector = PeerSelector(discovery.names, seed)
        decisions = FetchDecisions(
            self.wire_format,
            self._selector,
            self.snapshots,
            fetch_timeout_s=fetch_timeout_s,
            duration=emulated_duration,
            clock=clock,
        )
        self._fetching = FetchingThread(
            Fetcher(decisions, discovery, certificate=certificate, pinned=pinned)
        )
        try:
            self._server = SnapshotServer(
                self.wire_format,
                self.snapshots,
                num_peers=len(discovery.names),
                timeout_s=fetch_timeout_s,
                host=host,
                port=port,
                certificate=certificate,
                clock=clock,
            )
        except BaseException:
            self._fetching.close()
            raise
        # Peers may connect as soon as the port is announced, so it is served before.
        self._server.start()
        try:
            discovery.announce(self._server.port)
        except BaseException:
            self.close()
            raise
        self._fetching.start()

    @property
    def port(self) -> int:
        """Port that this node listens on."""
        return self._server.port

    def publish(self, flat: Tensor, tag: Tag) -> bool:
        """Copy parameters for peers to read. Never waits for them.

        ``flat`` is ``(P,)``, on any device; ValueError for another shape. Returns False, and keeps
        the last snapshot, while slow peers are reading all of the memory.
        """
        return self.snapshots.publish(flat, tag)

    def start_fetch(self) -> None:
        """Start to fetch from a peer in the background."""
        self._fetching.start_fetch()
        reach("after sending")

    def wait(self, timeout_s: float | None = None) -> Received | None:
        """Wait until the fetch has ended, at most ``fetch_timeout_s`` after its start.

        Args:
            timeout_s: Wait at most this long. The fetch continues and can be waited for again.

        Returns:
            The peer's parameters, valid until the next :meth:`start_fetch`. None if no peer sent
            usable ones, or no fetch was started.
        """
        started = self._clock.now()
        received = self._fetching.wait(timeout_s)
        self._wait_s += self._clock.now() - started
        return received

    @property
    def has_ended(self) -> bool:
        """Whether no fetch is running, so that :meth:`wait` would not block."""
        return self._fetching.has_ended

    @property
    def bytes_sent(self) -> int:
        """Bytes of parameters that were sent to peers."""
        return self._server.bytes_sent

    def count_sent(self) -> tuple[int, int]:
        """Return the bytes sent since the last call, and their number without compression."""
        num_bytes = self.bytes_sent - self._counted_bytes
        self._counted_bytes += num_bytes  # not read again: a peer may have been served meanwhile
        wire_format = self.wire_format
        uncompressed_bytes = wire_format.numel * wire_format.dtype.itemsize
        return num_bytes, num_bytes * uncompressed_bytes // wire_format.total_bytes

    @property
    def statistics(self) -> PeerStatistics:
        """A copy of the statistics."""
        counts = dataclasses.asdict(self._fetching.decisions.counts)
        counts["malformed"] += self._server.malformed
        return PeerStatistics(
            **counts,
            bytes_sent=self.bytes_sent,
            wait_s=self._wait_s,
            scores=self._selector.scores,
        )

    def close(self) -> None:
        """End all threads and free the port. Calling it again does nothing."""
        self._fetching.close()
        self._server.close()


# ------------------------------------------------------------------ from settings to a node


def open_node(
    settings: PairwiseSettings, group: WorkerGroup, layout: FlatLayout, seed: int
) -> PeerNode:
    """Start to serve this worker's parameters and to look for its peers.

    The peers are the other nodes of the settings or, without nodes, the other ranks of the job. In
    the second case all ranks must call this. RuntimeError if the port of this node is taken.
    """
    return PeerNode(
        layout.numel,
        layout.dtype,
        make_discovery(settings, group),
        schema_checksum=schema_checksum(layout.schema()),
        compression=settings.codec,
        fetch_timeout_s=settings.fetch_timeout_s,
        seed=seed,
        pinned=has_streams(layout.device),
        key_file=settings.key_file,
        # The other nodes have the port of this one in their lists; ranks read it in the store.
        port=None if settings.name is not None else _ANY_FREE_PORT,
        emulated_duration=make_emulated_duration(settings, group),
        clock=group.clock,
    )


def make_discovery(settings: PairwiseSettings, group: WorkerGroup) -> PeerDiscovery:
    """Return the discovery of the other nodes or of the other ranks; of none for one worker."""
    if settings.name is not None:
        return NodeListDiscovery(settings.peers, settings.name)
    if group.num_workers > 1:
        store = group.own_store("peers")
        return StoreDiscovery(store, group.worker, group.num_workers, _own_host(group))
    return NodeListDiscovery([Peer("alone", "127.0.0.1", 1)], "alone")


def _own_host(group: WorkerGroup) -> str:
    """Return the address of this rank for the others: loopback if all are on one machine."""
    names = group.gather_objects(socket.gethostname(), "peer discovery")
    # Of several machines, this one is reached at its address towards the master of the job.
    if len(set(names)) == 1:
        return "127.0.0.1"
    return address_towards(os.environ.get("MASTER_ADDR", names[0]))


def make_emulated_duration(settings: PairwiseSettings, group: WorkerGroup) -> FetchDuration | None:
    """Return the duration of fetches on the links of the settings; None without emulation."""
    if settings.link is None:
        return None
    names = [peer.name for peer in settings.peers]
    own = settings.node_number if names else group.worker
    names = names or [worker_name(worker) for worker in range(group.num_workers)]
    times = LinkTimes(settings.link, len(names))

    def emulated_duration(peer: str, num_bytes: int, count: int) -> float:
        return times.fetch(own, names.index(peer), num_bytes, count).seconds

    return emulated_duration

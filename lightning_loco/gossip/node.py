"""One worker among its peers: serves its own parameters and reads those of others."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.distributed.devices import has_streams
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.fault_points import reach
from lightning_loco.gossip.fetcher import (
    FetchCounts,
    Fetcher,
    FetchingThread,
    FetchSeconds,
    Received,
)
from lightning_loco.gossip.flow import FlowControl
from lightning_loco.gossip.model import Model, codec_of_peers
from lightning_loco.gossip.outlier_filter import MAX_PEER_DISTANCE, Nearness
from lightning_loco.gossip.peer_selection import (
    Directory,
    NodeDirectory,
    Peer,
    StoreDirectory,
    address_towards,
    worker_name,
)
from lightning_loco.gossip.server import SnapshotServer
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.gossip.snapshots import Snapshots
from lightning_loco.links.link_times import LinkTimes
from lightning_loco.parameters.flat import FlatLayout
from lightning_loco.parameters.schema import schema_checksum
from lightning_loco.transport import read_certificate

_ANY_FREE_PORT = 0


@dataclasses.dataclass
class PeerStatistics(FetchCounts):
    """Counters of a node from its start on; see also :class:`FetchCounts`.

    Attributes:
        malformed: Messages that were dropped, requests and replies.
        bytes_sent: Bytes of parameters handed out to peers.
        wait_s: Seconds spent in :meth:`PeerNode.wait`.
        scores: Scores of the peers in [10, 1000], by name.
    """

    bytes_sent: int = 0
    wait_s: float = 0.0
    scores: dict[str, int] = dataclasses.field(default_factory=dict)


class PeerNode:
    """Serve the latest parameters of this worker and read those of random peers.

    Serving and reading happen in threads of their own; the training thread only copies its
    parameters and waits for a fetch when it wants to. The threads are daemons: a node that is never
    closed does not keep its process alive.

    Args:
        numel: Number of parameters P.
        dtype: Their dtype, float32 or float64.
        directory: Who the peers are and where.
        schema_checksum: 64 bits that tell the model, equal on all peers; see
            :func:`~lightning_loco.parameters.schema.schema_checksum`.
        compression: How parameters are written on the wire, equal on all peers: ``"int8"``, another
            name or a codec, as in :class:`~lightning_loco.PairwiseEngine`. Default: as they are.
        fetch_timeout_s: The longest fetch, and so the longest :meth:`wait`, in seconds.
        max_peer_distance: How many times as far as usual a peer's parameters may be from one's own,
            more than 1; None for no limit. See
            :class:`~lightning_loco.gossip.outlier_filter.Nearness`.
        seed: Of the choice of peers; give each worker its own.
        pinned: Whether the model is on a GPU, which copies to and from the memory of this node.
        key_file: Only peers with this file may read; write one with ``lightning-loco keys FILE``.
        host: Address to listen at. Default: 127.0.0.1 if all peers are there, else 0.0.0.0.
        port: Port to listen at. Default: the one in the directory, or any that is free.
        seconds: How long a fetch is to take at least, on a link that is emulated.

    Raises:
        TypeError: If ``compression`` is no name and no codec.
        ValueError: If an argument is out of range or the key file cannot be used.
        FileNotFoundError: If there is no key file.
        RuntimeError: If the port is taken.

    Attributes:
        model: What travels, and how it is written.

    Example:
        >>> from lightning_loco.gossip import StoreDirectory
        >>> store = torch.distributed.HashStore()
        >>> here, there = (
        ...     PeerNode(3, torch.float32, StoreDirectory(store, worker, 2), schema_checksum=7)
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
        directory: Directory,
        *,
        schema_checksum: int,
        compression: Any | None = None,
        fetch_timeout_s: float = 2.5,
        max_peer_distance: float | None = MAX_PEER_DISTANCE,
        seed: int = 0,
        pinned: bool = False,
        key_file: str | Path | None = None,
        host: str | None = None,
        port: int | None = None,
        seconds: FetchSeconds | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}.")
        self.model = model = Model(schema_checksum, numel, dtype, codec_of_peers(compression))
        certificate = None if key_file is None else read_certificate(key_file)
        if certificate is None and not directory.is_local:
            warnings.warn(
                "Parameters are served to other machines without a key file, so everybody there "
                "who reaches this port may read them, and may pretend to be a peer. Write a key "
                "file with `lightning-loco keys FILE`, copy it to all machines and pass "
                "key_file=FILE.",
                stacklevel=2,
            )
        if host is None:
            host = "127.0.0.1" if directory.is_local else "0.0.0.0"
        if port is None:
            port = directory.port or _ANY_FREE_PORT
        self._wait_s = 0.0
        self._counted_bytes = 0
        self._snapshots = Snapshots(model, pinned=pinned)
        self._flow = FlowControl(directory.names, seed)
        fetcher = Fetcher(
            model,
            directory,
            self._flow,
            fetch_timeout_s=fetch_timeout_s,
            certificate=certificate,
            nearness=Nearness(model, self._snapshots, max_peer_distance),
            pinned=pinned,
            seconds=seconds,
        )
        self._fetching = FetchingThread(fetcher)
        try:
            self._server = SnapshotServer(
                model,
                self._snapshots,
                num_peers=len(directory.names),
                timeout_s=fetch_timeout_s,
                host=host,
                port=port,
                certificate=certificate,
            )
        except BaseException:
            self._fetching.close()
            raise
        self._server.start()
        try:
            directory.announce(self._server.port)
        except BaseException:
            self.close()
            raise
        self._fetching.start()

    @property
    def port(self) -> int:
        """Where this worker listens."""
        return self._server.port

    def publish(self, flat: Tensor, tag: Tag) -> bool:
        """Copy parameters for others to read; never waits for them.

        Args:
            flat: Parameters ``(P,)`` on any device.
            tag: Their clock and loss.

        Returns:
            Whether there was memory for them, which slow readers may hold for a while.

        Raises:
            ValueError: If the number of parameters is another one.
        """
        return self._snapshots.publish(flat, tag)

    def withdraw(self) -> None:
        """Serve nothing until parameters are published again."""
        self._snapshots.withdraw()

    def draft(self) -> Tensor | None:
        """Memory ``(P,)`` to write the next snapshot into, which saves a copy; None if all is read.

        Its dtype is that of the parameters. Nobody reads it until :meth:`post`.
        """
        return self._snapshots.draft()

    def post(self, tag: Tag, norm: float) -> None:
        """Let others read what was written into the :meth:`draft`; never waits for them.

        Args:
            tag: Clock and loss of the parameters.
            norm: Their norm, with which distances of peers are compared.
        """
        self._snapshots.post(tag, norm)

    def draft_bytes(self) -> Tensor | None:
        """Memory to write the next snapshot into as bytes, encoded already; None if all is read."""
        return self._snapshots.draft_bytes()

    def post_bytes(self, tag: Tag, norm: float) -> None:
        """Let others read what was written into the :meth:`draft_bytes`; else as :meth:`post`."""
        self._snapshots.post_bytes(tag, norm)

    def start_fetch(self) -> None:
        """Begin to read from a peer in the background."""
        self._fetching.start_fetch()
        reach("after sending")

    def wait(self, timeout_s: float | None = None) -> Received | None:
        """Wait until the fetch has ended, at most ``fetch_timeout_s`` after its start.

        Args:
            timeout_s: Wait for less; the fetch goes on and can be waited for again.

        Returns:
            The peer's parameters, valid until the next :meth:`start_fetch`; None if no peer
            answered with usable ones, or no fetch was started.
        """
        started = time.perf_counter()
        received = self._fetching.wait(timeout_s)
        self._wait_s += time.perf_counter() - started
        return received

    @property
    def has_ended(self) -> bool:
        """Whether no fetch is under way, so that :meth:`wait` would not block."""
        return self._fetching.has_ended

    @property
    def bytes_sent(self) -> int:
        """Bytes of parameters handed out to peers."""
        return self._server.bytes_sent

    def count_sent(self) -> tuple[int, int]:
        """Bytes handed out since the last call, and how many they would be without compression."""
        new = self.bytes_sent - self._counted_bytes
        self._counted_bytes += new
        plain_bytes = self.model.numel * self.model.dtype.itemsize
        return new, new * plain_bytes // self.model.total_bytes

    @property
    def statistics(self) -> PeerStatistics:
        """A copy of the counters."""
        counts = dataclasses.asdict(self._fetching.counts)
        counts["malformed"] += self._server.malformed
        return PeerStatistics(
            **counts,
            bytes_sent=self.bytes_sent,
            wait_s=self._wait_s,
            scores=self._flow.scores,
        )

    def close(self) -> None:
        """End all threads and free the port; a second call does nothing."""
        self._fetching.close()
        self._server.close()


def open_node(
    settings: PairwiseSettings, group: WorkerGroup, layout: FlatLayout, seed: int
) -> PeerNode:
    """Begin to serve this worker's parameters and to look for its peers.

    Its peers are the other nodes of the settings or, without any, the other ranks of the job. All
    of these must call it.

    Args:
        settings: Checked.
        group: The ranks of this job.
        layout: What travels.
        seed: Of the choice of peers; give each worker its own.

    Raises:
        RuntimeError: If the port of this node is taken.
    """
    return PeerNode(
        layout.numel,
        layout.dtype,
        open_directory(settings, group),
        schema_checksum=schema_checksum(layout.schema()),
        compression=settings.codec,
        fetch_timeout_s=settings.fetch_timeout_s,
        max_peer_distance=settings.max_peer_distance,
        seed=seed,
        pinned=has_streams(layout.device),
        key_file=settings.key_file,
        port=None if settings.name is not None else _ANY_FREE_PORT,
        seconds=fetch_seconds(settings, group),
    )


def open_directory(settings: PairwiseSettings, group: WorkerGroup) -> Directory:
    """Where to find the other nodes, the other ranks of the job, or nobody for a worker alone."""
    if settings.name is not None:
        return NodeDirectory(settings.peers, settings.name)
    if group.num_workers > 1:
        store = group.own_store("peers")
        return StoreDirectory(store, group.worker, group.num_workers, _own_host(group))
    return NodeDirectory([Peer("alone", "127.0.0.1", 1)], "alone")


def _own_host(group: WorkerGroup) -> str:
    """Where the other ranks of the job reach this one: loopback if all are on one machine."""
    names = group.gather_objects(socket.gethostname(), "the search for peers")
    if len(set(names)) == 1:
        return "127.0.0.1"
    return address_towards(os.environ.get("MASTER_ADDR", names[0]))


def fetch_seconds(settings: PairwiseSettings, group: WorkerGroup) -> FetchSeconds | None:
    """How long fetches take on the links of the settings; None if none are emulated."""
    if settings.link is None:
        return None
    names = [peer.name for peer in settings.peers]
    own = settings.node_number if names else group.worker
    names = names or [worker_name(worker) for worker in range(group.num_workers)]
    times = LinkTimes(settings.link, len(names))

    def seconds(peer: str, num_bytes: int, count: int) -> float:
        return times.fetch(own, names.index(peer), num_bytes, count).seconds

    return seconds

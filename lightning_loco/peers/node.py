"""One worker among its peers: serves its own parameters and reads those of others."""

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms.pairwise import Tag
from lightning_loco.fault_points import reach
from lightning_loco.peers.counts import PeerStatistics
from lightning_loco.peers.directory import Directory
from lightning_loco.peers.fetching import FetchingThread
from lightning_loco.peers.flow import FlowControl
from lightning_loco.peers.keys import read_key_file
from lightning_loco.peers.model import Model, codec_of_peers
from lightning_loco.peers.nearness import MAX_PEER_DISTANCE, Nearness
from lightning_loco.peers.open_files import make_room
from lightning_loco.peers.publications import Publications
from lightning_loco.peers.reader import Reader, Received
from lightning_loco.peers.serving import ServingThread
from lightning_loco.peers.slow_reader import FetchSeconds, SlowReader
from lightning_loco.peers.transfer import CHUNK_BYTES, WINDOW


class PeerNode:
    """Serve the latest parameters of this worker and read those of random peers.

    Serving and reading happen in two threads; the training thread only copies its parameters into a
    buffer and waits for a fetch when it wants to. Both threads are daemons: a node that is never
    closed does not keep its process alive.

    Args:
        numel: Number of parameters P.
        dtype: Their dtype, float32 or float64.
        directory: Who the peers are and where.
        schema_checksum: 64 bits that tell the model, equal on all peers; see
            :func:`~lightning_loco.comm.checks.schema_checksum`.
        compression: How parameters are written on the wire, equal on all peers: ``"int8"``, another
            name or a codec, as in :class:`~lightning_loco.PairwiseEngine`. Default: as they are.
        fetch_timeout_s: The longest fetch, and so the longest :meth:`wait`, in seconds.
        max_peer_distance: How many times as far as usual a peer's parameters may be from one's own,
            more than 1; see :class:`~lightning_loco.peers.nearness.Nearness`. None for no limit.
        seed: Of the choice of peers; give each worker its own.
        pinned: Whether the model is on a GPU, which copies to and from the memory of this node.
        key_file: Only peers with this file may read; see :mod:`lightning_loco.peers.keys`.
        host: Address to listen at. Default: 127.0.0.1 if all peers are there, else 0.0.0.0.
        port: Port to listen at. Default: the one in the directory, or any that is free.
        chunk_bytes: Length of the chunks in which parameters travel, at most 4 MiB.
        window: Chunks that are asked for at the same time, 1 to 8.
        slow: How long a fetch is to take at least, on a link that is emulated.

    Raises:
        TypeError: If ``compression`` is no name and no codec.
        ValueError: If an argument is out of range or the key file cannot be used.
        FileNotFoundError: If there is no key file.
        RuntimeError: If the port is taken.

    Attributes:
        model: What travels, and how it is written.

    Example:
        >>> from lightning_loco.peers import StoreDirectory
        >>> store = torch.distributed.HashStore()
        >>> here, there = (
        ...     PeerNode(3, torch.float32, StoreDirectory(store, worker, 2), schema_checksum=7)
        ...     for worker in range(2)
        ... )
        >>> there.publish(torch.tensor([1.0, 2.0, 3.0]), Tag(clock=5, loss=0.5))
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
        chunk_bytes: int = CHUNK_BYTES,
        window: int = WINDOW,
        slow: FetchSeconds | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}.")
        self.model = model = Model(schema_checksum, numel, dtype, codec_of_peers(compression))
        keys = None if key_file is None else read_key_file(key_file)
        if keys is None and not directory.is_local:
            warnings.warn(
                "Parameters are served to other machines without keys, so everybody there who "
                "reaches this port may read them, and may pretend to be a peer. Write a key file "
                "with `python -m lightning_loco.peers.keys FILE`, copy it to all machines "
                "and pass key_file=FILE.",
                stacklevel=2,
            )
        if host is None:
            host = "127.0.0.1" if directory.is_local else "0.0.0.0"
        _keep_freed_memory()
        self._wait_s = 0.0
        self._counted_bytes = 0
        self._publications = Publications(model, lease_s=fetch_timeout_s, pinned=pinned)
        self._flow = FlowControl(directory.names, seed)
        reader = Reader(
            model,
            directory,
            self._flow,
            fetch_timeout_s=fetch_timeout_s,
            keys=keys,
            nearness=Nearness(model, self._publications, max_peer_distance),
            pinned=pinned,
            chunk_bytes=chunk_bytes,
            window=window,
        )
        self._fetching = FetchingThread(reader if slow is None else SlowReader(reader, slow))
        try:
            self._serving = ServingThread(
                model,
                self._publications,
                host=host,
                port=directory.port if port is None else port,
                keys=keys,
                max_clients=make_room(len(directory.names)),
            )
        except BaseException:
            self._fetching.close()
            raise
        self._serving.start()
        try:
            directory.announce(self._serving.port)
        except BaseException:
            self.close()
            raise
        self._fetching.start()

    @property
    def port(self) -> int:
        """Where this worker listens."""
        return self._serving.port

    def publish(self, flat: Tensor, tag: Tag) -> None:
        """Copy parameters for others to read; never waits for them.

        Args:
            flat: Parameters ``(P,)`` on any device.
            tag: Their clock and loss.

        Raises:
            ValueError: If the number of parameters is another one.
        """
        self._publications.publish(flat, tag)

    def draft(self) -> Tensor:
        """Memory ``(P,)`` to write the next publication into, which saves a copy.

        Its dtype is that of the parameters. Nobody reads it until :meth:`post`.
        """
        return self._publications.draft()

    def post(self, tag: Tag, norm: float) -> None:
        """Let others read what was written into the :meth:`draft`; never waits for them.

        Args:
            tag: Clock and loss of the parameters.
            norm: Their norm, with which distances of peers are compared.
        """
        self._publications.post(tag, norm)

    def draft_bytes(self) -> Tensor:
        """Memory to write the next publication into as bytes, encoded already."""
        return self._publications.draft_bytes()

    def post_bytes(self, tag: Tag, norm: float) -> None:
        """Let others read what was written into the :meth:`draft_bytes`; else as :meth:`post`."""
        self._publications.post_bytes(tag, norm)

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
        return self._serving.bytes_sent

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
        counts["malformed"] += self._serving.malformed
        return PeerStatistics(
            **counts,
            bytes_sent=self.bytes_sent,
            wait_s=self._wait_s,
            scores=self._flow.scores,
        )

    def close(self) -> None:
        """End both threads and free the port; a second call does nothing."""
        self._fetching.close()
        self._serving.close()


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of messages, instead of getting it anew for each of them.

    Blocks larger than any that was freed so far go back to the system at once, and all pages of
    the next one are then cleared again, which halves the rate of a fetch.
    """
    block = bytearray(16 * 2**20)
    del block

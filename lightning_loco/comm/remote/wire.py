"""What travels between two ranks: a short header, a mask, and tensors packed into buckets."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 4 * 2**20


class Kind(enum.IntEnum):
    """What a client asks for, or a server's answer."""

    WEIGHTS = 1
    STEP = 2
    LEAVE = 3
    ACCEPTED = 4
    OTHER_MODEL = 5


class Header(NamedTuple):
    """The first message of a request, of the same size whatever the model.

    Attributes:
        kind: What is wanted.
        detail: The checksum of the model with WEIGHTS; with STEP whether a mask follows, since some
            parameters have no gradient.
    """

    kind: int
    detail: int = 0


class FlatTensors:
    """Memory for one tensor per parameter, side by side in one vector.

    Args:
        tensors: Their shapes.
        bucket_bytes: Length of the pieces in which the vector travels.

    Attributes:
        flat: All of them ``(P,)``, in float32, or in float64 if any tensor is.
        parts: Views of it in the shapes of the tensors.
        buckets: Views of it of ``bucket_bytes`` each.
    """

    def __init__(self, tensors: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        dtype = torch.float64 if wide else torch.float32
        sizes = [tensor.numel() for tensor in tensors]
        self.flat = torch.zeros(sum(sizes), dtype=dtype)
        parts = torch.split(self.flat, sizes)
        self.parts = [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)]
        self.buckets = torch.split(self.flat, max(bucket_bytes // dtype.itemsize, 1))

    @torch.no_grad()
    def load(self, tensors: Iterable[Tensor | None]) -> list[bool]:
        """Copy tensors in, zeros where there is none.

        Returns:
            Where there was one.
        """
        present = []
        parts, sources = [], []
        for part, tensor in zip(self.parts, tensors, strict=True):
            present.append(tensor is not None)
            if tensor is None:
                part.zero_()
            else:
                parts.append(part)
                sources.append(tensor)
        if parts:
            torch._foreach_copy_(parts, sources)
        return present


class Wire:
    """Messages to and from one other rank, in order.

    Args:
        rank: The other one, in ``group``.
        name: Who that is, for error messages.
        group: Default: the default process group.
    """

    def __init__(self, rank: int, name: str, group: dist.ProcessGroup | None = None) -> None:
        self.name = name
        self._group = group if group is not None else dist.group.WORLD
        assert self._group is not None
        self._rank = dist.get_global_rank(self._group, rank)

    def send(self, tensor: Tensor) -> dist.Work:
        """Begin to send; ``tensor`` must stay as it is until the work is done."""
        with self._explained():
            work = dist.isend(tensor, self._rank, group=self._group)
        assert work is not None
        return work

    def receive(self, tensor: Tensor) -> dist.Work:
        """Begin to receive into ``tensor``."""
        with self._explained():
            work = dist.irecv(tensor, self._rank, group=self._group)
        assert work is not None
        return work

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for what was begun.

        Raises:
            RuntimeError: That names the other rank, if it is gone or too late.
        """
        with self._explained(what):
            work.wait()

    def send_header(self, header: Header) -> None:
        """Send a header and wait until it has left."""
        self.wait(self.send(torch.tensor(header, dtype=torch.int64)), "a request")

    def receive_header(self, what: str) -> Header:
        """Wait for a header."""
        values = torch.zeros(len(Header._fields), dtype=torch.int64)
        self.wait(self.receive(values), what)
        return Header(*map(int, values))

    def receive_weights(self, checksum: int, buckets: Sequence[Tensor]) -> None:
        """Ask for the parameters of the same model and wait until they are in the buckets.

        Raises:
            ValueError: If the other rank has another model.
            RuntimeError: If it is gone or too late.
        """
        self.send_header(Header(Kind.WEIGHTS, checksum))
        if self.receive_header("the first answer").kind == Kind.OTHER_MODEL:
            raise ValueError(
                f"{self.name} has a model with other parameters. Build the same model on all "
                "ranks, and pass its parameters in the same order."
            )
        self.receive_all(buckets, "the parameters")

    def step(self, mask: Sequence[bool], buckets: Sequence[Tensor]) -> None:
        """Ask for a step with the gradients in the buckets; then they hold the parameters after it.

        Args:
            mask: Which parameters have a gradient.
            buckets: Zero where there is none.

        Raises:
            RuntimeError: If the other rank is gone or too late.
        """
        complete = all(mask)
        self.send_header(Header(Kind.STEP, int(not complete)))
        if not complete:
            self.send_mask(mask)
        self.send_all(buckets, "the gradients")
        self.receive_all(buckets, "the parameters after a step")

    def say_goodbye(self) -> None:
        """Say that no more requests will come."""
        self.send_header(Header(Kind.LEAVE))

    def send_mask(self, mask: Sequence[bool]) -> None:
        """Send one truth value per parameter."""
        self.wait(self.send(torch.tensor(mask, dtype=torch.uint8)), "a mask")

    def receive_mask(self, count: int) -> list[bool]:
        """Wait for the truth values of so many parameters."""
        values = torch.zeros(count, dtype=torch.uint8)
        self.wait(self.receive(values), "a mask")
        return [bool(value) for value in values]

    def send_all(self, buckets: Sequence[Tensor], what: str) -> None:
        """Send all buckets and wait until they have left."""
        for work in [self.send(bucket) for bucket in buckets]:
            self.wait(work, what)

    def receive_all(self, buckets: Sequence[Tensor], what: str) -> None:
        """Receive all buckets and wait until they have come."""
        for work in [self.receive(bucket) for bucket in buckets]:
            self.wait(work, what)

    def _explained(self, what: str = "a message") -> _Explained:
        return _Explained(self.name, what)


class _Explained:
    def __init__(self, name: str, what: str) -> None:
        self._text = f"{name}: {what} could not be exchanged"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(
                f"{self._text}. It has ended, or is later than the timeout of the process group. "
                "Look into its output first."
            ) from error

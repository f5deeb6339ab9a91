"""What the ranks of one worker tell each other after a local step, so that they blend together."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from typing_extensions import Self

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.distributed.worker_group import WorkerGroup


class RankReport(NamedTuple):
    """What one rank of a worker knows after a local step.

    Attributes:
        has_loss: 1 if it has a training loss, else 0.
        loss: That loss, which may be NaN.
        clock: Its clock.
        has_peer: 1 if the parameters of a peer have arrived here, else 0.
        peer_clock: The peer's clock.
        peer_loss: The peer's loss.
        finite: 0 if the parameters held NaN or infinity when they were read last, else 1.
    """

    has_loss: float
    loss: float
    clock: float
    has_peer: float
    peer_clock: float
    peer_loss: float
    finite: float

    @classmethod
    def of(cls, loss: float | Tensor, clock: float, peer: Tag | None, finite: bool) -> Self:
        """Describe a rank. A loss that is no tensor is NaN if it is not known."""
        has_loss = isinstance(loss, Tensor) or not math.isnan(loss)
        tag = Tag(math.nan, math.nan) if peer is None else peer
        return cls(has_loss, float(loss), clock, peer is not None, *tag, finite)

    @property
    def peer(self) -> Tag | None:
        """Clock and loss of the peer whose parameters have arrived; None without."""
        return Tag(self.peer_clock, self.peer_loss) if self.has_peer else None

    def gather(self, group: WorkerGroup, label: str) -> tuple[Self, float | None]:
        """Return the report of the first rank, and the mean loss; all ranks must call it.

        The mean is over the ranks that have a loss; None if none has. RuntimeError if a rank is
        missing or has failed; the message names it.
        """
        reports = [type(self)(*numbers) for numbers in group.agree(self, label)]
        losses = [report.loss for report in reports if report.has_loss]
        return reports[0], sum(losses) / len(losses) if losses else None

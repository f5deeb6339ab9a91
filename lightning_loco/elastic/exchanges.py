"""The exchange of messages among the members, and of the state with joining workers.

Every call belongs to a plan whose group is open.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lightning_loco._util.fault_points import reach
from lightning_loco.algorithms.algorithm import has_own
from lightning_loco.compression import Compression
from lightning_loco.elastic.group import MemberGroup
from lightning_loco.elastic.quorum import QuorumPlan
from lightning_loco.elastic.recovery import (
    RunState,
    copy_state,
    fragment_of_round,
    max_state_bytes,
)
from lightning_loco.elastic.round_request import RoundRequest, RoundResult
from lightning_loco.elastic.state_transfer import receive_state, send_state
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.exchanges.compressed import CompressedSum

log = logging.getLogger(__name__)


class SumExchange:
    """Messages are summed over all members; the donor sends its state to joining workers."""

    def __init__(self, group: MemberGroup, engine: Engine) -> None:
        self._group = group
        self._engine = engine
        self._compression = engine.settings.compression
        self._has_own_weights = has_own(engine.settings.algorithm, "weight")

    def exchange(self, message: Tensor | None, weight: float, plan: QuorumPlan) -> RoundResult:
        """Sum the messages of all members times their weights; RuntimeError if one is lost.

        ``message`` stays unchanged; None if this worker is joining, which adds zeros.
        """
        if message is None:
            fragment = fragment_of_round(self._engine, plan.round_index).memory
            total = torch.zeros(
                sum(map(len, fragment.buckets)), dtype=fragment.layout.dtype, device="cpu"
            )
        else:
            # A copy: the exchange may have to be repeated with the same message.
            total = message.cpu() if message.is_cuda else message.clone()
        if self._compression is not None:
            return self._sum_compressed(self._compression, total, weight, plan)
        if weight not in (0, 1):
            total.mul_(weight)
        self._group.all_reduce(total)
        return RoundResult(plan, total, bytes_sent=_ring_bytes(total, plan))

    def _sum_compressed(
        self, compression: Compression, message: Tensor, weight: float, plan: QuorumPlan
    ) -> RoundResult:
        """Sum the encoded messages; ``message`` is overwritten with what compression removed."""
        residual = message if compression.has_feedback else None
        memory = torch.empty_like(message) if compression.has_feedback else None
        if len(plan.names) == 1:
            # Nothing is sent, so nothing is encoded, and nothing lost.
            received = message * weight
            return RoundResult(plan, received, residual=None if memory is None else message.zero_())
        sent = weight if self._has_own_weights else None
        summing = CompressedSum(compression, message, plan.rank, len(plan.names), memory, sent)
        bytes_sent = summing.num_bytes
        bytes_saved = _ring_bytes(message, plan) - bytes_sent
        received = summing.run(self._group.swap)
        return RoundResult(plan, received, None, residual, bytes_sent, bytes_saved)

    def copy_state(self, request: RoundRequest) -> RunState:
        """Copy the state for joining workers, before the round ends."""
        # Only a worker that joins, and has no message, may have a round of a checkpoint pending.
        return copy_state(self._engine, request.position, with_saved_rounds=request.message is None)

    def send_state(self, state: RunState, plan: QuorumPlan) -> None:
        """Send the state to one joining worker after the other; a lost one causes a warning."""
        reach("before the state is sent")
        for rank in plan.joining:
            try:
                send_state(state, self._group, rank)
            except RuntimeError as error:
                # The group cannot be used any more, so the rest asks for the state again.
                self._group.abort()
                log.warning("%s was lost while it joined: %s", plan.names[rank], error)
                return

    def receive_state(self, plan: QuorumPlan) -> RunState:
        """Receive the state from the donor; RuntimeError if a member is lost."""
        return receive_state(self._group, plan.donor, max_state_bytes(self._engine))


def _ring_bytes(message: Tensor, plan: QuorumPlan) -> int:
    """Bytes that each member sends in a ring all-reduce."""
    num_members = len(plan.names)
    return 2 * (num_members - 1) * message.nbytes // num_members

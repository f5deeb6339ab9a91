"""How messages are averaged over the members, and how newcomers get the state."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lightning_loco.elastic.elastic_round import ElasticRound
from lightning_loco.elastic.group import Groups
from lightning_loco.elastic.quorum import Plan
from lightning_loco.elastic.recovery import copy_state, fragment_of, longest_state
from lightning_loco.elastic.state_transfer import StateTransfer, receive, send
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.exchanges.compressed import CompressedSum
from lightning_loco.fault_points import reach

log = logging.getLogger(__name__)


class Summing:
    """Messages are added up over all members; the donor brings its state to newcomers.

    Every call belongs to a plan whose group is open. All but :meth:`bring` raise RuntimeError if a
    connection breaks.

    Args:
        groups: The open group.
        engine: Whose messages and state travel.
    """

    def __init__(self, groups: Groups, engine: Engine) -> None:
        self._groups = groups
        self._engine = engine
        self._compression = engine.settings.compression

    def exchange(self, pending: ElasticRound, plan: Plan) -> Tensor:
        """The sum of the messages; that of a newcomer would not fit."""
        if plan.own in plan.newcomers:
            fragment = fragment_of(self._engine, plan.round_index).memory
            total = torch.zeros(sum(map(len, fragment.buckets)), dtype=fragment.layout.dtype)
        else:
            pending.is_sent.wait()
            assert pending.message is not None
            total = pending.message.cpu() if pending.message.is_cuda else pending.message.clone()
        if self._compression is not None:
            return self._add_compressed(pending, plan, total)
        self._groups.sum(total)
        count = len(plan.names)
        pending.bytes_sent = 2 * (count - 1) * total.nbytes // count
        return total

    def _add_compressed(self, pending: ElasticRound, plan: Plan, message: Tensor) -> Tensor:
        """The sum of what all have written; what is lost of the message takes its place."""
        compression, count = self._compression, len(plan.names)
        assert compression is not None
        pending.lost = message if compression.has_feedback else None
        memory = torch.empty_like(message) if compression.has_feedback else None
        if count == 1:
            return message if memory is None else _moved(message, memory)
        under_way = CompressedSum(compression, message, plan.own, count, memory)
        pending.bytes_sent = under_way.num_bytes
        pending.bytes_saved = 2 * (count - 1) * message.nbytes // count - pending.bytes_sent
        return under_way.run(self._groups.swap)

    def settle(self, pending: ElasticRound, received: Tensor) -> Tensor:
        """Of a round that stays, the place of the message: the landing writes there too.

        It saves time there, and takes it here, beside the local steps.
        """
        if pending.message is None or not pending.is_overlapped:
            return received
        return pending.message.copy_(received)

    def copy(self, pending: ElasticRound, plan: Plan) -> StateTransfer | None:
        """Copy the state that newcomers need, before the round ends; only the donor does."""
        if plan.own != plan.donor or not plan.newcomers:
            return None
        pending.is_sent.wait()
        return copy_state(self._engine, pending)

    def bring(self, state: StateTransfer, plan: Plan) -> None:
        """Send it to one newcomer after the other, beside the local steps.

        Who is lost meanwhile asks again.
        """
        reach("before the state is sent")
        for newcomer in plan.newcomers:
            try:
                send(state, self._groups, newcomer)
            except RuntimeError as error:
                self._groups.drop()
                log.warning("%s was lost while it joined: %s", plan.names[newcomer], error)
                return

    def fetch(self, plan: Plan) -> tuple[StateTransfer, None]:
        """The state of the run, which the donor sends."""
        return receive(self._groups, plan.donor, longest_state(self._engine)), None


def _moved(message: Tensor, memory: Tensor) -> Tensor:
    """The message in other memory; nothing of it is left in its own."""
    memory.copy_(message)
    message.zero_()
    return memory

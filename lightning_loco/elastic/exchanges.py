"""How messages are exchanged among the members, and how joining workers get the state.

``SumExchange`` is for algorithms that average over all workers, ``GossipExchange`` for those that
exchange with neighbours. Every call belongs to a plan whose group is open.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.compression import Compression
from lightning_loco.elastic.group import MemberGroup
from lightning_loco.elastic.quorum import NO_STATE, Plan
from lightning_loco.elastic.recovery import copy_state, fragment_of_round, max_state_bytes
from lightning_loco.elastic.state_transfer import RunState
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.exchanges.compressed import CompressedSum
from lightning_loco.engine.exchanges.neighbor import MixingRow
from lightning_loco.fault_points import reach
from lightning_loco.topology import Topology

_MESSAGE = "message"

log = logging.getLogger(__name__)


class Exchanged(NamedTuple):
    """The result of an exchange.

    Attributes:
        received: Sum or mix of the messages; None if this worker receives it with the state.
        bytes_sent: Bytes that this worker sent.
        bytes_saved: Bytes that it would have sent in addition without compression.
        residual: What compression removed from this worker's message, for error feedback.
    """

    received: Tensor | None
    bytes_sent: int = 0
    bytes_saved: int = 0
    residual: Tensor | None = None


class SumExchange:
    """Messages are summed over all members; the donor sends its state to joining workers.

    ``result_fits_message``: the result may replace the message in its memory.
    """

    result_fits_message = True

    def __init__(self, group: MemberGroup, engine: Engine) -> None:
        self._group = group
        self._engine = engine
        self._compression = engine.settings.compression

    def exchange(self, message: Tensor | None, plan: Plan) -> Exchanged:
        """Sum the messages of all members; RuntimeError if one is lost.

        ``message`` stays unchanged; None if this worker is joining, which adds zeros.
        """
        if message is None:
            fragment = fragment_of_round(self._engine, plan.round_index).memory
            total = torch.zeros(
                sum(map(len, fragment.buckets)), dtype=fragment.layout.dtype, device="cpu"
            )
        else:
            total = message.cpu() if message.is_cuda else message.clone()
        if self._compression is not None:
            return self._sum_compressed(self._compression, total, plan)
        self._group.all_reduce(total)
        return Exchanged(total, _ring_bytes(total, plan))

    def _sum_compressed(self, compression: Compression, message: Tensor, plan: Plan) -> Exchanged:
        """Sum the encoded messages; ``message`` is overwritten with what compression removed."""
        residual = message if compression.has_feedback else None
        memory = torch.empty_like(message) if compression.has_feedback else None
        if len(plan.names) == 1:
            if memory is None:
                return Exchanged(message)
            memory.copy_(message)
            message.zero_()
            return Exchanged(memory, residual=residual)
        summing = CompressedSum(compression, message, plan.rank, len(plan.names), memory)
        bytes_sent = summing.num_bytes
        bytes_saved = _ring_bytes(message, plan) - bytes_sent
        return Exchanged(summing.run(self._group.swap), bytes_sent, bytes_saved, residual)

    def sends_state(self, plan: Plan) -> bool:
        """Whether this worker sends its state to joining workers: only the donor does."""
        return bool(plan.joining) and plan.is_donor

    def copy_state(self, position: dict[str, Any], message: Tensor | None, plan: Plan) -> RunState:
        """Copy the state for joining workers, before the round ends."""
        return copy_state(self._engine, position, with_saved_rounds=message is None)

    def send_state(self, state: RunState, plan: Plan) -> None:
        """Send the state to one joining worker after the other; a lost one causes a warning."""
        reach("before the state is sent")
        for rank in plan.joining:
            try:
                state.send(self._group, rank)
            except RuntimeError as error:
                self._group.abort()
                log.warning("%s was lost while it joined: %s", plan.names[rank], error)
                return

    def receive_state(self, plan: Plan) -> tuple[RunState, None]:
        """Receive the state from the donor; RuntimeError if a member is lost."""
        max_bytes = max_state_bytes(self._engine)
        return RunState.receive(self._group, plan.donor, max_bytes), None


def _ring_bytes(message: Tensor, plan: Plan) -> int:
    """Bytes that each member sends in a ring all-reduce."""
    num_members = len(plan.names)
    return 2 * (num_members - 1) * message.nbytes // num_members


class GossipExchange:
    """Messages go to the neighbours in a topology; joining workers get the mean of the others.

    The topology is the one for as many workers as there are members without the joining ones, in
    the order of the plan. A joining worker gets the mean of the others' messages in place of both
    its own message and its result: algorithms that apply results linearly then take it to the mean
    of the others' new parameters, so the mean over all members does not change.
    """

    result_fits_message = False

    def __init__(self, group: MemberGroup, engine: Engine) -> None:
        topology, compression = engine.settings.topology, engine.settings.compression
        assert isinstance(topology, Topology)
        self._group = group
        self._engine = engine
        self._topology = topology
        self._codec = None if compression is None else compression.codec

    def exchange(self, message: Tensor | None, plan: Plan) -> Exchanged:
        """Mix the messages of this worker and its neighbours."""
        if message is None:
            return Exchanged(None)
        message = message.cpu()
        members = [rank for rank in range(len(plan.names)) if rank not in plan.joining]
        position = members.index(plan.rank), len(members), plan.round_index
        mix = MixingRow.of(self._topology, *position)
        receivers = self._topology.receivers(*position)
        encoded = message if self._codec is None else self._codec.encode(message)
        inbox = {neighbor: torch.empty_like(encoded) for neighbor in mix.others}
        self._group.swap(
            {members[neighbor]: encoded for neighbor in receivers},
            {members[neighbor]: memory for neighbor, memory in inbox.items()},
        )
        bytes_sent = len(receivers) * encoded.nbytes
        bytes_saved = len(receivers) * message.nbytes - bytes_sent
        received = mix.apply(message, encoded, inbox, self._codec)
        return Exchanged(received, bytes_sent, bytes_saved)

    def sends_state(self, plan: Plan) -> bool:
        """Whether this worker sends its state: every member does that is not joining."""
        return bool(plan.joining) and not plan.is_joining

    def copy_state(self, position: dict[str, Any], message: Tensor | None, plan: Plan) -> RunState:
        """Copy this member's state and message; both change when the round is applied."""
        state = copy_state(self._engine, position, with_saved_rounds=message is None)
        if plan.round_index != NO_STATE:
            assert message is not None
            state.tensors[_MESSAGE] = message.to("cpu", copy=True)
        return state

    def send_state(self, state: RunState, plan: Plan) -> None:
        """Send what cannot be averaged (only the donor does), then average all other tensors."""
        reach("before the state is sent")
        try:
            if plan.is_donor:
                for rank in plan.joining:
                    state.send(self._group, rank, is_sent=_has_no_mean)
            self._average(state, plan)
        except RuntimeError as error:
            self._group.abort()
            names = plan.format_names(plan.joining)
            log.warning("A member was lost while %s joined: %s", names, error)

    def receive_state(self, plan: Plan) -> tuple[RunState, Tensor | None]:
        """Receive the mean of the members' states, and of their messages."""
        max_bytes = max_state_bytes(self._engine)
        state = RunState.receive(self._group, plan.donor, max_bytes, is_sent=_has_no_mean)
        self._average(state, plan)
        return state, state.tensors.pop(_MESSAGE, None)

    def _average(self, state: RunState, plan: Plan) -> None:
        """Average over the members, tensor by tensor; joining workers add zeros."""
        count = len(plan.names) - len(plan.joining)
        for name, tensor in sorted(state.tensors.items()):
            if not _has_no_mean(tensor):
                total = tensor.reshape(-1)
                self._group.all_reduce(total)
                state.tensors[name] = total.div_(count).view(tensor.shape)


def _has_no_mean(tensor: Tensor) -> bool:
    """Whether joining workers get the donor's tensor, since a mean would not be valid."""
    return not tensor.is_floating_point()


MemberExchange = SumExchange | GossipExchange

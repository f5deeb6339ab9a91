"""Gossip among the present members: messages go to neighbours, newcomers begin at the mean."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lightning_loco.elastic.elastic_round import ElasticRound
from lightning_loco.elastic.group import Groups
from lightning_loco.elastic.quorum import NO_STATE, Plan
from lightning_loco.elastic.recovery import copy_state, longest_state
from lightning_loco.elastic.state_transfer import StateTransfer, receive, send
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.exchanges.neighbor import MixingRow
from lightning_loco.fault_points import reach
from lightning_loco.topology import Topology

_MESSAGE = "message"

log = logging.getLogger(__name__)


class Mixing:
    """Messages go to the neighbours of a topology; newcomers get the mean of all other members.

    The topology is that of so many workers as there are members, without the newcomers, in the
    order of the plan. What a newcomer receives of the round, and its own message, are the mean of
    the others' messages: algorithms that land linearly then bring it to the mean of what the others
    land at, so that the mean over all members stays where it is.

    Args:
        groups: The open group.
        engine: Whose messages and state travel.
    """

    def __init__(self, groups: Groups, engine: Engine) -> None:
        topology = engine.settings.topology
        assert isinstance(topology, Topology)
        self._groups = groups
        self._engine = engine
        self._topology = topology
        compression = engine.settings.compression
        self._codec = None if compression is None else compression.codec

    def exchange(self, pending: ElasticRound, plan: Plan) -> Tensor | None:
        """The mix of this worker and its neighbours."""
        if plan.own in plan.newcomers:
            return None
        pending.is_sent.wait()
        assert pending.message is not None
        message = pending.message.cpu()
        members = [place for place in range(len(plan.names)) if place not in plan.newcomers]
        place_here = members.index(plan.own), len(members), plan.round_index
        mix = MixingRow.of(self._topology, *place_here)
        receivers = self._topology.receivers(*place_here)
        written = message if self._codec is None else self._codec.encode(message)
        inbox = {peer: torch.empty_like(written) for peer in mix.others}
        self._groups.swap(
            {members[peer]: written for peer in receivers},
            {members[peer]: memory for peer, memory in inbox.items()},
        )
        pending.bytes_sent = len(receivers) * written.nbytes
        pending.bytes_saved = len(receivers) * message.nbytes - pending.bytes_sent
        return mix.apply(message, written, inbox, self._codec)

    def settle(self, pending: ElasticRound, received: Tensor) -> Tensor:
        """What was received: algorithms land with their message beside it."""
        return received

    def copy(self, pending: ElasticRound, plan: Plan) -> StateTransfer | None:
        """The state of every member, and its message; both change when the pending round lands."""
        if not plan.newcomers or plan.own in plan.newcomers:
            return None
        pending.is_sent.wait()
        state = copy_state(self._engine, pending)
        if plan.round_index != NO_STATE:
            assert pending.message is not None
            state.tensors[_MESSAGE] = pending.message.to("cpu", copy=True)
        return state

    def bring(self, state: StateTransfer, plan: Plan) -> None:
        """Say what the state is made of, and add this member's part of it."""
        reach("before the state is sent")
        try:
            if plan.own == plan.donor:
                for newcomer in plan.newcomers:
                    send(state, self._groups, newcomer, travels=_is_the_donors)
            self._average(state, plan)
        except RuntimeError as error:
            self._groups.drop()
            names = ", ".join(plan.names[newcomer] for newcomer in plan.newcomers)
            log.warning("A member was lost while %s joined: %s", names, error)

    def fetch(self, plan: Plan) -> tuple[StateTransfer, Tensor | None]:
        """The mean of the members' states, and of their messages."""
        longest = longest_state(self._engine)
        state = receive(self._groups, plan.donor, longest, travels=_is_the_donors)
        self._average(state, plan)
        return state, state.tensors.pop(_MESSAGE, None)

    def _average(self, state: StateTransfer, plan: Plan) -> None:
        """Take the mean over the members, one tensor after the other; newcomers have zeros."""
        count = len(plan.names) - len(plan.newcomers)
        for name, tensor in sorted(state.tensors.items()):
            if not _is_the_donors(tensor):
                total = tensor.reshape(-1)
                self._groups.sum(total)
                state.tensors[name] = total.div_(count).view(tensor.shape)


def _is_the_donors(tensor: Tensor) -> bool:
    """Whether there is no mean of such a tensor, so that newcomers get that of the donor."""
    return not tensor.is_floating_point()

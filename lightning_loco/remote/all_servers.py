"""A worker's side of all servers, each of which has a share of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from lightning_loco.fault_points import reach
from lightning_loco.remote.calls import Call
from lightning_loco.remote.channel import Channel
from lightning_loco.remote.optimizer_state import OptimizerState
from lightning_loco.remote.plan import (
    model_checksum,
    share_parameters,
    trainable_parameters,
)
from lightning_loco.remote.transport import Transport


class Meeting(NamedTuple):
    """What a worker learns when all have met.

    Attributes:
        stop: Why to stop, if all should.
        present: Ranks of the workers that all servers still have.
        behind: Whether this worker had no part in some steps, and has old parameters.
    """

    stop: str | None
    present: list[int]
    behind: bool


class AllServers:
    """Passes each request on to every server and joins their answers.

    Args:
        groups: Parameter groups; parameters that do not require gradients are left alone.
        ranks: The servers.
        transport: How the ranks are connected.

    Attributes:
        frozen: The parameters that are left alone.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], ranks: Sequence[int], transport: Transport
    ) -> None:
        run = transport.next_run()  # first: all ranks count as often, whatever error comes
        trainable, self.frozen = trainable_parameters(groups)
        params = [param for _, param in trainable]
        self._channels: list[Channel] = []
        self._shares: list[list[tuple[int, Tensor]]] = []
        for share, rank in zip(share_parameters(params, len(ranks)), ranks, strict=True):
            shared = [params[index] for index in share]
            messages = transport.plan(shared)
            checksum = model_checksum(shared, messages)
            wire = transport.wire(rank, f"the aggregator (rank {rank})", run)
            self._channels.append(Channel(shared, groups, messages, wire, checksum))
            self._shares.append([trainable[index] for index in share])
        for channel in self._channels:
            others = [other.wire for other in self._channels if other is not channel]
            channel.wire.waiting_too = others
        self._is_expecting = False
        self._handles: list[Any] = []

    def join(self) -> None:
        """Ask for the parameters and hyper-parameters; :meth:`take_over` ends it."""
        for channel in self._channels:
            channel.join()

    # -------------------------------------------------------------------- step

    def watch_gradients(self) -> None:
        """Notice when a parameter gets its gradient; until :meth:`forget_parameters`."""
        self._handles = [
            param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._on_gradient, channel, place)
            )
            for channel, share in zip(self._channels, self._shares, strict=True)
            for place, (_, param) in enumerate(share)
        ]

    def forget_parameters(self) -> None:
        """Remove the hooks from the parameters; no more steps can be made."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for channel in self._channels:
            channel.end()

    def expect_gradients(self) -> None:
        """Send the gradients of the next backward pass while it computes them."""
        self._is_expecting = True
        for channel in self._channels:
            channel.expect_gradients()

    def make_step(self, call: Call) -> str | None:
        """Have the step made; :meth:`take_over` ends it.

        Returns:
            Why to stop, if all should.
        """
        self._is_expecting = False
        for channel in self._channels:
            reach("asking for a step")
            channel.ask_for_step(call)
        reach("after sending")
        for channel in self._channels:
            channel.tell_changes()
        stops = [channel.finish_step() for channel in self._channels]
        return _last(stops)

    def take_over(self, share: Callable[[Tensor], object]) -> None:
        """Write the parameters as they come.

        Args:
            share: Called with each message, in order.
        """
        for channel in self._channels:
            channel.take_over(share)

    def follow(self, share: Callable[[Tensor], object]) -> None:
        """Take over what another rank of this worker shares."""
        for channel in self._channels:
            channel.follow(share)

    # --------------------------------------------------------------- questions

    def are_finite(self, here: bool) -> bool:
        """Whether the gradients of all workers are finite."""
        return all([channel.are_finite(here) for channel in self._channels])

    def meet(self, purpose: str, stop: str | None) -> Meeting:
        """Wait until no worker makes steps."""
        for channel in self._channels:
            channel.ask_to_meet(purpose, stop)
        answers = [channel.meet() for channel in self._channels]
        present = [
            rank
            for rank in answers[0]["present"]
            if all(rank in answer["present"] for answer in answers)
        ]
        return Meeting(
            _last([answer["stop"] for answer in answers]),
            present,
            any(answer["behind"] for answer in answers),
        )

    def catch_up(self, share: Callable[[Tensor], object], leads: bool) -> None:
        """Take over the parameters after steps that this worker had no part in."""
        for channel in self._channels:
            channel.catch_up(share, leads)

    @property
    def is_changed(self) -> bool:
        """Whether parameters were changed by hand since the last step."""
        return any(channel.is_changed for channel in self._channels)

    def state(self) -> OptimizerState:
        """The state of all servers' optimizers as one, for all parameters."""
        return OptimizerState.join([channel.state() for channel in self._channels])

    def load_state(self, state: OptimizerState) -> None:
        """Give each server's optimizer its share of a state."""
        for channel, share in zip(self._channels, self._shares, strict=True):
            channel.load_state(state.share([number for number, _ in share]))

    def parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter with its value on the server, in full precision."""
        return [
            (param, value)
            for channel, share in zip(self._channels, self._shares, strict=True)
            for (_, param), value in zip(share, channel.parameters(), strict=True)
        ]

    def leave(self, farewell: dict[str, Any]) -> None:
        """Tell the servers that no more requests will come, with a last word."""
        for channel in self._channels:
            channel.leave(farewell)

    def fail(self, text: str) -> None:
        """Tell the servers that no more requests will come, because of an error."""
        for channel in self._channels:
            with suppress(RuntimeError):
                channel.fail(text)

    def let_go(self) -> None:
        """Keep nothing of the connections: no more messages can be exchanged."""
        for channel in self._channels:
            channel.let_go()

    @property
    def bytes_sent(self) -> int:
        """All bytes that have left this rank for the servers."""
        return sum(channel.wire.bytes_sent for channel in self._channels)

    @property
    def bytes_saved(self) -> int:
        """By how much more that would have been without compression."""
        return sum(channel.bytes_saved for channel in self._channels)

    @property
    def bytes_received(self) -> int:
        """All bytes that have come from the servers."""
        return sum(channel.wire.bytes_received for channel in self._channels)

    def _on_gradient(self, channel: Channel, place: int, _: Tensor) -> None:
        if self._is_expecting:
            channel.has_gradient(place)


def _last(reasons: Sequence[str | None]) -> str | None:
    """Why to stop, in the words of the last server that says so."""
    return next(filter(None, reversed(reasons)), None)

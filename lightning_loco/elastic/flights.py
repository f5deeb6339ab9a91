"""Carries flights of one worker, in a thread: who takes part, the exchange, and again if it fails.

Nothing here knows of engines. A flight brings its message and its row; it ends with the sum of all
messages and the rows of all members. Whoever knows nothing, or is behind, ends with the state of
the run as well.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_loco.comm.rows import Row
from lightning_loco.elastic.groups import Groups
from lightning_loco.elastic.handover import Handover, receive, send
from lightning_loco.elastic.lighthouse import Lighthouse
from lightning_loco.elastic.plan import UNKNOWING, OtherRun, Plan, Told, difference, make_plan
from lightning_loco.elastic.sharing import DataShare

PATIENCE_S = 30.0
"""How long a wait may be before something is said."""

STATES = 8
"""The most vectors of the length of a message that a state is made of."""

log = logging.getLogger(__name__)

_PAUSE_S, _PARTING_S = 0.2, 2.0


class Flight:
    """One exchange of this worker.

    Args:
        round_index: The round; :data:`UNKNOWING` to join a run.
        row: What it tells the others.

    Attributes:
        values: Where the engine is as it begins, for newcomers.
        message: To be added up; None if this worker only joins. Stays as it is, since the exchange
            may have to be repeated.
        is_sent: Set it once the message is there, and the state will not change until the landing.
        received: The sum of all messages; None if the run has only begun.
        rows: Of all members, of shape ``(members, width)``.
        plan: How it was carried in the end; None before that.
        state: The state of the run, if this worker needed it.
        is_adopted: Whether the engine goes on from it already.
        error: Why it was not carried.
    """

    def __init__(self, round_index: int, row: Row) -> None:
        self.round_index = round_index
        self.row = row
        self.values: dict[str, Any] = {}
        self.message: Tensor | None = None
        self.is_sent = threading.Event()
        self.received: Tensor | None = None
        self.rows: Tensor | None = None
        self.plan: Plan | None = None
        self.state: Handover | None = None
        self.is_adopted = False
        self.error: BaseException | None = None
        self._is_over = threading.Event()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will come."""
        self.error = error
        self._is_over.set()

    def is_over(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        return self._is_over.is_set()

    def wait(self) -> None:
        """Wait for its end, and say so when that takes long; raises what has gone wrong."""
        if not self._is_over.wait(PATIENCE_S):
            what = "A run" if self.round_index <= UNKNOWING else f"Round {self.round_index}"
            log.warning(
                "%s waits for other workers. The page of the lighthouse (its address in a browser) "
                "shows who is alive.",
                what,
            )
            self._is_over.wait()
        if self.error is not None:
            raise self.error


class Flights(threading.Thread):
    """Carries one flight after the other.

    Args:
        lighthouse: Says who takes part.
        groups: Carry the exchange.
        run: Settings and schema, for a comparison with the others'.
        numel: Elements of a message.
        dtype: Of a message.
        share: Dealt out anew when the members change.
        min_workers: With fewer, flights wait.
        timeout_s: Longest wait for enough members, in seconds.
        hand_over: Copies the state that newcomers need.
    """

    def __init__(
        self,
        lighthouse: Lighthouse,
        groups: Groups,
        run: dict[str, Any],
        *,
        numel: int,
        dtype: torch.dtype,
        share: DataShare,
        min_workers: int,
        timeout_s: float,
        hand_over: Callable[[Flight], Handover],
    ) -> None:
        super().__init__(name="loco-flights", daemon=True)
        self._lighthouse = lighthouse
        self._groups = groups
        self._told = run
        text = json.dumps(run)
        self._fingerprint = hashlib.sha256(text.encode()).hexdigest()
        groups.describe(text)
        self._numel, self._dtype = numel, dtype
        self._longest_state = STATES * numel * dtype.itemsize + 2**30
        self._share = share
        self._min_workers = min_workers
        self._timeout_s = timeout_s
        self._hand_over = hand_over
        self._queue: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()

    def carry(self, flight: Flight) -> None:
        """Carry a flight after those before it."""
        self._queue.put(flight)

    def close(self) -> None:
        """Take part no longer; whoever waits for a flight of this worker goes on without it."""
        self._queue.put(None)
        self._lighthouse.close()
        self.join(_PARTING_S)
        self._groups.close()

    def run(self) -> None:
        """Carry flights until :meth:`close`."""
        while (flight := self._queue.get()) is not None:
            try:
                self._carry(flight)
            except BaseException as error:  # the training thread raises it
                flight.end(error)

    def _carry(self, flight: Flight) -> None:
        began = time.monotonic()
        self._share.begin_round()
        while flight.plan is None:
            plan = self._agree(flight, began)
            if plan.is_new:
                self._share.deal(plan.data, plan.own, len(plan.names))
            try:
                self._groups.open(plan)
                self._exchange(flight, plan)
            except RuntimeError as error:
                self._groups.drop()
                if time.monotonic() - began > self._timeout_s:
                    raise
                text = str(error).partition("\n")[0]
                log.warning(
                    "Round %d is repeated, since a member was lost: %s", plan.round_index, text
                )

    def _agree(self, flight: Flight, began: float) -> Plan:
        """Who takes part; waits until they are enough."""
        while True:
            open_group, store = self._groups.name, self._groups.address
            told = Told(flight.round_index, open_group, store, self._share.reach, self._fingerprint)
            left_s = began + self._timeout_s - time.monotonic()
            quorum = self._lighthouse.quorum(told._asdict(), left_s)
            if quorum is None:
                raise RuntimeError(
                    f"Fewer than {self._min_workers} workers were there, or one that is alive did "
                    f"not come to round {flight.round_index}, for {self._timeout_s:g} s. The page "
                    "of the lighthouse (open its address in a browser) shows who is alive."
                )
            try:
                plan = make_plan(quorum, self._lighthouse.name)
            except OtherRun as other:
                theirs = json.loads(self._groups.ask(other.store))
                raise ValueError(difference(self._told, theirs, other.who)) from None
            if len(plan.names) >= self._min_workers:
                return plan
            time.sleep(_PAUSE_S)

    def _exchange(self, flight: Flight, plan: Plan) -> None:
        """Carry a flight once; where it is over for the training thread, it has ended."""
        is_newcomer = plan.own in plan.newcomers
        brings = plan.own == plan.donor and bool(plan.newcomers)
        state = None
        if brings:
            flight.is_sent.wait()
            state = self._hand_over(flight)
        received, rows = None, None
        if plan.round_index != UNKNOWING:
            rows = self._gather_rows(flight, plan, is_newcomer)
            received = self._sum(flight, is_newcomer)
        if is_newcomer:
            flight.state = receive(self._groups, plan.donor, self._longest_state)
        flight.received, flight.rows, flight.plan = received, rows, plan
        flight.end()
        if state is not None:
            self._bring(state, plan)

    def _gather_rows(self, flight: Flight, plan: Plan, is_newcomer: bool) -> Tensor:
        row = flight.row._replace(round_index=plan.round_index)
        if is_newcomer:
            row = row._replace(weight=0.0)
        return self._groups.gather(torch.tensor(row.numbers, dtype=torch.float64))

    def _sum(self, flight: Flight, is_newcomer: bool) -> Tensor:
        """The sum of the messages; that of a newcomer would not fit."""
        if is_newcomer:
            total = torch.zeros(self._numel, dtype=self._dtype)
        else:
            flight.is_sent.wait()
            assert flight.message is not None
            total = flight.message.cpu() if flight.message.is_cuda else flight.message.clone()
        self._groups.sum(total)
        return total

    def _bring(self, state: Handover, plan: Plan) -> None:
        """Send the state to the newcomers; one that is lost meanwhile asks again."""
        for newcomer in plan.newcomers:
            try:
                send(state, self._groups, newcomer)
            except RuntimeError as error:
                self._groups.drop()
                log.warning("%s was lost while it joined: %s", plan.names[newcomer], error)
                return

"""Elastic workers: members that join, are lost, are cut off and return, under a lighthouse."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_loco.algorithms import DiLoCo, LocalSGD, Mix
from lightning_loco.compression import ErrorFeedback, Int8, Sparse
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.elastic.connection import ElasticConnection
from lightning_loco.elastic.consistency import ConsistencyCheck
from lightning_loco.elastic.elastic import Elastic
from lightning_loco.elastic.exchanges import SumExchange
from lightning_loco.elastic.lighthouse import MIN_UPTIME_S
from lightning_loco.elastic.quorum import NO_STATE, QuorumPlan
from lightning_loco.elastic.round_decisions import RoundDecisions
from lightning_loco.elastic.round_request import RoundRequest, RoundResult
from lightning_loco.engine import Engine, RoundSettings, StepEngine
from lightning_loco.schedules import Staggered
from tests.exploration.members_process import models
from tests.exploration.members_worker import Blocks, WorkerProcess, state_of
from tests.exploration.model_lighthouse import ADDRESS, HOST, ModelLighthouse
from tests.exploration.model_network import Network
from tests.exploration.records import (
    Applied,
    Began,
    Ended,
    Finished,
    Merged,
    Overtaken,
    Read,
    Sent,
    Shown,
)
from tests.exploration.scheduler import Fault, Killed
from tests.exploration.world import World

TIMEOUT_S, HEARTBEAT_TIMEOUT_S, JOIN_TIMEOUT_S = 120.0, 5.0, 120.0
MARGIN_S = 60.0
MOST_WORKERS = 6

METHODS = ("diloco", "diloco", "overlap", "local_sgd", "streaming")
CODECS = (None, None, "int8", "feedback", "senders")
FAULTS = ("kill", "freeze", "cut", "lighthouse", "store", "stop", "drift", "late", "nan")
SENDERS = ErrorFeedback(Sparse(k=4, block=16, mean_over="senders"), 0.95)
RARE: tuple[dict[str, Any], ...] = (
    # One is lost within an exchange, maybe of one that has drifted: others may have its message.
    {"workers": 3, "min_workers": 1, "shorter": 0, "faults": ["kill"], "loses_at": "exchange"},
    {"workers": 3, "min_workers": 1, "shorter": 0, "faults": ["drift", "kill"], "check_every": 1}
    | {"loses_at": "exchange", "method": "diloco", "first_heartbeat_s": 0.0},
    # One is lost when another one has made all its steps.
    {"workers": 2, "min_workers": 2, "shorter": 0, "faults": ["kill"], "loses_at": "end"},
    # NaN at a save.
    {"method": "diloco", "shows_every": 1, "faults": ["nan"]},
    # Some ask a lighthouse that was just started again, and others are late.
    {"first_heartbeat_s": 0.5, "step_s": 1.0, "min_workers": 1, "faults": ["lighthouse"]},
    {"first_heartbeat_s": 3.0, "step_s": 1.0, "min_workers": 1, "faults": ["cut", "lighthouse"]},
    # A new member comes while results are on their way.
    {"workers": 3, "min_workers": 1, "method": "streaming", "faults": ["late"]},
    {"workers": 3, "min_workers": 1, "method": "overlap", "faults": ["kill", "late"]},
    # The others go on without one that comes back.
    {"workers": 3, "min_workers": 1, "step_s": 1.0, "faults": ["freeze"]},
    {"workers": 3, "min_workers": 1, "step_s": 0.0, "faults": ["cut"]},
)
"""Settings in place of drawn ones, with which situations happen that are rare otherwise."""


class MembersWorld(World):
    """Workers with the real engine, hooks, round thread, group and monitor."""

    name = "members"
    covered = (
        "lightning_loco.elastic.connection",
        "lightning_loco.elastic.consistency",
        "lightning_loco.elastic.data_shard",
        "lightning_loco.elastic.exchanges",
        "lightning_loco.elastic.group",
        "lightning_loco.elastic.hooks",
        "lightning_loco.elastic.lighthouse",
        "lightning_loco.elastic.quorum",
        "lightning_loco.elastic.recovery",
        "lightning_loco.elastic.round_decisions",
        "lightning_loco.elastic.rounds",
        "lightning_loco.elastic.state_transfer",
    )
    limit_s = 1500.0
    longest_stall_s = 1.0

    @classmethod
    def draw(cls, draw: random.Random) -> dict[str, Any]:
        """Draw how many workers, which method, and what may go wrong."""
        workers = draw.choice([2, 3, 3, 4])
        method = draw.choice(METHODS)
        sync_every = draw.choice([2, 3, 4])
        kinds = draw.sample(FAULTS, draw.choice([0, 1, 1, 2, 3]))
        drawn = {
            "workers": workers,
            "min_workers": draw.randint(1, workers),
            "method": method,
            "codec": None if method == "local_sgd" else draw.choice(CODECS),
            "sync_every": sync_every,
            "delay": draw.randint(0, sync_every // 2),
            "steps": sync_every * draw.choice([2, 3, 4, 5]) + draw.choice([0, 0, 1]),
            "shorter": draw.choice([0, 0, 0, 1, 2 * sync_every]),
            "check_every": draw.choice([0, 1, 2]),
            "first_heartbeat_s": draw.choice([0.0, 0.0, 0.5, 3.0]),
            "step_s": draw.choice([0.0, 0.0, 1.0]),
            "order": draw.sample(range(10, 99), MOST_WORKERS),
            "shows_every": draw.choice([0, 0, 1, 2]),
            "faults": sorted(kinds),
            "loses_at": "",
        }
        if draw.random() < 0.4:
            return drawn
        return drawn | draw.choice(RARE)

    # ------------------------------------------------------------------------- start

    def start(self) -> None:
        """Start the workers."""
        settings, scheduler = self.settings, self.scheduler
        self.network = Network(scheduler)
        self.lighthouse = ModelLighthouse(
            self.network,
            settings["first_heartbeat_s"],
            min_replicas=1,
            join_timeout_s=JOIN_TIMEOUT_S,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        )
        self.workers: dict[str, WorkerProcess] = {}
        self._by_name: dict[str, WorkerProcess] = {}
        self._messages: dict[tuple[str, int], int] = {}
        self._senders: dict[tuple[str, int], set[str]] = {}
        self._has_drifted = self._has_nan = False
        self._patches = ExitStack()
        self._patches.enter_context(
            models(scheduler, self.network, self.lighthouse, self._make_name)
        )
        self._observe()
        scheduler.after_event = self._after_event
        late = "late" in settings["faults"]
        for number in range(settings["workers"] - late):
            self._start_worker(shorter=settings["shorter"] if number == 0 else 0)

    def close(self) -> None:
        """Take the models out of the package."""
        if hasattr(self, "_patches"):
            self._patches.close()

    def _make_name(self) -> str:
        worker = self._own()
        worker.names.append(f"{len(worker.names)}")
        return worker.names[-1]

    def _start_worker(self, shorter: int = 0, saved: Any = None) -> None:
        host = f"w{len(self.workers)}"
        worker = WorkerProcess(host, self.settings["steps"] - shorter, saved)
        self.workers[host] = worker
        self.scheduler.start(host, lambda: self._run_process(worker), host)

    def _own(self) -> WorkerProcess:
        """The worker of the task that runs now."""
        return self.workers[self.scheduler.current.host]

    # ------------------------------------------------------------------- the program

    def _run_process(self, worker: WorkerProcess) -> None:
        """Run the program of a worker, and end its process with it."""
        error = ""
        try:
            self._train(worker)
        except Killed:
            raise
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            worker.has_failed = True
            if not self._is_excused(worker, raised):
                raise
        steps = 0 if worker.engine is None else worker.engine.worker.steps
        self.history.add(Ended(worker.host, steps, error, self.scheduler.now))
        worker.is_over = True
        self.scheduler.post(f"exit of {worker.host}", lambda: self._end(worker), worker.host)

    def _train(self, worker: WorkerProcess) -> None:
        settings, scheduler = self.settings, self.scheduler
        number = int(worker.host[1:])
        engine = worker.engine = self._make_engine(worker, number)
        shard = engine.exchange.data_shard
        shard.add_dataset(1000)
        if worker.saved is not None:
            engine.load_state_dict(worker.saved[0])
            shard.start_at(worker.saved[1])
        try:
            engine.start()
            stop = engine.worker.stop
            while engine.worker.steps < worker.total and stop.agreed is None:
                position = shard.next_position()
                if not worker.is_apart:
                    self.history.add(Read(worker.host, (position,), worker.run))
                with torch.no_grad():
                    values = [p.view(-1) for p in engine.worker.replica.model.parameters()]
                    values[number % 2][number // 2] += 1.0
                    if worker.has_nan:
                        worker.has_nan = False
                        values[number % 2].fill_(torch.nan)
                if settings["step_s"]:
                    scheduler.clock().sleep(settings["step_s"])
                has_begun = engine.step()
                self._show(worker)
                if has_begun:
                    self._record_state(worker)
                    if len(worker.saves) < 2:
                        worker.saves.append((engine.state_dict(), shard.first_unused))
            if stop.agreed is not None:
                engine.exchange.leave()
                return
            worker.is_finishing = True
            engine.finish()
            self._record_state(worker, is_last=True)
        finally:
            engine.close()

    def _make_engine(self, worker: WorkerProcess, number: int) -> Engine:
        settings, method = self.settings, self.settings["method"]
        codecs = {"feedback": ErrorFeedback(Int8()), "senders": SENDERS}
        codec = codecs.get(settings["codec"], settings["codec"])
        membership = Elastic(
            ADDRESS,
            min_workers=settings["min_workers"],
            name=f"n{settings['order'][number]}",
            host=worker.host,
            timeout_s=TIMEOUT_S,
            check_every=settings["check_every"],
        )
        group = WorkerGroup(0, 1, clock=self.scheduler.clock())
        model = Blocks(float(number))
        if method == "streaming":
            rounds = RoundSettings(
                DiLoCo(outer_lr=0.5, outer_momentum=0.5),
                Staggered(settings["sync_every"], 2, settings["delay"]),
                compression=codec,
                merge_policy=Mix(0.5),
                membership=membership,
            )
            return Engine.from_settings(model, rounds, group)
        is_overlapped = method == "overlap"
        algorithms = {
            "local_sgd": LocalSGD(),
            "overlap": DiLoCo(outer_lr=0.5, outer_momentum=0.0),
            "diloco": DiLoCo(outer_lr=0.5, outer_momentum=0.5),
        }
        return StepEngine(
            model,
            algorithms[method],
            sync_every=settings["sync_every"],
            overlap=is_overlapped,
            warm_start=False,
            compression=codec,
            membership=membership,
            group=group,
        )

    # ------------------------------------------------------------------------- faults

    def faults(self) -> Mapping[str, Fault]:
        """Return what may go wrong now."""
        kinds, scheduler = self.settings["faults"], self.scheduler
        loses_at = self.settings.get("loses_at", "")
        running = [worker for worker in self.workers.values() if not worker.is_over]
        found: dict[str, Fault] = {}
        for worker in running:
            host, is_frozen = worker.host, scheduler.is_frozen(worker.host)
            if is_frozen:
                found[f"thaw {host}"] = Fault(lambda w=worker: self._thaw(w), is_repair=True)
            if "kill" in kinds and self._may_be_lost(worker):
                found[f"kill {host}"] = Fault(lambda w=worker: self._kill(w))
            if "freeze" in kinds and not is_frozen:
                found[f"freeze {host}"] = Fault(lambda w=worker: self._freeze(w))
            if "cut" in kinds and not self.network.is_cut:
                for other in [HOST, *(w.host for w in running if w.host > host)]:
                    found[f"cut {host}-{other}"] = Fault(lambda h=host, o=other: self._cut(h, o))
                found[f"cut {host}"] = Fault(lambda h=host: self._cut(h))
            engine = worker.engine
            if engine is None or is_frozen:
                continue
            if "store" in kinds and engine.exchange.has_joined:
                found[f"reset {host}"] = Fault(lambda h=host: self._reset_own_store(h))
            if "stop" in kinds and engine.worker.stop.requested is None:
                found[f"stop {host}"] = Fault(lambda w=worker: self._stop(w))
            if "nan" in kinds and not self._has_nan:
                found[f"nan {host}"] = Fault(lambda w=worker: self._break(w))
            if "drift" in kinds and self._can_drift(worker):
                found[f"drift {host}"] = Fault(lambda w=worker: self._drift(w))
        if self.network.is_cut:
            found["heal"] = Fault(self.network.heal, is_repair=True)
        if not self.lighthouse.is_up:
            found["start lighthouse"] = Fault(self._start_lighthouse, is_repair=True)
        elif "lighthouse" in kinds:
            found["lose lighthouse"] = Fault(self._lose_lighthouse)
        if running and len(self.workers) < MOST_WORKERS and not loses_at:
            has_room = len(running) < self.settings["workers"]
            if has_room and ("late" in kinds or "kill" in kinds):
                found["join"] = Fault(self._start_worker)
            if has_room and "kill" in kinds:
                for worker in self.workers.values():
                    if worker.is_over and worker.saves:
                        saved = worker.saves[-1]
                        found[f"resume {worker.host}"] = Fault(
                            lambda saved=saved: self._start_worker(saved=saved)
                        )
        return found

    def _may_be_lost(self, worker: WorkerProcess) -> bool:
        """Whether a worker is where it is to be lost: anywhere, as one exchanges, or as one ends.

        If one may drift, that is an exchange in which one has.
        """
        settings, plan = self.settings, worker.exchange
        match settings.get("loses_at", ""):
            case "exchange":
                return plan is not None and (
                    bool(plan.drifted) or "drift" not in settings["faults"]
                )
            case "end":
                return any(w.is_finishing and w is not worker for w in self.workers.values())
        return True

    def _kill(self, worker: WorkerProcess) -> None:
        self._end(worker)
        worker.is_over = True

    def _end(self, worker: WorkerProcess) -> None:
        self.network.end(worker.host)
        self.lighthouse.forget(worker.host)
        self.scheduler.kill(worker.host)

    def _freeze(self, worker: WorkerProcess) -> None:
        worker.is_apart = True
        self.scheduler.freeze(worker.host)

    def _thaw(self, worker: WorkerProcess) -> None:
        self.scheduler.thaw(worker.host)

    def _cut(self, host: str, other: str = "") -> None:
        """Cut a host off from another one, or from all."""
        for target in [other] if other else [HOST, *(w for w in self.workers if w != host)]:
            self.network.cut(host, target)
            for name in (host, target):
                if name in self.workers:
                    self.workers[name].is_apart = True

    def _reset_own_store(self, host: str) -> None:
        for store in self.network.stores.values():
            if store.host == host:
                store.own_client.is_cut = True

    def _stop(self, worker: WorkerProcess) -> None:
        assert worker.engine is not None
        worker.is_apart = True
        worker.engine.worker.stop.request("a test")

    def _break(self, worker: WorkerProcess) -> None:
        self._has_nan = worker.has_nan = worker.had_nan = True

    def _can_drift(self, worker: WorkerProcess) -> bool:
        engine, settings = worker.engine, self.settings
        assert engine is not None
        is_checked = settings["check_every"] > 0 and settings["method"] != "local_sgd"
        return is_checked and bool(worker.run) and not self._has_drifted

    def _drift(self, worker: WorkerProcess) -> None:
        assert worker.engine is not None
        self._has_drifted = worker.has_drifted = True
        worker.engine.fragments[0].state["outer"][0] += 7.0 + int(worker.host[1:])
        # It may spread to all: what they have applied is compared again after a comparison.
        for other in self.workers.values():
            other.is_doubtful = True

    def _lose_lighthouse(self) -> None:
        self.lighthouse.stop()

    def _start_lighthouse(self) -> None:
        self.lighthouse.start()

    # ------------------------------------------------------------------- what is seen

    def _after_event(self) -> None:
        self.lighthouse.after_event()
        now, network = self.scheduler.now, self.network
        running = [worker for worker in self.workers.values() if not worker.is_over]
        is_bad = not self.lighthouse.is_up or network.is_cut
        is_bad = is_bad or any(self.scheduler.is_frozen(worker.host) for worker in running)
        least = self.settings["min_workers"]
        for worker in running:
            is_few = len(running) < least and not worker.is_finishing
            if is_bad or (is_few and len(running) + self._finished_before(worker) < least):
                worker.bad_until_s = now

    def _finished_before(self, worker: WorkerProcess) -> int:
        """How many members have announced to a worker that they have finished."""
        stores = self.network.stores.values()
        return sum(s.data.get("finished", 0) for s in stores if s.host == worker.host)

    def _is_excused(self, worker: WorkerProcess, error: Exception) -> bool:
        """Whether the promises allow a worker to end with an error now."""
        if isinstance(error, AssertionError):
            return False
        is_nan = worker.had_nan and "hold NaN or infinity" in str(error)
        return is_nan or self.scheduler.now - worker.bad_until_s < TIMEOUT_S + MARGIN_S

    def _show(self, worker: WorkerProcess) -> None:
        """Show what a save would hold, as all that save at any local step."""
        engine, every = worker.engine, self.settings.get("shows_every", 0)
        assert engine is not None
        if not every or engine.worker.steps % every or engine.outer() is None:
            return
        engine.sync_point("a checkpoint")
        try:
            engine.write_consensus("a checkpoint")
        except RuntimeError as error:
            raise AssertionError(f"{worker.host} cannot save: {error}") from error
        shown, outer = engine.worker.replica.layout.new_flat(), engine.outer()
        assert outer is not None
        self.history.add(Shown(worker.host, tuple(shown.tolist()), tuple(outer.tolist())))
        engine.worker.show_local()

    def _record_state(self, worker: WorkerProcess, is_last: bool = False) -> None:
        """Record the state after a round, as it is equal on all members."""
        engine = worker.engine
        assert engine is not None
        last = engine.exchange.last_round
        is_doubtful = worker.is_doubtful or engine.worker.round_index < worker.equal_from
        if is_doubtful or last is None:
            return
        pending = [index for index, f in enumerate(engine.fragments) if f.pending is not None]
        state = state_of(engine)
        round_index = engine.worker.round_index
        if not is_last:  # the last round of a fragment is left out if it has no local steps
            key = f"{worker.run} {last.plan.group} {pending}"
            self.history.add(Applied(worker.host, round_index, state, key))
        if not is_last and not worker.is_apart:
            self.history.add(Applied(worker.host, round_index, state, f"{worker.run} {pending}"))
        if is_last:
            may_differ = worker.is_apart or self.settings["shorter"] > 0
            self.history.add(Finished(worker.host, worker.run, may_differ, state))

    def _observe(self) -> None:
        """Let the package tell what it does."""
        world = self
        finished, submit = RoundDecisions._finished, ElasticConnection.submit
        record, exchange = ElasticConnection._record, SumExchange.exchange
        compare = ConsistencyCheck.compare

        def _finished(self: RoundDecisions, result: RoundResult, data_start: Any) -> RoundResult:
            world._note_finished(self._name, result.plan)
            return finished(self, result, data_start)

        def _submit(self: ElasticConnection, request: RoundRequest) -> Any:
            name = f"{self._name}-{world._own().names[-1]}"
            world._by_name[name] = world._own()
            world._messages[name, request.round_index] = request.position["steps"]
            return submit(self, request)

        def _exchange(self: SumExchange, message: Tensor | None, weight: float, plan: QuorumPlan):
            name = plan.names[plan.rank]
            if message is not None:
                senders = world._senders.setdefault((plan.group, plan.round_index), set())
                senders.add(name)
                world._note_sent(name, plan, message)
            own = world._own()
            own.exchange = plan
            try:
                return exchange(self, message, weight, plan)
            except RuntimeError:
                own.exchange = None
                raise

        def _record(self: ElasticConnection, result: RoundResult) -> None:
            world._note_received(result)
            record(self, result)

        def _compare(self: ConsistencyCheck, plan: QuorumPlan, all_gather: Any) -> QuorumPlan:
            num_with_state = len(plan.names) - len(plan.joining)
            if num_with_state > 1:
                world._note_compared(plan.names[plan.rank])
            found = compare(self, plan, all_gather)
            if found.has_drifted:
                world._by_name[plan.names[plan.rank]].is_outvoted = True
            return found

        for owner, name, function in (
            (ConsistencyCheck, "compare", _compare),
            (RoundDecisions, "_finished", _finished),
            (ElasticConnection, "submit", _submit),
            (SumExchange, "exchange", _exchange),
            (ElasticConnection, "_record", _record),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, function))

    def _note_finished(self, name: str, plan: QuorumPlan) -> None:
        worker = self._by_name[name]
        worker.exchange = None
        donor = self._by_name.get(plan.names[plan.donor])
        if plan.round_index == NO_STATE:
            if not worker.run:
                worker.run = plan.group
            ahead = [
                other.host
                for other in self.workers.values()
                if other.run not in ("", plan.group)
                and not (other.is_over or other.is_apart or other.host == worker.host)
                and self._by_name.get(plan.names[plan.donor]) is not other
            ]
            if not (worker.is_apart or self._is_slow_restart()):
                self.history.add(Began(worker.host, plan.group, tuple(ahead)))
        elif plan.is_joining and donor is not None:
            is_apart = worker.is_apart or donor.is_apart or self._is_slow_restart()
            if worker.run and not (is_apart or worker.is_outvoted):
                self.history.add(Overtaken(worker.host, plan.round_index))
            worker.run, worker.is_outvoted = donor.run, False
        if worker.was_compared:
            worker.has_drifted = worker.was_compared = worker.is_doubtful = False
            worker.equal_from = plan.round_index + 2
        if plan.is_joining and donor is not None and not plan.drifted:
            worker.has_drifted, worker.is_doubtful = donor.has_drifted, donor.is_doubtful
            worker.equal_from = max(worker.equal_from, donor.equal_from)

    def _is_slow_restart(self) -> bool:
        # A lighthouse that was restarted may not know a worker for longer than MIN_UPTIME_S: then
        # one without a state may begin a run of its own.
        is_slow = self.settings["first_heartbeat_s"] > MIN_UPTIME_S
        return is_slow and self.lighthouse.epoch > 1

    def _note_compared(self, name: str) -> None:
        # A state that drifts later is not what was compared.
        worker = self._by_name[name]
        worker.was_compared = worker.is_doubtful

    def _note_sent(self, name: str, plan: QuorumPlan, message: Tensor) -> None:
        worker = self._by_name[name]
        if not (worker.is_apart or worker.is_doubtful):
            values = tuple(message.tolist())
            self.history.add(Sent(name, worker.run, plan.round_index, values))

    def _note_received(self, result: RoundResult) -> None:
        plan, statuses = result.plan, result.statuses
        assert statuses is not None
        weights = statuses[:, 3].tolist()
        senders = self._senders.get((plan.group, plan.round_index), set())
        total = sum(weights)
        if not total:
            return  # nobody has made local steps since it received the state
        shares = [
            weight / total if name in senders else 0.0
            for name, weight in zip(plan.names, weights, strict=True)
        ]
        fragment = plan.round_index % (2 if self.settings["method"] == "streaming" else 1)
        messages = tuple(
            (f"{name}/{fragment}", self._messages.get((name, plan.round_index), -1))
            for name, share in zip(plan.names, shares, strict=True)
            if share > 0
        )
        self.history.add(Merged(plan.round_index, tuple(shares), messages))

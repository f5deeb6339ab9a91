"""One worker of the world of rounds: its program, and the records of what its engine does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_loco.distributed.graceful_stop import StopAgreed
from lightning_loco.distributed.store_barrier import StoreBarrier
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine import ClockEngine, StepEngine
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.exchanges.neighbor import MixingRow, NeighborExchange
from lightning_loco.engine.fragment_sync import FragmentSync, Round, Stage
from tests.exploration.model_store import TaskStore, TaskWatchdog
from tests.exploration.records import (
    Applied,
    Counted,
    Failed,
    Harmed,
    Healed,
    Merged,
    Mixed,
    Read,
    Reported,
    Stopped,
)
from tests.exploration.rounds_methods import Numbers, round_settings

if TYPE_CHECKING:
    from tests.exploration.rounds_world import RoundsWorld

TIMEOUT_S = 8.0
_SIGTERM = "SIGTERM"
_STEPS_TO_HEAL = 8
"""Steps of two rounds, after which the result of the first one was applied in any case."""
_ROUNDS_TO_HEAL = 3
"""Rounds by the clock: one that was under way, one without this worker, and one to be sure."""


@dataclasses.dataclass
class Saved:
    """What a worker has saved: its engine's state, and how far it is in its program."""

    state: dict[str, Any]
    position: int
    taken: int


class WorkerRun:
    """One worker, from its start to its end.

    Attributes:
        left: What it has saved when it stopped.
        next_fails: Whether its next local step raises an error.
    """

    def __init__(self, world: RoundsWorld, number: int, name: str, saved: Saved | None) -> None:
        self.world, self.number, self.name, self.host = world, number, name, f"w{number}"
        self.engine: Engine | None = None
        self.left: Saved | None = None
        self.next_fails = False
        self._saved = saved
        self._position, self._taken = (0, 0) if saved is None else (saved.position, saved.taken)
        self._life = world.life
        self._is_ending = False
        self._nan_at_round: int | None = None

    # --------------------------------------------------------- called by the world

    @property
    def can_stop(self) -> bool:
        """Whether it can be asked to stop."""
        return self.engine is not None and self.engine.worker.stop.requested is None

    def request_stop(self) -> None:
        """Do what a signal handler does."""
        assert self.engine is not None
        # Worker 0 takes the store with it, for which others may still have a use.
        self.world.harm(self.number, "ends at once" if self._is_ending else "stop")
        self.engine.request_stop(_SIGTERM)

    def fail_next(self) -> None:
        """Let the next local step raise an error."""
        self.next_fails = True

    # -------------------------------------------------------------------- the task

    def run(self) -> None:
        """Train until the end, a stop or an error."""
        world = self.world
        self._group = group = self._make_group()
        watchdog = group.watchdog
        try:
            self._make_engine(group)
            self._follow_program()
            outcome = "finished"
        except StopAgreed:
            outcome = "stopped"
            try:
                self._stop()
            except RuntimeError as error:
                outcome = self._fail(error)
        except RuntimeError as error:
            outcome = self._fail(error)
        except Exception:
            world.exit_later(self, "crashed")
            raise
        if isinstance(watchdog, TaskWatchdog) and self._is_timely():
            world.history.add(Reported(self.host, watchdog.report_s))
        world.exit_later(self, outcome)

    def _is_timely(self) -> bool:
        """Whether this worker was not frozen."""
        is_frozen = any(h.worker == self.host and h.kind == "freeze" for h in self._harms())
        return not is_frozen and self.world.scheduler.stalled_s < 1.0

    def _harms(self) -> Iterator[Harmed]:
        return self.world.history.of(Harmed)

    def _make_group(self) -> WorkerGroup:
        world, number, count = self.world, self.number, self.world.num_workers
        scheduler = world.scheduler
        clock = scheduler.clock()
        hosts = [f"w{other}" for other in range(count)]
        store = TaskStore(world.server, self.name, self.host)
        watchdog = TaskWatchdog(
            store.with_prefix("watchdog"), number, count, timeout_s=TIMEOUT_S, clock=clock
        )
        watchdog.run_as_task(scheduler, f"{self.name} watchdog", self.host)
        watchdog.start()
        barrier = StoreBarrier(store.with_prefix("store_barrier"), number, count, clock)
        return WorkerGroup(
            number,
            count,
            data=world.groups.make("data", number, hosts),
            control=world.groups.make("control", number, hosts),
            watchdog=watchdog,
            store_barrier=barrier,
            store=store,
            clock=clock,
            timeout_s=TIMEOUT_S,
        )

    def _make_engine(self, group: WorkerGroup) -> None:
        world = self.world
        kind = ClockEngine if world.by_clock else StepEngine
        self.model = Numbers(float(self.number), world.dtype)
        engine = kind.from_settings(self.model, round_settings(world.settings), group)
        if world.settings["measures"]:
            engine.measure_outer_gradient, engine.consensus_every = True, 1
        Observer(self, engine).observe()
        if self._saved is not None:
            engine.load_state_dict(copy.deepcopy(self._saved.state))
        engine.start()
        self.engine = engine
        self.note(self._taken)

    def _follow_program(self) -> None:
        engine, program = self.engine, self.world.program[self.number]
        assert engine is not None
        while self._position < len(program):
            kind, number = program[self._position]
            if kind == "step":
                self._step(number)
                continue
            if kind == "validate":
                engine.show_consensus("validation")
                engine.worker.show_local()
            elif kind == "save":
                engine.sync_point("checkpoint")
                self._position += 1
                self.world.saved.setdefault(f"{number}", {})[self.number] = self._state()
                self._group.raise_together(None, "saving a checkpoint")
                continue
            else:
                self._note_healed()
                engine.finish()
                self._note_finite("the final parameters", self.model.parameters())
                if self.world.settings["reports"]:
                    self._is_ending = True
                    self._group.end_together("the end")
                digest = digest_of(*self.model.parameters())
                self.world.final[self.number] = digest
                self._count()
                engine.close()
            self._position += 1

    def _step(self, num_left: int) -> None:
        """Take a local step; ``num_left`` follow in this epoch."""
        engine, world = self.engine, self.world
        assert engine is not None
        step_s = world.settings["step_s"][self.number]
        if step_s:
            self._group.clock.sleep(step_s)
        if self.next_fails:
            world.harm(self.number, "error")
            raise RuntimeError("the batch is broken")
        self.model.step(self.number, self._taken)
        if [self.number, self._taken] == world.settings["nan"]:
            self.model.layers[1].data[1] = float("nan")
            self._nan_at_round = engine.statistics.rounds
        engine.worker.last_loss = float(self._taken)
        world.history.add(Read(self.host, (self._taken,)))
        self._taken += 1
        self._position += 1
        self.note(self._taken)
        engine.step()
        self.note(self._taken)
        self._count()
        stop = engine.worker.stop
        if stop.agreed is not None:
            if num_left:
                raise StopAgreed(stop.agreed)
            stop.postpone()  # as the strategies do after the last batch of an epoch
            world.has_postponed = True

    def _note_healed(self) -> None:
        """Note whether the own parameters are finite, if a round has begun and ended since NaN."""
        nan = self.world.settings["nan"]
        if not nan or nan[0] != self.number or self._nan_at_round is None:
            return
        assert self.engine is not None
        has_time = self._taken > nan[1] + _STEPS_TO_HEAL
        if self.world.by_clock:
            has_time = self.engine.statistics.rounds >= self._nan_at_round + _ROUNDS_TO_HEAL
        if not has_time:
            return
        fragments, algorithm = self.engine.fragments, self.engine.settings.algorithm
        # Without a start to go back to, the other fragments bring NaN back in the next step.
        if len(fragments) == 1 or algorithm.round_start(fragments[0].memory.state) is not None:
            self._note_finite("the local parameters", self.model.parameters())

    def _note_finite(self, what: str, tensors: Iterable[Tensor]) -> None:
        is_finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
        self.world.history.add(Healed(self.host, what, is_finite))

    def note(self, steps: int) -> None:
        """Remember the values of each fragment, for comparisons."""
        engine, world = self.engine, self.world
        if engine is None or world.by_clock:
            return
        params, _ = engine.worker.replica.local()
        for index, digest in enumerate(digests_of(engine, params)):
            world.trace.setdefault((self.number, steps, index), set()).add(digest)

    def _count(self) -> None:
        assert self.engine is not None
        self.world.history.add(Counted(self.host, self._taken, self.engine.worker.steps))

    def _state(self) -> Saved:
        assert self.engine is not None
        self._count()
        return Saved(copy.deepcopy(self.engine.state_dict()), self._position, self._taken)

    def _stop(self) -> None:
        """Save where all have agreed to stop, and end."""
        engine, world = self.engine, self.world
        assert engine is not None
        engine.worker.show_local()
        engine.sync_point("checkpoint")  # as the strategies do before a save
        self.left = self._state()
        self._group.raise_together(None, "saving a checkpoint")
        worker = engine.worker
        step = worker.steps if world.is_even else worker.round_index
        if not (world.by_clock and (not world.is_even or any(self._frozen()))):
            world.history.add(Stopped(self.host, step, engine.stop_agreed or ""))
        engine.close()

    def _frozen(self) -> Iterator[bool]:
        return (harm.kind == "freeze" for harm in self._harms())

    def _fail(self, error: RuntimeError) -> str:
        world, group = self.world, self._group
        kind, now = type(error).__name__, world.scheduler.now
        world.history.add(Failed(self.host, self._life, kind, str(error), now))
        if self.engine is None:
            return "failed"  # its group was closed by the engine
        if world.settings["reports"]:
            group.report_error(error)
            self.engine.close()
            if not world.by_clock:
                self._compare_what_is_left()
        return "failed"

    def _compare_what_is_left(self) -> None:
        """Note what is left after a failure, unless it is refused as torn."""
        engine, world = self.engine, self.world
        assert engine is not None
        try:
            state = engine.state_dict()
        except RuntimeError:
            return
        for index, digest in enumerate(digests_of(engine, state["params"])):
            world.trace.setdefault((self.number, self._taken, index), set()).add(digest)


class Observer:
    """Adds records of what an engine does.

    It wraps methods of one engine; they do what they did.
    """

    def __init__(self, run: WorkerRun, engine: Engine) -> None:
        self._run, self._engine, self._world = run, engine, run.world

    def observe(self) -> None:
        """Begin."""
        engine = self._engine
        engine._record_rounds = self._and_before(engine._record_rounds, self._applied)
        begin = engine.begin_in_parts

        def begin_in_parts(*arguments: Any) -> Iterator[Any]:
            yield from begin(*arguments)
            self._run.note(engine.worker.steps)

        engine.begin_in_parts = begin_in_parts
        for fragment in engine.fragments:
            fragment.new_round = self._and_before(fragment.new_round, self._sent)
            if not self._world.by_clock:
                find = functools.partial(self._find_divisor, fragment, fragment._find_divisor)
                fragment._find_divisor = find
        if isinstance(engine.exchange, NeighborExchange):
            engine.exchange.start = functools.partial(self._mix, engine.exchange.start)

    def _and_before(
        self, method: Callable[..., Any], before: Callable[..., None]
    ) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            before(*arguments)
            return method(*arguments)

        return call

    def _applied(self, fragment: FragmentSync, ended: Sequence[Round]) -> None:
        key, world = self._engine.settings.consensus_key, self._world
        self._run.note(self._engine.worker.steps)
        if key is not None:
            outer = tuple(
                float(v) for part in parts_of(fragment, fragment.state[key]) for v in part
            )
            if any(value != value for value in outer):
                outer = ()
            index = ended[-1].index
            world.history.add(Applied(self._run.host, index, outer, f"life {world.life}"))

    def _sent(self, index: int, began_at: int, weight: float) -> None:
        self._world.sent[self._run.number, index] = began_at

    def _find_divisor(
        self, fragment: FragmentSync, find: Callable[..., None], ended: Round, info: Any
    ) -> None:
        find(ended, info)
        engine, world = self._engine, self._world
        if ended.stage is Stage.COMBINED or not engine.exchange.is_weighted:
            return
        if not any(info.weights):  # no worker had progress: a mean of zero
            return
        total = ended.divisor if fragment._divides else sum(info.weights)
        number = engine.fragments.index(fragment)
        messages = tuple(
            (f"w{worker}/{number}", world.sent.get((worker, ended.index), -1))
            for worker, weight in enumerate(info.weights)
            if weight > 0
        )
        shares = tuple(weight / total for weight in info.weights)
        world.history.add(Merged(ended.index, shares, messages))

    def _mix(self, start: Callable[..., Any], bucket: Any, index: int, weight: float = 1.0) -> Any:
        engine, world, host = self._engine, self._world, self._run.host
        life = world.life
        sent = tuple(map(float, bucket.wire))
        handle = start(bucket, index, weight)
        topology = engine.settings.topology
        row = MixingRow.of(topology, self._run.number, world.num_workers, index)
        world.history.add(Merged(index, (row.own, *row.others.values())))
        fragment = engine.fragments[index % len(engine.fragments)]
        number = fragment.memory.buckets.index(bucket)
        wait = handle.wait

        def waited() -> Tensor:
            received = wait()
            values = tuple(map(float, received))
            world.history.add(Mixed(host, life, world.num_workers, index, number, sent, values))
            return received

        handle.wait = waited
        return handle


def parts_of(fragment: FragmentSync, vector: Tensor) -> list[Tensor]:
    """The parts of a vector ``(P,)`` that belong to a fragment."""
    return [vector[part.start : part.stop] for part in fragment.memory._slices]


def digests_of(engine: Engine, params: Tensor) -> list[str]:
    """A digest of the parameters and the state of each fragment."""
    found = []
    for fragment in engine.fragments:
        state = fragment.state
        vectors = [
            params,
            *(state[key] for key in sorted(state) if fragment.memory.is_cut(state[key])),
        ]
        found.append(digest_of(*(part for v in vectors for part in parts_of(fragment, v))))
    return found


def digest_of(*tensors: Tensor) -> str:
    """A short text that differs if any bit does; all NaN are alike."""
    sum_ = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        values = tensor.detach().double().nan_to_num(nan=1.25e300, posinf=1.5e300)
        sum_.update(values.numpy().tobytes())
    return sum_.hexdigest()

"""After Ctrl-C or an exception in `fit`, none of its threads and sockets remain."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from lightning_loco import (
    AsyncDiLoCoStrategy,
    AsyncModelAverageStrategy,
    DiLoCoStrategy,
    GASLoCStrategy,
    PairwiseGossipStrategy,
)
from tests.harness.cover import cover
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import TinyModule, make_loader

pytestmark = pytest.mark.recovery

STRATEGIES: dict[str, Any] = {
    "async_diloco": lambda: AsyncDiLoCoStrategy(sync_every=3, fragments=None, timeout_s=20),
    "gasloc": lambda: GASLoCStrategy("ring", sync_every=3, timeout_s=20),
    "async_model_average": lambda: AsyncModelAverageStrategy(interval_s=0.01, timeout_s=20),
    "async_model_average ring": lambda: AsyncModelAverageStrategy(
        interval_s=0.01, topology="ring", timeout_s=20
    ),
    "pairwise_gossip": lambda: PairwiseGossipStrategy(1.0, timeout_s=20),
}


def resources() -> frozenset[str]:
    """Return native threads, threads of Python, and open sockets of this process."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in the meantime
            links.append(os.readlink(path))
    return frozenset(
        [f"native thread {path.name}" for path in Path("/proc/self/task").iterdir()]
        + [f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()]
        + [link for link in links if link.startswith("socket:")]
    )


def wait_for_all(trainer: Trainer) -> None:
    """Wait for all ranks; otherwise the slowest one would get an error from the first."""
    store = dist.distributed_c10d._get_default_store()
    here = store.add("loco-test/here", 1)
    deadline = time.monotonic() + 20
    while here < trainer.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
        here = store.add("loco-test/here", 0)


class AllAtOnce(Callback):
    """Sends Ctrl-C to all ranks, like a terminal, or raises an exception on all."""

    def __init__(self, ending: str) -> None:
        self.ending = ending
        self.resources: frozenset[str] = frozenset()

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        time.sleep(0.01)
        if trainer.global_step == 20:
            self.resources = resources()
            wait_for_all(trainer)
            if self.ending == "exception":
                raise ArithmeticError("a bad day")
            os.kill(os.getpid(), signal.SIGINT)


def fit(rank: int, world: int, name: str, ending: str) -> tuple[frozenset[str], frozenset[str]]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = resources()
    event = AllAtOnce(ending)
    trainer = make_trainer(
        STRATEGIES[name](), max_steps=10_000, use_distributed_sampler=False, callbacks=[event]
    )
    with pytest.raises(ArithmeticError if ending == "exception" else SystemExit):
        trainer.fit(TinyModule(), make_loader(rank, 10_000))
    deadline = time.monotonic() + 5
    while (left := resources() - before) and time.monotonic() < deadline:
        gc.collect()  # tracebacks reference pending messages
        time.sleep(0.01)
    return event.resources - before, left


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")
@pytest.mark.parametrize(("name", "ending"), cover(STRATEGIES, ["ctrl_c", "exception"], strength=1))
def test_no_resources_remain(pool: Pool, name: str, ending: str) -> None:
    for used, left in pool.run(fit, name, ending, world=3):
        assert {"native", "socket"} <= {line[:6] for line in used}
        assert not left


class ErrorAfterStop(Callback):
    """Requests a stop, and raises an error in the batch after which all would stop."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.strategy.request_stop("by hand")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.engine.worker.stop_agreed is not None:
            raise ArithmeticError("a bad day")


def fit_after_an_error(rank: int, world: int) -> int:
    trainer = make_trainer(DiLoCoStrategy(sync_every=2, timeout_s=20), max_steps=400)
    event = ErrorAfterStop()
    trainer.callbacks.append(event)
    with pytest.raises(ArithmeticError):
        trainer.fit(TinyModule(), make_loader(rank, 400))
    trainer.callbacks.remove(event)
    trainer.fit(TinyModule(), make_loader(rank, 400))
    return trainer.global_step


def test_a_stop_before_an_error_does_not_stop_the_next_fit(pool: Pool) -> None:
    assert pool.run(fit_after_an_error, world=1) == [400]

"""What a local step of a decoupled learner costs while it pushes and fetches.

Measured: the seconds of a local step (forward, backward, AdamW) in a plain loop, in blocks that
take turns in one process: with ``LearnerEngine.step()``, which follows a syncer at the default
settings (24 fragments, each merged every 24 steps: a push and a fetch in nearly every step), and
without an engine. The syncer is the real program in a process of its own. With two cores and more
the learner is kept on one of them, and the syncer on the others.

How to read it: the ratio is that of the medians of the steps, pair by pair of blocks, with
quartiles in brackets, and should be at most 1.05. ``per step`` counts the fragments received and
pushed in a step. Whatever else runs on the machine changes both; look at the load.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import harness
import torch
from harness import HOST, ROOT, free_port, ms, ratios, spread

from lightning_loco import LearnerEngine
from lightning_loco.app.demo.model import ByteGPT

MODELS: dict[str, dict[str, int]] = {"0.8M": {}, "5M": {"num_layers": 6, "width": 256}}
BATCH_SIZE = 8
BOUND = 1.05
WARM_UP = 24


class Steps:
    """Local steps of a model on random bytes."""

    def __init__(self, sizes: dict[str, int]) -> None:
        torch.manual_seed(0)
        self.model = ByteGPT(**sizes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        context = self.model.hparams["context"]
        self.windows = torch.randint(0, 256, (BATCH_SIZE, context + 1), dtype=torch.uint8)

    def step(self) -> None:
        """Take one."""
        self.optimizer.zero_grad()
        self.model.training_step(self.windows, 0).backward()
        self.optimizer.step()

    def times(self, count: int, after: Callable[[], object] = bool) -> list[float]:
        """Seconds of each step, with what follows it."""
        found = []
        for _ in range(count):
            started = time.perf_counter()
            self.step()
            after()
            found.append(time.perf_counter() - started)
        return found


def measure(sizes: dict[str, int], steps: int, pairs: int, port: int) -> dict[str, list[float]]:
    """Medians of the blocks of both kinds, and the fragments received and pushed per step."""
    worker = Steps(sizes)
    worker.model.log = lambda *_, **__: None  # type: ignore[method-assign]  # there is no Trainer
    exchanged: list[float] = []

    def alone() -> float:
        return statistics.median(worker.times(steps))

    def learner() -> float:
        engine = LearnerEngine(worker.model, syncer=f"{HOST}:{port}", name="learner")
        engine.start()
        worker.times(WARM_UP, engine.step)
        assert engine.learner is not None
        before = sum(engine.learner.counts.values())
        found = statistics.median(worker.times(steps, engine.step))
        exchanged.append((sum(engine.learner.counts.values()) - before) / steps)
        engine.finish()
        engine.close()
        return found

    results = harness.in_turns({"alone": alone, "learner": learner}, pairs)
    return {**results, "per step": exchanged}


def main() -> None:
    options = harness.parse(__doc__, steps=100, pairs=12, quick={"steps": 8, "pairs": 2})
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    rows = []
    for name, sizes in MODELS.items():
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / "command.py"), "syncer", "--folder", folder]
            command += ["--bind", f"{HOST}:{port}"]
            syncer = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            try:
                if len(cores) > 1:
                    os.sched_setaffinity(syncer.pid, cores[1:])
                    os.sched_setaffinity(0, cores[:1])
                chosen = harness.QUICK_SIZES if options.quick else sizes
                found = measure(chosen, options.steps, options.pairs, port)
            finally:
                if len(cores) > 1:
                    os.sched_setaffinity(0, cores)
                syncer.terminate()
                syncer.wait()
        pairs = ratios(found["learner"], found["alone"])
        ratio = statistics.median(pairs)
        rows.append(
            [
                name,
                ms(found["alone"], 2),
                ms(found["learner"], 2),
                f"{statistics.median(found['per step']):.2f}",
                spread(pairs, digits=3),
                harness.at_most(ratio, BOUND),
            ]
        )
        print(f"done: {name}", flush=True)
    header = ["local step of", "alone ms", "learner ms", "per step", "learner/alone", "bound"]
    harness.print_table(header, rows)


if __name__ == "__main__":
    main()

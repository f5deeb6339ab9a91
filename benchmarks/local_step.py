"""What a local step costs between rounds, against plain single-device Lightning.

Measured: the seconds from the start of one batch to the start of the next, taken by a callback, in
two kinds of fit that take turns in the same processes: a plain ``Trainer(devices=1)`` in each, and
``Trainer(strategy=DiLoCoStrategy(...))`` over all of them with ``sync_every`` larger than the run.
So equally many processes with one thread each run at the same time on both sides, on the same
batches, with the same seed. The first steps of every fit are dropped. Which kind comes first
changes from pair to pair.

Two models: the demo's byte-level GPT, and one so small that the step is almost only the loop
itself. The second shows the extra time more sharply; it is then set against the demo's step.

How to read it: ``extra`` is the median, over pairs of fits and workers, of the difference between
the two medians of a pair, with quartiles in brackets; the ratio is 1 + extra / plain, and should be
at most 1.02 on the demo model. On a busy machine trust the row of the tiny model.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from functools import partial
from typing import Any

import harness
import torch
from harness import Worker, ms, spread
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from lightning_loco import DiLoCoStrategy
from lightning_loco.app.demo.model import ByteGPT

# name: (settings of the model, local steps of a fit, dropped at the start)
MODELS: dict[str, tuple[dict[str, int], int, int]] = {
    "demo": ({}, 50, 10),
    "tiny": ({"num_layers": 1, "num_heads": 1, "width": 8, "context": 8}, 300, 50),
}
BATCH_SIZE = 8
BOUND = 1.02


class Clock(Callback):
    """Notes when each batch starts, once the device has done all before."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.started: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.worker.wait_for_device()
        self.started.append(time.perf_counter())


def fit(worker: Worker, is_plain: bool, sizes: dict[str, int], steps: int, dropped: int) -> float:
    """Median seconds from the start of a batch to the start of the next, in one fit."""
    num_ranks = 1 if is_plain else worker.num_workers
    strategy: Strategy | str = "auto" if is_plain else DiLoCoStrategy(sync_every=10**6)
    # Lightning takes each for another machine, and starts no processes then.
    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(worker.rank % num_ranks))
    seed_everything(0, verbose=False)
    model = ByteGPT(**sizes)
    generator = torch.Generator().manual_seed(worker.rank)
    shape = (steps * BATCH_SIZE, model.hparams["context"] + 1)
    windows = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    clock = Clock(worker)
    trainer = Trainer(
        strategy=strategy,
        devices=1,
        num_nodes=num_ranks,
        accelerator=worker.device,
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[clock],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(windows, batch_size=BATCH_SIZE)  # type: ignore[arg-type]
    worker.wait_for_all()
    with worker.process_group(num_ranks) if num_ranks > 1 else contextlib.nullcontext():
        trainer.fit(model, loader)
    worker.wait_for_all()
    seconds = [later - earlier for earlier, later in itertools.pairwise(clock.started)]
    return statistics.median(seconds[dropped:])


def fit_pairs(worker: Worker, pairs: int, *settings: Any) -> dict[str, list[float]]:
    """Seconds of a step in each fit; the first pair is dropped."""
    kinds = {
        "plain": partial(fit, worker, True, *settings),
        "diloco": partial(fit, worker, False, *settings),
    }
    return harness.in_turns(kinds, pairs)


def main() -> None:
    options = harness.parse(__doc__, workers=2, pairs=20, quick={"pairs": 2}, device="cpu")
    rows, demo_step_s = [], 0.0
    for name, settings in MODELS.items():
        if options.quick:
            settings = (settings[0], 8, 3)
        results = harness.run_workers(
            fit_pairs, options.workers, options.pairs, *settings, device=options.device
        )
        plain, diloco = ([s for r in results for s in r[kind]] for kind in ("plain", "diloco"))
        plain_s = statistics.median(plain)
        extra_s = [b - a for a, b in zip(plain, diloco, strict=True)]
        demo_step_s = demo_step_s or plain_s
        ratio = 1 + statistics.median(extra_s) / demo_step_s
        row = [f"{name}, {options.workers} workers", ms(plain, 2), ms(diloco, 2)]
        row += [spread([1e6 * extra for extra in extra_s], digits=0)]
        row += [f"{1 + statistics.median(extra_s) / plain_s:.3f}", f"{ratio:.3f}"]
        rows.append([*row, harness.at_most(ratio, BOUND)])
        print(f"done: {name}", flush=True)
    header = ["local step of", "plain ms", "DiLoCo ms", "extra us", "ratio"]
    harness.print_table([*header, "1 + extra / demo step", "bound"], rows)


if __name__ == "__main__":
    main()

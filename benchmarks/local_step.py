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
import logging
import os
import statistics
import time
import warnings
from typing import Any

import torch
from common import (
    Worker,
    add_device,
    against,
    make_parser,
    print_machine,
    print_table,
    run_workers,
    spread,
)
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from lightning_loco import DiLoCoStrategy
from lightning_loco.demo.model import ByteGPT

BOUND = 1.02
BATCH_SIZE = 8
# name: (settings of the model, local steps per fit, dropped at the start)
MODELS: dict[str, tuple[dict[str, int], int, int]] = {
    "demo": ({}, 50, 10),
    "tiny": ({"num_layers": 1, "num_heads": 1, "width": 8, "context": 8}, 300, 50),
}


class Clock(Callback):
    """Notes when each batch starts, once the device has done all before."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.started: list[float] = []
        self.used: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.worker.wait_for_device()
        self.started.append(time.perf_counter())
        self.used.append(time.process_time())

    @property
    def seconds(self) -> list[float]:
        """From the start of each batch to that of the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.started)]

    @property
    def cpu_seconds(self) -> list[float]:
        """The same in CPU time of all threads of this process."""
        return [later - earlier for earlier, later in itertools.pairwise(self.used)]


def time_fit(
    worker: Worker,
    strategy: Strategy | str,
    num_ranks: int,
    sizes: dict[str, int],
    steps: int,
    clip_val: float | None = None,
) -> Clock:
    """When the batches of a fit of ByteGPT with so many ranks have started."""
    # Each is a machine of its own to Lightning, which starts no processes then.
    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(worker.rank % num_ranks))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
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
        gradient_clip_val=clip_val,
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
    return clock


def fit(worker: Worker, kind: str, settings: dict[str, int], steps: int) -> list[float]:
    """Seconds of the local steps of one fit."""
    if kind == "diloco":
        strategy, num_ranks = DiLoCoStrategy(sync_every=10**6), worker.num_workers
        return time_fit(worker, strategy, num_ranks, settings, steps, clip_val=1.0).seconds
    return time_fit(worker, "auto", 1, settings, steps, clip_val=1.0).seconds


def time_pairs(
    worker: Worker, settings: dict[str, int], steps: int, warm_up: int, pairs: int
) -> list[dict[str, float]]:
    """Median seconds of a step, one pair of fits after the other; the first pair is dropped."""
    medians = []
    for pair in range(1 + pairs):
        kinds = ("plain", "diloco") if pair % 2 else ("diloco", "plain")
        medians.append(
            {
                kind: statistics.median(fit(worker, kind, settings, steps)[warm_up:])
                for kind in kinds
            }
        )
    return medians[1:]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=2, help="processes at the same time")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of fits for each model")
    add_device(parser)
    options = parser.parse_args()
    print_machine()
    rows = []
    demo_step_s = None
    for name, (settings, steps, warm_up) in MODELS.items():
        pairs = options.pairs
        if options.quick:
            steps, warm_up, pairs = 8, 3, 2
        results = run_workers(
            time_pairs, options.workers, settings, steps, warm_up, pairs, device=options.device
        )
        medians = [pair for result in results for pair in result]
        plain_s = statistics.median(pair["plain"] for pair in medians)
        extra_s = [pair["diloco"] - pair["plain"] for pair in medians]
        demo_step_s = demo_step_s or plain_s
        ratio = 1 + statistics.median(extra_s) / demo_step_s
        rows.append(
            [
                f"{name}, {options.workers} workers",
                f"{1000 * plain_s:.2f}",
                f"{1000 * statistics.median(pair['diloco'] for pair in medians):.2f}",
                spread([1e6 * extra for extra in extra_s], digits=0),
                f"{1 + statistics.median(extra_s) / plain_s:.3f}",
                f"{ratio:.3f}",
                against(ratio, BOUND),
            ]
        )
        print(f"done: {name}", flush=True)
    print_table(
        [
            *("local step of", "plain ms", "DiLoCo ms", "extra us", "ratio"),
            *("1 + extra / demo step", "bound"),
        ],
        rows,
    )


if __name__ == "__main__":
    main()

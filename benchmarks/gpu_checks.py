"""Five checks of workers that shard the model, with all ranks on one GPU.

Four ranks, two workers of two, share the first GPU; an option of NCCL makes it take each for
another machine.

  1 numbers   2 x 2 ranks with FSDP2 in float32 end where two workers of one rank do, which read the
              rows of both of their ranks
  2 overlap   rounds that are pending beside the collectives of FSDP2, with
              CUDA_DEVICE_MAX_CONNECTIONS 1 and 8: no hang, finite, all ranks end with the same
  3 syncs     a local step waits for the GPU as often as one of plain FSDP2, that is Lightning's
              ModelParallelStrategy without its broadcast before every batch
  4 memory    of a model of 302M parameters in float32 that computes in bfloat16, with DiLoCo and
              AdamW, against docs/workers_of_several_ranks.md, for both values of outer_device
  5 time      of a local step of a GPT with 126M parameters, against two jobs of Lightning's
              ModelParallelStrategy with 2 ranks each at the same time, in turns

Each check has its own ranks and its own limit in seconds, which add up to 8 minutes. A check whose
ranks are still running at its limit has failed: then the stacks of all their threads are printed.
``--only 13`` makes the first and the third. ``--out`` is a folder for gpu_checks.json.

How to read it: "apart" is the distance between the final parameters of two runs, divided by the
distance from the start, of the tensor where it is largest. "between steps" is the memory that
PyTorch has allocated at the start of a batch, against the formula. "peak" is the most during steps
and rounds, against the formula and the parameters and gradients of two layers in bfloat16, which
are gathered during a step. "ratio" is the median over the turns, with the lowest and the highest.
The exit status is 1 if a check has failed.

With --device cpu the ranks use gloo. There the syncs and the memory are left out; memory.py
measures the memory on CPUs. With --quick as well it shows that the script runs: models are tiny,
neither the time nor the memory is judged, and all limits are longer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import harness
import numpy as np
import torch
from harness import RankFailed, Worker
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_loco import AsyncDiLoCoStrategy, DiLoCoStrategy, LocoModelParallelStrategy
from lightning_loco.app.demo.model import ByteGPT
from lightning_loco.strategies import LocoStrategy
from lightning_loco.strategies.lightning_compat import remove_lockstep

NUM_RANKS, SIZE = 4, 2  # of all workers, and of one
QUICK_FACTOR = 4.0  # of the limits with --quick, for a busy machine
TIMEOUT_S = 60.0
BATCH_SIZE = 4
DROPPED_STEPS = 3  # before counting, measuring and timing
APART, MEMORY_WITHIN, RATIO = 1e-3, 0.05, 1.10
BUCKET_BYTES = 64 * 2**20
NEVER = 10**6

Sizes = dict[str, int]
Parameters = dict[str, np.ndarray]
TINY: Sizes = {"num_layers": 2, "num_heads": 2, "width": 32, "context": 16}
SMALL: Sizes = {"num_layers": 2, "num_heads": 4, "width": 256, "context": 64}
GPT_126M: Sizes = {"num_layers": 10, "num_heads": 16, "width": 1024, "context": 256}
GPT_302M: Sizes = {"num_layers": 24, "num_heads": 16, "width": 1024, "context": 8}


@dataclasses.dataclass(frozen=True)
class Run:
    """What the ranks of a job train, and how.

    Args:
        sizes: Of the model.
        steps: Local steps.
        kind: Workers that shard the model, workers of one rank, or Lightning's own strategy.
        method: Makes the method of workers.
        has_adamw: AdamW, instead of SGD.
        is_mixed: FSDP2 gathers layers in bfloat16.
    """

    sizes: Sizes
    steps: int
    kind: Literal["sharded", "whole", "plain"] = "sharded"
    method: Callable[[], LocoStrategy] = partial(
        DiLoCoStrategy, sync_every=5, timeout_s=TIMEOUT_S, summary=False
    )
    has_adamw: bool = False
    is_mixed: bool = False

    def strategy(self) -> Strategy:
        """A new strategy for one rank."""
        if self.kind == "plain":
            return ModelParallelStrategy(data_parallel_size=SIZE, tensor_parallel_size=1)
        method = self.method()
        if self.kind == "whole":
            return method
        return LocoModelParallelStrategy(method, data_parallel_size=SIZE)

    def batches(self, reader: int) -> Tensor:
        """Windows of random bytes, (steps, rows, context + 1), for a rank of a sharded worker."""
        generator = torch.Generator().manual_seed(reader)
        shape = (self.steps, BATCH_SIZE, self.sizes["context"] + 1)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


class Model(LightningModule):
    """The demo's GPT, sharded as a user would."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = ByteGPT(**run.sizes)
        self.settings = run

    def configure_model(self) -> None:
        """Shard each block and the rest, unless there is no mesh or it has been done."""
        if self.device_mesh is None or isinstance(self.gpt, FSDPModule):
            return
        dtype = torch.bfloat16 if self.settings.is_mixed else None
        shard = partial(
            fully_shard,
            mesh=self.device_mesh["data_parallel"],
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype),
        )
        for block in self.gpt.blocks:
            shard(block)
        shard(self.gpt)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean cross-entropy."""
        return self.gpt.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The fused AdamW needs no memory during a step, unlike the default one on a GPU."""
        if self.settings.has_adamw:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(worker: Worker, run: Run, *callbacks: Callback) -> Trainer:
    """Train on this rank, which is a machine with one device to Lightning."""
    size = SIZE if run.kind == "whole" else 1
    batches = [run.batches(size * worker.rank + place) for place in range(size)]
    num_ranks = SIZE if run.kind == "plain" else worker.num_workers  # of a job
    rows = torch.cat(batches, dim=1)
    os.environ.update(LOCAL_RANK="0", NODE_RANK=str(worker.rank % num_ranks))
    trainer = Trainer(
        strategy=run.strategy(),
        accelerator="gpu" if worker.device == "cuda" else "cpu",
        devices=1,
        num_nodes=num_ranks,
        max_steps=run.steps,
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(rows.flatten(0, 1), batch_size=size * BATCH_SIZE)  # type: ignore[arg-type]
    with worker.process_group(num_ranks):
        trainer.fit(Model(run), loader)
    return trainer


class Collect(Callback):
    """Collects the consensus at the end of training; whole tensors on all ranks."""

    found: Parameters

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Gather the parameters."""
        self.found = {}
        for name, parameter in module.named_parameters():
            values: Tensor = parameter.detach()
            whole = values.full_tensor() if isinstance(values, DTensor) else values
            self.found[name] = whole.cpu().numpy()


def final_parameters(worker: Worker, run: Run) -> tuple[Parameters, int]:
    """The consensus, and the number of rounds."""
    collect = Collect()
    trainer = fit(worker, run, collect)
    return collect.found, trainer.strategy.statistics.rounds


class CountSyncs(Callback):
    """Counts how often the host waits for the GPU, from one batch to another.

    Args:
        is_plain: Whether to remove what plain FSDP2 does not have: Lightning's broadcast before
            every batch.
    """

    def __init__(self, is_plain: bool) -> None:
        self.is_plain = is_plain
        self.caught = ExitStack()
        self.count = 0

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Remove the broadcast."""
        if self.is_plain:
            remove_lockstep(trainer, lambda reason: None)

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin, or end with one more read, which proves that reads are noticed."""
        if batch_idx == DROPPED_STEPS:
            self.seen = self.caught.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif batch_idx == trainer.max_steps - 1:
            torch.zeros(1, device=module.device).item()
            torch.cuda.set_sync_debug_mode("default")
            self.caught.close()
            texts = [str(warning.message) for warning in self.seen]
            self.count = sum("synchronizing CUDA operation" in text for text in texts) - 1
            if self.count < 0:
                raise RuntimeError(f"A read of the GPU's memory was not noticed: {texts}.")


def count_syncs(worker: Worker, run: Run) -> int:
    """How often this rank waits for the GPU in the counted steps."""
    counter = CountSyncs(run.kind == "plain")
    fit(worker, run, counter)
    return counter.count


class Memory(Callback):
    """Bytes that PyTorch has allocated on the GPU at the start of a batch, and at most before."""

    between = peak = 0

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin after the first steps and rounds, and note at the start of the last step."""
        if batch_idx == DROPPED_STEPS:
            torch.cuda.reset_peak_memory_stats()
        elif batch_idx == trainer.max_steps - 1:
            self.between = torch.cuda.memory_allocated()
            self.peak = torch.cuda.max_memory_allocated()


def measure_memory(worker: Worker, run: Run) -> tuple[int, int]:
    """Bytes between steps, and at most."""
    memory = Memory()
    fit(worker, run, memory)
    return memory.between, memory.peak


class Timer(Callback):
    """Seconds from the start of a batch to the end of the last one."""

    seconds = 0.0

    def __init__(self, device: str) -> None:
        self.device = device

    def now(self) -> float:
        """The time when the GPU has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin."""
        if batch_idx == DROPPED_STEPS:
            self.started = self.now()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End."""
        if batch_idx == trainer.max_steps - 1:
            self.seconds = self.now() - self.started


def time_steps(worker: Worker, run: Run) -> float:
    """Seconds of a local step."""
    timer = Timer(worker.device)
    fit(worker, run, timer)
    return timer.seconds / (run.steps - DROPPED_STEPS)


class Found(NamedTuple):
    """What a check has found: whether it is as it should be (None: not judged), and numbers."""

    is_right: bool | None
    text: str
    numbers: dict[str, float]


class Launch:
    """Calls a function on ranks, all of which are gone at the deadline.

    Args:
        device: Of the ranks.
        deadline: By ``time.monotonic``.
    """

    def __init__(self, device: str, deadline: float) -> None:
        self.device, self.deadline = device, deadline

    def __call__(
        self, fn: Callable[[Worker, Run], Any], num_ranks: int, run: Run, **environ: str
    ) -> list[Any]:
        """The results by rank."""
        limit_s = max(1.0, self.deadline - time.monotonic())
        return harness.run_workers(
            fn, num_ranks, run, device=self.device, environ=environ, limit_s=limit_s
        )


def distance(found: Parameters, expected: Parameters, sizes: Sizes) -> float:
    """The largest distance of a tensor, as a share of the change by training."""
    start = Model(Run(sizes, steps=0))
    worst = 0.0
    for name, values in start.named_parameters():
        change = np.linalg.norm(expected[name] - values.detach().numpy())
        worst = max(worst, float(np.linalg.norm(found[name] - expected[name]) / change))
    return worst


def check_numbers(launch: Launch, is_quick: bool) -> Found:
    """FSDP2 inside a worker does not change what is trained."""
    run = Run(TINY if is_quick else SMALL, steps=10 if is_quick else 50)
    whole = dataclasses.replace(run, kind="whole")
    expected, *_ = launch(final_parameters, NUM_RANKS // SIZE, whole)
    results = launch(final_parameters, NUM_RANKS, run)
    apart = max(distance(found, expected[0], run.sizes) for found, _ in results)
    return Found(apart <= APART, f"apart {apart:.1e} (<= {APART:g})", {"apart": apart})


def check_overlap(launch: Launch, is_quick: bool) -> Found:
    """Collectives of rounds and of FSDP2 do not wait for each other for ever."""
    method = partial(AsyncDiLoCoStrategy, sync_every=8, timeout_s=TIMEOUT_S, summary=False)
    steps = 40 if is_quick else 500
    run = Run(TINY if is_quick else SMALL, steps, method=method, has_adamw=True)
    is_right, texts, numbers = True, list[str](), dict[str, float]()
    for connections in ("1", "8"):
        started = time.monotonic()
        environ = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
        results = launch(final_parameters, NUM_RANKS, run, **environ)
        seconds = time.monotonic() - started
        first, rounds = results[0]
        is_finite = all(np.isfinite(values).all() for values in first.values())
        are_equal = all(
            np.array_equal(found[name], first[name]) for found, _ in results for name in first
        )
        is_right = is_right and is_finite and are_equal and rounds > 0
        texts.append(
            f"{connections}: {rounds} rounds in {seconds:.1f} s, "
            f"{'finite' if is_finite else 'NOT FINITE'}, {'equal' if are_equal else 'NOT EQUAL'}"
        )
        numbers |= {f"rounds, {connections}": rounds, f"seconds, {connections}": seconds}
    return Found(is_right, f"{steps} steps; {'; '.join(texts)}", numbers)


def check_syncs(launch: Launch, is_quick: bool) -> Found:
    """A local step adds no wait for the GPU."""
    if launch.device == "cpu":
        return Found(None, "PyTorch counts waits for a GPU only", {})
    counted = 20
    run = Run(TINY if is_quick else SMALL, DROPPED_STEPS + counted + 1, has_adamw=True)
    own = dataclasses.replace(run, method=local_steps)
    plain = dataclasses.replace(run, kind="plain")
    most = max(launch(count_syncs, NUM_RANKS, own)) / counted
    least = min(launch(count_syncs, SIZE, plain)) / counted
    text = f"{most:g} in a step, plain FSDP2 {least:g}"
    return Found(most <= least, text, {"own": most, "plain": least})


def local_steps() -> LocoStrategy:
    """DiLoCo whose first round never comes."""
    return DiLoCoStrategy(sync_every=NEVER, timeout_s=TIMEOUT_S, summary=False)


def check_memory(launch: Launch, is_quick: bool) -> Found:
    """The memory of a rank agrees with the formula."""
    if launch.device == "cpu":
        return Found(None, "PyTorch counts the memory of a GPU only; see memory.py", {})
    sizes = SMALL if is_quick else GPT_302M
    with torch.device("meta"):
        model = Model(Run(sizes, steps=0))
    vector = 4 * sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.gpt.blocks[0].parameters())
    gathered = 2 * 2 * 2 * block  # two layers, their parameters and gradients, two bytes each
    is_right, texts, numbers = True, list[str](), dict[str, float]()
    for outer_device in (None, "cpu"):
        method = partial(
            DiLoCoStrategy,
            sync_every=2,
            bucket_bytes=BUCKET_BYTES,
            outer_device=outer_device,
            timeout_s=TIMEOUT_S,
            summary=False,
        )
        run = Run(sizes, DROPPED_STEPS + 5, method=method, has_adamw=True, is_mixed=True)
        environ = {"CUBLAS_WORKSPACE_CONFIG": ":4096:1"}  # 4 MiB, which are no vector
        results = launch(measure_memory, NUM_RANKS, run, **environ)
        expected = 4 * vector / SIZE
        if outer_device is None:
            expected += 2 * vector / SIZE + min(BUCKET_BYTES, vector // SIZE)
        between = max(result[0] for result in results) / expected - 1
        peak = max(result[1] for result in results) / (expected + gathered) - 1
        is_right = is_right and max(abs(between), abs(peak)) <= MEMORY_WITHIN
        texts.append(
            f"outer_device={outer_device}: {expected / 2**20:.0f} MiB, between steps "
            f"{100 * between:+.1f} %, peak {100 * peak:+.1f} %"
        )
        name = f"outer_device={outer_device}"
        numbers |= {f"{name}, expected": expected, f"{name}, between": between}
        numbers |= {f"{name}, peak": peak}
    return Found(None if is_quick else is_right, "; ".join(texts), numbers)


def check_time(launch: Launch, is_quick: bool) -> Found:
    """A local step takes about as long as one of plain FSDP2."""
    turns, counted = (1, 3) if is_quick else (3, 6)
    sizes = TINY if is_quick else GPT_126M
    run = Run(sizes, DROPPED_STEPS + counted, has_adamw=True, is_mixed=True)
    runs = {
        "own": dataclasses.replace(run, method=local_steps),
        "plain": dataclasses.replace(run, kind="plain"),  # two jobs, at the same time
    }
    ratios, longest_s = list[float](), 0.0
    seconds = {"own": list[float](), "plain": list[float]()}
    for turn in range(turns):
        started = time.monotonic()
        if ratios and started + longest_s > launch.deadline:
            break
        for name in sorted(runs, reverse=turn % 2 == 1):
            seconds[name].append(max(launch(time_steps, NUM_RANKS, runs[name])))
        ratios.append(seconds["own"][-1] / seconds["plain"][-1])
        longest_s = max(longest_s, time.monotonic() - started)
    ratio = statistics.median(ratios)
    own_s, plain_s = (statistics.median(seconds[name]) for name in ("own", "plain"))
    text = f"ratio {ratio:.2f} [{min(ratios):.2f}, {max(ratios):.2f}] (<= {RATIO:.2f}), "
    text += f"{1000 * own_s:.0f} ms, plain {1000 * plain_s:.0f} ms"
    numbers = {"ratio": ratio, "own_s": own_s, "plain_s": plain_s}
    return Found(None if is_quick else ratio <= RATIO, text, numbers)


CHECKS: dict[str, tuple[Callable[[Launch, bool], Found], float]] = {
    "1 numbers": (check_numbers, 45.0),
    "2 overlap": (check_overlap, 150.0),
    "3 syncs": (check_syncs, 40.0),
    "4 memory": (check_memory, 85.0),
    "5 time": (check_time, 120.0),
}
"""The checks, with the limit of each in seconds."""


def make(name: str, device: str, is_quick: bool) -> dict[str, Any]:
    """Make a check, and print its line."""
    check, limit_s = CHECKS[name]
    started = time.monotonic()
    try:
        launch = Launch(device, started + limit_s * (QUICK_FACTOR if is_quick else 1.0))
        found = check(launch, is_quick)
    except RankFailed as error:
        found = Found(False, str(error), {})
    seconds = time.monotonic() - started
    verdict: Any = {True: "PASS", False: "FAIL", None: "SKIP"}[found.is_right]
    print(f"{verdict}  {name:<10}  {seconds:5.1f} s  {found.text}", flush=True)
    return {"check": name, "result": verdict, "seconds": seconds, **found._asdict()}


def main() -> None:
    options = harness.parse(__doc__, only="12345", out=Path, quick={}, device="cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU here. Use --device cpu.")
    names = [name for name in CHECKS if name[0] in options.only]
    results = [make(name, options.device, options.quick) for name in names]
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        machine = {"device": options.device, "torch": torch.__version__}
        if options.device == "cuda":
            machine["gpu"] = torch.cuda.get_device_name()
        text = json.dumps({**machine, "checks": results}, indent=1)
        (options.out / "gpu_checks.json").write_text(text + "\n")
    sys.exit(any(result["result"] == "FAIL" for result in results))


if __name__ == "__main__":
    main()

"""How much memory the rounds need beyond the model and its optimizer, and a rank needs in all.

The first table is measured on a model without activations, in units of its parameters in float32
(4 P bytes):

  owned    tensors that are alive between rounds and were not before there was an engine
  rounds   the largest size of all tensors that torch allocated, above the level before the engine,
           during rounds

The second table is about DiLoCo with AdamW, on workers of one rank, and of two ranks with DDP or
FSDP2 inside. It says for one rank, in the same units:

  parameters, gradients, AdamW   what each of them adds; DDP's buckets count as gradients
  outer    what the rounds add: outer parameters, momentum, and the bucket
  total    their sum: what is allocated between steps
  formula  the total as docs/workers_of_several_ranks.md has it
  RSS      growth of the resident memory, at its highest, during steps and rounds after the set-up,
           in processes without a profiler: it includes gathered layers, results that the ranks of a
           worker share, and gloo's buffers. The allocator returns what is released (Linux with
           glibc only; not with --quick)

How to read it: ``owned`` and ``rounds`` should be at most 2 x P float32 plus one bucket for DiLoCo,
and one bucket for Local SGD. In the second table the total should be within 5 % of the formula.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

# The profiler and the allocator comment on themselves.
os.environ.update(KINETO_LOG_LEVEL="99", TORCH_CPP_LOG_LEVEL="ERROR")
os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of the ranks: large blocks go back to the system

import harness
import torch
import torch.distributed as dist
from harness import Worker
from libraries.counters import forget_peak, peak_bytes, resident_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from lightning_loco import Algorithm, DiLoCo, GASLoC, LocalSGD, StepEngine
from lightning_loco.distributed import WorkerGroup

MB = 1e6
BUCKET_BYTES = 16 * 2**20
SLACK_BYTES = 2**18  # scalars, the sample of automatic momentum, what travels beside a round
# name: (algorithm, overlap, bound in vectors of the model's size without the bucket)
SETTINGS: dict[str, tuple[Algorithm, bool, int | None]] = {
    "Local SGD": (LocalSGD(), False, 0),
    "DiLoCo": (DiLoCo(), False, 2),
    "Async DiLoCo": (DiLoCo(outer_momentum=0.0), True, None),
    "GASLoC ring": (GASLoC(), False, None),
}
RANKS_PER_WORKER = 2
# name: (ranks of a worker, vectors of the model's size on a rank, without the bucket)
INSIDE: dict[str, tuple[int, float]] = {
    "one rank": (1, 4 + 2),
    "DDP": (RANKS_PER_WORKER, 5 + 2 / RANKS_PER_WORKER),
    "DDP, gradients as views": (RANKS_PER_WORKER, 4 + 2 / RANKS_PER_WORKER),
    "FSDP2": (RANKS_PER_WORKER, 6 / RANKS_PER_WORKER),
}
PARTS = ("parameters", "gradients", "AdamW", "outer")
FORMULA_WITHIN = 0.05


def living_bytes() -> int:
    """Bytes of all tensors of this process; those that share memory count once."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        # isinstance would ask lazy objects of other libraries for their class.
        kind = type(item)
        if not issubclass(kind, Tensor) or issubclass(kind, DTensor):  # whose shard is a tensor
            continue
        if item.device.type == "cpu":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def changes(action: Callable[[], object]) -> tuple[int, int]:
    """Bytes that torch holds more after an action, and the most during it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    level = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    return level, highest


def highest_rise(action: Callable[[], object]) -> int:
    """The most bytes that torch held during an action, above its level at the start."""
    return changes(action)[1]


def make_model(num_layers: int, width: int) -> nn.Module:
    """Nothing but layers."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))


def make_engine(model: nn.Module, name: str, group: WorkerGroup) -> StepEngine:
    """An engine that runs a round at every step."""
    algorithm, overlap, _ = SETTINGS[name]
    return StepEngine(
        model, algorithm, sync_every=1, overlap=overlap, bucket_bytes=BUCKET_BYTES, group=group
    )


def measure_tensors(worker: Worker, *size: int) -> dict[str, tuple[int, int]]:
    """Bytes of tensors that each setting owns and needs in rounds, on one worker."""
    return {name: tensors_of(worker, name, *size) for name in SETTINGS}


def tensors_of(worker: Worker, name: str, *size: int) -> tuple[int, int]:
    """Bytes of tensors of one worker and one setting."""
    gc.freeze()  # modules hold no tensors, and many objects to look through
    with worker.process_group():
        model = make_model(*size)
        group = WorkerGroup.create()
        before = living_bytes()
        engine = make_engine(model, name, group)
        for _ in range(2):  # some memory is made at the first use
            engine.step()
        owned = living_bytes() - before
        rounds = owned + highest_rise(partial(step_and_wait, engine))
        engine.finish()
        engine.close()
    return owned, rounds


def step_and_wait(engine: StepEngine) -> None:
    """A step; its messages arrive as well, since a collective must not outlive the profiler."""
    engine.step()
    for fragment in engine.fragments:
        while fragment.pending is not None and not fragment.pending.has_arrived():
            time.sleep(0.01)
    time.sleep(0.1)  # gloo's thread records the end


class Rank:
    """One rank that trains with DiLoCo and AdamW.

    Args:
        worker: Its process.
        inside: A key of ``INSIDE``.
        num_layers: Layers of the model.
        width: Their size.
    """

    def __init__(self, worker: Worker, inside: str, num_layers: int, width: int) -> None:
        self.size = INSIDE[inside][0]
        self.num_ranks = worker.num_workers
        self.inside = inside
        self.sizes = num_layers, width
        self.engine: StepEngine

    def make_model(self) -> None:
        """Make the model; with FSDP2 each rank keeps its shards."""
        self.model = make_model(*self.sizes)
        if self.inside == "FSDP2":
            ranks = torch.arange(self.num_ranks).view(-1, self.size)
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("worker", "data_parallel"))
            own = mesh["data_parallel"]
            for layer in [*self.model.children(), self.model]:
                fully_shard(layer, mesh=own)

    def make_gradients(self) -> None:
        """Wrap the model, and make gradients; DDP makes other buckets after the first ones."""
        self.wrapped: nn.Module = self.model
        if self.inside.startswith("DDP"):
            own, _ = dist.new_subgroups(self.size)
            views = "views" in self.inside
            self.wrapped = DistributedDataParallel(
                self.model, process_group=own, gradient_as_bucket_view=views
            )
        for _ in range(2):
            self.backward()

    def make_optimizer(self) -> None:
        """Make AdamW, with its state."""
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.optimizer.step()

    def make_rounds(self) -> None:
        """Make the engine and two rounds; some memory is made at the first use."""
        group = WorkerGroup.create(replica_size=self.size)
        self.engine = make_engine(self.model, "DiLoCo", group)
        for _ in range(2):
            self.engine.step()

    def backward(self) -> None:
        """Add to the gradients."""
        self.wrapped(torch.ones(1, self.sizes[1])).sum().backward()

    def train(self) -> None:
        """Two steps with a round each."""
        for _ in range(2):
            self.backward()
            self.optimizer.step()
            self.engine.step()

    def close(self) -> None:
        """End the rounds."""
        self.engine.finish()
        self.engine.close()


def measure_rank(worker: Worker, *settings: Any) -> dict[str, int]:
    """Bytes that each part of a training adds to one rank.

    The profiler sees DDP's buckets, which Python does not, but not the messages of FSDP2 and of
    rounds that threads of gloo release.
    """
    gc.freeze()
    with worker.process_group():
        rank = Rank(worker, *settings)
        found = {}
        for name, action in (
            ("parameters", rank.make_model),
            ("gradients", rank.make_gradients),
            ("AdamW", rank.make_optimizer),
            ("outer", rank.make_rounds),
        ):
            before = living_bytes()
            allocated, _ = changes(action)
            gradients = [p.grad for p in rank.model.parameters()]  # known to Python from now on
            found[name] = living_bytes() - before
            if name == "gradients" and rank.inside.startswith("DDP"):
                found[name] = allocated
            del gradients
        rank.close()
    return found


def resident_rank(worker: Worker, *settings: Any) -> int:
    """Highest growth of the resident memory of one rank after its set-up."""
    with worker.process_group():
        rank = Rank(worker, *settings)
        started = resident_bytes()
        for action in (rank.make_model, rank.make_gradients, rank.make_optimizer, rank.make_rounds):
            action()
        forget_peak()
        rank.train()
        rise = peak_bytes() - started
        rank.close()
    return rise


def row_of_rank(inside: str, size: tuple[int, int], unit: int, is_quick: bool) -> list[str]:
    """Measure a rank of one kind of worker."""
    ranks, vectors = INSIDE[inside]
    found = harness.run_workers(measure_rank, 2 * ranks, inside, *size)[0]
    total, formula = sum(found.values()) / unit, vectors + BUCKET_BYTES / unit
    apart, resident = total / formula - 1, "-"
    if not is_quick:
        rise = harness.run_workers(resident_rank, 2 * ranks, inside, *size)[0]
        resident = f"{rise / unit:.2f}"
    row = [inside, *(f"{found[name] / unit:.2f}" for name in PARTS), f"{total:.2f}"]
    verdict = "ok" if abs(apart) <= FORMULA_WITHIN else "MISSED"
    return [*row, f"{formula:.2f}", f"{100 * apart:+.1f} % {verdict}", resident]


def main() -> None:
    quick = {"layers": 8, "width": 1024}
    options = harness.parse(__doc__, workers=2, layers=12, width=2048, quick=quick)
    size = (options.layers, options.width)
    unit = 4 * sum(p.numel() for p in make_model(*size).parameters())
    tensors = harness.run_workers(measure_tensors, options.workers, *size)[0]
    rows = []
    for name, (_, _, vectors) in SETTINGS.items():
        owned, rounds = tensors[name]
        bound = "-"
        if vectors is not None:
            most = vectors * unit + BUCKET_BYTES
            verdict = "ok" if max(owned, rounds) <= most + SLACK_BYTES else "MISSED"
            bound = f"<= {most / unit:.2f} ({vectors} P + bucket) {verdict}"
        rows.append([name, f"{owned / unit:.2f}", f"{rounds / unit:.2f}", bound])
    harness.print_table(["in units of 4 P bytes", "owned", "rounds", "bound"], rows)
    rows = []
    for inside in INSIDE:
        rows.append(row_of_rank(inside, size, unit, options.quick))
        print(f"done: {inside}", flush=True)
    header = ["a rank; inside a worker", *PARTS, "total", "formula", "apart", "RSS"]
    harness.print_table(header, rows)
    print(f"4 P is {unit / MB:.1f} MB, and the bucket has {BUCKET_BYTES / MB:.1f} MB.")


if __name__ == "__main__":
    main()

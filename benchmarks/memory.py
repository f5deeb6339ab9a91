"""How much memory the rounds need beyond the model and its optimizer.

Measured on a model without activations, in units of its parameters in float32 (4 P bytes):

  owned    tensors that are alive between rounds and were not before there was an engine
  rounds   the largest size of all tensors that torch allocated, above the level before the engine,
           while rounds are made
  set-up   the same while the engine is built
  shown    the same while the consensus stands in the model for a validation
  RSS      growth of the process's resident memory from before the engine to the end of the rounds,
           at its highest, in processes without a profiler: it includes the set-up, gloo's own
           buffers and what the allocator keeps (Linux only; not with --quick)

How to read it: ``owned`` and ``rounds`` should be at most 2 x P float32 plus one bucket for DiLoCo,
and one bucket for Local SGD. What torch does not see (gloo's buffers) is in RSS only.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

# The profiler and the allocator comment on themselves.
os.environ.update(KINETO_LOG_LEVEL="99", TORCH_CPP_LOG_LEVEL="ERROR")

from common import Worker, make_parser, print_machine, print_table, run_workers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_loco import Algorithm, DiLoCo, GASLoC, LocalSGD, StepEngine
from lightning_loco.distributed import WorkerGroup

MB = 1e6
BUCKET_BYTES = 16 * 2**20
SLACK_BYTES = 2**16  # scalars, and the few numbers that travel beside a round
# name: (algorithm, overlap, bound in vectors of the model's size without the bucket)
SETTINGS: dict[str, tuple[Algorithm, bool, int | None]] = {
    "Local SGD": (LocalSGD(), False, 0),
    "DiLoCo": (DiLoCo(), False, 2),
    "Async DiLoCo": (DiLoCo(outer_momentum=0.0), True, None),
    "GASLoC ring": (GASLoC(), False, None),
}


def living_bytes() -> int:
    """Bytes of all tensors of this process; those that share memory count once."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        # isinstance would ask lazy objects of other libraries for their class.
        if issubclass(type(item), Tensor) and item.device.type == "cpu":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def highest_rise(action: Callable[[], object]) -> int:
    """The most bytes that torch held during an action, above its level at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    level = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    return highest


def resident_bytes(field: str) -> int:
    """``VmRSS``, or ``VmHWM``, its highest value so far; 0 where there is no /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(x for x in status.read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def make_model(num_layers: int, width: int) -> nn.Module:
    """Nothing but layers."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))


def make_engine(model: nn.Module, name: str, group: WorkerGroup) -> StepEngine:
    """An engine that makes a round at every step."""
    algorithm, overlap, _ = SETTINGS[name]
    return StepEngine(
        model, algorithm, sync_every=1, overlap=overlap, bucket_bytes=BUCKET_BYTES, group=group
    )


def measure_tensors(worker: Worker, num_layers: int, width: int) -> dict[str, dict[str, int]]:
    """Bytes of tensors of one worker, for all settings one after the other."""
    return {name: tensors_of(worker, name, num_layers, width) for name in SETTINGS}


def tensors_of(worker: Worker, name: str, num_layers: int, width: int) -> dict[str, int]:
    """Bytes of tensors of one worker and one setting."""
    with worker.process_group():
        model = make_model(num_layers, width)
        group = WorkerGroup.create()
        before = living_bytes()
        engines: list[StepEngine] = []
        set_up = highest_rise(lambda: engines.append(make_engine(model, name, group)))
        engine = engines[0]
        for _ in range(2):  # some memory is made at the first use
            engine.step()
        owned = living_bytes() - before
        rounds = owned + highest_rise(engine.step)
        shown = owned + highest_rise(engine.worker.show_consensus)
        engine.worker.show_local()
        engine.finish()
        engine.close()
    return {"owned": owned, "rounds": rounds, "set-up": set_up, "shown": shown}


def measure_resident(worker: Worker, name: str, num_layers: int, width: int) -> int:
    """Highest growth of the resident memory of one worker."""
    with worker.process_group():
        model = make_model(num_layers, width)
        group = WorkerGroup.create()
        started = resident_bytes("VmRSS")
        engine = make_engine(model, name, group)
        for _ in range(4):
            engine.step()
        rise = resident_bytes("VmHWM") - started
        engine.finish()
        engine.close()
    return rise


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048, help="layers of width x width")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.width = 8, 1024
    print_machine()
    size = (options.layers, options.width)
    unit = 4 * sum(p.numel() for p in make_model(*size).parameters())
    tensors = run_workers(measure_tensors, options.workers, *size)[0]
    rows = []
    for name, (_, _, vectors) in SETTINGS.items():
        found = tensors[name]
        bound = "-"
        if vectors is not None:
            most = vectors * unit + BUCKET_BYTES
            kept = max(found["owned"], found["rounds"]) <= most + SLACK_BYTES
            bound = f"<= {most / unit:.2f} ({vectors} P + bucket) {'ok' if kept else 'MISSED'}"
        resident = "-"
        if not options.quick:
            rise = run_workers(measure_resident, options.workers, name, *size)[0]
            resident = f"{rise / unit:.2f}"
        rows.append(
            [
                name,
                *(f"{found[key] / unit:.2f}" for key in ("owned", "rounds")),
                bound,
                *(f"{found[key] / unit:.2f}" for key in ("set-up", "shown")),
                resident,
            ]
        )
        print(f"done: {name}", flush=True)
    print_table(
        ["in units of 4 P bytes", "owned", "rounds", "bound", "set-up", "shown", "RSS"], rows
    )
    print(f"4 P is {unit / MB:.1f} MB, and the bucket has {BUCKET_BYTES / MB:.1f} MB.")


if __name__ == "__main__":
    main()

"""Recovery: how a worker that joins, or has fallen behind, resumes from the state of the run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco._util.fault_points import reach
from lightning_loco.algorithms import Mix
from lightning_loco.compression import shared_part
from lightning_loco.elastic.member_connection import LoopPosition
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.fragment_sync import FragmentSync

MAX_VECTORS = 8
"""Most vectors of the length of the parameters in a state."""

_STATE, _RECEIVED = "state/", "received/"
_PARAMS, _BUFFERS, _SHARED_RESIDUAL = "params", "buffers", "known"


class RunState(NamedTuple):
    """The state of a run, as a joining worker receives it.

    Attributes:
        tensors: Tensors by name, on the CPU.
        values: Plain values, such as the position of the run.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def max_state_bytes(engine: Engine) -> int:
    """Return the most bytes that the state of a run may take."""
    return MAX_VECTORS * engine.worker.replica.layout.num_bytes + 2**30


def fragment_of_round(engine: Engine, round_index: int) -> FragmentSync:
    """Return the fragment that a round synchronizes."""
    return engine.fragments[round_index % len(engine.fragments)]


# ------------------------------------------------------------------------- the donor


def position_of(engine: Engine, loop: LoopPosition | None, round_index: int) -> dict[str, Any]:
    """Return the position of a worker at the start of a round, as plain values."""
    return {
        "round_index": round_index,
        "steps": engine.worker.steps,
        "steps_under_way": engine.settings.schedule.delay_of_round(0, round_index),
        "began_at": [sync.began_at for sync in engine.fragments],
        "host": None if loop is None else loop.read(),
    }


def outer_state(engine: Engine) -> dict[str, Any]:
    """Return the algorithm's state as it is until the pending round is applied.

    Entries of a single fragment, such as counters, have names that begin with its index.
    """
    # Vectors (P,) are shared by the fragments, and travel once.
    state: dict[str, Any] = {}
    for index, sync in enumerate(engine.fragments):
        fragment = sync.memory
        own = fragment.chunks[0].state if fragment.has_uncut_state else fragment.state
        for key, value in fragment.state.items():
            is_shared = fragment.is_cut(value)
            state[key if is_shared else f"{index}/{key}"] = value if is_shared else own[key]
    return state


def _state_of_fragment(state: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the entries of :func:`outer_state` for one fragment, by the algorithm's names."""
    own = f"{index}/"
    names = [name for name in state if "/" not in name or name.startswith(own)]
    return {name.removeprefix(own): state[name] for name in names}


@torch.no_grad()
def copy_state(engine: Engine, position: dict[str, Any], with_saved_rounds: bool) -> RunState:
    """Copy the state of the run to the CPU, as it is until the pending round is applied.

    It may run in another thread during local steps: they do not change outer parameters. If the
    algorithm has none, the model's parameters are copied, and the round replaces them.
    ``with_saved_rounds`` includes results of rounds that were pending in a checkpoint.
    """
    reach("copying the state")
    fragment, worker, state = engine.fragments[0].memory, engine.worker, outer_state(engine)
    tensors = {f"{_STATE}{k}": _to_cpu(v) for k, v in state.items() if isinstance(v, Tensor)}
    # Otherwise the start of the round is in the state, and what joining workers load.
    if engine.settings.algorithm.round_start(fragment.state) is None:
        tensors[_PARAMS] = worker.replica.layout.new_flat_on_cpu()
    if (shared_residual := shared_part(fragment.residual)) is not None:
        tensors[_SHARED_RESIDUAL] = _to_cpu(shared_residual)
    tensors[_BUFFERS] = worker.replica.buffers.new_flat_on_cpu()
    values: dict[str, Any] = {
        "numbers": {k: v for k, v in state.items() if not isinstance(v, Tensor)},
        **position,
    }
    for index, sync in enumerate(engine.fragments) if with_saved_rounds else ():
        shared, own = sync.state_dict()
        if own["pending"] is not None:
            tensors[f"{_RECEIVED}{index}"] = shared["received"]
            values[f"{_RECEIVED}{index}"] = own["pending"]
    return RunState(tensors, values)


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


# --------------------------------------------------------------- the worker that joins


def is_ahead(engine: Engine, state: RunState | None) -> bool:
    """Whether this worker resumed from a later round than the next one of the run's ``state``.

    It then starts that round, and the others recover from it. With exactly the next one it would
    take part in the same round as they, but with another state.
    """
    return state is not None and int(state.values["round_index"]) + 1 < engine.worker.round_index


@torch.no_grad()
def apply_saved_rounds(engine: Engine) -> None:
    """Apply rounds that were pending in a checkpoint, so that joining workers do not need them.

    The local steps made since are kept, and are part of the next message. With ``Mix`` the rounds
    stay pending on all workers instead: joining ones receive them with the state.
    """
    if isinstance(engine.settings.merge_policy, Mix):
        return
    for sync in engine.fragments:
        if sync.pending is None:
            continue
        shared, own = sync.state_dict()
        pending = {
            **own["pending"],
            "received": shared["received"],
            "sent_params": own["sent_params"],
        }
        for handle in sync.drop_pending():
            handle.release()
        sync.apply_saved(pending, engine.worker.steps)
        engine.add_up(sync)
    engine.worker.replica.share()


def resume_from_state(
    engine: Engine,
    loop: LoopPosition | None,
    state: RunState,
    donor: str,
    *,
    keep_position: bool = False,
    missed_steps: int = 0,
) -> None:
    """Resume from the state of the run, as it was at the start of the pending round.

    ``keep_position`` if only the state had drifted; ``missed_steps`` are local steps that the
    others have made since. RuntimeError if the state does not fit this worker.
    """
    worker = engine.worker
    adopt_state(engine, state)
    if not keep_position:
        position = state.values
        worker.steps = int(position["steps"])
        worker.round_index = int(position["round_index"])
        worker.steps_since_round = int(position.get("steps_since_round", 0))
        for sync, began_at in zip(engine.fragments, position["began_at"], strict=True):
            sync.began_at = int(began_at)
        if loop is not None:
            loop.resume_from(position["host"], donor)
        for _ in range(missed_steps):
            if loop is not None:
                loop.finish_step()
            worker.steps += 1
            worker.steps_since_round += 1
        if loop is not None:
            loop.count_steps()
    for sync in engine.fragments:
        # What this worker has trained from another state is no progress of the run.
        sync.fresh_at = worker.steps


@torch.no_grad()
def adopt_state(engine: Engine, state: RunState) -> None:
    """Load the state of the run into model and fragments; RuntimeError if it does not fit."""
    replica = engine.worker.replica
    tensors = {k.removeprefix(_STATE): t for k, t in state.tensors.items() if k.startswith(_STATE)}
    merged = {**tensors, **state.values["numbers"]}
    states = [_state_of_fragment(merged, index) for index in range(len(engine.fragments))]
    # Everything is checked before anything changes.
    for sync, values in zip(engine.fragments, states, strict=True):
        for key, own in sync.state.items():
            if isinstance(own, Tensor) and getattr(values.get(key), "shape", None) != own.shape:
                message = f"The state of the run does not fit this worker's: {key!r} differs."
                raise RuntimeError(message)
    outer = engine.settings.algorithm.round_start(states[0])
    params = state.tensors.get(_PARAMS) if outer is None else outer
    if params is None or params.shape != (replica.layout.numel,):
        raise RuntimeError("The state of the run has parameters of another size than this model.")
    if state.tensors[_BUFFERS].numel() != replica.buffers.numel:
        raise RuntimeError("The state of the run has buffers of another size than this model.")
    residual = engine.settings.init_residual(state.tensors.get(_SHARED_RESIDUAL, params))
    for index, (sync, values) in enumerate(zip(engine.fragments, states, strict=True)):
        name = f"{_RECEIVED}{index}"
        sync.load_state_dict(
            {"state": values, "received": state.tensors.get(name)},
            {"pending": state.values.get(name), "residual": residual, "sent_params": params},
        )
    replica.reshard()
    replica.layout.write(params)
    replica.buffers.write(state.tensors[_BUFFERS])
    engine.buffers_at_start = replica.buffers.new_flat()

"""A worker that goes on from the state of the run: one that comes, or has been left behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_loco.algorithms import Mix
from lightning_loco.compression import shared_part
from lightning_loco.elastic.elastic_round import Carried, ElasticRound, statuses_of
from lightning_loco.elastic.state_transfer import StateTransfer
from lightning_loco.engine.engine import Engine
from lightning_loco.engine.fragment_sync import FragmentSync, PendingRound
from lightning_loco.engine.membership import Host

STATES = 8
"""The most vectors of the length of a message that a state is made of."""

_STATE, _RECEIVED = "state/", "received/"
_PARAMS, _BUFFERS, _KNOWN = "params", "buffers", "known"


def longest_state(engine: Engine) -> int:
    """The most bytes that the state of a run may take."""
    layout = engine.worker.replica.layout
    return STATES * layout.num_bytes + 2**30


def fragment_of(engine: Engine, round_index: int) -> FragmentSync:
    """The fragment that a round moves."""
    return engine.fragments[round_index % len(engine.fragments)]


def outer_state(engine: Engine) -> dict[str, Any]:
    """What the algorithm remembers, as it is until the pending round lands.

    What fragments have each for itself, counters say, begins with the number of the fragment.
    """
    found: dict[str, Any] = {}
    for index, rounds in enumerate(engine.fragments):
        fragment = rounds.memory
        present = fragment.chunks[0].state if fragment.has_uncut_state else fragment.state
        for key, value in fragment.state.items():
            is_shared = fragment.is_cut(value)
            found[key if is_shared else f"{index}/{key}"] = value if is_shared else present[key]
    return found


def _state_of_fragment(found: dict[str, Any], index: int) -> dict[str, Any]:
    """What :func:`outer_state` has found for one fragment, by the names of the algorithm."""
    own = f"{index}/"
    names = [name for name in found if "/" not in name or name.startswith(own)]
    return {name.removeprefix(own): found[name] for name in names}


@torch.no_grad()
def copy_state(engine: Engine, pending: ElasticRound) -> StateTransfer:
    """Copy the state of the run into the host's memory, as it is until the pending round lands.

    It may be called beside the local steps: outer parameters stand still meanwhile. Where the
    algorithm has none, the model's parameters are taken, and the round replaces them.
    """
    fragment, worker, state = engine.fragments[0].memory, engine.worker, outer_state(engine)
    tensors = {f"{_STATE}{k}": _copied(v) for k, v in state.items() if isinstance(v, Tensor)}
    if engine.settings.algorithm.restart(fragment.state) is None:
        tensors[_PARAMS] = worker.replica.layout.set_aside()
    if (known := shared_part(fragment.residual)) is not None:
        tensors[_KNOWN] = _copied(known)
    tensors[_BUFFERS] = worker.replica.buffers.set_aside()
    values: dict[str, Any] = {
        "numbers": {k: v for k, v in state.items() if not isinstance(v, Tensor)},
        **pending.values,
    }
    for index, rounds in enumerate(engine.fragments) if pending.message is None else ():
        shared, own = rounds.state_dict()  # what a checkpoint has left under way has arrived
        if own["pending"] is not None:
            tensors[f"{_RECEIVED}{index}"] = shared["received"]
            values[f"{_RECEIVED}{index}"] = own["pending"]
    return StateTransfer(tensors, values)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@torch.no_grad()
def adopt_state(engine: Engine, pending: ElasticRound) -> None:
    """Let rounds and model go on from the state that a pending round has brought, as at its begin.

    Raises:
        RuntimeError: If it does not fit.
    """
    replica, state = engine.worker.replica, pending.state
    assert state is not None
    pending.is_adopted = True
    tensors = {k.removeprefix(_STATE): t for k, t in state.tensors.items() if k.startswith(_STATE)}
    found = {**tensors, **state.values["numbers"]}
    states = [_state_of_fragment(found, index) for index in range(len(engine.fragments))]
    for rounds, values in zip(engine.fragments, states, strict=True):
        for key, own in rounds.memory.state.items():
            if isinstance(own, Tensor) and getattr(values.get(key), "shape", None) != own.shape:
                message = f"The state of the run does not fit this worker's: {key!r} differs."
                raise RuntimeError(message)
    start = engine.settings.algorithm.restart(states[0])
    params = state.tensors.get(_PARAMS) if start is None else start
    if params is None or params.shape != (replica.layout.numel,):
        raise RuntimeError("The state of the run has parameters of another size than this model.")
    if state.tensors[_BUFFERS].numel() != replica.buffers.numel:
        raise RuntimeError("The state of the run has buffers of another size than this model.")
    residual = engine.settings.init_residual(state.tensors.get(_KNOWN, params))
    for index, (rounds, values) in enumerate(zip(engine.fragments, states, strict=True)):
        name = f"{_RECEIVED}{index}"
        under_way = state.values.get(name)
        rounds.load_state_dict(
            {"state": values, "received": state.tensors.get(name)},
            {"pending": under_way, "residual": residual, "sent_params": params},
        )
    replica.layout.write(params)
    replica.buffers.write(state.tensors[_BUFFERS])
    engine.buffers_at_start = replica.buffers.new_flat()


@torch.no_grad()
def apply_saved_rounds(engine: Engine) -> None:
    """Land what was under way when it was saved, so that newcomers need not learn of it.

    The local steps made meanwhile stay, and are in the message of the next round. Where they are
    mixed with the result, all go on with what is under way: newcomers get that with the state.
    """
    if isinstance(engine.settings.merge_policy, Mix):
        return
    for rounds in engine.fragments:
        if rounds.pending is None:
            continue
        shared, own = rounds.state_dict()
        pending = {
            **own["pending"],
            "received": shared["received"],
            "sent_params": own["sent_params"],
        }
        for handle in rounds.drop_pending():
            handle.release()
        rounds.apply_saved(pending)


def is_ahead(engine: Engine, pending: ElasticRound) -> bool:
    """Whether this worker knows a later round than the next one of those that it has come to.

    It then begins with that round, and the others follow. With the very next one it would meet them
    in the same round, but with another state.
    """
    state = pending.state
    return state is not None and int(state.values["round_index"]) + 1 < engine.worker.round_index


def position_of(engine: Engine, host: Host | None, round_index: int) -> dict[str, Any]:
    """Where a worker is when a round begins, as plain values."""
    return {
        "round_index": round_index,
        "steps": engine.worker.steps,
        "steps_under_way": engine.settings.schedule.steps_under_way(0, round_index),
        "began_at": [rounds.began_at for rounds in engine.fragments],
        "host": None if host is None else host.read(),
    }


def follow(engine: Engine, host: Host | None, pending: ElasticRound, missed: int = 0) -> None:
    """Go on from the state that a pending round has brought, as it was when the pending round
    began.

    Args:
        engine: Of this worker.
        host: The program around it.
        pending: It is over.
        missed: Local steps that the others have made since.

    Raises:
        RuntimeError: If the state does not fit.
    """
    worker = engine.worker
    adopt_state(engine, pending)
    if not pending.has_drifted:  # otherwise this worker knows where it is
        assert pending.state is not None
        position = pending.state.values
        worker.steps = int(position["steps"])
        worker.round_index = int(position["round_index"])
        worker.steps_since_round = int(position.get("steps_since_round", 0))
        for rounds, began_at in zip(engine.fragments, position["began_at"], strict=True):
            rounds.began_at = int(began_at)
        if host is not None:
            assert pending.plan is not None
            host.go_on(position["host"], pending.plan.names[pending.plan.donor])
        for _ in range(missed):
            if host is not None:
                host.end_step()
            worker.steps += 1
            worker.steps_since_round += 1
        if host is not None:
            host.count()
    for rounds in engine.fragments:
        rounds.fresh_at = worker.steps


def take_part(engine: Engine, pending: ElasticRound, handle: Carried) -> FragmentSync:
    """Put a pending round whose state this worker has gone on from; it has no weight in
    it.

    Of such a round the message is nobody's own.

    Returns:
        The fragment in which it lands, when it lands for all.
    """
    plan, state = pending.plan, pending.state
    assert plan is not None
    assert state is not None
    position = pending.values if pending.has_drifted else state.values
    index = plan.round_index
    rounds = fragment_of(engine, index)
    rounds.began_at = int(position["steps"])
    statuses = statuses_of(pending, engine, f"round {index}")
    rounds.pending = PendingRound(index, False, rounds.began_at, statuses, [handle])
    rounds.pending.is_overlapped = engine.settings.schedule.is_overlapped(index)
    for message in [bucket.message for bucket in rounds.memory.buckets]:
        if engine.settings.algorithm.exchange == "mean" or pending.received is None:
            message.zero_()
        else:
            message.copy_(pending.received)
    return rounds

"""The loop of a process of the pool, which runs one job at a time."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.guards import Surroundings, restore_environ, seed

# Collectives time out later than the pool, so that a hang is reported with all stacks.
COLLECTIVE_MARGIN_S = 60.0


@dataclass
class Job:
    """Everything that a worker needs to run a function as the pytest process would."""

    prefix: str
    rank: int
    world: int
    timeout_s: float
    folder: str
    sys_path: list[str]
    environ: dict[str, str]
    warning_filters: list[tuple[str, str, type[Warning], str, int]]
    call: bytes  # pickled (fn, args); unpickled only after sys_path is in place


@dataclass
class Success:
    result: Any


@dataclass
class Failure:
    """The error of one rank."""

    rank: int
    type_name: str
    message: str
    traceback: str
    raised_at_s: float


def serve_store(connection: Connection) -> None:
    """Host the rendezvous store until the parent process exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send_bytes(pickle.dumps(store.port))
    try:
        connection.recv_bytes()
    except EOFError:
        return


def serve(connection: Connection, port: int, stack_file: str) -> None:
    """Run jobs in a loop: receive, run, answer, wait for the others, clean up, report leftovers."""
    os.setsid()  # a separate process group, so that killing it kills its children
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with open(stack_file, "a") as stacks:
        connection.send_bytes(b"ready")
        try:
            while message := connection.recv_bytes():
                # Needed for every job: Lightning's Trainer resets all signal handlers at its end.
                faulthandler.unregister(signal.SIGUSR2)
                faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
                _work(connection, store, pickle.loads(message))
        except (EOFError, ConnectionError):
            return  # the pytest process has exited


def _work(connection: Connection, store: dist.TCPStore, job: Job) -> None:
    sys.path[:] = job.sys_path
    os.chdir(job.folder)
    restore_environ(job.environ)
    before = Surroundings.now()
    thread_errors = _collect_thread_errors()
    try:
        # Plain pickle, because torch.multiprocessing would pass tensors by file descriptor.
        answer = pickle.dumps(Success(_call(job, store)))
    except BaseException as error:
        failure = _failure(job.rank, error)
        del error  # its frames may hold the process group
        _destroy_group()  # ranks that wait for this one get an error
        answer = pickle.dumps(failure)
    connection.send_bytes(answer)
    # A finished rank keeps its group until all have finished: closing early can lose messages.
    connection.recv_bytes()
    _destroy_group()
    connection.send_bytes(pickle.dumps(before.restore() + thread_errors))
    sys.stdout.flush()
    sys.stderr.flush()


def _call(job: Job, store: dist.TCPStore) -> Any:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in job.warning_filters:
            warnings.filterwarnings(action, message, category, module, line)  # type: ignore[arg-type]
        fn, args = pickle.loads(job.call)
        seed(job.rank)
        torch.set_num_threads(1)
        # A failed set-up has already counted its group, so group names would differ between ranks.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(job.prefix, store),
            rank=job.rank,
            world_size=job.world,
            timeout=timedelta(seconds=job.timeout_s + COLLECTIVE_MARGIN_S),
        )
        return fn(job.rank, job.world, *args)


def _collect_thread_errors() -> list[str]:
    """Return a list that collects the traceback of every exception that ends a thread."""
    errors: list[str] = []

    def note(raised: threading.ExceptHookArgs) -> None:
        name = raised.thread.name if raised.thread else "unknown"
        lines = traceback.format_exception(raised.exc_type, raised.exc_value, raised.exc_traceback)
        errors.append(f"an exception in thread {name!r}:\n{''.join(lines).rstrip()}")

    threading.excepthook = note
    return errors


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # Results of DTensor operations are cached with their mesh, which names its process groups.
    if "torch.distributed.tensor" in sys.modules:
        debug = importlib.import_module("torch.distributed.tensor.debug")
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def _failure(rank: int, error: BaseException) -> Failure:
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return Failure(
        rank=rank,
        type_name=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(type(error), error, frames)).rstrip(),
        raised_at_s=time.monotonic(),
    )

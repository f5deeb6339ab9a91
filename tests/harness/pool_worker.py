"""What runs inside the processes of the pool: one loop, one job at a time."""

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

# Collectives give up later than the pool, so that a hang is reported with the stacks of all.
COLLECTIVE_MARGIN_S = 60.0


@dataclass
class Job:
    """Everything a worker needs in order to run a function as the pytest process would."""

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
    """What one rank raised."""

    rank: int
    type_name: str
    message: str
    traceback: str
    raised_at_s: float


def serve_store(connection: Connection) -> None:
    """Hold the server of the rendezvous store until the parent goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send_bytes(pickle.dumps(store.port))
    try:
        connection.recv_bytes()
    except EOFError:
        return


def serve(connection: Connection, port: int, stack_file: str) -> None:
    """The loop of one worker: job in, answer out, wait for the others, clean up, leftovers out."""
    os.setsid()  # a process group of its own: killing it takes its children along
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with open(stack_file, "a") as stacks:
        connection.send_bytes(b"ready")
        try:
            while message := connection.recv_bytes():
                # For every job: at its end Lightning's Trainer resets all signal handlers.
                faulthandler.unregister(signal.SIGUSR2)
                faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
                _work(connection, store, pickle.loads(message))
        except (EOFError, ConnectionError):
            return  # the pytest process is gone


def _work(connection: Connection, store: dist.TCPStore, job: Job) -> None:
    sys.path[:] = job.sys_path
    os.chdir(job.folder)
    restore_environ(job.environ)
    before = Surroundings.now()
    thread_errors = _collect_thread_errors()
    try:
        # Plain pickle on purpose: torch.multiprocessing would pass tensors by file descriptor.
        answer = pickle.dumps(Success(_call(job, store)))
    except BaseException as error:
        failure = _failure(job.rank, error)
        del error  # its frames may hold the process group
        _destroy_group()  # ranks that wait for this one get an error
        answer = pickle.dumps(failure)
    connection.send_bytes(answer)
    # A rank that is done keeps its group until all are: closing early can lose data on the way.
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
        # A set-up that failed because another rank died has counted its group: names would differ.
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
    """A list that receives the traceback of every exception that ends a thread from now on."""
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

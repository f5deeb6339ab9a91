"""Guards for what a test must not leave behind: threads, processes, groups, files, settings.

The same checks run around every test in the pytest process and around every job in a pool worker.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# Daemon threads of libraries that live as long as the process.
KNOWN_DAEMONS = ("TMonitor", "QueueFeederThread", "Dummy-")
# After a failure they wait for pending work of a gloo group, until the group's timeout.
KNOWN_WAITING = "loco-abandoned"
# Caches of the tools, and folders that are created by development, not by a test.
KNOWN_FILES = {".git", ".venv", ".versions", "__pycache__"}
KNOWN_FILES |= {".mypy_cache", ".pytest_cache", ".ruff_cache"}
# Child processes that multiprocessing keeps for the whole session.
KNOWN_CHILDREN = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


_may_start_processes = True


def allow_processes(allowed: bool) -> None:
    """Set whether the next test may start processes besides the pool."""
    global _may_start_processes
    _may_start_processes = allowed


def check_may_start_processes() -> None:
    """Fail a test that starts processes without the mark; it would run in the wrong target."""
    assert _may_start_processes, "This test starts processes: mark it with pytest.mark.process."


@dataclass(frozen=True)
class Surroundings:
    """A snapshot of a process before a test or a job."""

    environ: dict[str, str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    folder: Path | None
    files: frozenset[str]
    drawing: dict[str, object]

    @classmethod
    def now(cls, folder: Path | None = None) -> Surroundings:
        """Take the snapshot; folder is watched for new files at its top level."""
        return cls(
            environ=dict(os.environ),
            threads=frozenset(threading.enumerate()),
            children=frozenset(_children()),
            folder=folder,
            files=_files(folder),
            drawing=_matplotlib("rcParams"),
        )

    def restore(self, patience_s: float = 2.0) -> list[str]:
        """Restore the environment and rank_zero_only; return a phrase for each thing left over."""
        left = [f"the process group of torch.distributed ({rank})" for rank in _drop_group()]
        _forget_stores()
        left += [f"thread {name}" for name in self._new_threads(patience_s)]
        left += [f"process {pid}: {command}" for pid, command in self._new_children(patience_s)]
        left += [f"file {name}" for name in sorted(_files(self.folder) - self.files)]
        left += self._changed_drawing()
        restore_environ(self.environ)
        _reset_rank_zero()
        return left

    def _changed_drawing(self) -> list[str]:
        """Return and restore the settings of matplotlib that have changed."""
        before = self.drawing or _matplotlib("rcParamsOrig")
        now = _matplotlib("rcParams")
        # Drawing selects the backend.
        changed = [key for key in now if key != "backend" and now[key] != before[key]]
        for key in changed:
            sys.modules["matplotlib"].rcParams[key] = before[key]
        return [f"matplotlib.rcParams[{key!r}] = {now[key]!r}" for key in changed]

    def _new_threads(self, patience_s: float) -> list[str]:
        """Return new threads that are still alive after a moment in which they may end."""
        deadline = time.monotonic() + patience_s
        while True:
            left = [
                thread
                for thread in threading.enumerate()
                if thread not in self.threads and not _is_known(thread)
            ]
            if not left or time.monotonic() > deadline:
                return [f"{thread.name!r} (daemon={thread.daemon})" for thread in left]
            time.sleep(0.01)

    def _new_children(self, patience_s: float) -> list[tuple[int, str]]:
        deadline = time.monotonic() + patience_s
        while True:
            left = [(pid, name) for pid, name in _children().items() if pid not in self.children]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.01)


def restore_environ(environ: dict[str, str]) -> None:
    """Make os.environ equal to environ; write changed variables only."""
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _is_known(thread: threading.Thread) -> bool:
    names = (thread.name, type(thread).__name__)
    if thread.name == KNOWN_WAITING:
        return True
    return thread.daemon and any(name.startswith(KNOWN_DAEMONS) for name in names)


def _children() -> dict[int, str]:
    """Return live direct children of this process, by process id; empty without /proc."""
    found = {}
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue
            # A zombie has no command line: it has exited, and its status has not been read yet.
            if command and not any(name in command for name in KNOWN_CHILDREN):
                found[int(pid)] = command[:200]
    return found


def _files(folder: Path | None) -> frozenset[str]:
    if folder is None:
        return frozenset()
    return frozenset(path.name for path in folder.iterdir()) - KNOWN_FILES


def _matplotlib(settings: str) -> dict[str, object]:
    """Return a copy of matplotlib's settings; empty if it has not been imported."""
    matplotlib = sys.modules.get("matplotlib")
    return {} if matplotlib is None else dict.copy(getattr(matplotlib, settings))


def _drop_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return []
    rank = f"rank {distributed.get_rank()} of {distributed.get_world_size()}"
    distributed.destroy_process_group()
    return [rank]


def _forget_stores() -> None:
    """Close the stores that the package keeps until the process ends: each test has its own."""
    job = sys.modules.get("lightning_loco.distributed.job")
    if job is not None:
        job._stores.clear()


def _reset_rank_zero() -> None:
    for module in ("lightning.fabric.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
        if module in sys.modules:
            sys.modules[module].rank_zero_only.rank = 0


def seed(number: int) -> None:
    """Seed the random generators of Python, numpy and torch, if these are imported."""
    random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def threads_named(*prefixes: str) -> list[str]:
    """Return the names of running threads that start with one of the prefixes."""
    return [t.name for t in threading.enumerate() if t.name.startswith(prefixes)]


def open_files() -> int:
    """Return the number of open file descriptors of this process: sockets, pipes, files."""
    return len(os.listdir("/proc/self/fd"))

"""Settings and guards for every test, and the pool of gloo processes."""

from __future__ import annotations

import os

# Four processes share few cores: more threads would only wait for each other. torch reads this
# when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# PyTorch's store resolves addresses to host names, and a name server may not answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Libraries of Hugging Face would count their uses there; the first import of one reads this.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness.cover import pytest_addoption as pytest_addoption
from tests.harness.cover import pytest_configure as pytest_configure
from tests.harness.exclusive import pytest_collection_finish as pytest_collection_finish
from tests.harness.exclusive import pytest_runtest_protocol as pytest_runtest_protocol
from tests.harness.guards import Surroundings, allow_processes, seed
from tests.harness.sources import ROOT

if TYPE_CHECKING:
    from tests.harness.pool import Pool


def pytest_runtest_setup(item: pytest.Item) -> None:
    allow_processes(item.get_closest_marker("process") is not None)
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a process, a process group or a file behind."""
    before = Surroundings.now(ROOT)
    yield
    left = before.restore()
    if left:
        pytest.fail("The test left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed the random numbers before each test, whatever ran earlier in its process."""
    seed(0)


@pytest.fixture
def other_disk() -> Iterator[Path]:
    """Return a folder on another file system than the temporary files."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev:
        pytest.skip("there is only one file system")
    folder = Path(tempfile.mkdtemp(dir=memory))
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o777)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo processes: `pool.run(fn, *args, world=4, timeout_s=60)`; see harness/pool.py."""
    # Imported here because the controller of xdist does not need PyTorch.
    from tests.harness.pool import Pool

    processes = Pool()
    yield processes
    processes.close()

"""torchft logs warnings only, unless the user sets another level."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.cluster import Lighthouse
from tests.harness.programs import Program, python_script

pytestmark = pytest.mark.process

SCRIPT = """
import logging, os, sys
logging.getLogger("torchft_errors").setLevel(logging.DEBUG)
logging.basicConfig(level=logging.INFO)
from torch import nn
from lightning_loco import DiLoCo, Elastic, StepEngine

def main():
    elastic = Elastic(sys.argv[1], min_workers=1, host="127.0.0.1")
    engine = StepEngine(nn.Linear(1, 1), DiLoCo(), sync_every=1, membership=elastic)
    engine.start()
    engine.step()
    engine.close()
    levels = [logging.getLogger(name).level for name in ("torchft", "torchft_errors")]
    print("levels", *levels, "variable", os.environ.get("RUST_LOG"), engine.statistics.members)

if __name__ == "__main__":
    main()
"""


@pytest.mark.soak
@pytest.mark.parametrize(("given", "is_loud"), [(None, False), ("info", True)])
def test_log_level_of_torchft(tmp_path: Path, given: str | None, is_loud: bool) -> None:
    lighthouse = Lighthouse(1)
    environ = {} if given is None else {"RUST_LOG": given}
    try:
        command = [*python_script(tmp_path, SCRIPT), lighthouse.address]
        with Program(command, tmp_path, **environ) as program:
            status, output = program.finish(60)
    finally:
        lighthouse.stop()
    assert status == 0, output
    assert f"levels 30 10 variable {given or 'warn'} 1" in output
    assert ("[INFO]" in output) == is_loud, output

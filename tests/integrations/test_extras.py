"""Without the package that a front end needs, importing it says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.sources import ROOT


@pytest.mark.process
@pytest.mark.parametrize(("name", "needed"), [("ray", "ray"), ("huggingface", "transformers")])
def test_what_is_missing_is_named(name: str, needed: str) -> None:
    code = f"""
import sys
import lightning_loco as loco
sys.modules["{needed}"] = None
loco.DiLoCoStrategy()
try:
    import lightning_loco.integrations.{name}
except ImportError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert f"pip install -c constraints.txt -e '.[{name}]'" in out

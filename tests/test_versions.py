"""The versions that are tested, allowed, pinned and documented agree."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from tests import versions
from tests.conftest import ROOT
from tests.docs.pages import doc

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))


def oldest(package: str) -> str:
    """The oldest release that pyproject.toml allows."""
    found = re.search(rf'"{package}>=([\d.]+)', PYPROJECT)
    assert found
    return found.group(1)


def test_lightning_is_tested_from_the_oldest_to_the_newest() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert versions.LIGHTNING[0] == oldest("lightning")
    assert f"lightning=={versions.LIGHTNING[-1]}" in constraints
    minors = [release.rpartition(".")[0] for release in versions.LIGHTNING]
    assert minors == [f"2.{minor}" for minor in range(5, 5 + len(minors))]


def test_every_python_of_the_classifiers_is_in_the_workflow() -> None:
    listed = tuple(re.findall(r"Python :: (3\.\d+)", PYPROJECT))
    assert listed == versions.PYTHON
    for job in ("test", "soak"):
        assert tuple(WORKFLOW["jobs"][job]["strategy"]["matrix"]["python"]) == listed


def test_the_workflow_has_older_versions_of_lightning() -> None:
    job = WORKFLOW["jobs"]["older-lightning"]
    assert tuple(job["strategy"]["matrix"]["lightning"]) == versions.LIGHTNING[:-1]
    command = job["steps"][-1]["run"]
    assert command == 'make test-versions ONLY="Lightning ${{ matrix.lightning }}"'


def test_the_workflow_has_the_oldest_torch() -> None:
    lines = [step.get("run", "") for step in WORKFLOW["jobs"]["oldest-torch"]["steps"]]
    for package in ("torch", "torchdata"):
        assert any(f'"{package}=={oldest(package)}.0"' in line for line in lines)


def test_the_page_has_each_version() -> None:
    listed = [cell for cell, *_ in doc("testing.md").table("version")]
    assert [cell.removeprefix("Lightning ") for cell in listed if "Lightning" in cell] == [
        *versions.LIGHTNING
    ]
    assert {f"Python {release}" for release in versions.PYTHON} <= set(listed)


def test_the_python_that_runs_is_found_and_one_that_is_missing_is_not() -> None:
    running = "{}.{}".format(*sys.version_info)
    assert versions.try_python(running).startswith("that of .venv")
    assert versions.find_python("3.99") is None
    assert versions.try_python("3.99") == ("not run: there is no python3.99 on this machine")


def test_what_cannot_be_installed_is_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # as without a network
    outcome = versions.try_lightning("2.5.0")
    assert outcome.startswith("not run: pip could not install it (ERROR: ")
    assert list(tmp_path.iterdir()) == []

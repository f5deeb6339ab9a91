"""The tested, allowed, pinned and documented versions agree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_loco import __version__
from tests.harness import versions
from tests.harness.pages import doc
from tests.harness.sources import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))


RELEASE = yaml.safe_load(
    (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
)
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def oldest(package: str) -> str:
    """Return the oldest release that pyproject.toml allows."""
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


def test_the_citation_is_that_of_this_version_and_license() -> None:
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys()  # the required ones
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["version"] == __version__
    assert f'license = "{CITATION["license"]}"' in PYPROJECT


def test_ruff_at_a_commit_is_that_of_the_constraints() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repository,) = config["repos"]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ruff=={repository['rev'].removeprefix('v')}" in constraints


def test_a_release_checks_its_tag_against_the_files(tmp_path: Path) -> None:
    """The workflow's commands pass for the version in the files, and for no other version."""
    build = RELEASE["jobs"]["build"]["steps"]
    (check,) = [step["run"] for step in build if step.get("name", "").startswith("The tag is")]
    (tmp_path / "lightning_loco").mkdir()
    for name in ("lightning_loco/__about__.py", "CITATION.cff"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    (tmp_path / "CHANGELOG.md").write_text(f"## [{__version__}] - 2026-01-01\n")
    for tag, passes in ((f"v{__version__}", True), ("v9.9.9", False)):
        environ = {**os.environ, "GITHUB_REF_NAME": tag}
        done = subprocess.run(["bash", "-ec", check], cwd=tmp_path, env=environ, check=False)
        assert (done.returncode == 0) == passes, tag


def test_a_release_is_published_without_a_password() -> None:
    publish = RELEASE["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    assert "password" not in str(publish)


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

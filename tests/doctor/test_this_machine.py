"""What the doctor says of one machine by itself."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from lightning_loco.doctor import this_machine
from lightning_loco.doctor.this_machine import is_within, judge_this_machine


def found(check: str) -> list[tuple[str, str]]:
    return [(one.status, one.text) for one in judge_this_machine() if one.check == check]


def test_this_machine_is_well() -> None:
    ((status, text),) = found("packages")
    assert status == "ok"
    assert "python 3." in text
    assert "lightning 2." in text
    ((status, text),) = found("hardware")
    assert status == "ok"
    assert text.startswith("cores: ")


@pytest.mark.parametrize(
    ("version", "spec", "expected"),
    [
        ("2.4", ">=2.4", True),
        ("2.13.0+cpu", ">=2.4,<3", True),
        ("2.3.1", ">=2.4", False),
        ("3.0.0", "<3,>=2.5.6", False),
        ("2.6.2", "!=2.6.2,!=2.6.3", False),
        ("1.3.20", ">=1.3.2,<1.4", True),
        ("5", "", True),
    ],
)
def test_versions(version: str, spec: str, expected: bool) -> None:
    assert is_within(version, spec) is expected


def test_packages_out_of_range_and_missing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("torchft", "numpy"):
            raise PackageNotFoundError
        return {"lightning": "2.4.0"}.get(name, "99") if name in ("lightning", "torch") else "2.0"

    needs = ["torch>=2.4", "lightning<3,>=2.5.6", "numpy>=1", 'torchft<1; extra == "elastic"']
    monkeypatch.setattr(this_machine, "version", version)
    monkeypatch.setattr(this_machine, "requires", lambda _: [*needs, 'pytest>=9; extra == "dev"'])
    faults = found("packages")
    assert faults == [
        (
            "failed",
            "lightning is 2.4.0, and must be <3,>=2.5.6: pip install 'lightning<3,>=2.5.6'",
        ),
        ("failed", "numpy is not installed: pip install lightning-loco"),
    ]


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "LEAST_DISK_BYTES", 2**80)
    ((status, text),) = found("disk")
    assert status == "warning"
    assert str(Path.cwd()) in text

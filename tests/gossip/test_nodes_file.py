"""Nodes files in the format of dpwa: all keys are read, and errors name the problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_loco.gossip import Peer, read_nodes

LIST = """
- nodes:
    - {name: a, host: 10.0.0.1, port: 45000}
    - {name: b, host: 10.0.0.2, port: 45001}
- fetch_probability: 0.5
- timeout_ms: 2500
- interpolation: loss
- divergence_threshold: 0.2
- constant: {value: 0.4}
- clock: 0
- loss:
"""
MAP = """
nodes: [{name: a, host: h, port: 1}]
timeout_ms: 100
"""


def read(folder: Path, text: str) -> Any:
    file = folder / "nodes.yaml"
    file.write_text(text, encoding="utf-8")
    return read_nodes(file)


def test_file_may_hold_a_list_or_a_mapping(tmp_path: Path) -> None:
    nodes, settings = read(tmp_path, LIST)
    assert nodes == [Peer("a", "10.0.0.1", 45000), Peer("b", "10.0.0.2", 45001)]
    assert settings == {
        "fetch_probability": 0.5,
        "fetch_timeout_s": 2.5,
        "interpolation": "loss",
        "divergence_threshold": 0.2,
        "factor": 0.4,
    }
    assert read(tmp_path, MAP) == ([Peer("a", "h", 1)], {"fetch_timeout_s": 0.1})


def test_errors_name_the_problem_and_the_file(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for text, message in (
        ("", "Expected a mapping"),
        ("3", "Expected a mapping"),
        ("- nodes", "Expected a mapping"),
        ("nodes: 3", "'nodes' must be a list"),
        ("timeout_ms: 3", "'nodes' must be a list"),
        ("nodes: []", "'nodes' must be a list"),
        (MAP + "timeout: 3", "Unknown key 'timeout'"),
        (LIST + "- timeout_ms: 3", "'timeout_ms' is given twice"),
        (MAP + "constant: 0.5", "{value: 0.5}"),
        (MAP + "constant: {value: half}", "'value' must be a number, got 'half'"),
        (MAP + "fetch_probability: .nan", "must be a number"),
        (MAP + "interpolation: 3", "must be a name"),
        (MAP + "clock: 3", "'clock' has no settings, got 3. Write clock: 0"),
        (MAP + "loss: {value: 0.5}", "'loss' has no settings, got {'value': 0.5}"),
        ("nodes: [{name: a, host: h}]", "port in 1 to 65535"),
        ("nodes: [{name: a, host: h, port: 1}, {name: a, host: h, port: 2}]", "same name: a"),
        ("nodes: [", "cannot be read"),
        ("nodes: !!python/object/apply:os.getpid []", "cannot be read"),
        ("[" * 5000, "is nested too deeply"),
        (f"a: &a [{'x, ' * 10_000}]\nb: [{'*a, ' * 100}]", "its aliases repeat too much"),
        (f"constant: [{'x, ' * 1000}]\n{MAP}", "has the form"),
    ):
        with subtests.test(message, end=text[-40:]):
            with pytest.raises(ValueError, match=message) as caught:
                read(tmp_path, text)
            assert "nodes.yaml" in str(caught.value)
            assert len(str(caught.value)) < 1000


def test_error_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no nodes file"):
        read_nodes(tmp_path / "nodes.yaml")

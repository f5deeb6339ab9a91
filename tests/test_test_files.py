"""Every module of the rooms that all share has a test file of its name, or says where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import lightning_loco

PACKAGE = Path(lightning_loco.__file__).parent
TESTS = Path(__file__).parent

ROOMS = ("codecs", "comm", "rounds", "schedules", "simulation")
ELSEWHERE = {
    "codecs/base.py": "codecs/test_codecs.py",
    "codecs/floats.py": "codecs/test_codecs.py",
    "codecs/four_bits.py": "codecs/test_codecs.py",
    "codecs/int8.py": "codecs/test_codecs.py",
    "codecs/scales.py": "codecs/test_codecs.py",
    "codecs/sparse.py": "codecs/test_codecs.py",
    "codecs/sums.py": "codecs/test_codecs.py",
    "comm/arrivals.py": "comm/test_groups.py",
    "comm/consensus.py": "comm/test_worker.py",
    "rounds/compressed_mean.py": "rounds/test_compression.py",
    "rounds/compressed_mixing.py": "rounds/test_compression.py",
    "rounds/compressed_sum.py": "rounds/test_compression.py",
    "rounds/engine_state.py": "rounds/test_engine.py",
    "rounds/membership.py": "elastic/test_elastic.py",
    "rounds/mean_exchange.py": "rounds/test_exchange.py",
    "rounds/neighbor_exchange.py": "rounds/test_exchange.py",
    "rounds/step_engine.py": "rounds/test_engine.py",
    "schedules/base.py": "schedules/test_schedules.py",
    "schedules/every_interval.py": "schedules/test_schedules.py",
    "schedules/every_steps.py": "schedules/test_schedules.py",
}
"""Modules that are tested with others, and where."""

MODULES = [
    path.relative_to(PACKAGE).as_posix()
    for room in ROOMS
    for path in sorted((PACKAGE / room).glob("*.py"))
    if path.name != "__init__.py"
]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_test_file(module: str) -> None:
    room, name = module.split("/")
    path = TESTS / ELSEWHERE.get(module, f"{room}/test_{name}")
    assert "\ndef test_" in path.read_text()
    if module in ELSEWHERE:
        assert not (TESTS / room / f"test_{name}").exists()


def test_what_is_tested_elsewhere_is_there() -> None:
    assert set(ELSEWHERE) <= set(MODULES)

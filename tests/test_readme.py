"""The README's first program runs, and its pictures can be redrawn."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.callbacks import LambdaCallback

from tests.harness.messages import RANK_ZERO, messages_of
from tests.harness.pages import README
from tests.harness.pool import Pool, PoolEnvironment
from tests.harness.small_model import quiet_trainer
from tests.harness.sources import ROOT

QUICK_START = README.blocks("python")[0]
READERS_OWN = """
from lightning_loco.app.demo.data import ByteTextData as MyData
from lightning_loco.app.demo.model import ByteGPT as MyModel
"""


def test_it_shows_what_travels_when_and_names_the_license() -> None:
    assert {"docs/what_travels_when.svg", "LICENSE"} <= {link for _, link in README.links}


def first_step(rank: int, world: int) -> list[str]:
    """Run the first step of the quick start; return the logged messages."""

    def trainer(**settings: Any) -> Any:
        assert settings["devices"] == world
        made = quiet_trainer(**settings, num_sanity_val_steps=0, plugins=[PoolEnvironment()])
        made.callbacks.append(LambdaCallback(on_train_batch_end=stop))
        return made

    def stop(trainer: Any, *_: Any) -> None:
        trainer.should_stop = True

    with (
        mock.patch("lightning.pytorch.Trainer", trainer),
        messages_of(RANK_ZERO) as texts,
    ):
        exec(compile(READERS_OWN + QUICK_START, "README", "exec"), {"__name__": "__main__"})
    return texts


def test_the_quick_start_gets_no_advice(pool: Pool) -> None:
    texts, _ = pool.run(first_step, world=2)
    assert any("a round every 100 local steps" in text for text in texts)
    assert [text for text in texts if " Use " in text or "rounds in this run" in text] == []


@pytest.mark.soak
@pytest.mark.process
def test_the_quick_start_runs(tmp_path: Path) -> None:
    assert "max_steps=10_000" in QUICK_START
    short = QUICK_START.replace("max_steps=10_000", 'accelerator="cpu", max_steps=200')
    (tmp_path / "quick_start.py").write_text(READERS_OWN + short)
    done = subprocess.run(
        [sys.executable, "quick_start.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "max_steps=200` reached" in done.stdout
    assert list(tmp_path.glob("lightning_logs/*/checkpoints/*.ckpt"))


def test_pictures_can_be_drawn_again(tmp_path: Path, subtests: pytest.Subtests) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    script = runpy.run_path(str(ROOT / "docs" / "draw_pictures.py"))
    drawn_by_hand = (ROOT / "docs" / "images").glob("*.svg")
    kept_files = {
        path.relative_to(ROOT / "docs")
        for path in {*(ROOT / "docs").rglob("*.svg")} - {*drawn_by_hand}
    }
    assert kept_files == {Path(f"{name}.svg") for name in script["PICTURES"]}
    for name, draw in script["PICTURES"].items():
        with subtests.test(name):
            file = tmp_path / f"{Path(name).name}.svg"
            with matplotlib.rc_context():
                draw(file)
            again, kept = (ET.parse(one).getroot() for one in (file, ROOT / "docs" / f"{name}.svg"))
            assert again.tag == kept.tag == "{http://www.w3.org/2000/svg}svg"
            assert len(list(again.iter())) == len(list(kept.iter()))

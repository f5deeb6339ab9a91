"""The tape of a run: merges are repeated bit for bit, and what differs or is missing is named."""

from __future__ import annotations

import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_loco.algorithms import CGAD, DecoupledDiLoCo, HeLoCo
from lightning_loco.syncer.merge_rounds import MergeSettings
from lightning_loco.syncer.syncer import Syncer
from lightning_loco.syncer.tape import Tape, replay
from tests.syncer.test_syncer import Caller
from tests.syncer.world import SIZE, contract_of

SETTINGS = MergeSettings(fragments=2, sync_every=2, min_quorum=2, grace=0.0)


def run(folder: Path, method: DecoupledDiLoCo, steps: int = 8, keeps_pushes: bool = True) -> Syncer:
    """Three learners, of which the last is often late; a run in the folder is continued."""
    tape = Tape(folder / "tape", lambda: 1000.0, keeps_pushes)
    contract = contract_of(method, SETTINGS, torch.float32)
    syncer = Syncer(contract, folder / "state", tape=tape)
    syncer.start([torch.arange(SIZE, dtype=torch.float32)] * 2)
    callers = [Caller(syncer, name, syncer.rounds.epoch) for name in "abc"]
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for caller in callers[: int(torch.randint(2, 4, (1,), generator=generator))]:
            caller.step(syncer, float(torch.randn((), generator=generator)))
    tape.close()
    return syncer


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "tape/tape.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


METHODS = {
    "default": DecoupledDiLoCo(),
    "momentum": DecoupledDiLoCo(0.7, 0.9, mix=0.5, correction=HeLoCo()),
    "gated": DecoupledDiLoCo(aggregate="mean", weight="steps", correction=CGAD(0.2, 4)),
}


@pytest.mark.parametrize("name", METHODS)
def test_merges_are_repeated_bit_for_bit_after_restarts_too(tmp_path: Path, name: str) -> None:
    run(tmp_path, METHODS[name])
    syncer = run(tmp_path, METHODS[name])
    found = list(replay(tmp_path / "tape"))
    assert [one.problem for one in found] == [None] * syncer.rounds.committed
    assert [one.round for one in found] == list(range(1, syncer.rounds.committed + 1))
    events = [line["event"] for line in lines(tmp_path)]
    assert events.count("start") == 2
    assert events.count("join") == 6
    merges = [line for line in lines(tmp_path) if line["event"] == "merge"]
    assert all(sum(one["weight"] for one in line["pushes"]) == pytest.approx(1) for line in merges)
    assert {one["learner"] for line in merges for one in line["pushes"]} == set("abc")


def test_what_differs_is_named(tmp_path: Path) -> None:
    run(tmp_path, METHODS["default"])
    path = tmp_path / "tape/tape.jsonl"
    text = path.read_text().splitlines()
    index, line = next(
        (index, json.loads(line))
        for index, line in enumerate(text)
        if json.loads(line)["event"] == "merge" and len(json.loads(line)["pushes"]) > 1
    )
    line["pushes"][0]["weight"] = 0.125
    text[index] = json.dumps(line)
    path.write_text("\n".join(text))
    problems = {one.round: one.problem for one in replay(tmp_path / "tape")}
    wrong = [number for number, problem in problems.items() if problem is not None]
    assert wrong == [number for number in problems if number in range(line["round"], 99, 2)]
    assert all(one.differs == (one.problem is not None) for one in replay(tmp_path / "tape"))
    assert "instead of [0.125" in str(problems[line["round"]])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    syncer = run(tmp_path, METHODS["default"], keeps_pushes=False)
    found = list(replay(tmp_path / "tape"))
    assert len(found) == syncer.rounds.committed
    assert {one.problem for one in found} == {"its pseudo-gradients were not kept"}
    with pytest.raises(ValueError, match=r"There is no .*nothing/tape.jsonl"):
        list(replay(tmp_path / "nothing"))


def test_the_last_line_of_a_killed_syncer_is_left_out(tmp_path: Path) -> None:
    syncer = run(tmp_path, METHODS["default"])
    with (tmp_path / "tape/tape.jsonl").open("a") as file:
        file.write('{"event": "mer')
    assert len(list(replay(tmp_path / "tape"))) == syncer.rounds.committed
    syncer = run(tmp_path, METHODS["default"])  # its lines are not appended to that one
    found = list(replay(tmp_path / "tape"))
    assert [one.problem for one in found] == [None] * syncer.rounds.committed


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("line", "it is not on the tape"),
        ("file", "there is no .*round_1_3.pt"),
        ("bytes", "round_1_3.pt cannot be read: "),
    ],
)
def test_what_follows_a_missing_merge_does_not_differ(
    tmp_path: Path, damage: str, problem: str
) -> None:
    syncer = run(tmp_path, METHODS["default"])
    path, pushes = tmp_path / "tape/tape.jsonl", tmp_path / "tape/pushes/round_1_3.pt"
    if damage == "line":
        text = path.read_text().splitlines(keepends=True)
        path.write_text("".join("7\n" if '"round": 3,' in line else line for line in text))
    elif damage == "file":
        pushes.unlink()
    else:
        pushes.write_bytes(b"PK")
    found = {one.round: one for one in replay(tmp_path / "tape")}
    assert not any(one.differs for one in found.values())
    assert [*found] == list(range(1, syncer.rounds.committed + 1))
    assert re.search(problem, str(found.pop(3).problem))
    after = "it follows round 3, which is missing"
    assert {one.problem for one in found.values() if one.fragment == 0 and one.round > 3} == {after}
    assert {one.problem for one in found.values() if one.fragment or one.round < 3} == {None}


@pytest.mark.parametrize("full", ["line", "pushes"])
def test_the_tape_ends_at_a_full_disk_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, full: str
) -> None:
    (tmp_path / "tape/pushes").mkdir(parents=True)
    name = "tape.jsonl" if full == "line" else "pushes/round_1_2.pt"
    (tmp_path / "tape" / name).symlink_to("/dev/full")
    syncer = run(tmp_path, METHODS["default"])
    assert syncer.rounds.committed > 4
    (record,) = (one for one in caplog.records if one.levelno >= logging.ERROR)
    assert "ends here: [Errno 28] No space left on device" in record.getMessage()
    if full == "pushes":
        assert [one.problem for one in replay(tmp_path / "tape")] == [None]


def test_refusals_are_recorded(tmp_path: Path) -> None:
    tape, settings = Tape(tmp_path, lambda: 1000.0), MergeSettings(fragments=2, sync_every=2)
    syncer = Syncer(contract_of(DecoupledDiLoCo(), settings), tmp_path / "a", tape=tape)
    syncer.start([torch.zeros(SIZE)] * 2)
    caller = Caller(syncer)
    with pytest.raises(Exception, match="NaN"):
        caller.step(syncer, float("nan"))
    syncer.leave("a", 1)
    tape.close()
    found = [json.loads(line) for line in (tmp_path / "tape.jsonl").read_text().splitlines()]
    assert [line["event"] for line in found] == ["start", "join", "refused", "leave"]
    assert found[2]["reason"] == "finite"


def test_own_functions_must_be_passed(tmp_path: Path) -> None:
    method = DecoupledDiLoCo(outer_optimizer=functools.partial(torch.optim.AdamW, lr=0.1))
    syncer = run(tmp_path, method)
    with pytest.raises(ValueError, match=r"has 'a function', which cannot be read from a file"):
        list(replay(tmp_path / "tape"))
    found = list(replay(tmp_path / "tape", method))
    assert [one.problem for one in found] == [None] * syncer.rounds.committed

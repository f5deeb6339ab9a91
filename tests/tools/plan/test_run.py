"""``lightning-loco plan``: its output, files, errors, and that PyTorch is not imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import command
import lightning_loco as loco
from lightning_loco.app import command_line
from lightning_loco.app.configured_strategy import build_strategy
from lightning_loco.costs import Link
from lightning_loco.tools.plan.planner import make_plan
from lightning_loco.tools.plan.text import commands, report
from tests.harness.pages import overrides_of
from tests.harness.programs import environment
from tests.harness.sources import ROOT
from tests.tools.plan.test_planner import job

Run = Callable[[str], tuple[object, str]]
PLAN = "--parameters 124e6 --step-s 0.5 --tokens-per-step 16384"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process; return its exit status and its output."""

    def run_command(arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["lightning-loco", "plan", *arguments.split()])
        status: object
        try:
            status = command.main()
        except SystemExit as error:
            status = error.code
        return status, "".join(capsys.readouterr())

    return run_command


PLANS = {
    "DDP": make_plan(job("datacentre")),
    "DiLoCo": make_plan(job(Link(1400))),
    "Streaming DiLoCo": make_plan(job(Link(50))),
    "few rounds": make_plan(job(Link(50), tokens=3_000_000)),
}


def test_the_commands_build_the_same_strategy(subtests: pytest.Subtests) -> None:
    with initialize_config_dir(command_line.conf_dir(), version_base="1.3"):
        for name, plan in PLANS.items():
            with subtests.test(name):
                shell, python = commands(plan)
                config = compose("train", overrides_of(shell))
                built = build_strategy(config)
                assert shell.startswith("torchrun --nnodes=2 --nproc-per-node=1 ")
                assert python.endswith("devices=1, num_nodes=2)")
                if name != "DDP":
                    expression = python.removeprefix("Trainer(strategy=").partition(", devices")[0]
                    written = eval(expression, {name: getattr(loco, name) for name in loco.__all__})
                    assert type(written) is type(built)
                    assert str(written.settings.prepare(2)) == str(built.settings.prepare(2))


def test_the_arithmetic_ends_in_the_numbers_of_the_table(subtests: pytest.Subtests) -> None:
    for name, plan in PLANS.items():
        with subtests.test(name):
            text = report(plan)
            (row,) = [line for line in text.splitlines() if "<-" in line]
            arithmetic = text.partition("Arithmetic:")[2]
            computes = row.split(" %")[0].split()[-1]
            assert f"= {computes} %" in arithmetic
            assert f"= {plan.job.one_worker_s / plan.chosen.time_s:.2f}" in arithmetic
            assert ("few rounds" in arithmetic) == (name == "few rounds")
            if plan.chosen.gap is not None and name != "DDP":
                assert f"= {plan.chosen.gap}" in arithmetic


@pytest.mark.process
def test_torch_is_not_imported() -> None:
    script = "import sys, command; status = command.main(); "
    script += "sys.exit(status or sorted({'torch', 'lightning'} & set(sys.modules)) or None)"
    words = [*f"plan {PLAN} --workers 2 --link lan".split()]
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_measured_links_and_the_plan_as_json(tmp_path: Path, run: Run) -> None:
    link = {"mbit_per_s": 940.0, "latency_s": 0.0001}
    measured, path = tmp_path / "machines.json", tmp_path / "plan.json"
    measured.write_text(json.dumps({"links": {"default": link, "workers": {"0": link, "1": link}}}))
    status, printed = run(f"{PLAN} --measured {measured} --json {path}")
    assert status == 0, printed
    assert "2 workers" in printed
    assert "slowest link: 940 Mbit/s, 0.1 ms" in printed
    plan = json.loads(path.read_text())
    assert plan["chosen"]["title"] == "Streaming DiLoCo, int8"
    assert plan["num_workers"] == 2
    assert plan["chosen"]["gap"]["low"] < plan["chosen"]["gap"]["percent"]
    assert {one["title"] for one in plan["options"] if one["gap"] is None} >= {"Local SGD"}
    assert all(line in printed for line in plan["commands"])


def test_a_line_between_sites_is_shown(run: Run) -> None:
    status, printed = run(f"{PLAN} --workers 8 --link two_datacentres_one_line")
    assert status == 0, printed
    assert "slowest link: 1000 Mbit/s, 30 ms; uplink of a site: 1000 Mbit/s" in printed
    assert "Mbit of each worker on all its links, and latency: 2.77 s" in printed


def test_tokens_per_second_are_another_way_to_give_the_speed(run: Run) -> None:
    by_step = run(f"{PLAN} --workers 2 --mbit 1000 --latency-ms 0.2")
    rate = PLAN.replace("--step-s 0.5", "--tokens-per-s 32768")
    assert by_step[0] == 0
    assert by_step == run(f"{rate} --workers 2 --mbit 1000 --latency-ms 0.2")


def test_failures_are_a_second_table_and_nothing_else_changes(tmp_path: Path, run: Run) -> None:
    _, plain = run(f"{PLAN} --workers 4 --link wan")
    path = tmp_path / "plan.json"
    given = "--mtbf-h 50 --restart-s 120 --checkpoint-every-s 900 --price 2"
    status, printed = run(f"{PLAN} --workers 4 --link wan {given} --json {path}")
    assert status == 0, printed
    assert printed.startswith(plain)
    table = " ".join(printed.removeprefix(plain).split())
    assert (
        "every 50 h, so one of 4 every 12.5 h; a restart takes 120 s, a checkpoint 1.49 s" in table
    )
    rows = json.loads(path.read_text())["failures"]
    assert [one["title"].split(",")[-1] for one in rows] == [
        *(" every 15.0 min", " every 6.1 min (best)") * 2,
        " elastic",
        "Decoupled DiLoCo",
    ]
    for one in rows:
        assert f"{one['title']} {100 * one['shares']['computing']:.2f} %" in table
        assert f" {one['cost']:,.2f}" in table
    _, cheaper = run(f"{PLAN} --workers 4 --link wan --mtbf-h 50 --checkpoint-s 1.488")
    assert " cost" not in cheaper.removeprefix(plain)
    status, hopeless = run(f"{PLAN} --workers 4 --link wan --mtbf-h 0.001 --price 1 --json {path}")
    assert status == 0
    assert "never          -" in hopeless
    assert json.loads(path.read_text())["failures"][0]["billion_tokens_s"] is None


def test_errors_name_the_argument_and_what_to_do(
    tmp_path: Path, run: Run, subtests: pytest.Subtests
) -> None:
    alone = tmp_path / "alone.json"
    alone.write_text('{"links": null}')
    others = {
        "list": '{"links": [1]}',
        "nothing": '{"links": {}}',
        "null": '{"links": {"workers": null}}',
        "empty": '{"links": {"workers": {}}}',
        "text": '{"links": {"workers": {"0": {"mbit_per_s": "5"}}}}',
        "nested": "[" * 100_000,
    }
    for name, text in others.items():
        (tmp_path / f"{name}.json").write_text(text)
    for arguments, message in (
        ("--parameters x --workers 2 --link lan", "must be a whole number, such as 124e6, got 'x'"),
        ("--workers 2 --link lann", "got 'lann'. Did you mean 'lan'?"),
        ("--workers 2 --link nowhere.yaml", "There is no file of links 'nowhere.yaml'"),
        ("--workers 2 --mbit 1Gbit", "must be a number of megabits per second, such as 1000, got"),
        ("--workers 2 --mbit 10 --latency-ms -1", "--latency-ms must be at least 0, got -1"),
        ("--workers 2 --mbit 0", "mbit_per_s of a link must be positive"),
        ("--workers 2 --link lan --latency-ms 3", "--latency-ms belongs to --mbit"),
        ("--link lan", "--workers is missing"),
        ("--workers 2 --link lan --price 2", "--price belongs to --mtbf-h. Drop it, or give"),
        ("--workers 2 --link lan --mtbf-h 0", "--mtbf-h must be from 0.001 to 1e+09, got 0"),
        ("--workers 2 --link lan --mtbf-h x", "must be a number of hours, such as 500, got 'x'"),
        ("--workers 2", "one of the arguments --link --mbit --measured is required"),
        ("--workers 2 --measured nowhere.json", "--measured cannot read nowhere.json"),
        ("--workers 2 --measured pyproject.toml", "was not written by lightning-loco doctor"),
        *(
            (f"--measured {tmp_path}/{name}.json", "was not written by lightning-loco doctor")
            for name in others
        ),
        ("--workers 2 --link lan --parameters 1e300", "too many for a float"),
        (f"--workers 2 --measured {alone}", "Run it on all machines, with --json on machine 0"),
        ("--workers 2 --link lan --json /nowhere/a", "--json cannot write /nowhere/a"),
    ):
        with subtests.test(arguments):
            status, printed = run(f"{PLAN} {arguments}")
            assert status == 2
            assert message in " ".join(printed.split())

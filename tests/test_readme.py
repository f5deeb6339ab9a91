"""The README says what is true: its code runs, its commands compose, its names and tables exist."""

from __future__ import annotations

import ast
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch import nn

import lightning_loco as loco
import train
from lightning_loco.cli import build_strategy
from lightning_loco.comm import Statistics
from lightning_loco.peers.keys import write_key_file
from lightning_loco.strategies import METHODS
from lightning_loco.topology import TOPOLOGIES, consensus_rate
from tests.conftest import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
QUICK_START = next(code for code in PYTHON if "trainer.fit(" in code)
SHELL = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
REMOTE_TEXT = (ROOT / "examples" / "remote_optimizer" / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for line in [*SHELL, *REMOTE_TEXT.splitlines()] if " train.py " in line]
TICKED = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S))


def overrides_of(command: str) -> list[str]:
    """What a command line gives to train.py; flags of Hydra's own are left out."""
    words = shlex.split(command, comments=True)
    words = words[next(i for i, word in enumerate(words) if word.endswith("train.py")) + 1 :]
    return [word for word in words if not word.startswith("--") and word != "job"]


def each_of_a_sweep(overrides: list[str]) -> Iterator[list[str]]:
    """Every value of every swept key once, with the other keys as they are."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    plain = [one.input_line for one in parsed if not one.is_sweep_override()]
    yield plain
    for override in parsed:
        if override.is_sweep_override():
            for value in override.sweep_string_iterator():
                yield [*plain, f"{override.key_or_group}={value}"]


def tables(first_cell: str) -> list[list[str]]:
    """The rows, without the headings, of the table whose first heading is first_cell."""
    lines = TEXT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_there_are_blocks_to_check() -> None:
    assert len(PYTHON) >= 3
    assert len(COMMANDS) >= 10
    assert len(QUICK_START.strip().splitlines()) <= 13


@pytest.mark.parametrize("code", PYTHON)
def test_code_compiles_and_names_what_exists(code: str) -> None:
    tree = ast.parse(code)
    compile(tree, "README.md", "exec")
    imported = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names: dict[str, object] = {}
    exec(compile(ast.Module(imported, []), "README.md", "exec"), names)
    calls = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        kind = eval(called, names) if called.split(".")[0] in names else None
        if getattr(kind, "__module__", "").startswith("lightning"):
            arguments = {str(word.arg): word.value for word in node.keywords}
            inspect.signature(kind).bind_partial(*node.args, **arguments)
            calls += 1
    assert calls


def test_strategies_that_are_shown_can_be_built() -> None:
    (shown,) = [code for code in PYTHON if "loco.LocoStrategy(" in code]
    exec(compile(shown, "README.md", "exec"), {})


@pytest.mark.slow
def test_the_quick_start_runs(tmp_path: Path) -> None:
    (tmp_path / "quick_start.py").write_text(QUICK_START)
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
    assert "max_steps=60` reached" in done.stdout
    assert list(tmp_path.glob("lightning_logs/*/checkpoints/*.ckpt"))


@pytest.fixture
def files_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of nodes that the text shows, and a key file, in the working folder."""
    monkeypatch.chdir(tmp_path)
    nodes = re.search(r"```yaml\n# nodes.yaml\n(.*?)```", TEXT, re.DOTALL)
    assert nodes
    Path("nodes.yaml").write_text(nodes.group(1))
    write_key_file("job.key")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("files_of_the_text")
def test_commands_compose(command: str) -> None:
    with initialize_config_dir(train.conf_dir(), version_base="1.3"):
        for overrides in each_of_a_sweep(overrides_of(command)):
            files = [one for one in overrides if one.startswith("topology.path=")]
            config = compose("train", overrides)
            if not files:  # FILE stands for a file of the reader's
                build_strategy(config)


def test_files_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT)
    local = [link for link in links if not link.startswith("https://")]
    assert {"docs/what_travels_when.svg", "docs/remote_optimizer.svg", "LICENSE"} < set(local)
    written = [word for word in TICKED if re.fullmatch(r"(?!myconf)[\w./]+(/|\.(py|txt|md))", word)]
    of_a_run = {"report.txt"}
    for name in {*local, *written} - of_a_run:
        assert (ROOT / name).exists(), name


def test_links_say_where_they_lead() -> None:
    for label, link in re.findall(r"\[([\w./]+\.(?:py|sbatch|md))\]\(([^)]+)\)", TEXT):
        assert Path(link).name == Path(label).name


def test_the_table_of_algorithms() -> None:
    rows = tables("`strategy=` and `algorithm=`")
    assert {name.strip("`"): kind.strip("`") for name, kind, *_ in rows} == {
        name: kind.__name__ for name, kind in METHODS.items()
    }
    for name, *_ in rows:
        assert (ROOT / "conf" / "algorithm" / f"{name.strip('`')}.yaml").is_file()


def test_the_table_of_topologies() -> None:
    rows = tables("name")
    assert [name.strip("`") for name, *_ in rows] == list(TOPOLOGIES)
    for name, messages, small, large, notes in rows:
        topology = TOPOLOGIES[name.strip("`")]()
        assert small == f"{consensus_rate(topology, 8):.2f}", name
        assert large == f"{consensus_rate(topology, 32):.2f}", name
        sent = {len(topology.receivers(worker, 32)) for worker in range(32)}
        says = {"N - 1": {31}, "1, worker 0: N - 1": {1, 31}, "log2 N": {5}, "ceil(log2 N)": {5}}
        if messages.startswith("up to "):
            assert max(sent) == int(messages.removeprefix("up to "))
        else:
            assert sent == says.get(messages, {int(messages)} if messages.isdigit() else None)
        if notes.startswith("a power of two"):
            with pytest.raises(ValueError, match="power of two"):
                topology.check(6)
        else:
            assert notes.startswith("any")
            topology.check(7)


def test_names_in_the_text_exist() -> None:
    for name in re.findall(
        r"\b(?:Async)?(?:Loco|LocalSGD|DiLoCo|GASLoC|RemoteOptimizer)Strategy\b", TEXT
    ):
        assert hasattr(loco, name), name
    for name in (cell.strip("`") for cell, *_ in tables("callback")):
        assert hasattr(loco, name), name


def test_metrics_exist() -> None:
    strategy = loco.DiLoCoStrategy()
    strategy.statistics = Statistics(outer_grad_norm=1.0, consensus_distance=1.0, losses=[1.0])
    logged: set[str] = set()
    for monitor in (loco.CommunicationMonitor(), loco.ConsensusMonitor()):
        logged |= set(monitor.figures(strategy))
    nodes = [{"name": name, "host": "127.0.0.1", "port": 45103} for name in "ab"]
    strategy.engine = loco.PairwiseEngine(nn.Linear(1, 1), nodes=nodes, name="a")
    strategy.engine.factors, strategy.engine.stalenesses = [0.5], [0.0, 1.0]
    logged |= set(loco.PeerMonitor().figures(strategy))
    strategy.engine.close()
    assert set(re.findall(r"`(loco/\w+)`", TEXT)) == logged


def test_arguments_in_the_text_exist() -> None:
    parameters: set[str] = set()
    for kind in (*METHODS.values(), loco.LocoStrategy, loco.ConsensusMonitor):
        parameters |= set(inspect.signature(kind).parameters)
    for name in ("sync_every", "outer_momentum", "warm_start", "bucket_bytes", "timeout_s",
                 "evaluate", "finalize", "start_method", "prog_bar", "num_workers", "num_servers",
                 "replica_size", "wire_dtype", "min_workers", "overlap"):  # fmt: skip
        assert f"`{name}" in TEXT
        assert name in parameters


@pytest.mark.parametrize("name", ["what_travels_when", "remote_optimizer"])
def test_a_picture_can_be_drawn_again(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    script = runpy.run_path(str(ROOT / "docs" / "draw_pictures.py"))
    script["PICTURES"][name](tmp_path / "again.svg")
    again, kept = (
        ET.parse(file).getroot() for file in (tmp_path / "again.svg", ROOT / "docs" / f"{name}.svg")
    )
    assert again.tag == kept.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(again.iter())) == len(list(kept.iter()))

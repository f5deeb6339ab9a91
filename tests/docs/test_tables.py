"""Tables and lists on the pages agree with the package."""

from __future__ import annotations

import ast
import inspect
import re
import statistics
from typing import Any

import pytest
from torch import nn

import lightning_loco as loco
from lightning_loco.algorithms.outer_lr import Linear
from lightning_loco.costs import LINKS
from lightning_loco.distributed import Statistics
from lightning_loco.engine import RoundSettings, StepEngine
from lightning_loco.strategies import METHODS
from lightning_loco.strategies.arguments import argument_names
from lightning_loco.strategies.engine_strategy import EngineStrategy
from lightning_loco.topology import TOPOLOGIES, consensus_rate
from tests.harness.pages import DOCS, PAGES, README, benchmark_results, doc
from tests.harness.programs import free_ports
from tests.harness.sources import ROOT

METHOD_PAGES = [page for page in DOCS if page.path.stem in METHODS]


def test_the_table_of_methods() -> None:
    index = doc("methods/README.md")
    rows = index.table("`strategy=` and `algorithm=`")
    links = [re.fullmatch(r"\[`(\w+)`\]\(([^)]+)\)", cell) for cell, *_ in rows]
    assert all(links)
    names = {link.group(1): link.group(2) for link in links if link}
    kinds = [kind.strip("`") for _, kind, *_ in rows]
    assert dict(zip(names, kinds, strict=True)) == {
        name: kind.__name__ for name, kind in METHODS.items()
    }
    for name, link in names.items():
        assert (ROOT / "conf" / "algorithm" / f"{name}.yaml").is_file()
        page = doc(f"methods/{name}.md")
        assert index.target(link) == page.path or not page.path.exists(), name


def test_a_method_page_names_its_strategy(subtests: pytest.Subtests) -> None:
    for page in METHOD_PAGES:
        with subtests.test(str(page)):
            name = page.path.stem
            head = page.text.partition("\n## ")[0]
            assert f'`{METHODS[name].__name__}`, `strategy="{name}"`, `algorithm={name}`.' in head
            assert "https://" in head  # a link to the source
            limits = {"when-to-use-it", "bytes-and-memory", "what-it-computes", "limits"}
            assert limits <= page.anchors
            assert any(link.endswith(".svg") for _, link in page.links)  # a timeline
            assert "$$" in page.text


def common_defaults() -> dict[str, Any]:
    """Return the defaults of the arguments that all strategies share."""
    takes = (EngineStrategy._init_worker, EngineStrategy._init_with, RoundSettings)
    parameters = [one for each in takes for one in inspect.signature(each).parameters.values()]
    return {parameter.name: parameter.default for parameter in parameters}


def test_arguments_of_a_method(subtests: pytest.Subtests) -> None:
    """The table of a page lists all arguments, with their defaults, and no others."""
    shared = {name.strip("`") for name, *_ in doc("methods/README.md").table("argument")}
    of_ddp = argument_names(loco.LocoStrategy) - {"topology"}
    for page in METHOD_PAGES:
        with subtests.test(str(page)):
            parameters = inspect.signature(METHODS[page.path.stem]).parameters.values()
            defaults = common_defaults() | {one.name: one.default for one in parameters}
            listed = page.table("argument") if page.has_table("argument") else []
            for cell, default, _ in listed:
                name = cell.strip("`")
                assert ast.literal_eval(default.strip("`")) == defaults[name], name
            names = {name.strip("`") for name, *_ in listed}
            assert argument_names(METHODS[page.path.stem]) - shared - of_ddp <= names


def test_arguments_of_all_methods() -> None:
    parameters = inspect.signature(loco.LocoStrategy).parameters.values()
    defaults = common_defaults() | {one.name: one.default for one in parameters}
    for name, default, _ in doc("methods/README.md").table("argument"):
        assert ast.literal_eval(default.strip("`")) == defaults[name.strip("`")], name


def test_the_table_of_topologies() -> None:
    rows = doc("topologies.md").table("name")
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


def test_callbacks_exist() -> None:
    listed = {cell.strip("`") for cell, *_ in doc("logging.md").table("callback")}
    assert listed == set(loco.callbacks.__all__) & set(loco.__all__)


def test_metrics_exist() -> None:
    strategy = loco.DiLoCoStrategy()
    values = {
        "outer_grad_norm": 1.0,
        "persistence": 0.5,
        "consensus_distance": 1.0,
        "losses": [1.0],
        "members": 2,
    }
    strategy.statistics = Statistics(**values, steps=1, participation=1.0)
    algorithm = loco.DiLoCo(Linear(0.1, 0.7, rounds=10), "auto")
    strategy.engine = engine = StepEngine(nn.Linear(1, 1), algorithm, sync_every={0: 1})
    logged: set[str] = set()
    for monitor in (loco.CommunicationMonitor(), loco.ConsensusMonitor()):
        logged |= set(monitor.metrics(strategy))
    engine.close()
    ports = zip("ab", free_ports(2), strict=True)
    nodes = [{"name": name, "host": "127.0.0.1", "port": port} for name, port in ports]
    strategy.engine = loco.PairwiseEngine(nn.Linear(1, 1), nodes=nodes, name="a")
    strategy.engine.factors, strategy.engine.stalenesses = [0.5], [0.0, 1.0]
    logged |= set(loco.PeerMonitor().metrics(strategy))
    strategy.engine.close()
    assert set(re.findall(r"`(loco/\w+)`", doc("logging.md").text)) == logged
    for page in PAGES:
        assert set(re.findall(r"`(loco/\w+)`", page.text)) <= logged, page


def test_arguments_that_users_ask_for_are_documented() -> None:
    parameters: set[str] = set()
    parameters |= set(inspect.signature(loco.ConsensusMonitor).parameters)
    for kind in (*METHODS.values(), loco.LocoStrategy):
        parameters |= argument_names(kind)
    for name in ("sync_every", "outer_momentum", "warm_start", "bucket_bytes", "timeout_s",
                 "evaluate", "finalize", "start_method", "prog_bar", "num_workers", "num_servers",
                 "replica_size", "compression", "overlap"):  # fmt: skip
        assert any(f"`{name}" in page.text for page in PAGES), name
        assert name in parameters


def test_the_readme_repeats_the_results() -> None:
    rows = README.table("3,000 steps of a small GPT on four workers")
    names = {
        "DDP": "ddp",
        "DiLoCo": "diloco",
        "GASLoC": "gasloc_ring",
        "Streaming DiLoCo": "streaming_diloco",
    }
    assert len(rows) == 4
    for first, loss, sent, seconds in rows:
        (title,) = re.findall(r"^\[?([\w ]+\w)", first)
        seeds = benchmark_results(names.pop(title), "longer").values()
        assert len(seeds) == 5
        assert loss == f"{statistics.fmean(one['loss'] for one in seeds):.2f}"
        megabytes = statistics.fmean(one["sent_mb"] for one in seeds)
        assert sent == f"{megabytes:,.0f} MB"
        compute_s, exchange_s = 3000 * 0.02, LINKS["wan"].seconds(megabytes * 1e6)
        is_hidden = "Streaming" in title
        total_s = max(compute_s, exchange_s) if is_hidden else compute_s + exchange_s
        assert seconds == f"{total_s:.0f} s"


def test_the_readme_repeats_the_times_on_a_shaped_link() -> None:
    shaped = doc("results/other_libraries.md").table("shaped to 100 Mbit/s")
    wall = {row[0].strip("*"): row[3] for row in shaped}
    text = " ".join(README.text.split())
    assert f"{wall['lightning_loco DiLoCo']} with DiLoCo" in text
    assert f"{wall['torch DDP, ten steps']} with DDP" in text


def test_the_groups_of_the_command_line() -> None:
    listed = re.search(r"^Groups: `([^`]+)`", doc("command_line.md").text, re.MULTILINE)
    assert listed
    folders = {folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir()}
    assert set(listed.group(1).split()) == folders - {"hydra"}


def test_every_example_is_listed() -> None:
    index = doc("examples.md")
    listed = {index.target(link) for _, link in index.links}
    examples = ROOT / "examples"
    assert {*examples.glob("*.py"), *examples.glob("*.ipynb"), *examples.rglob("*.yaml")} <= listed

"""For users of dpwa: the sample file, the settings, and the numbers of its loop."""

from __future__ import annotations

import hashlib
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_loco import PairwiseAverage, PairwiseEngine, PairwiseGossipStrategy
from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.app import command_line
from lightning_loco.app.configured_strategy import build_strategy
from lightning_loco.app.early_checks import early_settings
from lightning_loco.gossip import Peer, read_nodes
from lightning_loco.strategies.summary import describe
from tests.gossip.test_engine import Numbers
from tests.harness.gossip_nodes import peers
from tests.harness.programs import Program, free_ports
from tests.harness.small_model import make_model
from tests.harness.sources import ROOT

SAMPLE = ROOT / "examples" / "dpwa" / "config.yaml"
SHA256 = "15a81d6edab202d64a64f997b3d670f6ea8350680b5c7fc21ef2d648e7cc2fd2"
NODES = [Peer(f"w{number}", "localhost", 44999 + number) for number in range(1, 5)]


def config(*overrides: str) -> DictConfig:
    with initialize_config_dir(command_line.conf_dir(), version_base="1.3"):
        return compose("train", list(overrides))


def test_the_sample_file_is_read_as_it_is() -> None:
    assert hashlib.sha256(SAMPLE.read_bytes()).hexdigest() == SHA256
    assert read_nodes(SAMPLE) == (
        NODES,
        {
            "fetch_probability": 1.0,
            "fetch_timeout_s": 2.5,
            "interpolation": "constant",
            "divergence_threshold": 0.2,
            "factor": 0.5,
        },
    )


def test_strategy_engine_and_command_line_take_nodes_and_settings_from_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    nodes = peers(2, "w")
    entries = [f"{{name: {n}, host: {h}, port: {p}}}" for n, h, p in nodes]
    path.write_text(
        f"- nodes: [{', '.join(entries)}]\n- fetch_probability: 0.75\n- timeout_ms: 1500\n"
        "- interpolation: loss\n- divergence_threshold: 0.25\n- constant: {value: 0.5}\n- loss: 0\n"
    )
    cfg = config("algorithm=pairwise_gossip", f"algorithm.config_file={path}", "algorithm.name=w1")
    engine = PairwiseEngine.from_file(make_model(), path, "w1")
    assert " on node w1 of 2, " in describe(engine, None)
    engine.close()
    for settings in (
        PairwiseGossipStrategy(config_file=path, name="w1").settings,
        PairwiseGossipStrategy.from_file(str(path), "w1").settings,
        engine.settings,
        build_strategy(cfg).settings,
        early_settings(cfg),
    ):
        assert settings.peers == nodes
        assert settings.node_number == 1
        assert settings.fetch_timeout_s == 1.5
        assert settings.algorithm == PairwiseAverage(0.75, "loss", 0.5, 0.25)


def test_a_setting_that_would_be_dropped_is_an_error(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"nodes": SAMPLE}, "has also fetch_probability, .* Pass it as config_file="),
        ({"config_file": SAMPLE, "nodes": NODES}, "has the nodes: leave out nodes"),
        ({"config_file": SAMPLE, "factor": 0.7}, "factor is 0.7 here and 0.5 in config_file="),
        ({"config_file": SAMPLE, "interpolation": "clock"}, "interpolation is 'clock' here"),
        ({"config_file": SAMPLE, "fetch_timeout_s": 3}, "fetch_timeout_s is 3 here and 2.5 in"),
    ]
    for given, message in rows:
        with subtests.test(message), pytest.raises(ValueError, match=message):
            PairwiseGossipStrategy(name="w1", **given)
    # Arguments may add to the file, or repeat it with the same value.
    same = {"factor": 0.5, "keep_progress": False}
    algorithm = PairwiseGossipStrategy(config_file=SAMPLE, name="w1", **same).settings.algorithm
    assert algorithm == PairwiseAverage(1.0, "constant", 0.5, 0.2, keep_progress=False)


def test_the_experiment_has_the_settings_of_the_sample_file() -> None:
    settings = build_strategy(config("experiment=dpwa")).settings
    sample = PairwiseGossipStrategy(config_file=SAMPLE, name="w1", keep_progress=False).settings
    assert settings.algorithm == sample.algorithm
    assert settings.fetch_timeout_s == sample.fetch_timeout_s


def test_the_experiment_computes_what_dpwa_does() -> None:
    """Two workers publish, take a step, wait for each other, and average."""
    settings = build_strategy(config("experiment=dpwa")).settings
    progress, values, clocks = (1.0, 3.0), [0.0, 8.0], [0.0, 0.0]
    losses = [(0.3, 0.1), (0.1, 0.4), (0.15, 0.05), (0.0, 0.2), (0.5, 0.5)]
    nodes = peers(2, "w")
    models = [Numbers(value) for value in values]
    with ExitStack() as stack:
        engines = [
            PairwiseEngine(model, settings.algorithm, nodes=nodes, name=node.name)
            for model, node in zip(models, nodes, strict=True)
        ]
        for engine in engines:
            stack.callback(engine.close)
            engine._exchange.publisher._next_time = float("inf")  # the test publishes
        for before, now in zip(losses, losses[1:], strict=False):
            published = list(values)
            for worker, engine in enumerate(engines):
                clocks[worker] += 1
                engine.node.publish(engine._served.new_flat(), Tag(clocks[worker], before[worker]))
            for worker, engine in enumerate(engines):
                engine.update_send(before[worker])
                models[worker].values.data += progress[worker]
                values[worker] += progress[worker]
            tags = list(clocks)
            for worker, engine in enumerate(engines):
                factor = 0.5 * min(now[worker] / 0.2, 1.0)
                assert engine.update_wait(now[worker]) == factor
                theirs = published[1 - worker]
                values[worker] = factor * theirs + (1 - factor) * values[worker]
                clocks[worker] = factor * tags[1 - worker] + (1 - factor) * clocks[worker]
                expected = torch.full((5,), values[worker], dtype=torch.float64)
                torch.testing.assert_close(models[worker].values.data, expected, rtol=1e-13, atol=0)
                assert engine.state_dict()["clock"] == pytest.approx(clocks[worker], rel=1e-13)


def cluster(folder: Path, count: int) -> list[str]:
    """Return the command of a cluster with the sample's settings, and nodes with free ports."""
    entries = [
        f"  - {{name: w{number}, host: localhost, port: {port}}}\n"
        for number, port in enumerate(free_ports(count), 1)
    ]
    text = SAMPLE.read_text()
    start, end = text.index("  - {name: w1"), text.index("\n# The probability")
    (folder / "config.yaml").write_text(text[:start] + "".join(entries) + text[end:])
    return [sys.executable, str(SAMPLE.with_name("cluster.py")), str(folder / "config.yaml")]


@pytest.mark.process
def test_the_cluster_starts_all_nodes_and_stops_them(tmp_path: Path) -> None:
    with Program(cluster(tmp_path, 2)) as program:
        output = program.wait_for(": step 50, ")
        program.signal(signal.SIGTERM)
        code, rest = program.finish()  # both nodes have ended, too
    assert code == 0, output + rest
    assert "the nodes are stopped" in rest
    assert "recognized" not in output + rest


@pytest.mark.soak
@pytest.mark.process
def test_the_nodes_of_the_example_learn(tmp_path: Path) -> None:
    output = Program(cluster(tmp_path, 4)).succeed()
    for name in ("w1", "w2", "w3", "w4"):
        (right,) = re.findall(rf"{name}: (\d+)% of the test images are recognized", output)
        assert int(right) > 50
        assert int(re.findall(rf"{name}: step 300, .* (\d+) averages", output)[0]) > 100

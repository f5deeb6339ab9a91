"""Settings of pairwise gossip: errors, and which settings must be equal on all workers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_loco import DiLoCo, PairwiseAverage, PairwiseEngine
from lightning_loco.algorithms.pairwise_average import Constant, Interpolation, by_clock, by_loss
from lightning_loco.compression import E3M0, BFloat16, ErrorFeedback, Int8
from lightning_loco.gossip import Peer
from lightning_loco.gossip.settings import PairwiseSettings
from lightning_loco.transport import write_certificate
from tests.harness.pool import Pool
from tests.harness.small_model import make_model

NODES = [
    {"name": "a", "host": "127.0.0.1", "port": 45671},
    {"name": "b", "host": "127.0.0.1", "port": 45672},
]
PEERS = [Peer("a", "127.0.0.1", 45671), Peer("b", "127.0.0.1", 45672)]


def make(**given: Any) -> PairwiseSettings:
    return PairwiseSettings(**{"algorithm": PairwiseAverage(), **given})


def test_errors_name_the_invalid_setting(subtests: pytest.Subtests) -> None:
    rows: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"algorithm": DiLoCo()}, TypeError, r"must be a PairwiseAverage\(\), got DiLoCo"),
        ({"algorithm": "pairwise"}, TypeError, "got 'pairwise'"),
        ({"algorithm": PairwiseAverage}, TypeError, "got <class"),
        ({"nodes": NODES}, ValueError, "nodes needs name"),
        ({"nodes": NODES, "name": "c"}, ValueError, "no node 'c' in the list, only a, b"),
        ({"nodes": [*NODES, NODES[0]], "name": "a"}, ValueError, "same name: a"),
        ({"name": "a"}, ValueError, "name='a' says which of the nodes this is"),
        ({"nodes": ["a"], "name": "a"}, TypeError, "a mapping with name, host and port"),
        ({"nodes": "there/is/none.yaml", "name": "a"}, FileNotFoundError, "none.yaml"),
        ({"fetch_timeout_s": 0}, ValueError, "positive and finite, got 0"),
        ({"fetch_timeout_s": float("nan")}, ValueError, "positive and finite, got nan"),
        ({"fetch_timeout_s": float("inf")}, ValueError, "positive and finite, got inf"),
        ({"fetch_timeout_s": "1"}, TypeError, "number of seconds, got '1'"),
        ({"fetch_timeout_s": True}, TypeError, "number of seconds, got True"),
        ({"compression": "float32"}, ValueError, "one of none, bf16, fp16, int8.*got 'float32'"),
        ({"compression": torch.bfloat16}, TypeError, "a codec such as Int8.*got torch.bfloat16"),
        ({"compression": "int4"}, ValueError, 'too roughly for gossip.*compression="int8"'),
        ({"compression": E3M0()}, ValueError, "too roughly"),
        ({"compression": "sparse"}, ValueError, "too roughly"),
        ({"compression": ErrorFeedback(Int8())}, ValueError, r"codec alone: .*=Int8\(block=256\)"),
        ({"key_file": "there/is/none.key"}, FileNotFoundError, "none.key"),
    ]
    for given, error, text in rows:
        with subtests.test(given=given), pytest.raises(error, match=text):
            make(**given)


def test_nodes_come_from_a_list_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(f"nodes: {NODES}")
    for nodes in (NODES, PEERS, [NODES[0], PEERS[1]], path, str(path)):
        for number, name in enumerate("ab"):
            settings = make(nodes=nodes, name=name)
            assert settings.peers == PEERS
            assert settings.node_number == number
    alone = make()
    assert alone.peers == []
    assert alone.node_number == 0


def test_prepare_resolves_the_algorithm_for_the_number_of_workers() -> None:
    @dataclasses.dataclass(frozen=True)
    class Share(PairwiseAverage):
        def prepare(self, num_workers: int, topology: object) -> PairwiseAverage:
            assert topology is None
            if num_workers > 10:
                raise ValueError("too many")
            return dataclasses.replace(self, factor=1 / num_workers)

    settings = make(algorithm=Share(), fetch_timeout_s=3.0)
    assert settings.prepare(4) == make(algorithm=Share(factor=0.25), fetch_timeout_s=3.0)
    with pytest.raises(ValueError, match="too many"):
        settings.prepare(11)
    assert make().prepare(4) == make()


def test_describe_lists_the_settings_that_must_be_equal(
    tmp_path: Path,
) -> None:
    write_certificate(tmp_path / "keys")
    average = PairwiseAverage(0.5, "loss", 0.25, 0.2, keep_progress=True)
    settings = make(
        algorithm=average,
        nodes=NODES,
        name="b",
        fetch_timeout_s=3.0,
        compression="int8",
        key_file=tmp_path / "keys",
    )
    assert settings.describe() == {
        "algorithm": "PairwiseAverage",
        "fetch_probability": 0.5,
        "interpolation": "loss",
        "factor": 0.25,
        "divergence_threshold": 0.2,
        "keep_progress": True,
        "nodes": [["a", "127.0.0.1", 45671], ["b", "127.0.0.1", 45672]],
        "fetch_timeout_s": 3.0,
        "compression": ["Int8", {"block": 256}],
    }
    other = dataclasses.replace(settings, name="a", key_file=None)
    assert other.describe() == settings.describe()


def test_describe_does_not_depend_on_how_the_codec_was_given(subtests: pytest.Subtests) -> None:
    for given, codec in (
        (None, None),
        ("none", None),
        ("bf16", BFloat16()),
        ("int8", Int8()),
        (Int8(64), Int8(64)),
    ):
        with subtests.test(given=given):
            settings = make(compression=given)
            assert settings.codec == codec
            assert settings.describe() == make(compression=codec).describe()
            assert settings.describe() != make(compression=Int8(128)).describe()


def share(clock: float, peer_clock: float, loss: float, peer_loss: float, power: int = 1) -> float:
    return 0.5**power


class Scaled:
    """A rule with no attributes to compare."""

    def __call__(self, clock: float, peer_clock: float, loss: float, peer_loss: float) -> float:
        return 0.5


@dataclasses.dataclass(frozen=True)
class Nested:
    """A rule whose attributes are another rule and numbers."""

    rule: Interpolation
    powers: tuple[int, ...] = (1, 2)

    def __call__(self, *given: float) -> float:
        return self.rule(*given)


RULES: list[Callable[[], Any]] = [
    lambda: "constant",
    lambda: "clock",
    lambda: by_clock,
    lambda: by_loss,
    lambda: share,
    lambda: functools.partial(share, power=1),
    lambda: functools.partial(share, power=2),
    lambda: Constant(0.25),
    lambda: Constant(0.5),
    lambda: Nested(by_loss),
    lambda: Nested(by_clock),
    lambda: Nested(by_clock, (1, 3)),
    lambda: Nested(functools.partial(share, power=2)),
    lambda: Scaled(),
]


def test_rules_are_described_by_value_and_not_by_memory_address() -> None:
    described = [
        [make(algorithm=PairwiseAverage(interpolation=rule())).describe() for rule in RULES]
        for _ in range(2)
    ]
    assert described[0] == described[1]
    values = [description["interpolation"] for description in described[0]]
    assert len({repr(value) for value in values}) == len(RULES)
    assert "0x" not in repr(values)
    assert "lightning_loco.algorithms.pairwise_average.by_loss" in values


def ranks_differ(rank: int, world: int, differ: bool) -> str:
    rule = functools.partial(share, power=1 + rank * differ)
    try:
        PairwiseEngine(make_model(), PairwiseAverage(interpolation=rule)).close()
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_different_rules_are_refused(pool: Pool) -> None:
    assert pool.run(ranks_differ, False, world=2) == ["", ""]
    for text in pool.run(ranks_differ, True, world=2):
        assert "Worker 1 has interpolation=" in text
        assert "{'power': 2}" in text


def ranks_compress_differently(rank: int, world: int) -> str:
    try:
        PairwiseEngine(make_model(), compression=Int8(block=(256, 64)[rank])).close()
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_different_compression_are_refused(pool: Pool) -> None:
    for text in pool.run(ranks_compress_differently, world=2):
        assert "Worker 1 has compression=['Int8', {'block': 64}]" in text
        assert "Start all workers with the same settings" in text

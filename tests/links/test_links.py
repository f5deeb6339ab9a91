"""The links of all workers: what a user may say, and what messages meet then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_loco import Link
from lightning_loco.links.links import LINKS, Links, as_links, read_links

WAN, DSL, LAN = LINKS["wan"], LINKS["dsl"], LINKS["lan"]

FILE = """
default: wan
workers:
  3: dsl
  2: {mbit_per_s: 50, latency_s: 0.01}
pairs:
  0-1: lan
  1->2: {mbit_per_s: 10}
seed: 7
"""


def test_one_for_all() -> None:
    assert as_links(None) is None
    for value in ("wan", WAN, {"mbit_per_s": 100, "latency_s": 0.03, "jitter_s": 0.003}):
        links = as_links(value)
        assert links == Links(WAN)
        assert as_links(links) is links
        assert links.between(0, 5) == links.of(3) == WAN
        assert links.own(0, 5) is None
        links.check(17)


def test_one_for_each_worker() -> None:
    links = as_links(["lan", Link(20), "wan"])
    assert [links.of(worker) for worker in range(3)] == [LAN, Link(20), WAN]
    assert links.between(0, 1) == links.between(1, 0) == Link(20, LAN.latency_s)
    assert links.between(2, 0) == WAN.slower(LAN)
    links.check(3)
    with pytest.raises(ValueError, match="link has 3 entries, .* there are 4 workers. Give one"):
        links.check(4)


def written(folder: Path, text: str, name: str = "links.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_workers_and_pairs_from_a_file(tmp_path: Path) -> None:
    links = as_links(written(tmp_path, FILE))
    assert [links.of(worker) for worker in range(4)] == [WAN, WAN, Link(50, 0.01), DSL]
    assert links.own(0, 1) == links.own(1, 0) == LAN
    assert links.own(1, 2) == links.between(1, 2) == Link(10)
    assert links.own(2, 1) is None
    assert links.between(2, 1) == WAN.slower(Link(50, 0.01))
    assert links.seed == 7
    links.check(4)
    with pytest.raises(ValueError, match="link names worker 3, but there are 3 workers, numbered"):
        links.check(3)


def test_files_in_json_and_of_other_forms(tmp_path: Path) -> None:
    table = {"default": "wan", "pairs": {"0-1": "lan"}}
    path = written(tmp_path, json.dumps(table), "links.json")
    assert as_links(path) == as_links(Path(path)) == as_links(table)
    assert read_links(written(tmp_path, "[wan, dsl]")) == as_links(["wan", "dsl"])
    assert read_links(written(tmp_path, "dsl")) == Links(DSL)
    assert read_links(written(tmp_path, "mbit_per_s: 20")) == Links(Link(20))


def test_links_that_are_not_understood_are_refused(subtests: pytest.Subtests) -> None:
    rows = [
        ("wam", ValueError, r"link must be one of wan, dsl, lan, datacentre, .* got 'wam'"),
        (100, TypeError, r"link must be a name such as 'wan', a Link\(...\), .* got 100"),
        (True, TypeError, "link must be a name .* got True"),
        ([], ValueError, "link is an empty list"),
        (["wan", "moon"], ValueError, r"link\[1\] must be one of wan, .* got 'moon'"),
        (["wan", 3], TypeError, r"link\[1\] must be a name .* got 3"),
        ({"mbit_per_s": -3}, ValueError, "mbit_per_s of a link must be positive .*, got -3"),
        ({"latency_s": 0.1}, ValueError, "link needs mbit_per_s, got {'latency_s': 0.1}"),
        ({"speed": 3}, ValueError, "link has no 'speed'. Use default, workers, pairs, seed"),
        ({"workers": {0: "wan"}}, ValueError, "link needs 'default'"),
        ({"default": "wan", "workers": ["wan"]}, ValueError, "link.workers is a map, got"),
        ({"default": "wan", "workers": {"a": "dsl"}}, ValueError, "workers' numbers from 0 on"),
        ({"default": "wan", "workers": {-1: "dsl"}}, ValueError, "from 0 on, got -1"),
        ({"default": "wan", "pairs": {"0": "dsl"}}, ValueError, "as in 0-1 or 0->1, got '0'"),
        ({"default": "wan", "pairs": {"1-1": "dsl"}}, ValueError, "two workers, .* got '1-1'"),
        ({"default": "wan", "pairs": {"0-1": {"mbit": 1}}}, ValueError, r"\[0-1\] has no 'mbit'"),
        ({"default": "wan", "seed": "x"}, TypeError, "seed of the links must be an integer"),
        ("no/such.yaml", FileNotFoundError, "There is no file of links 'no/such.yaml'"),
        (Path("nowhere"), FileNotFoundError, "There is no file of links 'nowhere'"),
    ]
    for value, error, text in rows:
        with subtests.test(str(value)), pytest.raises(error, match=text):
            as_links(value)


def test_files_that_are_not_understood_are_named(tmp_path: Path, subtests: pytest.Subtests) -> None:
    rows = [
        ("", "there is no link in it, only None"),
        ("wam", "there is no link in it, only 'wam'"),
        ("[", "cannot be read: "),
        ("default: wan\nworkers: {0: moon}", r"link.workers\[0\] must be one of wan, .* 'moon'"),
        ("mbit_per_s: fast", "mbit_per_s of a link must be a number, got 'fast'"),
    ]
    for text, message in rows:
        with subtests.test(text):
            path = written(tmp_path, text)
            with pytest.raises(ValueError, match=message) as caught:
                as_links(path)
            assert path in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        as_links(tmp_path)

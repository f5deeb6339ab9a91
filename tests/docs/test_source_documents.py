"""The table of terms: every name from this package exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.strategies import Strategy

import lightning_loco as loco
from lightning_loco.strategies.arguments import argument_names
from tests.harness.pages import README, doc
from tests.harness.sources import ROOT

PAGE = doc("source_documents.md")
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| (.+) \|$", PAGE.text, re.MULTILINE)
KEYS = {
    key
    for file in (ROOT / "conf" / "algorithm").glob("*.yaml")
    for key in yaml.safe_load(file.read_text(encoding="utf-8"))
}
OF_THE_TRAINER = {"accumulate_grad_batches", "lr", "max_steps", "Trainer(strategy=...)"}
FORMULAS = {"x += mean - copy"}


def exists(name: str) -> bool:
    """Whether a name in the middle column is a file, a choice, a setting or an object."""
    if name in OF_THE_TRAINER | FORMULAS:
        return True
    if name.startswith("lightning-loco "):
        return f'"{name.split()[1]}"' in (
            ROOT / "lightning_loco" / "tools" / "command.py"
        ).read_text(encoding="utf-8")
    if Path(name).suffix in (".py", ".md", ".sbatch", ".yaml"):
        return (ROOT / name).is_file()
    if "=" in name:
        group, _, choice = name.partition("=")
        return (ROOT / "conf" / group / f"{choice}.yaml").is_file()
    if name.startswith("algorithm."):
        return name.removeprefix("algorithm.") in KEYS
    path, _, arguments = name.removesuffix(")").partition("(")
    kind, _, attribute = path.partition(".")
    found = getattr(loco, kind, None)
    if found is None or (attribute and not hasattr(found, attribute)):
        return False
    called = getattr(found, attribute) if attribute else found
    known = set(inspect.signature(called).parameters if arguments else {})
    if isinstance(called, type) and issubclass(called, Strategy):
        known = argument_names(called)
    return all(argument in known for argument in arguments.split(", ") if argument)


def test_every_name_of_ours_exists(subtests: pytest.Subtests) -> None:
    names = [name for _, ours, _ in ROWS for name in re.findall(r"`([^`]+)`", ours)]
    assert len(names) > 50
    for name in names:
        with subtests.test(name):
            assert exists(name)


def test_a_name_that_does_not_exist_is_noticed() -> None:
    for name in ("GASLoC(eta)", "PairwiseEngine.send", "algorithm.gama", "topology=rings", "a.py"):
        assert not exists(name)


def test_cells_are_short() -> None:
    assert len(ROWS) > 50
    assert max(len(cell) for row in ROWS for cell in row) <= 90


def test_the_pages_of_the_methods_link_to_it() -> None:
    methods = "async_diloco", "async_model_average", "gasloc", "remote_optimizer", "pairwise_gossip"
    pages = [README, *(doc(f"methods/{name}.md") for name in methods)]
    for page in pages:
        targets = {page.target(link) for _, link in page.links}
        assert PAGE.path in targets, str(page)

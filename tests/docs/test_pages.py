"""Pages are correct: names in code exist, commands compose, and links have targets.

A new page in docs/ is checked without a change here.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import strategies as lightning_strategies
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_loco as loco
from lightning_loco import algorithms, compression, integrations, parameter_server, topology
from lightning_loco.app import command_line
from lightning_loco.app.configured_strategy import build_method, build_strategy
from lightning_loco.strategies import RoundArguments
from lightning_loco.transport import write_certificate
from tests.harness.pages import DOCS, LINKING, PAGES, README, Page, doc, overrides_of
from tests.harness.sources import ROOT, can_import, sources


def imported(code: str) -> set[str]:
    """Return the packages that code imports; front ends may not be installed."""
    return set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))


PYTHON = {
    f"{page}, block {number}": code
    for page in PAGES
    for number, code in enumerate(page.blocks("python"), start=1)
    if all(importlib.util.find_spec(name) for name in imported(code))
}
NAMED_FILES = {
    name.group(1): block
    for page in PAGES
    for block in page.blocks("yaml")
    if (name := re.match(r"# ([\w/]+\.yaml)$", block, re.MULTILINE))
}
OF_RAY = {"checkpoint_upload_mode", "use_gpu"}
"""Arguments of Ray and of what reports to it, which need not be installed here."""
OF_HUGGING_FACE = {
    "dispatch_batches",
    "evaluation_mode",
    "gradient_accumulation_steps",
    "loco",
    "resume_from_checkpoint",
    "save_only_model",
    "use_cpu",
    "use_seedable_sampler",
}
"""Arguments of transformers and Accelerate, which need not be installed here."""
OF_OTHER_LIBRARIES = {
    "delay_state_averaging",
    "enabled",
    "init_sync",
    "initial_peers",
    "local_sgd_steps",
    "should_quantize",
    "use_local_updates",
}
"""Arguments of torchft, Accelerate and hivemind."""

BUILDABLE = (Strategy, Callback, loco.Algorithm, loco.Topology)


def test_there_is_something_to_check() -> None:
    assert len(DOCS) >= 10
    assert len(PYTHON) >= 10
    assert sum(len(page.commands) for page in PAGES) >= 20


# ------------------------------------------------------------------------- code


def calls_of(tree: ast.Module) -> Iterator[tuple[ast.Call, object, dict[str, object]]]:
    """Return calls of functions of Lightning and this package, and the names that code defines."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    names: dict[str, object] = {}
    exec(compile(ast.Module([*imports, *classes], []), "page", "exec"), names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            kind = eval(called, names) if called.split(".")[0] in names else None
            if str(getattr(kind, "__module__", "")).startswith("lightning"):
                yield node, kind, names


def test_code_compiles_and_names_what_exists(subtests: pytest.Subtests) -> None:
    for label, code in PYTHON.items():
        with subtests.test(label):
            tree = ast.parse(code)
            compile(tree, label, "exec")
            calls = list(calls_of(tree))
            for node, kind, _ in calls:
                arguments = {str(word.arg): word.value for word in node.keywords}
                inspect.signature(kind).bind_partial(*node.args, **arguments)  # type: ignore[arg-type]
            assert calls or "from tests." in code


def test_methods_that_are_called_exist(subtests: pytest.Subtests) -> None:
    for label, code in PYTHON.items():
        with subtests.test(label):
            tree = ast.parse(code)
            kinds = {id(node): kind for node, kind, _ in calls_of(tree)}
            made = {
                node.targets[0].id: kinds[id(node.value)]
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and id(node.value) in kinds
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    kind = made.get(node.value.id)
                    kind = getattr(kind, "__self__", kind)  # Simulation.from_settings makes one
                    assert kind is None or hasattr(kind, node.attr), ast.unparse(node)


@pytest.fixture
def files_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the YAML files that pages show by name, and a key file, to the working folder."""
    monkeypatch.chdir(tmp_path)
    for name, text in NAMED_FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    write_certificate("job.pem")


@pytest.mark.usefixtures("files_of_the_text")
def test_what_is_shown_can_be_built(subtests: pytest.Subtests) -> None:
    for label, code in PYTHON.items():
        with subtests.test(label):
            for node, kind, names in calls_of(ast.parse(code)):
                if isinstance(kind, type) and issubclass(kind, BUILDABLE):
                    assert isinstance(eval(ast.unparse(node), names), kind)


def test_strategies_are_shown() -> None:
    assert "loco.LocoStrategy(" in doc("methods/README.md").text


# --------------------------------------------------------------------- commands


def each_of_a_sweep(overrides: list[str]) -> Iterator[list[str]]:
    """Return commands that use every value of every swept key once, other keys unchanged."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    plain = [one.input_line for one in parsed if not one.is_sweep_override()]
    yield plain
    for override in parsed:
        if override.is_sweep_override():
            for value in override.sweep_string_iterator():
                yield [*plain, f"{override.key_or_group}={value}"]


def new_commands() -> dict[Page, list[str]]:
    """Return the commands of each page whose overrides do not occur on an earlier page."""
    found: dict[Page, list[str]] = {}
    known = set()
    for page in PAGES:
        for command in page.commands:
            overrides = frozenset(overrides_of(command))
            if overrides not in known:
                found.setdefault(page, []).append(command)
            known.add(overrides)
    return found


NEW_COMMANDS = new_commands()


@pytest.mark.parametrize("page", NEW_COMMANDS, ids=str)
@pytest.mark.usefixtures("files_of_the_text")
def test_commands_compose(page: Page, subtests: pytest.Subtests) -> None:
    with initialize_config_dir(command_line.conf_dir(), version_base="1.3"):
        for command in NEW_COMMANDS[page]:
            with subtests.test(command):
                own = [
                    f"hydra.searchpath=[{Path(folder).absolute()}]"
                    for folder in re.findall(r"--config-dir=(\S+)", command)
                ]
                for overrides in each_of_a_sweep([*overrides_of(command), *own]):
                    files = [one for one in overrides if one.startswith("topology.path=")]
                    config = compose("train", overrides)
                    if config.simulate:
                        build_method(config)
                    elif not files:  # FILE is a placeholder for the reader's file
                        build_strategy(config)


def test_commands_name_files_that_exist(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(str(page)):
            for line in page.shell:
                words = shlex.split(line, comments=True)
                for before, word in zip(["", *words], words, strict=False):
                    if before == "-m" and word.startswith("lightning_loco"):
                        assert importlib.util.find_spec(word), line
                    elif word.endswith((".py", ".sbatch")):
                        assert (ROOT / word).is_file(), line


# ------------------------------------------------------------------------ links


def test_links_lead_somewhere(subtests: pytest.Subtests) -> None:
    for page in LINKING:
        with subtests.test(str(page)):
            for label, link in page.links:
                target, anchor = page.target(link), link.partition("#")[2]
                assert target.exists(), link
                assert ROOT in target.parents, link
                if anchor:
                    assert anchor in Page(target).anchors, link
                name = re.search(r"(?:^|/)([\w.]+\.(?:py|sbatch|md))$", label)
                assert name is None or target.name == name.group(1), label


def test_pictures_are_shown() -> None:
    shown = {page.target(link).name for page in PAGES for _, link in page.links}
    assert {picture.name for picture in (ROOT / "docs").rglob("*.svg")} <= shown


def test_every_page_can_be_reached_from_the_readme() -> None:
    known, found = {README.path}, [README]
    while found:
        page = found.pop()
        new = {page.target(link) for _, link in page.links if ".md" in link} - known
        known |= new
        found += map(Page, new)
    assert {page.path for page in PAGES} <= known
    assert "(docs/README.md)" in README.text


def test_files_in_the_text_exist(subtests: pytest.Subtests) -> None:
    of_a_reader = {"report.txt", "mine.py"}
    for page in LINKING:
        with subtests.test(str(page)):
            for word in set(page.ticked) - of_a_reader:
                if re.fullmatch(r"(?!myconf)[\w./]+(/|\.(py|txt|md))", word):
                    assert (ROOT / word).exists(), word


# ------------------------------------------------------------------------ names


def test_names_in_the_text_exist(subtests: pytest.Subtests) -> None:
    found = pkgutil.iter_modules(integrations.__path__, f"{integrations.__name__}.")
    front_ends = [import_module(one.name) for one in found if can_import(one.name)]
    modules, texts = [loco, lightning_strategies, *front_ends], [*sources().values()]
    for page in PAGES:
        with subtests.test(str(page)):
            for name in re.findall(r"\b[A-Z]\w*Strategy\b", page.text):
                known = any(hasattr(module, name) for module in modules)
                assert known or any(name in text for text in texts), name
            for name in (word for word in page.ticked if re.match(r"lightning_loco[\w.]*$", word)):
                module, _, attribute = name.rpartition(".")
                found = not module or hasattr(import_module(module), attribute)
                assert found or importlib.util.find_spec(name), name


def known_arguments() -> set[str]:
    """Return the argument names of this package, its command line, and Lightning."""
    kinds = [getattr(loco, name) for name in loco.__all__]
    kinds += [
        getattr(module, name)
        for module in (parameter_server, topology, compression)
        for name in module.__all__
    ]
    kinds += [algorithms.TrimmedMean, algorithms.GeometricMedian, algorithms.Cosine]
    kinds += [lightning_strategies.DDPStrategy]
    kinds += [Trainer, Trainer.fit, ModelCheckpoint, LightningModule.log, StatefulDataLoader]
    known = {"strategy", *(folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir())}
    known |= set(re.findall(r"^(\w+):", (ROOT / "conf" / "train.yaml").read_text(), re.MULTILINE))
    for kind in filter(callable, kinds):
        known |= set(inspect.signature(kind).parameters)
    known |= set(RoundArguments.__annotations__) | OF_HUGGING_FACE | OF_RAY
    known |= OF_OTHER_LIBRARIES
    return known


def test_arguments_in_the_text_exist(subtests: pytest.Subtests) -> None:
    known = known_arguments()
    for page in PAGES:
        with subtests.test(str(page)):
            for ticked in page.ticked:
                for name in re.findall(r"(?:^|[(, ])([a-z]\w*)=", ticked):
                    assert name in known, ticked

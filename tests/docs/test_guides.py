"""Programs of tutorials and guides run and do what their pages describe."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml

import lightning_loco as loco
from tests.docs.test_pages import NAMED_FILES
from tests.harness.pages import DOCS, doc
from tests.harness.pool import Pool, PoolEnvironment
from tests.harness.programs import Program, free_ports
from tests.harness.small_model import quiet_trainer
from tests.harness.sources import ROOT

NOTEBOOK = ROOT / "examples" / "compare_methods.ipynb"
OWN_MODEL = doc("tutorials/your_own_model.md")
TROUBLE = doc("guides/troubleshooting.md")
MANIFEST = ROOT / "examples" / "kubernetes" / "loco.yaml"


# --------------------------------------------------------------------- programs


def run_program(rank: int, world: int, code: str) -> dict[str, Any]:
    """Return the names that a page's program defines; its Trainer runs on the ranks of the pool."""

    def trainer(**settings: Any) -> Any:
        assert settings["devices"] == world
        return quiet_trainer(**settings, plugins=[PoolEnvironment()])

    names = {"__name__": "__main__"}
    with mock.patch("lightning.pytorch.Trainer", trainer):
        exec(compile(code, "page", "exec"), names)
    return names


def accuracy(rank: int, world: int, code: str) -> float:
    return float(run_program(rank, world, code)["trainer"].callback_metrics["val/accuracy"])


def test_the_program_of_your_own_model_learns(pool: Pool) -> None:
    (code,) = OWN_MODEL.blocks("python")
    first, second = pool.run(accuracy, code, world=2)
    assert first == second  # the mean over the validation data of both workers
    assert first > 0.9


def adapters(rank: int, world: int, code: str) -> tuple[int, int, float, int, bool]:
    """Return trainable and all parameters, bytes, rounds, and whether the base models are equal."""
    names = run_program(rank, world, f"import torch\ntorch.manual_seed({rank})\n{code}")
    trainer = names["trainer"]
    parameters = list(trainer.lightning_module.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    base = torch.cat([p.detach().flatten() for p in parameters if not p.requires_grad])
    bases = [torch.empty_like(base) for _ in range(world)]
    dist.all_gather(bases, base)
    statistics = trainer.strategy.statistics
    equal = all(torch.equal(base, other) for other in bases)
    everything = sum(p.numel() for p in parameters)
    return trainable, everything, statistics.bytes_sent, statistics.rounds, equal


def test_only_adapters_travel(pool: Pool) -> None:
    page = doc("guides/lora.md")
    (code,) = page.blocks("python")
    for trainable, everything, sent, rounds, equal in pool.run(adapters, code, world=2):
        assert f"{trainable:,} of the {everything:,} of this model" in page.text
        assert rounds == 3
        assert 4 * trainable * rounds <= sent < 4 * everything  # one exchange of the whole model
        assert equal


def test_outer_settings_are_compared() -> None:
    (code,) = doc("guides/local_steps_and_outer_lr.md").blocks("python")
    names: dict[str, Any] = {}
    exec(compile(code, "page", "exec"), names)
    assert len(names["losses"]) == len(names["candidates"]) == 3
    start = names["loss_after"](names["candidates"][0], num_rounds=0)
    assert max(names["losses"]) < start


@pytest.mark.process
def test_your_own_model_on_the_command_line(tmp_path: Path) -> None:
    (code,) = OWN_MODEL.blocks("python")
    (tmp_path / "mypackage.py").write_text(code)
    for name in ("myconf/model/mine.yaml", "myconf/data/mine.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(NAMED_FILES[name])
    (command,) = OWN_MODEL.commands
    words = command.split()[2:]
    small = ["trainer.max_steps=20", "trainer.val_check_interval=10"]
    program = Program(
        [sys.executable, str(ROOT / "train.py"), *words, *small],
        tmp_path,
        PYTHONPATH=f"{ROOT}:{tmp_path}",
    )
    output = program.succeed()
    assert re.search(r"(?m)^validation loss +[\d.]+$", output), output
    assert re.search(r"322 trainable parameters", output), output


def test_the_notebook_runs() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    with matplotlib.rc_context():
        matplotlib.use("agg")
        for cell in cells:
            if cell["cell_type"] == "code":
                code = "".join(cell["source"]).replace("plt.show()", "")
                exec(compile(code, str(NOTEBOOK), "exec"), names)
    names["plt"].close(names["figure"])
    losses = {name: along[-1] for name, (along, _) in names["runs"].items()}
    (kept,) = [
        "".join(output["text"])
        for cell in cells
        for output in cell.get("outputs", [])
        if "loss" in "".join(output.get("text", []))
    ]
    for name, loss in losses.items():  # the numbers shown in the notebook
        found = re.search(rf"^{name} +loss ([\d.]+)", kept, re.MULTILINE)
        assert found
        assert loss == pytest.approx(float(found.group(1)), rel=0.05)


# ---------------------------------------------------------------- messages, API


def strings_of(node: ast.AST) -> Iterator[str]:
    """Return the strings in a call's arguments, with ``...`` for each placeholder."""
    match node:
        case ast.Constant(str(text)):
            yield re.sub(r"%(\.\d+f|\.\d+r|[dfgrs])", "...", text)
        case ast.JoinedStr(values):
            yield "".join(text for value in values for text in strings_of(value) or ["..."])
        case ast.FormattedValue():
            yield "..."
        case ast.BinOp(left, ast.Add(), right):
            yield "".join([*strings_of(left), *strings_of(right)])


def test_messages_of_the_page_are_those_of_the_package(subtests: pytest.Subtests) -> None:
    messages = [
        text
        for file in sorted((ROOT / "lightning_loco").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for text in strings_of(node)
    ]
    rows = re.findall(r"^\| (`.+?`(?: with `.+?`)?) \| ", TROUBLE.text, re.MULTILINE)
    assert len(rows) >= 30
    for cell in rows:
        for quoted in re.findall(r"`(.+?)`", cell):
            if quoted != "address already in use":  # raised by PyTorch
                with subtests.test(quoted):
                    assert any(quoted in message for message in messages)


def test_the_reference_has_every_public_name() -> None:
    pages = [page for page in DOCS if page.path.parent.name == "api"]
    listed = [
        name for page in pages for name in re.findall(r"^::: (\S+)$", page.text, re.MULTILINE)
    ]
    assert len(listed) == len(set(listed))
    for path in listed:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path
    missing = {f"lightning_loco.{name}" for name in loco.__all__} - set(listed)
    assert missing == {"lightning_loco.__version__"}


# ------------------------------------------------------------------- Kubernetes


def manifest() -> list[dict[str, Any]]:
    """Return the Service and the Job."""
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


def test_the_manifest_for_kubernetes() -> None:
    service, job = manifest()
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command = shlex.split(container["args"][0])
    options = dict(word[2:].split("=") for word in command if word.startswith("--"))

    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(options["nnodes"])
    first_pod = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert options["master-addr"] == first_pod
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    folder = next(word for word in command if word.startswith("hydra.run.dir=")).partition("=")[2]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(folder.startswith(f"{mount}/") for mount in mounts)
    assert f"ckpt_path={folder}/checkpoints/last.ckpt" in doc("tutorials/kubernetes.md").text


@pytest.mark.process
def test_the_command_of_the_manifest_runs(tmp_path: Path) -> None:
    """The two pods are processes on this machine, smaller and without GPUs."""
    (container,) = manifest()[1]["spec"]["template"]["spec"]["containers"]
    (port,) = free_ports(1)
    script = container["args"][0]
    for old, new in (
        ("--nproc-per-node=4", "--nproc-per-node=1"),
        ("loco-0.loco", "127.0.0.1"),
        ("29500", str(port)),
        ("train.py", str(ROOT / "train.py")),
        ("trainer=gpu", "experiment=smoke"),
        ("sync_every=100", "sync_every=5"),
        ("/runs/loco", str(tmp_path / "run")),
    ):
        assert script.count(old) == 1
        script = script.replace(old, new)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    pods = [
        Program(
            [*container["command"], script], tmp_path, JOB_COMPLETION_INDEX=str(index), PATH=path
        )
        for index in range(2)
    ]
    output, _ = (pod.succeed(120.0) for pod in pods)
    assert re.search(r"workers +2", output), output
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()


# ------------------------------------------------------------------------- a real notebook


@pytest.mark.process
def test_the_cells_of_from_a_notebook_run_in_a_kernel(tmp_path: Path) -> None:
    """Runs the cell after two mistakes of a new user, which are refused."""
    jupyter = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    (cell,) = doc("guides/from_a_notebook.md").blocks("python")
    without = cell.replace(', start_method="fork"', "")
    wrong = cell.replace("sync_every=10", "sync_every=0")
    assert cell not in (without, wrong)
    manager, client = jupyter.start_new_kernel(
        kernel_name="python3",
        cwd=str(tmp_path),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    try:
        popen, no_steps, fitted = (run_cell(client, code) for code in (without, wrong, cell))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert (
        "Use DiLoCoStrategy(start_method='fork'), or Trainer(strategy='diloco_notebook')" in popen
    )
    assert "sync_every counts optimizer steps" in no_steps
    assert "max_steps=100` reached" in fitted
    assert re.search(r"^tensor\([\d.]+\) b'def ", fitted, re.MULTILINE), fitted


def run_cell(client: Any, code: str) -> str:
    """Return the output of a cell, and the error that ended it, if any."""
    texts: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        content = message["content"]
        texts.append(content.get("text") or content.get("evalue") or "")

    client.execute_interactive(code, timeout=180, output_hook=keep)
    return "".join(texts)

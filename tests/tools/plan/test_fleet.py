"""``lightning-loco plan --write``: files that launchers accept, and that run the recommendation."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from lightning.pytorch.strategies import DDPStrategy

import lightning_loco as loco
from lightning_loco.app import command_line
from lightning_loco.app.configured_strategy import build_strategy
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.elastic.elastic import check_settings
from lightning_loco.engine import RoundSettings
from lightning_loco.strategies import METHODS
from lightning_loco.tools.plan.fleet import LAUNCHERS, MAX_ISLANDS, write_files
from lightning_loco.tools.plan.planner import make_plan
from lightning_loco.tools.plan.run import add_arguments, run
from lightning_loco.tools.plan.text import strategy as strategy_code
from tests.harness.limits import wait_until
from tests.harness.pages import overrides_of
from tests.harness.programs import Program, free_ports, python_script
from tests.harness.slurm import TINY, TINY_STEPS, fake_cluster
from tests.harness.sources import ROOT
from tests.tools.plan.test_planner import job

FIXED = make_plan(job("datacentre"))
ELASTIC = make_plan(job("lan"))
PLANS = {"fixed": FIXED, "elastic": ELASTIC}
EXAMPLE = ROOT / "examples" / "kubernetes" / "loco.yaml"
LENGTH = f"trainer.max_steps={ELASTIC.job.steps} trainer.val_check_interval=1000"
SMALL = f"{TINY} model.num_layers=3"  # for the recommended three fragments
CHANGES = f"{SMALL} trainer.max_steps=40 trainer.enable_progress_bar=false membership.min_workers=2"
QUIET = {"RUST_LOG": "error"}  # or the lighthouse fills the pipe that is read at the end


def test_the_plans_are_for_fixed_and_for_elastic_workers() -> None:
    assert FIXED.chosen.candidate.method == "ddp"
    assert ELASTIC.chosen.candidate.method == "streaming_diloco"
    assert ELASTIC.chosen.fragments == 3


def write(folder: Path, launcher: str, plan: str = "elastic", ranks: int = 1) -> dict[str, str]:
    """Write the files of a launcher; return their texts by name."""
    write_files(PLANS[plan], launcher, folder, ranks)
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_methods_for_elastic_members_are_those_of_the_table(subtests: pytest.Subtests) -> None:
    for name, kind in METHODS.items():
        with subtests.test(name):
            try:
                strategy: Any = kind(membership=loco.Elastic("localhost:29510"))
                check_settings(strategy.settings.prepare(1))
                accepted = True
            except (TypeError, ValueError):
                accepted = False
            assert METHOD_TABLE[name].elastic == accepted


# ------------------------------------------------------------------------ the command


def arguments(*more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = "--parameters 124e6 --step-s 0.5 --tokens-per-step 16384 --link lan --workers 2"
    return parser.parse_args([*words.split(), *more])


def test_the_command_writes_and_says_how_to_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for launcher in LAUNCHERS:
        with subtests.test(launcher):
            folder = tmp_path / launcher
            assert run(arguments("--write", launcher, "--to", str(folder))) == 0
            printed = capsys.readouterr().out.partition("Wrote ")[2]
            names = [path.name for path in folder.iterdir()]
            assert names
            for name in names:
                wrote, _, start = printed.partition("\n")
                assert f"{folder / name}" in wrote
                assert re.search(rf"^  .* {folder / name}\b", start, re.MULTILINE), start


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "loco_workers.sbatch").write_text("mine")
    with pytest.raises(ValueError, match=r"loco_workers.sbatch exists, and .* folder with --to"):
        write_files(ELASTIC, "slurm", tmp_path, 1)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_errors_say_what_to_do(tmp_path: Path, subtests: pytest.Subtests) -> None:
    (tmp_path / "file").touch()
    for words, message in (
        ("--to a", "--to belongs to --write. Drop it, or give --write."),
        ("--ranks-per-worker 8", "--ranks-per-worker belongs to --write"),
        ("--write ray --ranks-per-worker 0", "--ranks-per-worker must be at least 1, got 0"),
        (f"--write ray --to {tmp_path}/file/a", f"--to cannot write {tmp_path}/file/a: Not a dir"),
        (f"--write skypilot --workers {MAX_ISLANDS + 1}", "use --write kubernetes or slurm"),
    ):
        with subtests.test(words), pytest.raises(ValueError, match=re.escape(message)):
            run(arguments(*words.split()))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ------------------------------------------------------------------------- what is run


def command_in(name: str, text: str) -> str | None:
    """Return the command line of train.py in a file, if there is one."""
    if name.endswith(".yaml"):
        parts = [*yaml.safe_load_all(text)][-1]
        if parts.get("kind") == "JobSet":
            return str(member_of(parts)["args"][0])
        text = parts["run"] if "run" in parts else container_of(parts["spec"])["args"][0]
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    found = re.search(r"train\.py(?:\s*\\\n|.)*", text)
    return found and found.group().replace("\\\n", " ").replace('"$@"', "")


def commands_in(folder: Path, launcher: str, plan: str, ranks: int) -> list[tuple[str, ...]]:
    """Return the overrides of train.py in each file that starts it, without Hydra's own."""
    found = [command_in(*item) for item in write(folder, launcher, plan, ranks).items()]
    return [
        tuple(one for one in overrides_of(command) if not one.startswith("hydra."))
        for command in found
        if command
    ]


def container_of(job_spec: dict[str, Any]) -> dict[str, Any]:
    (found,) = job_spec["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def member_of(jobset: dict[str, Any]) -> dict[str, Any]:
    return container_of(jobset["spec"]["replicatedJobs"][1]["template"]["spec"])


def test_the_commands_are_those_of_the_plan(tmp_path: Path, subtests: pytest.Subtests) -> None:
    with initialize_config_dir(command_line.conf_dir(), version_base="1.3"):
        build = functools.cache(build_run)
        for launcher, (name, plan) in product(sorted(LAUNCHERS.keys() - {"ray"}), PLANS.items()):
            with subtests.test(launcher, plan=name):
                one, eight = (
                    commands_in(tmp_path / f"{launcher}-{name}-{ranks}", launcher, name, ranks)
                    for ranks in (1, 8)
                )
                islands = 2 if (launcher, name) == ("skypilot", "elastic") else 1
                assert len(one) == len(eight) == islands
                assert len(set(one)) == 1
                assert set(eight[0]) - set(one[0]) == (
                    set() if name == "fixed" else {"algorithm.replica_size=node"}
                )
                strategy, trainer = build(one[0])
                assert (trainer.accelerator, trainer.max_steps) == ("gpu", plan.job.steps)
                if name == "fixed":
                    assert isinstance(strategy, DDPStrategy)
                    continue
                settings = strategy.settings
                assert (settings.membership is not None) == (launcher != "torchrun")
                assert without_members(settings) == without_members(RECOMMENDED.settings)


def build_run(overrides: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the strategy and the Trainer's configuration."""
    config = compose("train", [*overrides])
    return build_strategy(config), config.trainer


def without_members(settings: RoundSettings) -> str:
    return str(dataclasses.replace(settings, membership=None).prepare(2))


RECOMMENDED = eval(f"loco.{strategy_code(ELASTIC.chosen)}")


def test_the_script_for_ray_is_the_strategy_of_the_plan(tmp_path: Path) -> None:
    for ranks in (1, 8):
        (text,) = write(tmp_path / str(ranks), "ray", ranks=ranks).values()
        tree = ast.parse(text)
        calls = {
            ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)
        }
        (expression,) = calls["RayLocoStrategy"].args
        written = eval(ast.unparse(expression), {"loco": loco})
        assert without_members(written.settings) == without_members(RECOMMENDED.settings)
        assert written.arguments["replica_size"] == ranks
        assert f"NUM_WORKERS = {2 * ranks} " in text
        assert f"MAX_STEPS = {ELASTIC.job.steps}\n" in text
    (text,) = write(tmp_path / "ddp", "ray", "fixed").values()
    compile(text, "loco_ray.py", "exec")
    assert "strategy=RayDDPStrategy()," in text
    assert "RayLocoStrategy" not in text


# -------------------------------------------------------------- formats of the launchers


@pytest.mark.process
def test_bash_accepts_the_scripts(tmp_path: Path) -> None:
    for plan in PLANS:
        for launcher in ("torchrun", "slurm"):
            folder = tmp_path / plan / launcher
            for name in write(folder, launcher, plan):
                subprocess.run(["bash", "-n", str(folder / name)], check=True, timeout=60)


def options_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))


def test_batch_scripts_ask_for_the_ranks(tmp_path: Path) -> None:
    (fixed,) = write(tmp_path / "fixed", "slurm", "fixed", 8).values()
    lighthouse, workers = write(tmp_path / "elastic", "slurm", "elastic", 8).values()
    for text, nodes in ((fixed, "2"), (workers, "1")):
        options = options_of(text)
        assert options["nodes"] == nodes
        assert options["ntasks-per-node"] == options["gpus-per-node"] == "8"
        assert options["signal"].startswith("SIGUSR1@")
    assert options_of(workers)["array"] == "0-1"
    assert "gpus-per-node" not in options_of(lighthouse)
    (port,) = re.findall(r"--bind=\[::\]:(\d+)", lighthouse)
    assert f"}}:{port}\n" in workers


def kubernetes(folder: Path, plan: str, ranks: int = 8) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(write(folder, "kubernetes", plan, ranks)["loco.yaml"]))


def test_a_job_of_kubernetes_is_that_of_the_example(tmp_path: Path) -> None:
    service, job = kubernetes(tmp_path, "fixed")
    their_service, theirs = yaml.safe_load_all(EXAMPLE.read_text())
    containers = container_of(job["spec"]), container_of(theirs["spec"])
    options, theirs_are = (dict(re.findall(r"--([\w-]+)=(\S+)", c["args"][0])) for c in containers)
    assert options == {**theirs_are, "nproc-per-node": "8"}
    container, their_container = containers
    their_container["args"] = container["args"]
    their_container["resources"]["limits"]["nvidia.com/gpu"] = 8
    assert (service, job) == (their_service, theirs)


def test_a_jobset_has_a_lighthouse_that_its_workers_reach(tmp_path: Path) -> None:
    (jobset,) = kubernetes(tmp_path, "elastic")
    spec = jobset["spec"]
    lighthouse, worker = spec["replicatedJobs"]
    assert (lighthouse["replicas"], worker["replicas"]) == (1, 2)
    assert spec["successPolicy"]["targetReplicatedJobs"] == [worker["name"]]
    member = member_of(jobset)
    environ = {one["name"]: one.get("value") for one in member["env"]}
    host, _, port = environ["TORCHFT_LIGHTHOUSE"].partition(":")
    network = spec["network"]
    assert host == f"{jobset['metadata']['name']}-{lighthouse['name']}-0-0.{network['subdomain']}"
    command = container_of(lighthouse["template"]["spec"])["command"]
    assert command == ["lightning-loco", "lighthouse", f"--bind=[::]:{port}"]
    assert member["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert "--nproc-per-node=8" in member["args"][0]
    pod = worker["template"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # which podFailurePolicy needs
    mounts = {mount["name"] for mount in member["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_kubernetes_accepts_the_manifests(tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for part in kubernetes(tmp_path / "fixed", "fixed"):
        validate(part, "1.34", strict=True)
    (jobset,) = kubernetes(tmp_path / "elastic", "elastic")
    for one in jobset["spec"]["replicatedJobs"]:
        meant = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "loco"}}
        validate({**meant, "spec": one["template"]["spec"]}, "1.34", strict=True)


def test_jobset_accepts_the_manifest(tmp_path: Path) -> None:
    """A field that the models do not know would be lost."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (jobset,) = kubernetes(tmp_path, "elastic")
    read = models.JobsetV1alpha2JobSet.from_dict(jobset)
    assert json.loads(read.to_json()) == jobset


def islands(folder: Path, plan: str = "elastic", ranks: int = 1) -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for text in write(folder, "skypilot", plan, ranks).values()]


def test_islands_share_the_address_of_the_lighthouse(tmp_path: Path) -> None:
    head, other = islands(tmp_path / "elastic", ranks=8)
    assert (head["name"], other["name"]) == ("loco-0", "loco-1")
    (port,) = re.findall(r"lighthouse --bind=\[::\]:(\d+) &", head["run"])
    assert re.findall(r"TORCHFT_LIGHTHOUSE=\S+:(\d+)$", other["run"], re.MULTILINE) == [port]
    assert "lighthouse" not in other["run"].lower().replace("torchft_lighthouse", "")
    assert other["envs"] == {"HOST": None}  # sky launch refuses to start without it
    assert {one["resources"]["accelerators"] for one in (head, other)} == {"H100:8"}
    (cluster,) = islands(tmp_path / "fixed", "fixed")
    assert cluster["num_nodes"] == 2
    assert "membership" not in cluster["run"]


READ_TASKS = """
import pathlib, sky, yaml
for path in sorted(pathlib.Path("files").iterdir()):
    given = yaml.safe_load(path.read_text())
    task = sky.Task.from_yaml_config(given, env_overrides=[("HOST", "10.0.0.1")])
    assert (task.name, task.num_nodes) == (given["name"], given.get("num_nodes", 1))
    (resources,) = task.resources
    assert resources.accelerators == {"H100": 8}
"""


@pytest.mark.process
@pytest.mark.parametrize("plan", PLANS)
def test_skypilot_accepts_the_tasks(tmp_path: Path, plan: str) -> None:
    if importlib.util.find_spec("sky") is None:
        pytest.skip("SkyPilot is not installed")
    write(tmp_path / "files", "skypilot", plan, 8)
    command = python_script(tmp_path, READ_TASKS)
    Program(command, tmp_path, HOME=str(tmp_path)).succeed()


# ------------------------------------------------------------------------------ real runs


def replace(path: Path, *pairs: tuple[str, str]) -> None:
    """Edit a file as its reader would."""
    text = path.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def programs(folder: Path) -> str:
    """Return PATH with the programs of a faked environment, torchrun and the system's."""
    return f"{folder}/.venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"


def succeed_together(programs: list[Program]) -> None:
    """Wait for programs that need each other; if one fails, end all."""
    with ExitStack() as stack:
        for program in programs:
            stack.enter_context(program)
        for program in programs:
            code, output = program.finish()
            assert code == 0, output


def report_of(folder: Path) -> dict[str, Any]:
    figures = json.loads((folder / "report.json").read_text())
    assert isinstance(figures, dict)
    return figures


@pytest.mark.process
def test_the_script_for_torchrun_runs(tmp_path: Path) -> None:
    """Two machines are two processes of this one, without GPUs."""
    fake_cluster(tmp_path)
    write_files(ELASTIC, "torchrun", tmp_path, 1)
    (port,) = free_ports()
    script = tmp_path / "loco_torchrun.sh"
    replace(script, ("--master-port=29500", f"--master-port={port}"))
    usage = Program(["bash", str(script), "0"], tmp_path)
    assert usage.finish()[0] == 2
    changes = f"{SMALL} trainer.max_steps=8".split()
    machines = [
        Program(
            ["bash", str(script), str(rank), "127.0.0.1", *changes],
            tmp_path,
            PATH=programs(tmp_path),
        )
        for rank in range(2)
    ]
    succeed_together(machines)
    figures = report_of(tmp_path / "outputs/torchrun-loco")
    assert (figures["algorithm"], figures["num_workers"]) == ("StreamingDiLoCo", 2)
    assert figures["rounds"] > 0


@pytest.mark.soak
@pytest.mark.process
def test_the_batch_script_of_a_fixed_job_runs(tmp_path: Path) -> None:
    cluster = fake_cluster(tmp_path)
    write_files(FIXED, "slurm", tmp_path, 2)
    script = ["bash", str(tmp_path / "loco_job.sbatch")]
    Program(script, tmp_path, **cluster, CHANGES=f"{TINY_STEPS} trainer.max_steps=8").succeed()
    figures = report_of(tmp_path / "outputs/slurm-123456-0")
    assert (figures["algorithm"], figures["num_workers"]) == ("DDP", 2)


@pytest.mark.soak
@pytest.mark.process
def test_the_array_finds_the_lighthouse_and_trains_together(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    cluster = fake_cluster(tmp_path)
    squeue = tmp_path / ".venv/bin/squeue"
    squeue.write_text(
        '#!/bin/sh\n[ "$2" = --jobs=7 ] && [ "$3" = --format=%B ] && echo 127.0.0.1\n'
    )
    squeue.chmod(0o755)
    write_files(ELASTIC, "slurm", tmp_path, 1)
    (port,) = free_ports()
    for name in ("loco_lighthouse.sbatch", "loco_workers.sbatch"):
        replace(tmp_path / name, (":29510", f":{port}"))
    del cluster["MASTER_PORT"]  # Lightning's port depends on the job
    one_task = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "LIGHTHOUSE_JOB": "7"}
    with Program(["bash", "loco_lighthouse.sbatch"], tmp_path, **QUIET):
        workers = [
            Program(
                ["bash", "loco_workers.sbatch"],
                tmp_path,
                **{**cluster, **one_task, "SLURM_JOB_ID": number, "CHANGES": CHANGES},
            )
            for number in ("101", "102")
        ]
        succeed_together(workers)
    losses = [report_of(tmp_path / f"outputs/slurm-{n}-0")["val_loss"] for n in (101, 102)]
    assert losses[0] == losses[1]


@pytest.mark.soak
@pytest.mark.process
def test_islands_train_together(tmp_path: Path) -> None:
    """The islands are processes on this machine; a lighthouse stays with the first one."""
    pytest.importorskip("torchft")
    fake_cluster(tmp_path)
    (port,) = free_ports()
    scripts = []
    for island, one in enumerate(islands(tmp_path / "files")):
        script = one["run"].replace("29510", str(port))
        assert script.count(LENGTH) == 1
        scripts.append(script.replace(LENGTH, f"{CHANGES} hydra.run.dir=run{island}"))
    environ = {**QUIET, "PATH": programs(tmp_path), "HOST": "127.0.0.1"}
    head, other = (Program(["bash", "-c", script], tmp_path, **environ) for script in scripts)
    with head:
        other.succeed()
        wait_until((tmp_path / "run0" / "report.json").exists)
    assert report_of(tmp_path / "run0")["val_loss"] == report_of(tmp_path / "run1")["val_loss"]


@pytest.mark.soak
@pytest.mark.process
def test_members_of_the_jobset_train_together(tmp_path: Path) -> None:
    """The pods are processes on this machine."""
    pytest.importorskip("torchft")
    fake_cluster(tmp_path)
    (jobset,) = kubernetes(tmp_path / "files", "elastic", ranks=1)
    (port,) = free_ports()
    lighthouse = container_of(jobset["spec"]["replicatedJobs"][0]["template"]["spec"])["command"]
    member = member_of(jobset)
    script = member["args"][0].replace("/runs/", "runs/")
    assert script.count(LENGTH) == 1
    script = script.replace(LENGTH, CHANGES)
    environ = {**QUIET, "PATH": programs(tmp_path), "TORCHFT_LIGHTHOUSE": f"127.0.0.1:{port}"}
    with Program([word.replace("29510", str(port)) for word in lighthouse], tmp_path, **environ):
        pods = [
            Program([*member["command"], script], tmp_path, **environ, POD=f"loco-worker-{index}")
            for index in range(2)
        ]
        succeed_together(pods)
    first, second = (report_of(tmp_path / f"runs/loco-worker-{index}") for index in range(2))
    assert first["val_loss"] == second["val_loss"]


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.process
@pytest.mark.parametrize("plan", PLANS)
def test_the_script_for_ray_runs(tmp_path: Path, plan: str) -> None:
    """On CPUs, with few steps."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    write_files(PLANS[plan], "ray", tmp_path, 1)
    script, storage = tmp_path / "loco_ray.py", tmp_path / "runs"
    replace(
        script,
        ("USE_GPU = True", "USE_GPU = False"),
        ('STORAGE = "/runs"', f"STORAGE = {str(storage)!r}"),
        (f"MAX_STEPS = {PLANS[plan].job.steps}", "MAX_STEPS = 8"),
        ("=1000", "=4"),
        ("ByteTextData()", "ByteTextData(max_bytes=200_000)"),
    )
    environ = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "local"}  # no other cluster of here
    if plan == "elastic":
        replace(script, ("sync_every=30", "sync_every=4"))
    output = Program([sys.executable, str(script)], tmp_path, **environ).succeed(480.0)
    assert list(storage.glob("loco/checkpoint_*/checkpoint.ckpt")), output

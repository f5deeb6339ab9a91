"""Every example runs as its docstring describes, with the claimed results; so do batch scripts."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.harness.programs import Program, free_ports
from tests.harness.slurm import COMMAND, TINY, TINY_STEPS, fake_cluster
from tests.harness.sources import ROOT
from tests.integrations import ray_runs

EXAMPLES = ROOT / "examples"
BATCH_SCRIPT = EXAMPLES / "slurm" / "train.sbatch"
BATCH_SCRIPT_OF_NODES = EXAMPLES / "slurm" / "nodes.sbatch"
REMOTE = EXAMPLES / "remote_optimizer"
LIMIT_S = 300.0
NUMBER = r"(\d+\.\d+)"


def run(command: list[str], folder: Path, **environ: str) -> str:
    """Return the output of a command that must succeed."""
    return Program(command, folder, **environ).succeed(LIMIT_S)


def numbers(pattern: str, output: str) -> list[float]:
    found = re.search(pattern, output)
    assert found, output
    return [float(group) for group in found.groups()]


def quickstart(output: str) -> None:
    (loss,) = numbers(f"validation loss {NUMBER} after 320 local steps .* 31 rounds", output)
    assert loss < 0.05  # the variance of the surface is 0.25


def gossip(output: str) -> None:
    (ring,) = numbers(rf"ring +messages per round \[2, 2, 2, 2\] .* distance {NUMBER}", output)
    (pairs,) = numbers(rf"pairs +messages per round \[1, 2, 2, 1\] .* distance {NUMBER}", output)
    assert 0 < ring < pairs


def plain_pytorch(output: str) -> None:
    (loss,) = numbers(f"loss {NUMBER} of the consensus of 2 workers after 300 .* 30 round", output)
    assert loss < 0.05


def simulation(output: str) -> None:
    losses = [float(loss) for loss in re.findall(rf"^\w.*? {NUMBER} +\d", output, re.MULTILINE)]
    alone, *together = losses
    assert len(together) == 5
    assert max(together) < alone / 4


def slow_worker(output: str) -> None:
    (even,) = numbers(rf"sync_every=10 .* waited {NUMBER} s", output)
    (fitted,) = numbers(rf"sync_every=\[20, 4\] .* waited {NUMBER} s", output)
    assert fitted < even / 2


def no_waiting(output: str) -> None:
    for worker, steps in ((0, 200), (1, 20)):
        seconds, waited, rounds = numbers(
            rf"worker {worker}: {steps} local steps in {NUMBER} s, .* {NUMBER} s; (\d+) rounds",
            output,
        )
        assert seconds < 4
        assert waited < 0.3
        assert rounds >= 3
    (distance,) = numbers(f"distance to the target: {NUMBER}", output)
    assert distance < 0.1


def separate_peers(output: str) -> None:
    assert "w4 was killed" in output
    for name in ("w1", "w2", "w3", "w4"):
        (blends,) = numbers(rf"{name}: \d+ steps, (\d+) blends", output)
        assert blends > 10


def replica_groups(output: str) -> None:
    values = numbers(r"before the first round: " + ", ".join([r"(-?\d+\.\d+)"] * 4), output)
    assert values[0] == values[1]
    assert values[2] == values[3]
    assert values[0] != values[2]
    (loss,) = numbers(
        f"validation loss {NUMBER} after 320 local steps of 2 workers with 2 ranks each, 31 rounds",
        output,
    )
    assert loss < 0.05


def fsdp_inside(output: str) -> None:
    held, total = numbers(r"rank 0 holds (\d+) of (\d+) parameters", output)
    assert held == total / 2
    (loss,) = numbers(
        f"validation loss {NUMBER} after 100 local steps of 2 workers with 2 ranks each, 9 rounds",
        output,
    )
    assert loss < 3.5  # 5.5 before training


def late_joiner(output: str) -> None:
    ends = re.findall(r"(w\d): took (\d+) local steps, weights (\[.*\])", output)
    steps = {name: int(steps) for name, steps, _ in ends}
    assert set(steps) == {"w1", "w2", "w3"}
    assert 60 <= steps["w3"] < steps["w1"]
    assert len({weights for _, _, weights in ends}) == 1


def fabric(output: str) -> None:
    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", output)]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.2
    assert "15 rounds; the model is the mean of both workers" in output


def hugging_face(output: str) -> None:
    losses = [float(loss) for loss in re.findall(r"evaluation loss ([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 4  # 5.9 before training
    (adapters, whole) = numbers(r"(\d+) of (\d+) parameters are adapters", output)
    assert adapters < whole / 10
    assert len(re.findall(r"on 2 workers, .* a round every 10 local steps", output)) == 2


def decoupled_learners(output: str) -> None:
    assert "b was killed after" in output
    assert "b is back" in output
    row = rf"^([a-d]) +\d+ +\d+ \( ?(\d+)%\) +{NUMBER} +{NUMBER} +{NUMBER} +{NUMBER}$"
    rows = re.findall(row, output, re.MULTILINE)
    assert [name for name, *_ in rows] == ["a", "b", "c", "d"]
    for name, merged, before, while_b_was_away, _, loss in rows:
        assert int(merged) > 60
        assert name == "b" or float(while_b_was_away) > 0.7 * float(before)
        assert float(loss) < 0.05  # the variance of the surface is 0.25
    merges, equal = numbers(r"(\d+) merges: (\d+) equal bit for bit", output)
    assert merges == equal > 20


def ray_train(output: str) -> None:
    assert "from the start" in output
    assert "from the last report" in output
    loss, _ = numbers(rf"loss {NUMBER} after (256) local steps", output)
    assert loss < 0.05


CHECKS: dict[str, Callable[[str], None]] = {
    "01_quickstart.py": quickstart,
    "02_gossip_on_a_ring.py": gossip,
    "03_plain_pytorch.py": plain_pytorch,
    "04_compare_in_simulation.py": simulation,
    "05_slow_worker.py": slow_worker,
    "06_no_waiting.py": no_waiting,
    "07_separate_peers.py": separate_peers,
    "08_replica_groups.py": replica_groups,
    "09_fsdp_inside_diloco.py": fsdp_inside,
    "10_late_joiner.py": late_joiner,
    "11_fabric.py": fabric,
    "12_hugging_face_lora.py": hugging_face,
    "13_decoupled_learners.py": decoupled_learners,
    "ray_train.py": ray_train,
}


def test_every_example_is_checked() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(CHECKS)


def test_an_example_is_short_and_says_how_to_run_it(subtests: pytest.Subtests) -> None:
    for name in CHECKS:
        with subtests.test(name):
            text = (EXAMPLES / name).read_text()
            assert text.startswith('"""')
            assert "What it shows: " in text
            assert f"python examples/{name}" in text
            assert len(text.splitlines()) < 100


NEEDS = {"12_hugging_face_lora.py": "transformers", "ray_train.py": "ray"}


@pytest.mark.alone
@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n.startswith("01_") else pytest.mark.soak) for n in CHECKS],
)
def test_an_example_shows_what_it_claims(tmp_path: Path, name: str) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    CHECKS[name](run([sys.executable, str(EXAMPLES / name)], tmp_path, **ray_runs.ENVIRON))
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
@pytest.mark.process
def test_the_plain_loop_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    example = str(EXAMPLES / "03_plain_pytorch.py")
    plain_pytorch(run([*torchrun, "--nproc-per-node=2", example], tmp_path))


def test_the_remote_plain_loop_says_how_to_run_it() -> None:
    text = (REMOTE / "plain_loop.py").read_text()
    assert "What it shows: " in text
    for processes in (3, 4):
        command = f"torchrun --nproc-per-node={processes} examples/remote_optimizer/plain_loop.py"
        assert command in text
    assert len(text.splitlines()) < 100


@pytest.mark.soak
@pytest.mark.process
def test_the_remote_plain_loop_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    example = str(REMOTE / "plain_loop.py")
    sums = []
    for processes, tiers in ((3, 2), (4, 3)):
        output = run([*torchrun, f"--nproc-per-node={processes}", example], tmp_path)
        assert f"{tiers} tiers: worker 0, worker 1, the aggregator" in output
        assert "all 2 workers have the same parameters: yes" in output
        first, last = numbers(f"loss {NUMBER} at first, {NUMBER} after 300 steps", output)
        assert last < first / 5
        sums += numbers(r"sum of the parameters: (-?\d+\.\d+)", output)
    assert sums[0] == sums[1]
    assert not list(tmp_path.iterdir())


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Return a checkout with an environment, and the variables of a job with two tasks."""
    return fake_cluster(tmp_path)


@pytest.mark.soak
@pytest.mark.process
def test_the_batch_script(tmp_path: Path, cluster: dict[str, str]) -> None:
    run(["bash", str(BATCH_SCRIPT)], tmp_path, **cluster, CHANGES=f"{TINY} trainer.max_steps=8")
    figures = json.loads((tmp_path / "outputs/slurm-123456-0/report.json").read_text())
    assert (figures["algorithm"], figures["num_workers"]) == ("DiLoCo", 2)
    assert figures["rounds"] == 1  # none after the last step


@pytest.mark.soak
@pytest.mark.process
def test_the_batch_script_whose_nodes_are_workers(tmp_path: Path, cluster: dict[str, str]) -> None:
    job = {**cluster, "SLURM_NNODES": "2", "SLURM_NTASKS": "4"}
    output = run(
        ["bash", str(BATCH_SCRIPT_OF_NODES)], tmp_path, **job, CHANGES=f"{TINY} trainer.max_steps=8"
    )
    assert "on 2 workers of 2 ranks each" in output
    figures = json.loads((tmp_path / "outputs/slurm-123456-0/report.json").read_text())
    assert (figures["num_workers"], figures["rounds"]) == (2, 1)


@pytest.mark.soak
@pytest.mark.process
def test_the_batch_script_goes_on_after_its_time_is_up(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    batch = ["bash", str(BATCH_SCRIPT)]
    when = "outputs/*/checkpoints/last.ckpt"
    changes = f"{TINY} trainer.max_steps=100000"
    run(batch, tmp_path, **cluster, CHANGES=changes, SIGNAL_WHEN_THERE_IS=when)
    assert (tmp_path / "scontrol.log").read_text() == "requeue 123456\n"
    saved = tmp_path / "outputs/slurm-123456-0/hpc_ckpt_1.ckpt"
    step = torch.load(saved)["global_step"]
    assert 10 <= step < 100000

    output = run(batch, tmp_path, **cluster, CHANGES=f"{TINY} trainer.max_steps={step + 8}")
    assert f"Restored all states from the checkpoint at {saved}" in output
    figures = json.loads((saved.parent / "report.json").read_text())
    assert figures["tokens"] == (step + 8) * 2 * 4 * 32
    assert figures["rounds"] == (step + 7) // 4


@pytest.mark.soak
@pytest.mark.process
def test_the_remote_batch_script_goes_on_after_its_time_is_up(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    batch = ["bash", str(REMOTE / "train.sbatch")]
    job = remote_job(cluster, tasks=4)
    changes = f"{TINY_STEPS} algorithm.num_workers=2"
    when = "outputs/*/checkpoints/last.ckpt"
    run(
        batch, tmp_path, **job, CHANGES=f"{changes} trainer.max_steps=100000",
        SIGNAL_WHEN_THERE_IS=when,
    )  # fmt: skip
    assert (tmp_path / "scontrol.log").read_text() == "requeue 123456\n"
    saved = tmp_path / "outputs/slurm-123456-0/hpc_ckpt_1.ckpt"
    step = torch.load(saved)["global_step"]
    assert 10 <= step < 100000

    output = run(batch, tmp_path, **job, CHANGES=f"{changes} trainer.max_steps={step + 8}")
    assert (
        "2 training ranks, 1 aggregator rank, 1 optimizer rank (3 tiers): ranks below 2 train"
        in output
    )
    assert f"Restored all states from the checkpoint at {saved}" in output
    figures = json.loads((saved.parent / "report.json").read_text())
    assert (figures["algorithm"], figures["num_workers"]) == ("RemoteOptimizer", 2)
    assert figures["tokens"] == (step + 8) * 2 * 4 * 32


def remote_job(cluster: dict[str, str], tasks: int) -> dict[str, str]:
    """Return the same job with more tasks."""
    return {**cluster, "SLURM_NTASKS": str(tasks), "SLURM_NTASKS_PER_NODE": str(tasks)}


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_of_the_elastic_array_is_preempted_and_returns(
    tmp_path: Path, cluster: dict[str, str], ranks: int
) -> None:
    pytest.importorskip("torchft")
    from tests.elastic.cluster import Lighthouse

    lighthouse = Lighthouse(1)
    batch = ["bash", str(EXAMPLES / "slurm" / "elastic_array.sbatch")]
    job = remote_job(cluster, tasks=ranks)
    del job["MASTER_PORT"]  # Lightning's port depends on the job
    environ = {
        "TORCHFT_LIGHTHOUSE": lighthouse.address,
        # The remaining one waits, however long the other one takes to start again.
        "CHANGES": f"{TINY} trainer.max_steps=200 trainer.log_every_n_steps=10 "
        "membership.min_workers=2",
    }
    first, second = ({**job, **environ, "SLURM_JOB_ID": number} for number in ("101", "102"))
    remaining = Program(batch, tmp_path, **second)
    try:
        with remaining:
            when = "outputs/slurm-101-0/checkpoints/last.ckpt"
            run(batch, tmp_path, **first, SIGNAL_WHEN_THERE_IS=when)
            assert (tmp_path / "scontrol.log").read_text() == "requeue 101\n"
            saved = tmp_path / "outputs/slurm-101-0/hpc_ckpt_1.ckpt"
            output = run(batch, tmp_path, **first)
            assert f"Restored all states from the checkpoint at {saved}" in output
            code, theirs = remaining.finish()
            assert code == 0, theirs
    finally:
        lighthouse.stop()
    reports = [tmp_path / f"outputs/slurm-{number}-0/report.json" for number in ("101", "102")]
    losses = [json.loads(report.read_text())["val_loss"] for report in reports]
    assert losses[0] == losses[1]


@pytest.mark.soak
@pytest.mark.process
def test_a_learner_of_the_array_is_preempted_and_returns(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    program, address = [sys.executable, str(COMMAND)], f"127.0.0.1:{free_ports()[0]}"
    batch = ["bash", str(EXAMPLES / "slurm" / "learners_array.sbatch")]
    job = {**remote_job(cluster, tasks=1), "SYNCER": address, "SLURM_ARRAY_TASK_ID": "3"}
    del job["MASTER_PORT"]  # Lightning's port depends on the job
    run([*program, "keys", "job.pem"], tmp_path)
    serve = ["syncer", "--folder=run", "--key-file=job.pem", "--bind", address]
    with Program([*program, *serve], tmp_path) as syncer:
        changes, when = f"{TINY} trainer.max_steps", "outputs/*/checkpoints/last.ckpt"
        run(batch, tmp_path, **job, CHANGES=f"{changes}=100000", SIGNAL_WHEN_THERE_IS=when)
        assert (tmp_path / "scontrol.log").read_text() == "requeue 123456\n"
        saved = tmp_path / "outputs/slurm-123456-0/hpc_ckpt_1.ckpt"
        step = torch.load(saved)["global_step"]
        output = run(batch, tmp_path, **job, CHANGES=f"{changes}={step + 8}")
        assert f"Restored all states from the checkpoint at {saved}" in output
        syncer.signal(signal.SIGTERM)
        code, log = syncer.finish()
    assert code == 0, log
    assert log.count("Learner w3 has joined; there are 1.") == 2
    assert log.count("Learner w3 has left; there are 0.") == 2


@pytest.mark.parametrize("script", [BATCH_SCRIPT, BATCH_SCRIPT_OF_NODES, REMOTE / "train.sbatch"])
def test_a_batch_script_asks_for_one_gpu_per_task(script: Path) -> None:
    settings = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), re.MULTILINE))
    assert settings["gpus-per-node"] == settings["ntasks-per-node"]
    assert settings["signal"].startswith("SIGUSR1@")


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("schedule", [[], ["--overlap"]])
def test_chaos_ends_well(tmp_path: Path, schedule: list[str]) -> None:
    pytest.importorskip("torchft")
    chaos = [sys.executable, str(EXAMPLES / "chaos" / "chaos.py"), "--rounds=60", *schedule]
    with Program([*chaos, "--kills=3", "--joins=3", "--sleeps=1"], tmp_path) as program:
        _, output = program.finish(limit_s=480)
    verdicts = dict(re.findall(r"^(.+?)  .* (ok|MISSED)$", output, re.MULTILINE))
    for name in ("ended by itself", "rounds lost", "rounds with different states"):
        assert verdicts[name] == "ok", output

"""LocoTrainerMixin: the numbers of a plain loop, one evaluated model, exact resumes, refusals."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_loco as loco
from tests.harness.pool import Pool, run_each
from tests.harness.programs import Program, free_ports
from tests.integrations import hugging_face_runs as runs
from tests.integrations.hugging_face_runs import METHODS, Watch, flat, join, make_trainer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


# ----------------------------------------------------------------------- same numbers


def both(rank: int, world: int, method: str, folder: str) -> tuple[Any, ...]:
    join(rank, world)
    watch = Watch()
    settings = {"lr_scheduler_type": "constant", "callbacks": [watch.callback()]}
    trainer = make_trainer(METHODS[method](), folder, **settings)
    trainer.is_sequential = True
    trainer.train()
    logs = trainer.state.log_history
    statistics = trainer.loco.statistics
    local = watch.seen["step"][-1]
    ends = flat(trainer.model), watch.seen["end"][0]
    return (local, *ends), runs.plain_loop(rank, world, METHODS[method]()), statistics.rounds, logs


def test_the_numbers_of_a_plain_loop(pool: Pool, tmp_path: Path) -> None:
    names = ["diloco", "async_diloco", "gasloc"]
    found = run_each(pool, both, {name: (name, str(tmp_path)) for name in names}, world=2)
    for name in names:
        rows = found[name]
        for (local, end, seen), (plain_local, plain_end), rounds, _ in rows:
            assert torch.equal(local, plain_local), name
            assert torch.equal(end, plain_end), name
            assert torch.equal(end, seen), name
            assert rounds >= 7
        assert not torch.equal(rows[0][0][0], rows[1][0][0])  # local gradients
    check_logs([row[3] for row in found["diloco"]])


def check_logs(logs: list[list[dict[str, Any]]]) -> None:
    """Each worker's loss and norm are its own, and the metrics of rounds are beside them."""
    first, second = ([one for one in log if "loss" in one] for log in logs)
    assert [one["step"] for one in first] == list(range(5, runs.STEPS + 1, 5))
    assert all(one["grad_norm"] != two["grad_norm"] for one, two in zip(first, second, strict=True))
    assert all(one["loss"] != two["loss"] for one, two in zip(first, second, strict=True))
    assert first[-1]["loco/round"] == 7
    assert first[-1]["loco/bytes_sent"] > 0
    assert first[-1]["loco/train_loss_mean"] == second[-1]["loco/train_loss_mean"]


# ---------------------------------------------------------------- the evaluated model


def evaluated(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    join(rank, world)
    watch = Watch()
    trainer = make_trainer(
        loco.DiLoCoStrategy(sync_every=4),
        folder,
        callbacks=[watch.callback()],
        eval_dataset=runs.data(8),
        max_steps=9,
        learning_rate=0.3,  # so that the last evaluation is not the best
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
    )
    trainer.train()
    losses = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
    best = trainer.state.best_model_checkpoint
    trainer.save_model(f"{folder}/own")
    after = trainer.evaluate()["eval_loss"]
    locals_ = [watch.seen["step"][step - 1] for step in (3, 6, 9)]
    return locals_, watch.seen["evaluation"], losses, best, flat(trainer.model), after


def test_one_evaluated_model(pool: Pool, tmp_path: Path) -> None:
    """It is evaluated, saved, chosen as the best one and left in the model."""
    first, second = pool.run(evaluated, str(tmp_path), world=2)
    saved = [runs.loaded(tmp_path / f"checkpoint-{step}") for step in (3, 6, 9)]
    for index, one in enumerate(saved):
        mean = (first[0][index] + second[0][index]) / 2
        torch.testing.assert_close(first[1][index], mean, rtol=0, atol=1e-15)
        assert torch.equal(first[1][index], second[1][index])
        assert torch.equal(first[1][index], one)
    losses, best = first[2:4]
    assert second[2:4] == (losses, best)
    index = losses.index(min(losses))
    assert index < 2  # the best one is not the last
    assert best == str(tmp_path / f"checkpoint-{3 * index + 3}")
    for found in (first, second):
        assert torch.equal(found[4], saved[index])
        assert math.isclose(found[5], losses[index])
    assert torch.equal(runs.loaded(tmp_path / "own"), saved[index])


def shown_otherwise(rank: int, world: int, folder: str) -> dict[str, Any]:
    """``evaluate`` and ``finalize`` of the strategy."""
    join(rank, world)
    found = {}
    for name in ("local", "outer"):
        watch = Watch()
        method = loco.DiLoCoStrategy(sync_every=4, evaluate=name, finalize="keep", summary=False)
        settings = {"eval_strategy": "steps", "eval_steps": 6, "max_steps": 6}
        trainer = make_trainer(
            method,
            f"{folder}/{name}",
            callbacks=[watch.callback()],
            eval_dataset=runs.data(8),
            save_strategy="steps",
            **settings,
        )
        trainer.train()
        found[name] = watch.seen["step"][-1], watch.seen["evaluation"][-1], flat(trainer.model)
    return found


def test_other_evaluated_models(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(shown_otherwise, str(tmp_path), world=2)
    for found in (first, second):
        local, shown, end = found["local"]
        assert torch.equal(local, shown)
        assert torch.equal(local, end)
    mean = (first["local"][0] + second["local"][0]) / 2
    torch.testing.assert_close(runs.loaded(tmp_path / "local/checkpoint-6"), mean)
    assert torch.equal(first["outer"][1], second["outer"][1])
    assert not torch.equal(first["outer"][1], first["outer"][0])
    assert torch.equal(runs.loaded(tmp_path / "outer/checkpoint-6"), first["outer"][1])


def other_methods(rank: int, world: int, folder: str) -> list[tuple[Tensor, int, int]]:
    join(rank, world)
    found = []
    for name in ("async_average", "pairwise_gossip", "decoupled"):
        trainer = make_trainer(METHODS[name](), folder, max_steps=20)
        trainer.train()
        statistics = trainer.loco.statistics
        found.append((flat(trainer.model), statistics.rounds, statistics.bytes_sent))
    return found


@pytest.mark.recovery
def test_methods_that_follow_the_clock(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(other_methods, str(tmp_path), world=2)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one[0], two[0])
        assert min(one[2], two[2]) > 0


# -------------------------------------------------------------------------- resuming


def resume(rank: int, world: int, method: str, folder: str) -> tuple[Any, ...]:
    """With dropout and shuffled data; in the second epoch, within a round."""
    join(rank, world)
    settings: dict[str, Any] = {"max_steps": 26, "save_strategy": "steps", "save_steps": 8}
    watch = Watch()
    callbacks = [watch.callback()]
    model = runs.gpt2(0.1)
    trainer = make_trainer(METHODS[method](), folder, model=model, callbacks=callbacks, **settings)
    trainer.train()
    whole = watch.seen["step"], flat(trainer.model)
    watch.seen.clear()
    model = runs.gpt2(0.1)
    trainer = make_trainer(METHODS[method](), folder, model=model, callbacks=callbacks, **settings)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-16")
    return whole, (watch.seen["step"], flat(trainer.model))


@pytest.mark.recovery
def test_a_run_resumes_exactly(pool: Pool, tmp_path: Path) -> None:
    rows = {name: (name, str(tmp_path / name)) for name in list(METHODS)[:4]}
    for name, found in run_each(pool, resume, rows, world=2).items():
        for (steps, end), (resumed, resumed_end) in found:
            assert len(steps) == 26
            assert all(map(torch.equal, steps[16:], resumed)), name
            assert len(resumed) == 10
            assert torch.equal(end, resumed_end), name


def choose(rank: int, world: int, folder: str) -> tuple[list[str], list[str], int]:
    join(rank, world)
    settings: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2}
    make = METHODS["diloco"]
    make_trainer(make(), folder, **settings, save_total_limit=3).train()
    names = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    torch.distributed.barrier()
    if rank == 0:  # as if the processes had been killed while these were saved
        Path(folder, "checkpoint-8/trainer_state.json").write_text("{")
        (side,) = Path(folder, "checkpoint-6").rglob("worker_00001.pt")
        side.unlink()
    torch.distributed.barrier()
    errors = []
    for name in ("checkpoint-8", "checkpoint-6", "checkpoint-5"):
        trainer = make_trainer(make(), folder, **settings)
        with pytest.raises(ValueError, match="checkpoint-") as raised:
            trainer.train(resume_from_checkpoint=f"{folder}/{name}")
        errors.append(str(raised.value))
    trainer = make_trainer(make(), folder, **settings)
    with pytest.warns(UserWarning, match="is not complete and is left out") as warned:
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    return names, errors, len(warned)


@pytest.mark.recovery
def test_only_complete_checkpoints_are_used(pool: Pool, tmp_path: Path) -> None:
    for names, errors, _ in pool.run(choose, str(tmp_path), world=2):
        assert names == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
        assert "trainer_state.json" in errors[0]
        assert "worker_00001.pt" in errors[1]
        assert "no such folder" in errors[2]
        assert all("checkpoint-4" in error for error in errors)


def stop(rank: int, world: int, folder: str, on: int) -> tuple[int, list[str], str]:
    join(rank, world)
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5 and rank == on:
                os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    settings = {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": runs.data(8)}
    trainer = make_trainer(METHODS["diloco"](), folder, callbacks=[Stop()], **settings)
    trainer.train()
    assert signal.getsignal(signal.SIGTERM) is handler
    saved = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return trainer.state.global_step, saved, str(flat(trainer.model).sum().item())


@pytest.mark.recovery
@pytest.mark.parametrize("on", [0, 1])
def test_sigterm_stops_all_workers_at_one_step(pool: Pool, tmp_path: Path, on: int) -> None:
    first, second = pool.run(stop, str(tmp_path), on, world=2)
    assert first == second
    assert 6 <= first[0] < runs.STEPS
    assert first[1] == [f"checkpoint-{first[0]}"]


def fail(rank: int, world: int, folder: str) -> str:
    join(rank, world)
    rows: Any = runs.data()
    if rank == 1:
        rows[100] = {"input_ids": torch.tensor([99]), "labels": torch.tensor([99])}
    trainer = make_trainer(METHODS["diloco"](), folder, train_dataset=rows)
    with pytest.raises((IndexError, RuntimeError)) as raised:
        trainer.train()
    return str(raised.value)


@pytest.mark.recovery
def test_an_error_of_one_worker_ends_the_others(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(fail, str(tmp_path), world=2)
    assert "worker 1" in first.lower()
    assert second


def launch(folder: Path, method: str, kill_at: int, *options: str) -> list[str]:
    """Return the command that trains with two processes."""
    (port,) = free_ports(1)
    launcher = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    if options:
        launcher = ["accelerate.commands.accelerate_cli", "launch", f"--main_process_port={port}"]
    program = ["-m", "tests.integrations.hugging_face_runs", str(folder), method, str(kill_at)]
    return [sys.executable, "-m", *launcher, *options, *program]


@pytest.mark.process
def test_a_killed_job_of_torchrun_resumes_exactly(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    code, _ = Program(launch(tmp_path / "killed", "one_round_late", 14), root).finish()
    assert code != 0
    again = Program(launch(tmp_path / "killed", "one_round_late", 0), root).succeed()
    assert "trained 20 steps, resumed True" in again
    Program(launch(tmp_path / "whole", "one_round_late", 0), root).succeed()
    ends = [torch.load(tmp_path / name / "end.pt") for name in ("killed", "whole")]
    assert torch.equal(*ends)


@pytest.mark.process
def test_accelerate_launch(tmp_path: Path) -> None:
    # As with GPUs: for CPUs alone it needs mpirun to start several processes.
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    options += ["--dynamo_backend=no"]
    root = Path(__file__).parents[2]
    output = Program(launch(tmp_path, "diloco", 0, *options), root).succeed()
    assert "on 2 workers" in output
    assert json.loads((tmp_path / "checkpoint-20/trainer_state.json").read_text())


# -------------------------------------------------------------------------- TRL, PEFT


def fine_tune(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    """SFTTrainer with adapters of PEFT, resumed."""
    join(rank, world)
    warnings.simplefilter("ignore")  # TRL uses what transformers will drop
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from lightning_loco.integrations.huggingface import LocoTrainerMixin

    class MyTrainer(LocoTrainerMixin, SFTTrainer):
        pass

    rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in runs.data(64)])
    ends = []
    for is_resumed in (False, True):
        args = SFTConfig(
            folder,
            max_steps=12,
            per_device_train_batch_size=2,
            learning_rate=0.01,
            logging_steps=3,
            save_steps=6,
            eval_strategy="steps",
            eval_steps=6,
            **runs.quiet(),
            bf16=False,
        )
        trainer = MyTrainer(
            runs.llama(),
            args,
            processing_class=runs.tokenizer(),
            train_dataset=rows,
            eval_dataset=rows.select(range(8)),
            peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
            loco=loco.DiLoCoStrategy(sync_every=4),
        )
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-6" if is_resumed else None)
        trained = {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}
        assert all("lora" in name for name in trained)
        sent = trainer.loco.statistics.bytes_sent
        ends.append((trained, sent, trainer.state.log_history))
        torch.distributed.barrier()
    return tuple(ends)


@pytest.mark.recovery
def test_adapters_with_trl(pool: Pool, tmp_path: Path) -> None:
    (whole, resumed), (other, _) = pool.run(fine_tune, str(tmp_path), world=2, timeout_s=180.0)
    trained, sent, logs = whole
    numel = sum(p.numel() for p in trained.values())
    # Two rounds, two evaluations and the end: nothing but adapters.
    assert sent < 12 * 4 * numel
    for name, parameter in trained.items():
        assert torch.equal(parameter, other[0][name])
        assert torch.equal(parameter, resumed[0][name])
    assert any("mean_token_accuracy" in one and "loco/round" in one for one in logs)
    assert (tmp_path / "checkpoint-12/adapter_model.safetensors").exists()
    assert not (tmp_path / "checkpoint-12/model.safetensors").exists()


# -------------------------------------------------------------------------- wrong uses


def refused(rank: int, world: int, folder: str) -> dict[str, str]:
    """Return the text of each error by what was wrong."""
    join(rank, world)
    from lightning.pytorch.strategies import DDPStrategy
    from transformers import Trainer, TrainerCallback

    from lightning_loco.integrations.huggingface import LocoCallback, LocoTrainerMixin

    found: dict[str, str] = {}

    def note(name: str, make: Any) -> None:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
            make()
        found[name] = str(raised.value)

    method = METHODS["diloco"]

    def with_method(given: Any) -> Any:
        return lambda: make_trainer(given, folder)

    def with_arguments(**settings: Any) -> Any:
        return lambda: make_trainer(method(), folder, **settings)

    note("no loco", with_method(None))
    note("Lightning's", with_method(DDPStrategy()))
    note("algorithm", with_method(loco.DiLoCo()))
    note("class", with_method(loco.DiLoCoStrategy))
    note("remote", with_method(loco.RemoteOptimizerStrategy()))
    note("sharded", with_method(loco.LocoModelParallelStrategy()))
    note("replicas", with_method(loco.DiLoCoStrategy(replica_size=2)))
    note("private", with_method(loco.DiLoCoStrategy(checkpoint_folder="private")))
    note("members", with_method(loco.DiLoCoStrategy(membership=loco.Elastic("localhost:1"))))
    note("backend", with_method(loco.DiLoCoStrategy(process_group_backend="gloo")))
    note("uneven", with_method(loco.DiLoCoStrategy(sync_every=[4, 8])))
    note("batch size", with_arguments(auto_find_batch_size=True))
    note("dispatched", with_arguments(accelerator_config={"dispatch_batches": True}))
    wrapped = torch.nn.parallel.DistributedDataParallel(runs.gpt2())
    note("DDP", with_arguments(model=wrapped))
    note("FSDP", with_arguments(fsdp="full_shard"))
    callback = LocoCallback(method())
    note("no mixin", lambda: Trainer(runs.gpt2(), runs.arguments(folder), callbacks=[callback]))
    note("twice", with_arguments(callbacks=[LocoCallback(method())]))
    note("order", lambda: type("Wrong", (Trainer, LocoTrainerMixin), {}))

    class Counts(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.loco.participant.count_step()

    trainer = make_trainer(method(), folder, callbacks=[Counts()])
    note("counted twice", trainer.train)
    trainer = make_trainer(None, folder, callbacks=[LocoCallback(method())], max_steps=1)
    trainer.train()  # the other way to give the method
    os.environ["WORLD_SIZE"] = "3"
    note("alone", lambda: make_trainer(method(), folder))
    return found


EXPECTED = {
    "no loco": "class MyTrainer(LocoTrainerMixin, Trainer): pass",
    "Lightning's": "DiLoCoStrategy(sync_every=100)",
    "algorithm": "LocoStrategy(algorithm, sync_every=100)",
    "class": "DiLoCoStrategy(sync_every=100)",
    "remote": "RemoteOptimizerStrategy",
    "sharded": "LocoModelParallelStrategy",
    "replicas": "replica_size",
    "private": "checkpoint_folder",
    "members": "membership",
    "backend": "backend",
    "uneven": "Use one number",
    "batch size": "auto_find_batch_size",
    "dispatched": "dispatch_batches",
    "DDP": "MyTrainer(model.module, ...)",
    "FSDP": "FSDP divides the model",
    "no mixin": "class MyTrainer(LocoTrainerMixin, Trainer): pass",
    "twice": "Leave LocoCallback out of callbacks",
    "order": "class MyTrainer(LocoTrainerMixin, Trainer): pass",
    "counted twice": "once for all batches of gradient_accumulation_steps",
    "alone": "use_cpu=True",
}


def test_wrong_uses_name_the_line(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(refused, str(tmp_path), world=2)
    assert first.keys() == second.keys() == EXPECTED.keys()
    for name, text in EXPECTED.items():
        assert text in first[name], name
        assert text in second[name], name

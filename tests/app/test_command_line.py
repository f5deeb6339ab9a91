"""The command line: from a configuration to a finished run, and its error messages."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from lightning_loco import __version__
from lightning_loco.app import command_line, launch
from lightning_loco.app import run as cli
from lightning_loco.report.record import RunRecord

ROOT = Path(__file__).resolve().parents[2]
RANK_ZERO_LOG = logging.getLogger("lightning.pytorch.utilities.rank_zero")
SMOKE = (
    "experiment=smoke",
    "trainer.max_steps=20",
    "trainer.val_check_interval=10",
    "trainer.devices=1",
    "trainer.enable_progress_bar=false",
)


@pytest.fixture
def conf() -> Iterator[None]:
    with initialize_config_dir(command_line.conf_dir(), version_base="1.3"):
        yield


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the process state that a run changes; outside of tests a run has its own process."""
    monkeypatch.setenv(
        "LOCAL_RANK", "0"
    )  # starts no other processes, and no thread that monitors them
    num_threads, filters = torch.get_num_threads(), list(RANK_ZERO_LOG.filters)
    yield
    torch.set_num_threads(num_threads)
    RANK_ZERO_LOG.filters[:] = filters
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def config(run_dir: Path, *overrides: str) -> DictConfig:
    return compose("train", [*SMOKE, f"run_dir={run_dir}", *overrides])


def command(
    *overrides: str, cwd: Path, timeout_s: float = 300, **env: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *overrides],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.usefixtures("conf", "process")
class TestRun:
    def test_a_run_returns_the_loss_and_writes_a_report(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        loss = cli.run(config(tmp_path, "sample=true", "sample_bytes=20", "per_worker_logs=true"))
        figures = json.loads((tmp_path / "report.json").read_text())
        assert figures["val_loss"] == loss
        assert 2 < loss < 5.6
        assert figures["algorithm"] == "GASLoC"
        assert figures["topology"] == "ring"
        assert figures["tokens"] == 20 * 4 * 32
        assert figures["rounds"] == 1
        table = (tmp_path / "report.txt").read_text()
        assert table in capsys.readouterr().out
        assert (tmp_path / "sample.txt").read_bytes().startswith(b"def ")
        assert len((tmp_path / "sample.txt").read_bytes()) == 24
        assert (tmp_path / "checkpoints/last.ckpt").exists()
        assert (tmp_path / "workers/worker_00000.csv").exists()
        record = RunRecord.load(tmp_path)
        (validation,) = record.of_kind("validation")
        assert validation.points[-1][0] == record.numbers["local steps"] == 20
        assert validation.points[-1][3] == pytest.approx(loss, rel=1e-6)
        assert record.settings["algorithm"]["sync_every"] == 10
        assert "<h2>Loss</h2>" in (tmp_path / "report.html").read_text()

    @pytest.mark.recovery
    @pytest.mark.filterwarnings("ignore:The dirpath has changed")
    def test_a_resumed_run_equals_an_uninterrupted_one(self, tmp_path: Path) -> None:
        whole = cli.run(config(tmp_path / "whole"))
        saving = (
            "callbacks.checkpoint.monitor=null",
            "callbacks.checkpoint.every_n_train_steps=13",
            "callbacks.checkpoint.save_last=false",
        )
        cli.run(config(tmp_path / "first", *saving))
        broken_off = tmp_path / "first/checkpoints/step-13.ckpt"
        resumed = cli.run(config(tmp_path / "second", *saving, f"ckpt_path={broken_off}"))
        assert resumed == whole

    def test_the_baseline_runs_in_the_same_harness(self, tmp_path: Path) -> None:
        assert cli.run(config(tmp_path, "algorithm=ddp", "test=true")) > 2
        figures = json.loads((tmp_path / "report.json").read_text())
        assert (figures["algorithm"], figures["rounds"]) == ("DDP", 20)

    def test_gossip_without_rounds_is_reported(self, tmp_path: Path) -> None:
        """A single worker has no peer to fetch from, and DDP would count 20 steps."""
        without = "callbacks.consensus=null", "logger=none"
        cli.run(config(tmp_path, "algorithm=pairwise_gossip", *without))
        figures = json.loads((tmp_path / "report.json").read_text())
        found = [figures[key] for key in ("algorithm", "rounds", "bytes_sent", "tokens")]
        assert found == ["PairwiseGossip", 0, 0, 20 * 4 * 32]

    def test_without_callbacks(self, tmp_path: Path) -> None:
        assert cli.run(config(tmp_path, "callbacks=none", "report=false", "num_threads=1")) > 2
        assert not (tmp_path / "report.html").exists()

    def test_settings_that_cannot_work(self, tmp_path: Path, subtests: pytest.Subtests) -> None:
        rows = [
            ("model.num_heads=3", "model: width must be a multiple of num_heads"),
            ("+model.wdth=3", "model: .* unexpected keyword argument 'wdth'"),
            ("data=text", "data.path has no value. Add data.path=VALUE."),
            ("data.batch_size=0", "data: data.batch_size must be at least 1, got 0"),
            ("data.batch_size=10000", "data: The text has 200000 bytes"),
            ("trainer.precision=13", "trainer: Precision 13 is invalid"),
            ("callbacks.consensus.every_n_rounds=0", "callbacks: .*at least 1"),
            (
                "+callbacks.mine._target_=builtins.list",
                "callbacks: callbacks.mine._target_ must make a Callback of lightning.pytorch, got "
                "builtins.list. In your code import lightning.pytorch, not pytorch_lightning.",
            ),
            ("model._target_=builtins.dict", "model: model._target_ must make a LightningModule"),
            ("num_threads=0", "num_threads: num_threads must be at least 1, got 0"),
            ("ckpt_path=nowhere.ckpt", "ckpt_path: there is no checkpoint at .*nowhere.ckpt"),
            ("trainer.max_steps=-1", "The cosine schedule needs to know when training ends"),
        ]
        for number, (override, message) in enumerate(rows):
            with subtests.test(override):
                with pytest.raises(cli.SettingsError, match=message) as caught:
                    cli.run(config(tmp_path / str(number), override))
                assert "\n" not in str(caught.value)

    def test_the_error_lists_the_disks_of_all_workers(self, tmp_path: Path) -> None:
        private = ("algorithm.checkpoint_folder=private", "ckpt_path=nowhere.ckpt")
        with pytest.raises(ValueError, match="nowhere.ckpt that all .* disks: worker 0 has none"):
            cli.run(config(tmp_path, *private))

    def test_several_machines_need_a_launcher(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        several = ("trainer.devices=2", "trainer.num_nodes=2")
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        monkeypatch.delenv("MASTER_PORT", raising=False)
        for algorithm in ("diloco", "ddp", "remote_optimizer"):
            with pytest.raises(cli.SettingsError, match="on each with torchrun --nnodes=2"):
                cli.run(config(tmp_path, f"algorithm={algorithm}", *several))
        monkeypatch.setenv("MASTER_PORT", "29500")
        with pytest.raises(cli.SettingsError, match="MASTER_ADDR, MASTER_PORT and NODE_RANK"):
            cli.run(config(tmp_path, *several))
        monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
        cli.check_machines(cli.build_trainer(config(tmp_path, *several), Timer()))

    def test_the_number_of_workers_is_checked_before_others_are_started(
        self, tmp_path: Path
    ) -> None:
        with pytest.raises(cli.SettingsError, match="needs a power of two workers, got 6"):
            cli.run(config(tmp_path, "topology=hypercube", "trainer.devices=6"))

    def test_the_number_of_ranks_is_checked_before_others_are_started(self, tmp_path: Path) -> None:
        """Also without ``checked``, for cases in which only Lightning knows the number of ranks."""
        for override, message in (
            ("algorithm.replica_size=4", "replica_size=4 does not divide the 6 ranks"),
            ("algorithm.replica_size=2", "needs a power of two workers, got 3"),
        ):
            with pytest.raises(cli.SettingsError, match=message):
                cli.run(config(tmp_path, "topology=hypercube", "trainer.devices=6", override))

    def test_workers_with_different_numbers_of_steps_validate_at_the_ends_of_epochs(
        self, tmp_path: Path
    ) -> None:
        pace = ("trainer.devices=2", "algorithm.sync_every=[5,10]")
        with pytest.raises(cli.SettingsError, match="Use trainer.check_val_every_n_epoch=1"):
            cli.run(config(tmp_path, *pace))

    def test_an_error_in_a_run_keeps_its_traceback(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise ValueError("a fault")

        monkeypatch.setattr("lightning_loco.app.demo.model.ByteGPT.loss", fail)
        with pytest.raises(ValueError, match="a fault") as caught:
            cli.run(config(tmp_path))
        assert not isinstance(caught.value, cli.SettingsError)


class TestOneLine:
    def test_lightnings_settings_errors_become_one_line(self) -> None:
        with (
            pytest.raises(cli.SettingsError, match="^trainer: two lines$"),
            cli.errors_for("trainer"),
        ):
            raise MisconfigurationException("two\n  lines")

    def test_other_errors_pass(self) -> None:
        with pytest.raises(RuntimeError, match="a fault"), cli.errors_for("trainer"):
            raise RuntimeError("a fault")

    def test_an_error_without_text_is_named(self) -> None:
        assert cli.one_line(ValueError()) == "ValueError"


class TestChoices:
    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            (
                "algorithm=gaslc",
                "algorithm=gaslc: no such algorithm. Did you mean algorithm=gasloc?",
            ),
            (
                "algorithm=async",
                "algorithm=async: no such algorithm. Did you mean algorithm=async_diloco or "
                "algorithm=async_model_average?",
            ),
            (
                "algorithm=model_average",
                "algorithm=model_average: no such algorithm. Did you mean "
                "algorithm=async_model_average?",
            ),
            ("topology=rng", "topology=rng: no such topology. Did you mean topology=ring?"),
            (
                "+compression=in8",
                "compression=in8: no such compression. Did you mean compression=int8",
            ),
            ("trainer=zzz", "trainer=zzz: no such trainer.\nThere are cpu, fsdp, gpu, slurm."),
            (
                "algorithm=ddp,dilco",
                "algorithm=dilco: no such algorithm. Did you mean algorithm=dilo",
            ),
            ("algoritm=diloco", "algoritm is no setting. Did you mean algorithm=...?"),
            ("callbacks=null", "callbacks=null: no such callbacks. Did you mean callbacks=none?"),
            ("logger=false", "logger=false: no such logger. Did you mean logger=none?"),
            ("topology=", "topology=: no such topology. Did you mean topology=none?"),
            ("logger=[csv,wadb]", "logger=wadb: no such logger. Did you mean logger=wandb?"),
        ],
    )
    def test_unknown_ones_are_named_with_all_choices(self, argument: str, message: str) -> None:
        found = command_line.unknown_choice(["--multirun", "seed=1", argument])
        assert found is not None
        assert found.startswith(message)
        assert len(found.splitlines()) <= 2

    @pytest.mark.parametrize(
        "arguments",
        [
            [
                "experiment=null",
                "seed=3",
                "+data.more=1",
                "algorithm.sync_every=[1,2]",
            ],
            ["--cfg", "job", "hydra/launcher=basic", "experiment=[demo,smoke]", "++width=64"],
            ["--config-name=mine", "flavour=mild"],
            ["hydra.searchpath=[file:///mine]", "model=mine"],
        ],
    )
    def test_what_may_exist_is_checked_by_hydra(self, arguments: list[str]) -> None:
        assert command_line.unknown_choice(arguments) is None

    def test_keys_that_an_experiment_adds_are_known(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        conf = tmp_path / "conf"
        shutil.copytree(command_line.conf_dir(), conf)
        monkeypatch.setattr(command_line, "conf_dir", lambda: str(conf))
        wide = "# @package _global_\nwidth: 8\nmodel: {width: '${width}', depth: 1}"
        (conf / "experiment" / "wide.yaml").write_text(wide, encoding="utf-8")
        assert command_line.unknown_choice(["experiment=wide", "width=512"]) is None
        assert command_line.unknown_setting(["experiment=wide", "model.depth=2"]) is None
        assert command_line.unknown_choice(["experiment=wide", "widht=512"]) == (
            "widht is no setting. Did you mean width=...?"
        )

    def test_choices_of_the_user_are_known(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model/mine.yaml").touch()
        assert command_line.unknown_choice([f"--config-dir={tmp_path}", "model=mine"]) is None
        found = command_line.unknown_choice(["--config-dir", str(tmp_path), "model=mien"])
        assert found is not None
        assert found.endswith("Did you mean model=mine?\nThere are gpt, mine.")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                "algorithm=diloco algorithm.sync_evry=5",
                "algorithm.sync_evry is no setting of algorithm=diloco. Did you mean "
                "algorithm.sync_every? To pass it on, write +algorithm.sync_evry=...",
            ),
            (
                "algorithm.interval_s=1",
                "algorithm.interval_s is no setting of algorithm=gasloc. To pass it on, write",
            ),
            (
                "--multirun algorithm=gasloc,diloco algorithm.momentum=0",
                "algorithm.momentum is no setting of algorithm=diloco. Did you mean algorithm.",
            ),
            ("topology.rows=2", "topology.rows: topology=none has no settings. Add topology=NAME."),
            ("link.mbit_per_s=2", "link.mbit_per_s: link=none has no settings. Add link=NAME."),
            (
                "model.widht=8",
                "model.widht is no setting of model=gpt. Did you mean model.width?",
            ),
            ("data.pth=a", "data.pth is no setting of data=stdlib. Did you mean data.path?"),
            (
                "algorithm.static_graph=true",
                "algorithm.static_graph is no setting of algorithm=gasloc. To pass it on, write "
                "+algorithm.static_graph=...",
            ),
            ("algorithm.compression=int8", "compression is another group: write compression="),
            (
                "algorithm.link.mbit_per_s=5",
                "link is another group: write link.mbit_per_s=5.",
            ),
            (
                "num_workers=4 algorithm.num_workers=4",
                "algorithm.num_workers is no setting of algorithm=gasloc.",
            ),
            (
                "trainer.max_step=3",
                "trainer.max_step is no setting of trainer=cpu. Did you mean trainer.max_steps? To "
                "pass it on, write +trainer.max_step=...",
            ),
            ("trainer=fsdp trainer.max_step=3", "trainer.max_step is no setting of trainer=fsdp."),
            (
                "callbacks.checkpoint.monitr=x",
                "callbacks.checkpoint.monitr is no setting of callbacks=default. Did you mean "
                "callbacks.checkpoint.monitor?",
            ),
            (
                "callbacks=none callbacks.checkpoint.monitor=x",
                "callbacks.checkpoint.monitor: callbacks=none has no settings.",
            ),
            ("logger.csv.nam=x", "logger.csv.nam is no setting of logger=csv. Did you mean"),
            ("simulation.max_step=3", "simulation.max_step is no setting of simulation. Did you"),
            ("trainr.max_steps=3", "trainr is no setting. Did you mean trainer.max_steps=3?"),
            (
                "algorithm.membership=elastic",
                "membership is another group: write membership=elastic.",
            ),
            (
                "experiment=dpwa algorithm.fetch_timeout=3",
                "algorithm.fetch_timeout is no setting of algorithm=pairwise_gossip. Did you mean "
                "algorithm.fetch_timeout_s?",
            ),
            (
                "experiment=smoke algorithm=diloco algorithm.gossip_step=1",
                "algorithm.gossip_step is no setting of algorithm=diloco.",
            ),
        ],
    )
    def test_unknown_settings_are_named(self, arguments: str, message: str) -> None:
        found = command_line.unknown_setting(arguments.split())
        assert found is not None
        assert found.startswith(message)

    @pytest.mark.parametrize(
        "arguments",
        [
            "algorithm=diloco algorithm.sync_every=5 +trainer.deterministic=true +algorithm.new=1",
            "callbacks.consensus=null logger=csv_tensorboard logger.tensorboard.name=a hydra.x.y=1",
            "+callbacks.mine._target_=a.Mine callbacks.mine.a=3 trainer=fsdp trainer.devices=2",
            "algorithm=diloco algorithm.outer_lr.start=1 topology=torus topology.rows=2",
            "experiment=sparse compression.k=8",
            "experiment=smoke trainer.devices=4 trainer.val_check_interval=5",
            "experiment=mine algorithm.own=1",
            "experiment=null algorithm.sync_every=5",
            "--config-dir=mine algorithm=mine algorithm.own=1",
            "algorithm=mine algorithm.own=1",
            "--multirun algorithm=choice(diloco,gasloc) algorithm.nesterov=false",
            "topology._target_=mine.Ring",
            "link=wan link.mbit_per_s=10 simulate=true",
            "algorithm=remote_optimizer algorithm.bucket_bytes=8",
            "model.width=64 data=stdlib data.batch_size=2 data=text data.path=a",
        ],
    )
    def test_settings_that_may_exist_are_checked_by_hydra(self, arguments: str) -> None:
        assert command_line.unknown_setting(arguments.split()) is None

    def test_values_that_hydra_cannot_read_are_named(self) -> None:
        for value in ("a=b.ckpt", "数据.ckpt", "it's.ckpt"):
            said = command_line.unreadable_value(["--cfg", "job", "seed=1", f"ckpt_path={value}"])
            assert said is not None
            assert said.startswith(f"ckpt_path={value} cannot be read. If the value is text,")
            quoted = shlex.split(said.partition("quote it twice: ")[2])
            assert command_line.unreadable_value(quoted) is None
        several = ["algorithm.sync_every=[1,2]", "~callbacks.consensus", "--config-dir=a=b"]
        more = [*several, "seed=range(3)", "data.path=my text"]
        assert command_line.unreadable_value(more) is None

    @pytest.mark.parametrize("program", ["train", "command"])
    def test_text_that_the_terminal_cannot_show_is_no_error(
        self, program: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shown = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
        monkeypatch.setattr(sys, "argv", [program, "--version"])
        with contextlib.suppress(SystemExit):
            importlib.import_module(program).main()
        print("\ufffd", flush=True)
        assert shown.getvalue().endswith(b"\\ufffd\n")

    @pytest.mark.parametrize(("name", "meant"), [("plann", "plan"), ("docter", "doctor")])
    def test_a_misspelt_command_is_named(
        self,
        name: str,
        meant: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["lightning-loco", name, "--workers", "3"])
        with pytest.raises(SystemExit):
            importlib.import_module("command").main()
        said = capsys.readouterr().err
        assert f"error: there is no command {name}. Did you mean {meant}? There are " in said

    def test_help_names_the_program_that_is_installed(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """In a wheel the module has another name, and conf/ is in the package."""
        for file, expected, other in (
            ("train.py", "python train.py ", "lightning-loco-train "),
            ("lightning-loco-train", "lightning-loco-train ", "train.py "),
        ):
            monkeypatch.setattr(sys, "argv", [file, "--help"])
            with pytest.raises(SystemExit):
                command_line.main()
            said = capsys.readouterr().out
            assert f"  {expected}" in said
            assert other not in said
            assert "algorithm: async_diloco, " in said  # not the parts that they share
            assert f"GROUP/NAME.yaml of {os.path.relpath(ROOT / 'conf')}," in said

    @pytest.mark.parametrize("program", ["train", "command"])
    def test_the_version_needs_no_slow_imports(
        self, program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", [program, "--version"])
        with contextlib.suppress(SystemExit):
            importlib.import_module(program).main()
        said = capsys.readouterr().out
        assert re.fullmatch(rf"lightning-loco {__version__} \(.*torch .*, lightning .*\)\n", said)


class TestLaunchers:
    def test_no_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_JOB_ID"):
            monkeypatch.delenv(name, raising=False)
        assert launch.outer_launch() is None
        assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", command_line.run_stamp())

    def test_torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setenv("WORLD_SIZE", "6")
        assert launch.outer_launch() == ("torchrun", 2, 3)
        assert command_line.run_stamp() == "torchrun-abc"
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert command_line.run_stamp() == command_line.parent_start().strftime("%Y-%m-%d/%H-%M-%S")

    @pytest.mark.parametrize("local", ["2", "1"])
    def test_torchrun_with_other_numbers_of_processes_is_refused_on_every_machine(
        self, local: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
        monkeypatch.setenv("WORLD_SIZE", "3")
        with pytest.raises(ValueError, match=f"{local} processes on this machine, and 3 on 2 mach"):
            launch.outer_launch()

    def test_slurm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"NTASKS": "8", "NNODES": "2", "JOB_ID": "17", "STEP_ID": "1"}.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        monkeypatch.setenv("SLURM_JOB_NAME", "train")
        assert launch.outer_launch() == ("SLURM", 4, 2)
        assert command_line.run_stamp() == "slurm-17-1"
        monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
        assert launch.outer_launch() is None
        assert "slurm" not in command_line.run_stamp()

    def test_the_parent_has_started_earlier(self) -> None:
        assert command_line.parent_start() <= datetime.now()
        assert command_line.parent_start() == command_line.parent_start()

    def test_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        assert command_line.rank() == 0
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("RANK", "5")
        assert command_line.rank() == 5


@pytest.mark.process
class TestCommand:
    @pytest.mark.alone
    @pytest.mark.parametrize("arguments", [("--help",), ("--cfg", "job", "algorithm=diloco")])
    def test_help_and_configuration_are_fast(
        self, tmp_path: Path, arguments: tuple[str, ...]
    ) -> None:
        start = time.monotonic()
        done = command(*arguments, cwd=tmp_path)
        assert time.monotonic() - start < 10
        assert done.returncode == 0
        assert "sync_every: 10" in done.stdout
        assert not list(tmp_path.iterdir())

    def test_they_import_nothing_heavy(self, tmp_path: Path) -> None:
        code = f"""if True:
            import sys
            sys.path.insert(0, {str(ROOT)!r})
            import train
            sys.argv[1:] = ["--version"]
            train.main()
            print(*sys.modules)
        """
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert not {"torch", "lightning"} & set(done.stdout.splitlines()[-1].split())

    def test_values_are_checked_before_lightning_is_imported(
        self, tmp_path: Path, subtests: pytest.Subtests
    ) -> None:
        rows = [
            ("algorithm.sync_every=-3", "error: algorithm: sync_every counts"),
            (
                "trainer.devices=6 topology=hypercube",
                "error: algorithm: Topology 'hypercube'",
            ),
            ("algorithm=diloco topology=ring", "error: algorithm: DiLoCo has no neighbours"),
            ("compression=int8 compression.block=0", "error: compression: block counts values"),
            ("link=wan link.mbit_per_s=-1", "error: link: mbit_per_s of a link"),
            ("algorithm=streaming_diloco algorithm.mix=3", "error: algorithm: mix is the share"),
            ("algorithm.timeout_s=0", "error: algorithm: timeout_s must be positive"),
            ("algorithm.replica_size=0", "error: algorithm: replica_size is the number"),
            (
                "trainer.devices=4 algorithm.replica_size=3",
                "error: algorithm: replica_size=3 does not divide the 4 ranks",
            ),
            ("inner.tensor_parallel_size=0", "error: inner: tensor_parallel_size is a number of"),
            (
                "trainer=fsdp trainer.devices=4 inner.data_parallel_size=3",
                "error: inner: A worker has data_parallel_size=3 times",
            ),
            (
                "trainer.devices=6 inner.data_parallel_size=2 topology=hypercube",
                "error: algorithm: Topology 'hypercube' needs a power of two workers, got 3",
            ),
            (
                "inner.data_parallel_size=2 sample=true",
                "error: sample=true generates text on one rank, which holds a shard",
            ),
            (
                "trainer.devices=6 algorithm.replica_size=2 topology=hypercube",
                "error: algorithm: Topology 'hypercube' needs a power of two workers, got 3",
            ),
            ("topology=file", "error: topology.path has no value. Add topology.path=VALUE."),
            (
                "algorithm=remote_optimizer algorithm.num_workers=9",
                "error: algorithm: 9 workers",
            ),
        ]
        code = f"""if True:
            import sys
            sys.path.insert(0, {str(ROOT)!r})
            import train
            for line in {[line for line, _ in rows]!r}:
                sys.argv = ["train.py", *line.split()]
                try:
                    train.main()
                except SystemExit as end:
                    print(end)
            assert not {{"lightning", "torchmetrics"}} & {{*sys.modules}}
        """
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        for (line, message), said in zip(rows, done.stdout.splitlines(), strict=True):
            with subtests.test(line):
                assert said.startswith(message)

    @pytest.mark.soak
    def test_two_workers_share_one_folder(self, tmp_path: Path) -> None:
        done = command("experiment=smoke", "topology=ring", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (report,) = tmp_path.glob("outputs/*/*/report.json")
        figures = json.loads(report.read_text())
        assert figures["num_workers"] == 2
        assert figures["bytes_sent"] > 0
        assert (report.parent / "train-rank1.log").exists()
        assert len(list(tmp_path.glob("outputs/*/*"))) == 1

    @pytest.mark.soak
    def test_spawned_workers(self, tmp_path: Path) -> None:
        """The main process validates afterwards, also with spawned processes."""
        spawned = "algorithm.start_method=spawn", "trainer.max_steps=10", "run_dir=here"
        done = command("experiment=smoke", *spawned, "trainer.val_check_interval=10", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "here/report.json").read_text())["val_loss"] < 5.5

    @pytest.mark.soak
    def test_two_workers_of_two_ranks(self, tmp_path: Path) -> None:
        sizes = "algorithm=diloco", "trainer.devices=4", "algorithm.replica_size=2"
        done = command("experiment=smoke", *sizes, "per_worker_logs=true", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (report,) = tmp_path.glob("outputs/*/*/report.json")
        figures = json.loads(report.read_text())
        assert figures["num_workers"] == 2
        assert figures["bytes_sent"] > 0
        assert sorted(file.name for file in (report.parent / "workers").iterdir()) == [
            "worker_00000.csv", "worker_00001.csv",
        ]  # fmt: skip

    @pytest.mark.soak
    @pytest.mark.parametrize("sizes", ["data_parallel_size=2", "tensor_parallel_size=2"])
    def test_two_workers_that_shard_the_model(self, tmp_path: Path, sizes: str) -> None:
        chosen = "trainer=fsdp", "trainer.devices=4", "inner.data_parallel_size=1", f"inner.{sizes}"
        steps = "trainer.max_steps=20", "trainer.val_check_interval=10"
        done = command("experiment=smoke", "algorithm=diloco", *chosen, *steps, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (report,) = tmp_path.glob("outputs/*/*/report.json")
        figures = json.loads(report.read_text())
        assert (figures["algorithm"], figures["num_workers"]) == ("DiLoCo", 2)
        assert figures["bytes_sent"] > 0
        num_readers = 4 if "data" in sizes else 2
        assert figures["tokens"] == num_readers * 10_240 // 4

    @pytest.mark.soak
    def test_two_and_three_tiers_end_at_the_same_loss(self, tmp_path: Path) -> None:
        figures = []
        for devices in (3, 4):
            folder = tmp_path / str(devices)
            folder.mkdir()
            done = command(
                "experiment=smoke", "algorithm=remote_optimizer", "algorithm.num_workers=2",
                f"trainer.devices={devices}", "test=true", cwd=folder,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert f"{devices - 1} tiers" in done.stdout + done.stderr
            (report,) = folder.glob("outputs/*/*/report.json")
            figures.append(json.loads(report.read_text()))
        two, three = figures
        assert two["val_loss"] == three["val_loss"] is not None
        assert two["bytes_sent"] == three["bytes_sent"] > 0
        assert two["num_workers"] == 2

    @pytest.mark.soak
    def test_a_remote_optimizer_sends_a_quarter_of_the_bytes(self, tmp_path: Path) -> None:
        done = command(
            "experiment=smoke", "algorithm=remote_optimizer", "algorithm.num_workers=2",
            "trainer.devices=3", "compression=int8", cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert " without compression" in done.stdout
        (report,) = tmp_path.glob("outputs/*/*/report.json")
        figures = json.loads(report.read_text())
        assert 3 * figures["bytes_sent"] == pytest.approx(figures["bytes_saved"], rel=0.1)

    @pytest.mark.soak
    def test_torchrun_sets_the_number_of_workers(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3",
                "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
                str(ROOT / "train.py"), "experiment=smoke", "algorithm=diloco",
            ],
            cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "torchrun decides: trainer.devices=3 instead of 2." in done.stdout
        (report,) = tmp_path.glob("outputs/*/*/report.json")
        assert json.loads(report.read_text())["num_workers"] == 3
        assert len(list(tmp_path.glob("outputs/*/*"))) == 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["algorithm.sync_every=0"], "error: algorithm: sync_every counts optimizer steps"),
            (
                ["algorithm=gaslc"],
                "error: algorithm=gaslc: no such algorithm. Did you mean algorithm=",
            ),
            (["algorithm.sync_evry=1"], "error: algorithm.sync_evry is no setting of algorithm="),
            (
                ["+algoritm=diloco"],
                "error: algoritm is no setting, and nothing refers to it. Did you mean algorithm=",
            ),
            pytest.param(
                ["algorithm=diloco", "topology=ring"],
                "error: algorithm: DiLoCo has no neighbours in a graph",
                marks=pytest.mark.soak,
            ),
            pytest.param(
                ["algorithm=remote_optimizer", "algorithm.num_workers=2", "trainer.devices=5"],
                "error: algorithm: 2 workers need 3 ranks (2 tiers:",
                marks=pytest.mark.soak,
            ),
            pytest.param(
                ["--multirun", "seed=1,2"],
                "error: 2 ranks on one machine cannot be swept by --multirun: each child would"
                " repeat the sweep. Use trainer.devices=1, or hydra/launcher=submitit_slurm.",
                marks=pytest.mark.soak,
            ),
            pytest.param(
                ["algorithm=async_diloco", "algorithm.fragments=null", "algorithm.sync_every=60"],
                "error: sync_every=60: the result of a round is applied one round later",
                marks=pytest.mark.soak,
            ),
        ],
    )
    def test_invalid_settings_end_with_one_message(
        self, tmp_path: Path, arguments: list[str], message: str
    ) -> None:
        done = command(*arguments, "experiment=smoke", cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.count(message) == 1
        assert "Traceback" not in done.stderr

    @pytest.mark.soak
    def test_the_traceback_of_an_error_is_shown_on_request(self, tmp_path: Path) -> None:
        done = command("algorithm.sync_every=0", cwd=tmp_path, HYDRA_FULL_ERROR="1")
        assert done.returncode == 1
        assert "Traceback" in done.stderr

    @pytest.mark.soak
    def test_a_sweep_of_single_workers(self, tmp_path: Path) -> None:
        done = command("--multirun", "algorithm=diloco,gasloc", *SMOKE, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        reports = sorted(tmp_path.glob("multirun/*/*/*/report.json"))
        found = [json.loads(report.read_text())["algorithm"] for report in reports]
        assert found == ["DiLoCo", "GASLoC"]

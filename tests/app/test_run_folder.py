"""Folders of runs: shared by all ranks of a run, and different for any two runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_loco.app import command_line
from lightning_loco.app.run_folder import claim


def test_runs_that_start_in_the_same_second_have_separate_folders(tmp_path: Path) -> None:
    time = tmp_path / "2026-01-01" / "12-00-00"
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda rank: (rank % 3, claim(time, str(rank % 3))), range(12)))
    assert len(set(found)) == 3
    assert sorted(folder.name for _, folder in set(found)) == [
        "12-00-00",
        "12-00-00-2",
        "12-00-00-3",
    ]
    assert len(list(time.parent.iterdir())) == 3


def test_existing_folders_and_files_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.log").touch()
    (tmp_path / "run-2").touch()
    assert claim(tmp_path / "run", "one") == tmp_path / "run-3"
    assert claim(tmp_path / "run", "one") == tmp_path / "run-3"


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        claim(tmp_path / "file" / "run", "one")


@pytest.mark.usefixtures("tmp_cwd")
class TestCommandLine:
    @pytest.fixture
    def tmp_cwd(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)

    def folder_of(self, monkeypatch: pytest.MonkeyPatch, process: int, parent: int) -> str:
        monkeypatch.setattr("os.getpid", lambda: process)
        monkeypatch.setattr("os.getppid", lambda: parent)
        monkeypatch.setattr(command_line, "parent_start", lambda: command_line.STARTED)
        return command_line.run_folder("outputs")

    def test_two_commands_and_sweeps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        folders = [self.folder_of(monkeypatch, process, 1) for process in (7, 8, 7)]
        assert folders[1:] == [f"{folders[0]}-2", folders[0]]
        cfg = OmegaConf.load(Path(command_line.conf_dir()) / "hydra" / "default.yaml")
        assert Path(cfg.sweep.dir).is_dir()
        assert cfg.sweep.dir.startswith("multirun/")

    def test_two_torchruns_on_one_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "2")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        ranks = ((10, 1), (11, 1), (20, 2), (21, 2))
        first, also_first, second, also_second = (
            self.folder_of(monkeypatch, process, agent) for process, agent in ranks
        )
        assert first == also_first
        assert second == also_second == f"{first}-2"

    def test_torchruns_on_several_machines_without_a_run_id(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("MASTER_ADDR", "node-a")
        monkeypatch.setenv("MASTER_PORT", "29500")
        assert command_line.run_folder("outputs") == "outputs/torchrun-node-a-29500"
        monkeypatch.setenv("MASTER_PORT", "29501")
        assert command_line.run_folder("outputs") == "outputs/torchrun-node-a-29501"

    def test_printing_the_configuration_creates_no_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.argv", ["train.py", "--cfg", "all", "--resolve"])
        assert command_line.run_folder("outputs") == f"outputs/{command_line.run_stamp()}"
        assert not list(tmp_path.iterdir())

"""What workers save whose optimizer is on another rank: its state, and where each worker is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_loco.parameter_server import RemoteOptimizer, RemoteParticipant
from lightning_loco.strategies.checkpoint.checkpoints import Loaded, RunState
from lightning_loco.strategies.checkpoint.main_file import MainFile, WriteMain
from lightning_loco.strategies.checkpoint.position import DataShares, Position, ResumedPosition
from lightning_loco.strategies.checkpoint.reader import (
    check_same_save,
    read_main,
)
from lightning_loco.strategies.checkpoint.side_files import (
    FORMAT,
    SideFiles,
    check_format,
    errors_naming,
    new_stamp,
)
from lightning_loco.strategies.checkpoint.writer import Save
from lightning_loco.strategies.protocols import StrategyWithRemoteOptimizer

_KEY = "lightning_loco_positions"
_FORMAT_KEY = "lightning_loco_format"


class RemoteState(RunState):
    """The optimizer's state and every worker's position, all in the main file.

    There are no side files: the workers have the same parameters, and nothing else of their own.
    """

    def __init__(self, strategy: StrategyWithRemoteOptimizer) -> None:
        self.main = MainFile(strategy)
        self._strategy = strategy
        self._final_state: dict[str, Any] = {}
        self._lost: str | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the workers train; when they have left the servers, none waits for another."""
        return self._strategy.is_training

    def start_fit(self) -> None:
        """Forget the optimizer's state of an earlier fit."""
        self._final_state = {}
        self._lost = None

    def finish_fit(self, remote: RemoteParticipant) -> None:
        """Keep the optimizer's state for checkpoints after ``fit``."""
        if self._strategy.is_global_zero:
            try:
                self._final_state = remote.state_dict()
            except TypeError as error:
                rank_zero_warn(f"Checkpoints after fit have no optimizer state: {error}")

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state of the optimizer on its rank; empty on all ranks except the first."""
        if not self._strategy.is_global_zero:
            return {}
        remote, module = self._strategy.remote, self._strategy.lightning_module
        if remote is None or remote.optimizer.has_left:
            if module is not None and module.trainer.interrupted and not self._final_state:
                self._lost = "the fit has ended"
            return self._final_state
        if self._strategy.is_training:
            return remote.state_dict()
        return self._state_after_failure(remote)

    def _state_after_failure(self, remote: RemoteParticipant) -> dict[str, Any]:
        """Return the state if the optimizer's rank still answers, as after an error of worker 0."""
        service = self._strategy.service
        assert service is not None
        assert service.watchdog is not None
        self._lost = ", ".join(service.watchdog.silent()) or service.watchdog.failure
        if self._lost is None:
            try:
                return remote.state_dict()
            except (RuntimeError, TypeError) as error:
                self._lost = str(error)
        return {}

    def model_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the model's state, with parameters that were not rounded by compression.

        All ranks that train must call it during ``fit``.
        """
        strategy = self._strategy
        remote, module = strategy.remote, strategy.lightning_module
        if not strategy.is_training:
            return read()
        assert remote is not None
        assert module is not None
        strategy.sync_point("checkpoint")  # brings a worker that has run out of data up to date
        state = read()
        is_rounded = strategy.compression is not None
        optimizer = remote.optimizer
        if strategy.is_global_zero and is_rounded and not optimizer.has_changed_parameters:
            values = {id(param): value for param, value in optimizer.full_precision_parameters()}
            for name, param in module.named_parameters(remove_duplicate=False):
                if name in state and id(param) in values:
                    state[name] = values[id(param)]
        return state

    def agree_on(self, path: str | Path, checkpoint: dict[str, Any]) -> tuple[str | Path, str]:
        """Return the path and a stamp; only rank 0 writes, so the others' do not matter."""
        return path, new_stamp(checkpoint["global_step"])

    def collect(
        self, checkpoint: dict[str, Any], files: SideFiles, stamp: str
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Add the loops and random states of each worker to the main file."""
        strategy = self._strategy
        # Only at a sync point do the ranks that train take part in a collective together.
        strategy.sync_point("checkpoint")
        assert strategy.lightning_module is not None
        position = Position.of(strategy.lightning_module.trainer)
        own = {"loops": checkpoint["loops"], "position": position._asdict()}
        checkpoint[_FORMAT_KEY] = FORMAT
        with strategy.waiting_in("a checkpoint"):
            checkpoint[_KEY] = strategy.training_ranks().gather_states(own, "a checkpoint")
        return None, None

    def write(self, save: Save) -> bool:
        """Write the file, and rename it after another sync point.

        A worker 0 that was suspended while the others ended comes to no sync point, and so does not
        replace the file of a run that was started meanwhile.
        """
        files, is_first = save.files, self._strategy.is_global_zero
        before: list[str] = []
        try:
            if is_first:
                before = files.stamps()
                save.write_shared(files.can_stage)
            self._strategy.sync_point("checkpoint")
            if is_first:
                save.commit(files.can_stage, before, [])
        except BaseException:
            if is_first:
                files.discard(save.stamp)
            raise
        return is_first

    def save_alone(
        self, checkpoint: dict[str, Any], path: str | Path, write_main: WriteMain
    ) -> None:
        """Write the file, unless the optimizer's state that belongs in it is lost."""
        if not self._strategy.is_global_zero:
            return
        if self._lost and "optimizer_states" in checkpoint:
            last_line = self._lost.strip().rpartition("\n")[2]
            # An error here would replace the run's, and keep Lightning from the teardown.
            rank_zero_warn(
                f"{path} was not written: the optimizer's state is on another rank, which does not "
                f"answer after a failure ({last_line}). Resume from an "
                "earlier checkpoint."
            )
        else:
            write_main(path)

    def load(
        self, read: Callable[[], dict[str, Any]], path: str | Path, weights_only: bool | None
    ) -> Loaded:
        """Read the file, with this worker's loops where Lightning resumes from them.

        If there are more workers than before, the new ones resume from worker 0's loops, with their
        own random numbers, and the data are distributed again.
        """
        strategy, position = self._strategy, None
        with self.main.other_one_named(path):
            loaded = read_main(read, path)
        if _KEY in loaded:
            # Outside: another checkpoint of the folder will have the same format.
            check_format(loaded.get(_FORMAT_KEY), path)
            if not strategy.serves:
                with self.main.other_one_named(path):
                    position = self._enter_position(loaded, path)
        if strategy.service is not None:
            check_same_save(strategy.service, loaded, path)
        return loaded, position

    def _enter_position(self, loaded: dict[str, Any], path: str | Path) -> ResumedPosition:
        positions, rank = loaded[_KEY], self._strategy.global_rank  # one position for each rank
        with errors_naming(path):
            is_new = rank >= len(positions)
            own = positions[0 if is_new else rank]
            try:
                loaded["loops"], position = own["loops"], Position(**own["position"])
            except (KeyError, TypeError) as missing:
                text = f"{path} does not say where its workers were: {missing}."
                raise ValueError(text) from missing
            if is_new:  # else it would draw the same numbers as worker 0
                position = position._replace(random=None)
            before = DataShares([1] * len(positions))
            now = DataShares([1] * self._strategy.world_size)
            resumed = ResumedPosition(position, before, now, rank)
            assert self._strategy.lightning_module is not None
            resumed.prepare_loops(loaded["loops"], self._strategy.lightning_module.trainer)
        return resumed

    def resume(self, position: ResumedPosition, trainer: pl.Trainer) -> None:
        """Restore this worker's position; the optimizer's rank has loaded its state."""
        notes = position.restore(trainer)
        position.warn_of(notes + position.other_workers("the positions"))

    def load_param_groups(self, remote: RemoteOptimizer, checkpoint: Any) -> None:
        """Load learning rates and other numbers for a worker's schedulers.

        The optimizer's rank loads the whole state itself.
        """
        groups = checkpoint["optimizer_states"][0]["param_groups"]
        for present, group in zip(remote.param_groups, groups, strict=True):
            present.update({name: value for name, value in group.items() if name != "params"})

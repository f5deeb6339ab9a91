"""ReportCallback: what it records, on which ranks, and that it changes nothing else."""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import Strategy

from lightning_loco import (
    CommunicationMonitor,
    ConsensusMonitor,
    DiLoCo,
    GASLoC,
    LocoStrategy,
    PairwiseGossipStrategy,
    RemoteOptimizerStrategy,
    ReportCallback,
    WorkerLogs,
)
from lightning_loco.app.launch import is_no_tip
from lightning_loco.callbacks.rank_record import computing
from lightning_loco.callbacks.report_callback import NOT_COMPLETE, RunWarnings
from lightning_loco.distributed.statistics import Spans
from lightning_loco.report.page import mean_share
from lightning_loco.report.record import RunRecord
from tests.harness.pool import Pool, make_trainer
from tests.harness.small_model import (
    TinyModule,
    ValidatedModule,
    flat,
    loss_of,
    make_loader,
    quiet_trainer,
)
from tests.strategies.families import fit_with

STEPS = 12


class WarningModule(ValidatedModule):
    """Warns once, and optionally raises an error at a given step."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.global_rank == 0:
            logging.getLogger("lightning.pytorch").warning("<b>step</b> %d", batch_idx)
        if batch_idx == self.fails_at:
            raise RuntimeError("on <b>purpose</b>")
        return super().training_step(batch, batch_idx)


def fit(
    rank: int, folder: Path, strategy: Strategy | str, with_report: bool = True, **settings: Any
) -> dict[str, Any]:
    module = WarningModule()
    callbacks: list[pl.Callback] = [ConsensusMonitor()]
    if with_report:
        callbacks.append(ReportCallback(folder))
    trainer = make_trainer(
        strategy,
        use_distributed_sampler=False,
        callbacks=callbacks,
        max_epochs=1,
        log_every_n_steps=4,
        val_check_interval=6,
        **settings,
    )
    trainer.fit(module, make_loader(rank, STEPS), make_loader(9, 2))
    return {
        "losses": module.losses,
        "weights": flat(module),
        "bytes": getattr(trainer.strategy, "statistics", None)
        and trainer.strategy.statistics.bytes_sent,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
    }


def fit_loco(
    rank: int, world: int, folder: Path, strategy: dict[str, Any], with_report: bool = True
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"algorithm": DiLoCo(), "sync_every": 3, "summary": False}
    return fit(rank, folder, LocoStrategy(**{**arguments, **strategy}), with_report)


def fit_ddp(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return fit(rank, folder, "ddp")


def fit_gossip(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return fit(rank, folder, PairwiseGossipStrategy(summary=False))


def fit_unmonitored(rank: int, world: int, folder: Path) -> None:
    trainer = make_trainer(
        LocoStrategy(DiLoCo(), sync_every=5),
        use_distributed_sampler=False,
        callbacks=[ReportCallback(folder)],
        max_epochs=1,
    )
    trainer.fit(ValidatedModule(), make_loader(rank, STEPS), make_loader(9, 2))


# ------------------------------------------------------------------------ recorded values


def test_every_worker_is_on_the_page(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(fit_loco, tmp_path, {}, world=2)
    record = RunRecord.load(tmp_path)
    assert record.title == "DiLoCo, 2 workers"
    assert record.ended == ""
    assert record.lanes == ["worker 0", "worker 1"]
    for curve, result in zip(record.of_kind("train_loss"), results, strict=True):
        assert [step for step, *_ in curve.points] == list(range(1, STEPS + 1))
        assert [point[3] for point in curve.points] == pytest.approx(result["losses"], rel=1e-6)
        sent = [point[2] for point in curve.points]
        assert sent == sorted(sent)  # type: ignore[type-var]
        assert sent[0] == sent[2] < sent[3]  # type: ignore[operator]
    (validation,) = record.of_kind("validation")
    assert [step for step, *_ in validation.points] == [6, 12]
    assert validation.points[-1][3] == pytest.approx(results[0]["metrics"]["val_loss"], rel=1e-6)
    (rate,) = record.of_kind("learning_rate")
    assert (rate.name, [p[0] for p in rate.points]) == ("SGD", [4, 8, 12])
    assert len(record.of_kind("consensus")[0].points) == 3
    assert record.numbers == {"local steps": STEPS, "rounds": 3}
    assert record.ddp_bytes == 26 * 8 * STEPS
    assert record.warnings["<b>step</b> 2"] == 1
    assert record.settings["strategy"]["sync_every"] == 3
    assert record.settings["module"]["trainable parameters"] == 26
    kinds = {(lane, kind) for lane, kind, *_ in record.events}
    for kind in ("compute", "wait", "round", "sync point", "validation"):
        assert {(0, kind), (1, kind)} <= kinds, kind
    for lane in (0, 1):
        rounds = [event for event in record.events if event[:2] == (lane, "round")]
        assert len(rounds) == 3
    assert (tmp_path / "report.html").stat().st_size < 200_000
    assert "&lt;b&gt;step&lt;/b&gt; 2" in (tmp_path / "report.html").read_text()


def test_the_report_changes_no_number(pool: Pool, tmp_path: Path) -> None:
    bare = pool.run(fit_loco, tmp_path, {}, False, world=2)
    assert not list(tmp_path.iterdir())
    for one, other in zip(bare, pool.run(fit_loco, tmp_path, {}, world=2), strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert one["bytes"] == other["bytes"]


def test_a_topology_is_drawn(pool: Pool, tmp_path: Path) -> None:
    strategy = {"algorithm": GASLoC(), "topology": "ring"}
    pool.run(fit_loco, tmp_path, strategy, world=4)
    topology = RunRecord.load(tmp_path).topology
    assert topology is not None
    assert topology.edges == ((0, 1), (0, 3), (1, 2), (2, 3))
    assert topology.spectral_gap == pytest.approx(2 / 3)


def test_a_worker_computes_during_overlapped_rounds(pool: Pool, tmp_path: Path) -> None:
    strategy = {"algorithm": DiLoCo(outer_momentum=0.0), "overlap": True}
    pool.run(fit_loco, tmp_path, strategy, world=2)
    events = [event for event in RunRecord.load(tmp_path).events if event[0] == 1]
    rounds = [(start, end) for _, kind, start, end in events if kind == "round"]
    assert len(rounds) >= 2
    for first, last in rounds[1:]:  # the first one is blocking
        computed = [
            min(end, last) - max(start, first)
            for _, kind, start, end in events
            if kind == "compute"
        ]
        assert max(computed) > 0


def test_messages_on_an_emulated_link(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit_loco, tmp_path, {"link": {"mbit_per_s": 100}}, world=2)
    record = RunRecord.load(tmp_path)
    assert {event[0] for event in record.events if event[1] == "send"} == {0, 1}


def test_ddp(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit_ddp, tmp_path, world=2)
    record = RunRecord.load(tmp_path)
    assert (record.title, record.lanes) == ("DDP, 2 ranks", ["rank 0", "rank 1"])
    assert record.bytes_sent == 26 * 8 * STEPS
    assert record.ddp_bytes is None
    assert {kind for _, kind, *_ in record.events} == {"compute", "validation"}
    assert any("waits for other ranks inside its steps" in note for note in record.notes)


def test_gossip_without_rounds(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit_gossip, tmp_path, world=2)
    record = RunRecord.load(tmp_path)
    assert record.title == "PairwiseGossip, 2 workers"
    assert len(record.of_kind("train_loss")) == 2


def test_the_distance_at_the_end_is_shown_without_a_monitor(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit_unmonitored, tmp_path, world=2)
    record = RunRecord.load(tmp_path)
    assert record.numbers["consensus distance"] > 0
    assert any("not measured in rounds" in note for note in record.notes)


def test_workers_of_two_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit_loco, tmp_path, {"replica_size": 2}, world=4)
    record = RunRecord.load(tmp_path)
    assert record.title == "DiLoCo, 2 workers of 2 ranks"
    assert record.lanes == [f"worker {w}, place {p}" for w in (0, 1) for p in (0, 1)]
    assert [curve.lane for curve in record.of_kind("train_loss")] == [0, 2]


def fit_remote(rank: int, world: int, folder: Path) -> None:
    strategy, data = RemoteOptimizerStrategy(num_workers=2, summary=False), make_loader(rank, STEPS)
    report = ReportCallback(folder)
    fit_with(strategy, ValidatedModule(), data, make_loader(9, 2), callbacks=[report])


def test_servers_of_an_optimizer_are_left_out(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit_remote, tmp_path, world=3)
    record = RunRecord.load(tmp_path)
    assert record.title == "RemoteOptimizer, 2 workers"
    assert record.lanes == ["worker 0", "worker 1"]
    assert record.numbers == {"local steps": STEPS, "rounds": STEPS}
    for lane in (0, 1):
        assert record.shares[lane]["wait"] > 0


# ------------------------------------------------------------------------------ one process


def alone(folder: Path, module: pl.LightningModule, **settings: Any) -> RunRecord:
    trainer = quiet_trainer(
        max_epochs=1, callbacks=[ReportCallback(folder)], log_every_n_steps=4, **settings
    )
    trainer.fit(module, make_loader(0, STEPS), make_loader(9, 2))
    return RunRecord.load(folder)


def test_a_single_device(tmp_path: Path) -> None:
    record = alone(tmp_path, ValidatedModule())
    assert (record.title, record.lanes) == ("SingleDevice, 1 rank", ["rank 0"])
    assert record.bytes_sent is None
    assert "Loss against bytes" not in (tmp_path / "report.html").read_text()


def test_accumulated_batches_have_their_own_loss(tmp_path: Path) -> None:
    module = ValidatedModule()
    (curve,) = alone(tmp_path, module, accumulate_grad_batches=3).of_kind("train_loss")
    assert [point[3] for point in curve.points] == pytest.approx(module.losses, rel=1e-6)
    assert [step for step, *_ in curve.points] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]


def test_the_default_folder_is_that_of_the_logs(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        max_epochs=1, callbacks=[ReportCallback()], default_root_dir=tmp_path, logger=False
    )
    trainer.fit(ValidatedModule(), make_loader(0, 2), make_loader(9, 2))
    assert (tmp_path / "report.html").exists()


def test_checkpoints_are_on_the_timeline(tmp_path: Path) -> None:
    record = alone(
        tmp_path, ValidatedModule(), enable_checkpointing=True, default_root_dir=tmp_path
    )
    assert [kind for _, kind, *_ in record.events].count("checkpoint") >= 1
    shares = record.shares[0]
    assert sum(shares.values()) == pytest.approx(record.seconds, rel=1e-6)


def test_a_loss_is_not_read_between_logging_steps() -> None:
    """A tensor on the device "meta" has no value to read."""
    callback, module = ReportCallback(), ValidatedModule()
    read: list[int] = []

    class Replacing(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            own = callback._own
            assert own is not None
            if trainer.global_step % 4:
                own.keep_loss(torch.empty((), device="meta"), 1)
                callback.on_train_batch_end(trainer, module, {}, None, 0)
                read.append(own._unread.pop()[0][0])

    trainer = quiet_trainer(max_epochs=1, callbacks=[callback, Replacing()], log_every_n_steps=4)
    callback.dirpath = "unused"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "_write", lambda *_: None)
        trainer.fit(module, make_loader(0, STEPS), make_loader(9, 2))
    assert read == [1, 2, 3, 5, 6, 7, 9, 10, 11]


class WaitedAndSaved(pl.Callback):
    """Adds a very long wait to the statistics, and saves a checkpoint."""

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.strategy.statistics.wait_s += 1e6  # type: ignore[attr-defined]
        trainer.save_checkpoint(f"{trainer.default_root_dir}/saved.ckpt")


def fit_and_resume(rank: int, world: int, folder: Path) -> None:
    path, data = None, (make_loader(rank, STEPS), make_loader(9, 2))
    for epochs, callback in ((1, WaitedAndSaved()), (2, ReportCallback(folder))):
        trainer = make_trainer(
            LocoStrategy(DiLoCo(), sync_every=3, summary=False),
            use_distributed_sampler=False,
            callbacks=[callback],
            max_epochs=epochs,
            default_root_dir=folder,
        )
        trainer.fit(ValidatedModule(), *data, ckpt_path=path)
        path = folder / "saved.ckpt"


@pytest.mark.recovery
def test_a_resumed_run_counts_the_time_of_its_part(pool: Pool, tmp_path: Path) -> None:
    pool.run(fit_and_resume, tmp_path, world=2)
    record = RunRecord.load(tmp_path)
    assert record.numbers["resumed at step"] == STEPS
    assert record.numbers["local steps"] == 2 * STEPS
    assert [step for step, *_ in record.of_kind("train_loss")[0].points][0] == STEPS + 1
    for waited_s in (mean_share(record, "wait"), record.wait_s):
        assert waited_s is not None
        assert 0 < waited_s < record.seconds


# -------------------------------------------------------------------------- ends of all kinds


def fit_that_fails(rank: int, world: int, folder: Path) -> str:
    trainer = make_trainer(
        LocoStrategy(DiLoCo(), sync_every=3, timeout_s=20, summary=False),
        use_distributed_sampler=False,
        callbacks=[ReportCallback(folder)],
        max_epochs=1,
        log_every_n_steps=4,
    )
    module, data = WarningModule(7 if rank == 1 else None), make_loader(rank, STEPS)
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(module, data, make_loader(9, 2))
    return str(raised.value)


@pytest.mark.recovery
def test_a_run_that_fails_on_another_rank_has_a_page(pool: Pool, tmp_path: Path) -> None:
    errors = pool.run(fit_that_fails, tmp_path, world=2)
    assert "on <b>purpose</b>" in errors[0]
    assert errors[1] == "on <b>purpose</b>"
    record = RunRecord.load(tmp_path)
    assert record.lanes == ["worker 0"]
    assert "on <b>purpose</b>" in record.ended
    assert 7 <= len(record.of_kind("train_loss")[0].points) <= 9
    assert any("The run has ended early" in note for note in record.notes)
    assert "on &lt;b&gt;purpose" in (tmp_path / "report.html").read_text()


def test_an_error_is_not_hidden_by_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    callback = ReportCallback(tmp_path / "file")
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback], log_every_n_steps=4)
    data = make_loader(0, STEPS), make_loader(9, 2)
    with (
        pytest.warns(UserWarning, match="The report of this run cannot be written"),
        pytest.raises(RuntimeError, match="on <b>purpose</b>"),
    ):
        trainer.fit(WarningModule(fails_at=3), *data)
    with pytest.warns(UserWarning, match="The report of this run cannot be written"):
        trainer.fit(WarningModule(), *data)
    assert trainer.state.finished


def test_a_run_that_has_diverged_ends_as_any_other(tmp_path: Path) -> None:
    class Diverging(ValidatedModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * (torch.inf if batch_idx == 11 else 1e300 if batch_idx > 5 else 1.0)

    record = alone(tmp_path, Diverging(lr=0.0))
    (curve,) = record.of_kind("train_loss")
    assert (len(curve.points), curve.not_finite) == (11, 1)
    assert "1 value not finite" in (tmp_path / "report.html").read_text()


# ---------------------------------------------- errors while a run is displayed or recorded


@contextlib.contextmanager
def user_warnings() -> Iterator[list[str]]:
    """Collect the messages of the warnings that a user would see."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UserWarning)
        yield texts
        texts += [str(warning.message) for warning in caught]


class WithoutText:
    """An object whose ``repr`` raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Unprintable(DiLoCo):
    """A user's algorithm that trains, but whose ``repr`` and metrics raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no name")

    def metrics(self, state: Any) -> dict[str, float]:
        raise RuntimeError("no metrics")


class WithoutRate(torch.optim.SGD):
    """Has no learning rate, like an optimizer that computes it."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.05
        loss = super().step(closure)
        self.param_groups[0]["lr"] = None
        return loss


class Troubled(ValidatedModule):
    """Calls a function at step 5, and saves a hyper-parameter."""

    def __init__(self, kind: type[torch.optim.SGD], trouble: Any, value: object) -> None:
        super().__init__()
        self.save_hyperparameters("value")
        self.kind, self.trouble = kind, trouble

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 5:
            self.trouble()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.05)


def fit_in_trouble(rank: int, world: int, folder: Path, case: str) -> list[str]:
    logs = folder / "logs"
    troubles = {
        "message": lambda: logging.getLogger("some.library").warning("%d items", "many"),
        "disk": lambda: [path.unlink() for path in logs.iterdir()] and logs.rmdir(),
    }
    trainer = make_trainer(
        LocoStrategy(Unprintable() if case == "algorithm" else DiLoCo(), sync_every=3),
        callbacks=[CommunicationMonitor(), WorkerLogs(logs), ReportCallback(folder)],
        max_epochs=1,
        log_every_n_steps=STEPS,
    )
    module = Troubled(
        WithoutRate if case == "optimizer" else torch.optim.SGD,
        troubles.get(case, lambda: None),
        WithoutText() if case == "setting" else 1,
    )
    with pytest.MonkeyPatch.context() as patch, user_warnings() as texts:
        patch.setattr(logging, "raiseExceptions", False)  # Python's default handlers print it, too
        trainer.fit(module, make_loader(rank, STEPS), make_loader(9, 2))
    assert len(module.losses) == STEPS
    assert trainer.state.finished
    assert (folder / "report.html").exists()
    return texts


def test_an_error_in_what_only_shows_a_run_is_one_warning(
    pool: Pool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for case, expected in {
        "message": ["A message of the logger 'some.library' has a wrong format. TypeError: %d"],
        "setting": ["The report has no settings of the module and the Trainer. RuntimeError: no"],
        "optimizer": [f"{NOT_COMPLETE} TypeError: float"],
        "disk": ["Metrics cannot be written to .*worker_00000.csv. FileNotFoundError"],
        "algorithm": [
            "The summary of this run cannot be shown. RuntimeError: no name",
            "CommunicationMonitor cannot watch the outer steps. RuntimeError: no metrics",
            "CommunicationMonitor cannot log its metrics. RuntimeError: no metrics",
        ],
    }.items():
        with subtests.test(case):
            (tmp_path / case).mkdir()
            (found,) = pool.run(fit_in_trouble, tmp_path / case, case, world=1)
            assert len(found) == len(expected), found
            for text, pattern in zip(found, expected, strict=True):
                assert re.match(pattern, text)


class ReturnsNoNumber(TinyModule):
    """Uses manual optimization, and returns a value that is not a loss."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        optimizer = self.optimizers()
        loss = loss_of(self.model, batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss * 1j if self.global_rank == 1 else loss}


def fit_without_number(rank: int, world: int, folder: Path) -> list[str]:
    trainer = make_trainer(
        "ddp", use_distributed_sampler=False, callbacks=[ReportCallback(folder)], max_epochs=1
    )
    with user_warnings() as texts:
        trainer.fit(ReturnsNoNumber(), make_loader(rank, STEPS))
    return texts


def test_the_page_lacks_a_worker_that_cannot_record(pool: Pool, tmp_path: Path) -> None:
    """That worker takes part in all collectives, so the others do not wait for it."""
    first, second = pool.run(fit_without_number, tmp_path, world=2)
    assert first == []
    assert second == [f"{NOT_COMPLETE} TypeError: must be real number, not complex"]
    record = RunRecord.load(tmp_path)
    assert (record.lanes, record.ended) == (["rank 0"], "")


def test_a_filter_does_not_format_messages() -> None:
    """An error in a filter is raised where the message is logged."""
    record = logging.LogRecord("any", logging.INFO, __file__, 1, "%d items", ("many",), None)
    assert is_no_tip(record)


def test_a_validation_of_the_final_model_is_added(tmp_path: Path) -> None:
    callback = ReportCallback(tmp_path)
    callback.add_validation("val_loss", 1.0)  # there is no run yet
    assert not list(tmp_path.iterdir())
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback])
    trainer.fit(ValidatedModule(), make_loader(0, STEPS), make_loader(9, 2))
    trainer.validate(ValidatedModule(), make_loader(9, 2), verbose=False)
    callback.add_validation("val_loss", 0.125)
    (curve,) = RunRecord.load(tmp_path).of_kind("validation")
    assert [point[0] for point in curve.points] == [STEPS, STEPS]
    assert curve.points[-1][3] == 0.125


# ---------------------------------------------------------------------------------- parts


def test_computing_is_all_that_is_nothing_else() -> None:
    spans = Spans()
    spans.add("wait", 2.0, 3.0)
    spans.add("round", 1.0, 4.0)
    spans.add("validation", 2.5, 5.0)
    found = list(computing(spans, 0.0, 8.0))
    assert found == [("compute", 0.0, 2.0), ("compute", 5.0, 8.0)]


def test_nothing_is_said_about_spans_that_are_left_out() -> None:
    spans = Spans(limit=2)
    for start in range(0, 20, 2):
        spans.add("wait", start, start + 1)
    found = list(computing(spans, 0.0, 20.0))
    assert found == [("compute", 1, 2), ("compute", 17, 18), ("compute", 19, 20.0)]


def test_warnings_are_counted_and_passed_on() -> None:
    heard, shown = RunWarnings(), warnings.showwarning
    with warnings.catch_warnings(record=True) as passed_on:
        warnings.simplefilter("always")
        heard.start()
        warnings.warn("twice", stacklevel=1)
        warnings.warn("twice", stacklevel=1)
        logging.getLogger("lightning.pytorch.core").error("an error")
        logging.getLogger("other").warning("once")
        logging.getLogger("other").info("not one")
        heard.stop()
        warnings.warn("late", stacklevel=1)
    logging.getLogger("other").warning("late")
    assert heard.texts == {"UserWarning: twice": 2, "an error": 1, "once": 1}
    assert [str(one.message) for one in passed_on] == ["twice", "twice", "late"]
    assert warnings.showwarning is shown


def test_too_many_warnings() -> None:
    heard = RunWarnings()
    for number in range(1000):
        heard.add(f"{number} " + "x" * 10_000)
    assert len(heard.texts) == 100
    assert max(map(len, heard.texts)) == 2000


def test_a_callback_can_be_sent_to_other_processes() -> None:
    callback = pickle.loads(pickle.dumps(ReportCallback("folder", {"a": 1})))
    assert (callback.dirpath, callback.settings) == ("folder", {"a": 1})

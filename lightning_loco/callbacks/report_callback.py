"""ReportCallback: the page of a run."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_loco._util.plain import plain
from lightning_loco.callbacks.rank_record import STEPS, RankRecord, gather
from lightning_loco.report.page import write_report
from lightning_loco.report.record import Curve, RunRecord
from lightning_loco.strategies.lightning_compat import current_metrics, is_logging_step, surround
from lightning_loco.strategies.summary import errors_as_warnings

MAX_WARNINGS, MAX_TEXT = 100, 2000
"""Different warnings that are kept, and the characters of each."""

NOT_COMPLETE = "The report of this run is not complete."

MAX_ERROR = 20_000
"""Characters of the error that has ended a run; it may hold the traceback of another rank."""


class ReportCallback(pl.Callback):
    """Write a page about the run when training ends: ``report.html``.

    The page shows the loss against local steps, time and bytes, the learning rates and metrics,
    when each worker computed and waited, the topology, the settings, the warnings of the run, and
    what DDP would have sent. It is one file of less than a megabyte that needs no network. Beside
    it are its data, ``run.json`` (see :class:`~lightning_loco.report.record.RunRecord`), and
    ``trace.json`` for ui.perfetto.dev. ``lightning-loco report RUN...`` compares runs.

    It works with every strategy; parts that a strategy does not have are left out. A run that fails
    or is stopped by a signal writes the record of rank 0. Losses are kept on their device and read
    every ``log_every_n_steps`` steps, so that no local step waits for a GPU. Each curve keeps at
    most 1000 points, and each rank its first and its last 1000 spans of time.

    Args:
        dirpath: Folder for the files. Default: the trainer's log folder.
        settings: Settings to show, by name, maybe in groups, in place of the Trainer's.

    Example::

        Trainer(strategy=DiLoCoStrategy(), callbacks=[ConsensusMonitor(), ReportCallback()])
    """

    def __init__(
        self, dirpath: str | Path | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.dirpath = dirpath
        self.settings = settings
        self._folder = Path()
        self._record: RunRecord | None = None
        self._own: RankRecord | None = None
        self._warnings = RunWarnings()
        self._undo: Callable[[], None] | None = None

    # ------------------------------------------------------------------------- start

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Choose the folder, and listen to warnings."""
        if stage == "fit":
            self._folder = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
            self._warnings.start()

    @errors_as_warnings(NOT_COMPLETE)
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to record."""
        self._record, self._own = None, (own := RankRecord(trainer))

        @contextlib.contextmanager
        def saving() -> Iterator[None]:
            with own.timed("checkpoint"):
                yield

        self._undo = surround(trainer, "save_checkpoint", saving)

    # ---------------------------------------------------------------------- training

    @errors_as_warnings(NOT_COMPLETE)
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the loss, without reading it; read the last ones if loggers are written now."""
        own = self._own
        if own is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        is_automatic = pl_module.automatic_optimization
        own.keep_loss(loss, trainer.accumulate_grad_batches if is_automatic else 1)
        own.record_consensus()
        if is_logging_step(trainer):
            own.read_losses()
            own.record_rates()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the time."""
        if self._own is not None:
            self._own.validation_began_s = time.monotonic()

    @errors_as_warnings(NOT_COMPLETE)
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the metrics of the validation."""
        own = self._own
        if own is not None and not trainer.sanity_checking:
            own.spans.add("validation", own.validation_began_s, time.monotonic())
            own.record_metrics(current_metrics(trainer))

    # --------------------------------------------------------------------------- end

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the records of all ranks; rank 0 writes the page."""
        own, self._own = self._own, None
        self._stop_listening()
        of_rank = None
        if own is not None:
            with errors_as_warnings(NOT_COMPLETE):
                of_rank = {**own.to_json(), "warnings": self._warnings.texts}
        ranks = [rank for rank in gather(trainer, of_rank) if rank is not None]
        if own is not None and trainer.is_global_zero:
            self._write(lambda: own.record_of_run(ranks, self._shown(own), ""))

    @errors_as_warnings(NOT_COMPLETE)
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the record of rank 0, without communication."""
        self._stop_listening()
        own, self._own = self._own, None
        if own is None or not trainer.is_global_zero:
            return
        name, text = type(exception).__name__, str(exception).strip()[:MAX_ERROR]
        with errors_as_warnings(NOT_COMPLETE):  # a GPU that has failed returns no losses
            own.read_losses()
        rank = {**own.to_json(), "warnings": self._warnings.texts}
        reason = f"{name}: {text}" if text else name
        if isinstance(exception, SIGTERMException):
            reason = "A signal asked it to stop."
        self._write(lambda: own.record_of_run([rank], self._shown(own), reason))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop listening also if nothing was trained."""
        self._stop_listening()

    def add_validation(self, name: str, value: float) -> None:
        """Add a metric of the final model, measured after ``fit``, and write the page again.

        It does nothing on other ranks than the first, or without a ``fit`` before.
        """
        record = self._record
        if record is None:
            return
        curves = [one for one in record.curves if (one.kind, one.name) == ("validation", name)]
        if not curves:
            curves = [Curve("validation", name)]
            record.curves += curves
        curves[0].add(record.numbers[STEPS], record.seconds, record.bytes_sent, value)
        self._write(lambda: record)

    def _stop_listening(self) -> None:
        self._warnings.stop()
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _shown(self, own: RankRecord) -> dict[str, Any]:
        """Return the settings to show."""
        return own.settings if self.settings is None else dict(plain(dict(self.settings)))

    def _write(self, make: Callable[[], RunRecord]) -> None:
        is_new = self._record is None
        with errors_as_warnings("The report of this run cannot be written."):
            self._record = make()
            write_report(self._record, self._folder)
            if is_new:
                rank_zero_info(f"Report of the run: {self._folder}")


class RunWarnings(logging.Handler):
    """Counts the warnings of a run, and the messages of loggers of at least that level.

    Attributes:
        texts: The first hundred different ones, and how often each has come.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: dict[str, int] = {}
        self._loggers: list[logging.Logger] = []
        self._shown: Callable[..., None] | None = None

    def __reduce__(self) -> tuple[type[RunWarnings], tuple[()]]:
        """Handlers hold a lock, and a callback is sent to other processes."""
        return RunWarnings, ()

    def start(self) -> None:
        """Begin to listen, from zero."""
        self.stop()
        self.texts = {}
        # Lightning's loggers do not always pass on to the root logger.
        self._loggers = [
            logging.getLogger(name) for name in (None, "lightning", "lightning.pytorch")
        ]
        for logger in self._loggers:
            logger.addHandler(self)
        before = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any
        ) -> None:
            self.add(f"{category.__name__}: {message}")
            before(message, category, *args, **kwargs)

        self._before, self._shown = before, show
        warnings.showwarning = show

    def stop(self) -> None:
        """Stop listening."""
        for logger in self._loggers:
            logger.removeHandler(self)
        self._loggers = []
        if self._shown is not None and warnings.showwarning is self._shown:
            warnings.showwarning = self._before
        self._shown = None

    def emit(self, record: logging.LogRecord) -> None:
        """Count a message of a logger, once for all loggers that it passes through."""
        if not (getattr(record, "loco_counted", False) or record.name == "py.warnings"):
            record.loco_counted = True
            with errors_as_warnings(f"A message of the logger {record.name!r} has a wrong format."):
                self.add(record.getMessage())

    def add(self, text: str) -> None:
        """Count a text."""
        text = text[:MAX_TEXT]
        if text in self.texts or len(self.texts) < MAX_WARNINGS:
            self.texts[text] = self.texts.get(text, 0) + 1

"""The ranks of one elastic worker: their round threads take every step of a round together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_loco._util.background import run_in_thread
from lightning_loco.distributed import json_messages
from lightning_loco.distributed.watchdog import WorkerFailure
from lightning_loco.distributed.worker_group import WorkerGroup, abort_groups

T = TypeVar("T")

LOST_AFTER_S = 10.0
"""How long a rank may give no sign of life before its worker ends; the others continue then."""

_LABEL = "a round of elastic members"
_CHECK_EVERY_S = 1.0

log = logging.getLogger(__name__)


class Places:
    """The ranks of one worker: each exchanges with ranks of equal place in the other workers.

    The worker is one member. Place 0 talks to the lighthouse for all ranks, and a failure on one
    rank is a failure on all, so that a round counts for the whole worker or not at all. All ranks
    must call the methods in the same order, from one thread each. A worker of one rank never waits.

    Args:
        group: The worker; all its ranks make the places at the same time.
        timeout_s: Longest wait for a rank that gives signs of life, in seconds.

    Attributes:
        place: Index of this rank within its worker.
        size: Number of ranks.
    """

    def __init__(self, group: WorkerGroup, timeout_s: float) -> None:
        self.place, self.size = group.place, group.replica_size
        self._group = group
        self._inner = group.new_inner_group("gloo", timeout_s)

    @property
    def is_first(self) -> bool:
        """Whether this rank talks to the lighthouse, and logs."""
        return self.place == 0

    def gather(self, value: Any) -> list[Any]:
        """Collect a small value from every rank; see ``distributed.json_messages``.

        Raises:
            WorkerFailure: If a rank has failed or gives no sign of life; the message names it.
            RuntimeError: After :meth:`close`.
        """
        if self.size == 1:
            return [value]
        if (inner := self._inner) is None:
            raise RuntimeError("This worker has left the run.")
        names, started = list(self._group.rank_names), self._group.clock.now()
        gathering = run_in_thread(
            partial(json_messages.all_gather, json_messages.write(value), inner, names),
            exit_timeout_s=0.0,
        )
        try:
            while not wait([gathering], _CHECK_EVERY_S).done:
                self._group.raise_if_failed()
                self.check_alive()
            messages = gathering.result()
        except RuntimeError as error:
            raise self._group.explain_error(error, _LABEL, started) from error
        finally:
            del gathering  # a reference cycle, from the error's frames back to the error
        return [json_messages.read(*pair) for pair in zip(messages, names, strict=True)]

    def check_alive(self) -> None:
        """Raise WorkerFailure, which names it, if a rank gives no sign of life any more."""
        watchdog = self._group.watchdog
        if watchdog is not None and (lost := watchdog.lost(LOST_AFTER_S)):
            raise WorkerFailure(
                f"No sign of life from {', '.join(lost)} for {LOST_AFTER_S:g} s. This worker ends, "
                "and the other members continue without it."
            )

    def ask_first(self, ask: Callable[[], T]) -> T:
        """Return the result of ``ask`` on place 0, or raise its error on all ranks.

        Other ranks get tuples as lists.
        """
        if self.size == 1:
            return ask()
        answer, error = None, None
        if self.is_first:
            try:
                answer = ask()
            # Also ValueError, for settings: all ranks are to end with the same message.
            except Exception as raised:
                error = raised
        found: list[Any] = self.gather([answer, json_messages.write_error(error)])[0]
        if error is not None:
            raise error
        if (theirs := json_messages.read_error(found[1], self._group.rank_names[0])) is not None:
            raise theirs
        return found[0]  # type: ignore[no-any-return]

    def together(self, step: Callable[[], T]) -> T:
        """Take a step on all ranks; RuntimeError on all of them if it fails on one."""
        if self.size == 1:
            return step()
        error: RuntimeError | None = None
        try:
            result = step()
        except RuntimeError as raised:
            error = raised
        # Also without an error: all ranks have to know whether the step counts.
        texts = self.gather(None if error is None else str(error).partition("\n")[0])
        if error is not None:
            raise error
        for name, text in zip(self._group.rank_names, texts, strict=True):
            if text is not None:
                raise RuntimeError(f"{name}: {text}")
        return result

    def close(self, *, has_failed: bool) -> None:
        """Destroy the group; a second call does nothing."""
        groups = [self._inner] if self._inner is not None else []
        self._inner = None
        if has_failed or self._group.failed:
            # A regular end would wait for ranks that may be lost.
            abort_groups(groups)
        elif dist.is_initialized():
            list(map(dist.destroy_process_group, groups))

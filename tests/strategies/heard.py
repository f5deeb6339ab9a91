"""What a logger is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

RANK_ZERO = "lightning.pytorch.utilities.rank_zero"
"""The logger of what Lightning and this package say on rank 0 alone."""


class Messages(logging.Handler):
    """Keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def heard(name: str) -> Iterator[list[str]]:
    """The messages of a logger, as they come."""
    log, messages = logging.getLogger(name), Messages()
    level = log.level
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    try:
        yield messages.texts
    finally:
        log.setLevel(level)
        log.removeHandler(messages)

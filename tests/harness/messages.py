"""Records the messages of a logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

RANK_ZERO = "lightning.pytorch.utilities.rank_zero"
"""Logger of messages from Lightning and this package on rank 0."""


class Messages(logging.Handler):
    """Records log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def messages_of(name: str) -> Iterator[list[str]]:
    """Yield a list that collects the messages of a logger."""
    log, messages = logging.getLogger(name), Messages()
    level = log.level
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    try:
        yield messages.texts
    finally:
        log.setLevel(level)
        log.removeHandler(messages)

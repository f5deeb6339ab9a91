"""torchft without what it says of every connection, at level INFO, from Python and from Rust."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors")
_OF_RUST = "RUST_LOG"


@contextmanager
def quiet_torchft() -> Iterator[None]:
    """Import torchft inside: only then does its part in Rust read how much it is to say.

    Warnings are still shown, and what the user has set stays: the level of a logger, or the
    variable ``RUST_LOG``.
    """
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
    if _OF_RUST in os.environ:
        yield
        return
    os.environ[_OF_RUST] = "warn"
    try:
        yield
    finally:
        del os.environ[_OF_RUST]

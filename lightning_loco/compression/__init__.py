"""Codecs and error feedback for messages: flat tensors, no process group and no Lightning."""

from lightning_loco.compression.codec import Codec
from lightning_loco.compression.feedback import (
    CODECS,
    Compensated,
    Compression,
    ErrorFeedback,
    as_compression,
    check_compression,
    shared_part,
)
from lightning_loco.compression.floats import BFloat16, Float16
from lightning_loco.compression.four_bits import E3M0, Int4
from lightning_loco.compression.int8 import Int8
from lightning_loco.compression.sparse import Sparse

__all__ = [
    "CODECS",
    "E3M0",
    "BFloat16",
    "Codec",
    "Compensated",
    "Compression",
    "ErrorFeedback",
    "Float16",
    "Int4",
    "Int8",
    "Sparse",
    "as_compression",
    "check_compression",
    "shared_part",
]

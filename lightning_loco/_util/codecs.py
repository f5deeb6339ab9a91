"""The table of codecs: names, classes and sizes; it needs neither PyTorch nor NumPy."""

from __future__ import annotations

from typing import NamedTuple


class Encoding(NamedTuple):
    """How many bytes values take in a message.

    Attributes:
        block: Values that are encoded together.
        row_bytes: Bytes of an encoded block.
        is_sparse: Whether sums of messages do not stay that small, so that all send to all.
    """

    block: int
    row_bytes: int
    is_sparse: bool = False

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` values.

        Example:
            >>> CODEC_TABLE["int8"].encoding.num_bytes(1000)
            1040
        """
        return -(-numel // self.block) * self.row_bytes


class KnownCodec(NamedTuple):
    """A row of the table of codecs.

    Attributes:
        title: How the values of a message are encoded.
        codec: Its class, as an import path; None for messages that are not encoded.
        encoding: The size of its messages with the default arguments.
    """

    title: str
    codec: str | None
    encoding: Encoding


_PACKAGE = "lightning_loco.compression"

CODEC_TABLE = {
    "none": KnownCodec("float32", None, Encoding(1, 4)),
    "bf16": KnownCodec("bfloat16", f"{_PACKAGE}.floats.BFloat16", Encoding(64, 128)),
    "fp16": KnownCodec("float16", f"{_PACKAGE}.floats.Float16", Encoding(64, 128)),
    "int8": KnownCodec("8-bit integers", f"{_PACKAGE}.int8.Int8", Encoding(256, 260)),
    "int4": KnownCodec("4-bit integers", f"{_PACKAGE}.four_bits.Int4", Encoding(128, 68)),
    "e3m0": KnownCodec(
        "4-bit floating-point numbers", f"{_PACKAGE}.four_bits.E3M0", Encoding(128, 68)
    ),
    "sparse": KnownCodec(
        "the largest values only", f"{_PACKAGE}.sparse.Sparse", Encoding(4096, 120, is_sparse=True)
    ),
}
"""The codecs by their names in ``compression=``, each also a file in ``conf/compression``."""

"""What a user asks for, ``compression="int8"``, as far as a remote optimizer can do it."""

from __future__ import annotations

from typing import Any

from lightning_loco.codecs import CODECS, Codec, check_compression


def as_codec(given: Any) -> Codec | None:
    """The codec of gradients and parameters.

    Parameters travel too, and a worker may have no part in a step: nothing is remembered from one
    message to the next, and what a codec loses must be small.

    Args:
        given: None or ``"none"``, the name of a codec, or a codec.

    Returns:
        The codec; None if all travels as it is.

    Raises:
        TypeError: If it is none of these.
        ValueError: If the name is unknown, the codec is rough, or an error feedback is asked for.

    Example:
        >>> as_codec("int8")
        Int8(block=256)
    """
    check_compression(given)
    if given is None or given == "none":
        return None
    named = CODECS[given]() if isinstance(given, str) else given
    codec: Codec = named if isinstance(named, Codec) else named.codec
    if codec.is_rough:
        raise ValueError(
            f"{codec} writes too roughly for a remote optimizer, where parameters travel in every "
            'step. Use compression="int8", "bf16" or "fp16", or an algorithm with rounds.'
        )
    if named is not codec:
        raise ValueError(
            f"{named} has nothing to feed back to: under a remote optimizer a worker may miss "
            "messages, so nothing is remembered from one to the next. Give the codec alone: "
            f"compression={codec}."
        )
    return codec

"""How messages are written on the wire: flat tensors, no process group and no Lightning."""

from lightning_loco.codecs.base import Codec, Identity

__all__ = ["Codec", "Identity"]

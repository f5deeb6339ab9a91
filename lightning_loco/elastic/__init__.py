"""Members that come and go; the only room that knows torchft."""

from lightning_loco.elastic.membership import Elastic

__all__ = ["Elastic"]

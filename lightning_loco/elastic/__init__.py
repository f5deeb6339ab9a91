"""Elastic membership: workers that join and leave during a run, by torchft."""

from lightning_loco.elastic.membership import Elastic

__all__ = ["Elastic"]

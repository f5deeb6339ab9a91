"""Elastic membership: workers that join and leave during a run, by torchft."""

from lightning_loco.elastic.elastic import Elastic

__all__ = ["Elastic"]

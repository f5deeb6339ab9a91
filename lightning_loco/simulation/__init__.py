"""N workers in one process: the same algorithm objects in lock step, without process groups."""

from lightning_loco.simulation.simulation import Simulation

__all__ = ["Simulation"]

"""The simulation of N workers in one process, without process groups."""

from lightning_loco.simulation.simulation import Simulation

__all__ = ["Simulation"]

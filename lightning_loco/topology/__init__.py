"""Topologies: the graphs of gossip, their mixing matrices, and their rates of convergence."""

from __future__ import annotations

from lightning_loco.topology.custom import CustomTopology, FromFile, FromGraph, FromMatrix
from lightning_loco.topology.exponential import Exponential, OnePeerExponential
from lightning_loco.topology.matchings import (
    Matching,
    RandomMatching,
    RandomTopology,
    RandomTwoPeer,
    Xor,
)
from lightning_loco.topology.momentum import (
    OptimalGossip,
    gossip_radius,
    optimal_gossip,
)
from lightning_loco.topology.registry import TOPOLOGIES, as_topology, get_topology
from lightning_loco.topology.spectral import (
    chi,
    consensus_rate,
    lambda_max,
    laplacian_modes,
    spectral_gap,
)
from lightning_loco.topology.static import Complete, FixedGraph, Grid, Hypercube, Ring, Star, Torus
from lightning_loco.topology.topology import Topology

__all__ = [
    "TOPOLOGIES",
    "Complete",
    "CustomTopology",
    "Exponential",
    "FixedGraph",
    "FromFile",
    "FromGraph",
    "FromMatrix",
    "Grid",
    "Hypercube",
    "Matching",
    "OnePeerExponential",
    "OptimalGossip",
    "RandomMatching",
    "RandomTopology",
    "RandomTwoPeer",
    "Ring",
    "Star",
    "Topology",
    "Torus",
    "Xor",
    "as_topology",
    "chi",
    "consensus_rate",
    "get_topology",
    "gossip_radius",
    "lambda_max",
    "laplacian_modes",
    "optimal_gossip",
    "spectral_gap",
]

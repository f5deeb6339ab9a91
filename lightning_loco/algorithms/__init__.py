"""Algorithms: what a round computes, on flat tensors, without process groups or a Trainer."""

from lightning_loco.algorithms.algorithm import Algorithm, RoundInfo, State
from lightning_loco.algorithms.decoupled_diloco import (
    DecoupledDiLoCo,
    Push,
    TensorRange,
    radial_mean,
)
from lightning_loco.algorithms.delayed_nesterov import DelayedNesterov
from lightning_loco.algorithms.diloco import DiLoCo
from lightning_loco.algorithms.eager_diloco import EagerDiLoCo
from lightning_loco.algorithms.gasloc import GASLoC
from lightning_loco.algorithms.local_sgd import LocalSGD
from lightning_loco.algorithms.merge_policy import KeepProgress, MergePolicy, Mix, Restart
from lightning_loco.algorithms.model_average import ModelAverage, NeighborAverage
from lightning_loco.algorithms.noloco import NoLoCo
from lightning_loco.algorithms.outer_lr import Cosine, Linear, Piecewise
from lightning_loco.algorithms.outer_optimizer import largest_stable_contraction
from lightning_loco.algorithms.pairwise_average import PairwiseAverage, Tag
from lightning_loco.algorithms.robust import GeometricMedian, RobustMean, TrimmedMean
from lightning_loco.algorithms.sparta import SPARTA
from lightning_loco.algorithms.stale_correction import CGAD, HeLoCo, StaleCorrection

__all__ = [
    "Algorithm",
    "CGAD",
    "Cosine",
    "DecoupledDiLoCo",
    "DelayedNesterov",
    "DiLoCo",
    "EagerDiLoCo",
    "GASLoC",
    "GeometricMedian",
    "HeLoCo",
    "KeepProgress",
    "MergePolicy",
    "Linear",
    "LocalSGD",
    "Mix",
    "ModelAverage",
    "NeighborAverage",
    "NoLoCo",
    "PairwiseAverage",
    "Piecewise",
    "Push",
    "Restart",
    "RobustMean",
    "RoundInfo",
    "SPARTA",
    "StaleCorrection",
    "State",
    "Tag",
    "TensorRange",
    "TrimmedMean",
    "largest_stable_contraction",
    "radial_mean",
]

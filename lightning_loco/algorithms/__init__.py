"""Algorithms: what a round computes, on flat tensors, without process groups or a Trainer."""

import importlib
import pkgutil
from types import GenericAlias

from lightning_loco.algorithms.base import Algorithm, RoundInfo, State
from lightning_loco.algorithms.delayed_nesterov import DelayedNesterov
from lightning_loco.algorithms.diloco import DiLoCo
from lightning_loco.algorithms.eager_diloco import EagerDiLoCo
from lightning_loco.algorithms.gasloc import GASLoC
from lightning_loco.algorithms.local_sgd import LocalSGD
from lightning_loco.algorithms.merge import KeepProgress, MergePolicy, Mix, Restart
from lightning_loco.algorithms.model_average import ModelAverage, NeighborAverage
from lightning_loco.algorithms.outer_lr import Cosine, Linear, Piecewise
from lightning_loco.algorithms.outer_optimizer import largest_stable_contraction
from lightning_loco.algorithms.pairwise import PairwiseAverage, Tag
from lightning_loco.algorithms.robust import GeometricMedian, RobustMean, TrimmedMean

__all__ = [
    "Algorithm",
    "Cosine",
    "DelayedNesterov",
    "DiLoCo",
    "EagerDiLoCo",
    "GASLoC",
    "GeometricMedian",
    "KeepProgress",
    "MergePolicy",
    "Linear",
    "LocalSGD",
    "Mix",
    "ModelAverage",
    "NeighborAverage",
    "PairwiseAverage",
    "Piecewise",
    "Restart",
    "RobustMean",
    "RoundInfo",
    "State",
    "Tag",
    "TrimmedMean",
    "largest_stable_contraction",
]


def _all_algorithms() -> dict[str, type[Algorithm]]:
    """Find the algorithms of all modules in this folder, so a new one need not be listed."""
    modules = [
        importlib.import_module(file.name)
        for file in pkgutil.iter_modules(__path__, f"{__name__}.")
    ]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if not isinstance(value, GenericAlias)  # list[int], which Python 3.10 takes for a type
        if isinstance(value, type) and issubclass(value, Algorithm) and not name.startswith("_")
    }


_found = _all_algorithms()
globals().update(_found)
__all__ += sorted(_found.keys() - set(__all__))

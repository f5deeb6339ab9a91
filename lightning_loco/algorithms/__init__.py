"""What is computed in a round: flat tensors and numbers, no process group and no Trainer."""

from lightning_loco.algorithms.base import Algorithm, State
from lightning_loco.algorithms.diloco import DiLoCo
from lightning_loco.algorithms.gasloc import GASLoC
from lightning_loco.algorithms.local_sgd import LocalSGD
from lightning_loco.algorithms.model_average import ModelAverage, NeighborAverage
from lightning_loco.algorithms.pairwise import PairwiseAverage, Tag
from lightning_loco.algorithms.stability import largest_stable_contraction

__all__ = [
    "Algorithm",
    "DiLoCo",
    "GASLoC",
    "LocalSGD",
    "ModelAverage",
    "NeighborAverage",
    "PairwiseAverage",
    "State",
    "Tag",
    "largest_stable_contraction",
]

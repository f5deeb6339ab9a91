"""Local SGD: average the parameters now and then."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from lightning_loco.algorithms.base import Algorithm, State


@dataclasses.dataclass(frozen=True)
class LocalSGD(Algorithm):
    r"""Every round replaces the parameters by their mean over the workers.

    .. math:: \theta^i \leftarrow \frac{1}{N} \sum_j \theta^j

    The inner optimizer is arbitrary, and its state stays local. Keeps no state of its own.

    Source:
        Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767.

    Example:
        >>> import torch
        >>> algorithm = LocalSGD()
        >>> params = torch.tensor([1.0, 3.0])
        >>> state = algorithm.init(params.clone())
        >>> message = algorithm.propose(params, state)
        >>> algorithm.apply(params, torch.tensor([0.0, 2.0]), state)  # the mean over the workers
        >>> params
        tensor([0., 2.])
    """

    exchange = "mean"
    sends_parameters = True

    def init(self, params: Tensor) -> State:
        """No state is needed."""
        return {}

    def propose(self, params: Tensor, state: State) -> Tensor:
        """The message is the local parameters."""
        return params

    def update(self, params: Tensor, received: Tensor, state: State) -> Tensor:
        """The mean becomes the local parameters."""
        return received

    def restart(self, state: State) -> None:
        """Nothing remembers where the round began: a worker without progress takes the mean."""

"""Local SGD: the parameters are replaced by their mean over the workers."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from lightning_loco.algorithms.algorithm import Algorithm, RoundInfo, State


@dataclasses.dataclass(frozen=True)
class LocalSGD(Algorithm):
    r"""Replaces the parameters by their mean over the workers in every round.

    .. math:: \theta^i \leftarrow \frac{1}{N} \sum_j \theta^j

    Any inner optimizer can be used; its state is not exchanged. The algorithm has no state.

    Source:
        Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767.

    Example:
        >>> import torch
        >>> algorithm = LocalSGD()
        >>> params = torch.tensor([1.0, 3.0])
        >>> state = algorithm.init(params.clone())
        >>> message = algorithm.propose(params, state, RoundInfo())
        >>> mean = torch.tensor([0.0, 2.0])  # over the workers
        >>> algorithm.update(None, None, mean, state, RoundInfo())
        tensor([0., 2.])
    """

    exchange = "mean"
    sends_parameters = True

    def init(self, params: Tensor) -> State:
        """Return an empty state."""
        return {}

    def propose(self, params: Tensor, state: State, info: RoundInfo) -> Tensor:
        """Return the local parameters."""
        return params

    def update(
        self,
        local: Tensor | None,
        message: Tensor | None,
        received: Tensor,
        state: State,
        info: RoundInfo,
    ) -> Tensor:
        """Return the mean."""
        return received

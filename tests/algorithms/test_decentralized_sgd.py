"""NeighborAverage after every local step of SGD is decentralized SGD, in two orders."""

from __future__ import annotations

import torch

from lightning_loco import NeighborAverage
from lightning_loco.topology import Ring
from tests.algorithms.quadratics import RATE, gradient, start, trained
from tests.algorithms.toys import assert_close

MATRIX = Ring().mixing_matrix(5)


def test_blocking_rounds_average_after_the_step() -> None:
    x, history = start.repeat(5, 1), []
    for _ in range(20):
        x = MATRIX @ (x - RATE * gradient(x))
        history.append(x)
    assert_close(trained(NeighborAverage(), 5, 20, topology="ring")[0], torch.stack(history))


def test_overlapped_rounds_are_d_psgd() -> None:
    """Algorithm 1 of arXiv:1705.09056: the gradient at the parameters that are being averaged."""
    x, history = start.repeat(5, 1), []
    for _ in range(20):
        history.append(x - RATE * gradient(x) if not history else MATRIX @ x - RATE * gradient(x))
        x = history[-1]
    settings = {"topology": "ring", "overlap": True, "warm_start": False}
    assert_close(trained(NeighborAverage(), 5, 20, **settings)[0], torch.stack(history))

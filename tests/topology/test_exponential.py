"""Exponential graphs: closed forms, and when one peer per round gives the exact mean."""

from __future__ import annotations

import pytest
import torch

from lightning_loco.topology import Exponential, OnePeerExponential, consensus_rate


def cycle_product(topology: OnePeerExponential, num_workers: int) -> torch.Tensor:
    product = torch.eye(num_workers, dtype=torch.float64)
    for t in range(topology.period(num_workers)):
        product = topology.mixing_matrix(num_workers, t) @ product
    return product


def test_static_graph_has_the_known_norm(subtests: pytest.Subtests) -> None:
    for num_workers in range(2, 65):
        with subtests.test(num_workers=num_workers):
            matrix = Exponential().mixing_matrix(num_workers)
            tau = (num_workers - 1).bit_length()
            norm = float(torch.linalg.matrix_norm(matrix - 1 / num_workers, ord=2))
            bound = 1 - 2 / (tau + 1)
            if num_workers % 2 == 0:
                assert norm == pytest.approx(bound, abs=1e-12)
            else:
                assert norm < bound
            assert consensus_rate(Exponential(), num_workers) == pytest.approx(norm, abs=1e-12)


def test_static_graph_of_33() -> None:
    assert consensus_rate(Exponential(), 33) == pytest.approx(0.608, abs=5e-4)


def test_one_peer_is_exact_for_powers_of_two_only(subtests: pytest.Subtests) -> None:
    for num_workers in range(1, 33):
        with subtests.test(num_workers=num_workers):
            rest = cycle_product(OnePeerExponential(), num_workers) - 1 / num_workers
            if num_workers & (num_workers - 1):
                assert torch.linalg.matrix_norm(rest, ord=2) > 0.01
            else:
                assert torch.equal(rest, torch.zeros_like(rest))


@pytest.mark.parametrize(("num_workers", "left"), [(6, 0.217), (12, 0.209)])
def test_distance_that_remains_with_one_peer(num_workers: int, left: float) -> None:
    period = OnePeerExponential().period(num_workers)
    rest = cycle_product(OnePeerExponential(), num_workers) - 1 / num_workers
    assert float(torch.linalg.matrix_norm(rest, ord=2)) == pytest.approx(left, abs=5e-4)
    assert consensus_rate(OnePeerExponential(), num_workers) ** period == pytest.approx(
        left, abs=5e-4
    )


def test_one_message_out_and_one_in() -> None:
    for t in range(4):
        sent = [OnePeerExponential().receivers(worker, 12, t) for worker in range(12)]
        assert sorted(peer for peers in sent for peer in peers) == list(range(12))

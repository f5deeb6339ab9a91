"""Pairs: XOR is exact; random matchings are uniform, equal everywhere, as fast as predicted."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import pytest
import torch

from lightning_loco.topology import RandomMatching, RandomTwoPeer, Xor, consensus_rate

torch.set_num_threads(1)


def test_xor_is_exact_after_log2_rounds(subtests: pytest.Subtests) -> None:
    """Gossip with step 0.5 on the pair Laplacian, as in GASLoC."""
    for num_workers in (1, 2, 4, 8, 16, 64):
        with subtests.test(num_workers=num_workers):
            identity = torch.eye(num_workers)
            values = start = torch.randn(num_workers, dtype=torch.float64)
            for t in range(num_workers.bit_length() - 1):
                laplacian = Xor().laplacian_scale * (identity - Xor().mixing_matrix(num_workers, t))
                values = values - 0.5 * laplacian @ values
            torch.testing.assert_close(values, start.mean().expand(num_workers), rtol=0, atol=1e-14)


def test_xor_needs_a_power_of_two() -> None:
    message = (
        "Topology 'xor' needs a power of two workers, got 12. Use topology=one_peer_exponential or "
        "topology=random_matching, or run 8 or 16 workers."
    )
    for ask in (Xor().check, lambda n: Xor().weights(0, n, 0), lambda n: Xor().period(n)):
        with pytest.raises(ValueError, match=re.escape(message)):
            ask(12)


def test_random_matching_is_an_involution(subtests: pytest.Subtests) -> None:
    for num_workers in (*range(1, 13), 4096, 4097):
        with subtests.test(num_workers=num_workers):
            for t in range(5):
                partners = [
                    RandomMatching(3).partner(i, num_workers, t) for i in range(num_workers)
                ]
                assert [partners[partner] for partner in partners] == list(range(num_workers))
                assert sum(partner == i for i, partner in enumerate(partners)) == num_workers % 2


def test_draws_never_change() -> None:
    """Workers with other hosts, Python versions and hash seeds must draw the same pairs."""
    assert [RandomMatching(5).partner(i, 9, 4) for i in range(9)] == [6, 7, 5, 4, 3, 2, 0, 1, 8]
    peers = [RandomTwoPeer(5).peers(i, 6, 1000) for i in range(6)]
    assert peers == [(3, 1), (2, 0), (1, 4), (0, 5), (5, 2), (4, 3)]


def test_drawing_does_not_change_global_random_states() -> None:
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    RandomMatching(11).weights(0, 50, 123)
    RandomTwoPeer(11).weights(0, 50, 123)
    assert random.getstate() == python_state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_rounds_and_seeds_differ() -> None:
    drawn = {
        tuple(RandomMatching(seed).partner(i, 32, t) for i in range(32))
        for seed in range(10)
        for t in range(10)
    }
    assert len(drawn) == 100


@pytest.mark.parametrize("num_workers", [5, 6])
def test_all_matchings_are_equally_likely(num_workers: int) -> None:
    """Five and six workers each have 15 matchings; 6000 draws, 5 standard deviations."""
    drawn = Counter(
        tuple(RandomMatching(1).partner(i, num_workers, t) for i in range(num_workers))
        for t in range(6000)
    )
    assert len(drawn) == 15
    assert all(abs(count - 400) < 5 * 19.4 for count in drawn.values())


def contraction(
    topology: RandomMatching | RandomTwoPeer, num_workers: int, num_draws: int
) -> float:
    """Return the mean over rounds of ``|W x|^2 / |x|^2``, averaged over all x with mean zero."""
    total = 0.0
    for t, worker in itertools.product(range(num_draws), range(num_workers)):
        row = topology.weights(worker, num_workers, t).values()
        total += sum((weight - 1 / num_workers) ** 2 for weight in row)
        total += (num_workers - len(row)) / num_workers**2
    return total / num_draws / (num_workers - 1)


def predicted(num_workers: int) -> float:
    """Return the formula's value for a random matching."""
    return 0.5 if num_workers % 2 else (num_workers - 2) / (2 * (num_workers - 1))


def test_random_matching_shrinks_the_square_as_predicted(subtests: pytest.Subtests) -> None:
    """The sum over all directions is the same for each matching, so one matching is enough."""
    for num_workers in (3, 4, 7, 8):
        with subtests.test(num_workers=num_workers):
            expected = pytest.approx(predicted(num_workers), abs=1e-12)
            assert contraction(RandomMatching(0), num_workers, 3) == expected
            assert consensus_rate(RandomMatching(), num_workers) ** 2 == expected


def test_random_matching_shrinks_one_vector_as_predicted(subtests: pytest.Subtests) -> None:
    """Monte Carlo over 20 000 rounds from one fixed start, within 1 %."""
    for num_workers in (3, 4, 7, 8):
        with subtests.test(num_workers=num_workers):
            matching, workers = RandomMatching(2), range(num_workers)
            start = torch.arange(num_workers, dtype=torch.float64).square()
            start -= start.mean()
            partners = torch.tensor(
                [[matching.partner(i, num_workers, t) for i in workers] for t in range(20_000)]
            )
            after = (start + start[partners]) / 2
            factor = float(after.square().sum(dim=1).mean() / start.square().sum())
            assert factor == pytest.approx(predicted(num_workers), rel=0.01)


def test_two_peers_shrink_the_square_as_predicted(subtests: pytest.Subtests) -> None:
    for num_workers in (2, 3, 7, 8):
        with subtests.test(num_workers=num_workers):
            measured = pytest.approx(contraction(RandomTwoPeer(4), num_workers, 1500), rel=0.05)
            assert consensus_rate(RandomTwoPeer(), num_workers) ** 2 == measured


def test_two_peers_of_eight() -> None:
    assert consensus_rate(RandomTwoPeer(), 8) ** 2 == pytest.approx(0.275, abs=1e-3)


def test_two_peers_have_weights_of_thirds() -> None:
    third = pytest.approx(1 / 3)
    for t in range(30):
        for worker in range(6):
            row = RandomTwoPeer(0).weights(worker, 6, t)
            first, second = RandomTwoPeer(0).peers(worker, 6, t)
            assert row == (
                {worker: third, first: third, second: third}
                if first != second
                else {worker: third, first: pytest.approx(2 / 3)}
            )


def test_seed_must_be_an_int(subtests: pytest.Subtests) -> None:
    for kind in (RandomMatching, RandomTwoPeer):
        for seed in (True, 1.5, "1", None):
            with (
                subtests.test(kind.__name__, seed=seed),
                pytest.raises(TypeError, match="seed must be an int, got"),
            ):
                kind(seed)

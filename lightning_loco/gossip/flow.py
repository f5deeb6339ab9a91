"""Which peer to read from: at random, and less often from those that let us wait."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

LOWEST_SCORE = 10
HIGHEST_SCORE = 1000
_REWARD = 10
_PENALTY = 100
_PASSED_OVER = 1


class FlowControl:
    """A score for every peer, and choices that follow the scores.

    The next peer is the one with the largest ``score + U``, U a random integer in [10, 1000].
    Scores start at 1000 and stay within [10, 1000]: 10 points are gained by a success, 100 are lost
    by a timeout or a refusal.

    With these numbers alone a peer that has fallen to 10 would hardly ever be tried again, because
    its best draw only equals the worst one of a peer at 1000. So every peer gains one point
    whenever it could have been chosen and was not: whatever the others do, it is level with them
    after at most 990 choices, and long before that the draws overlap. A peer that stays dead loses
    100 points each time it is tried, and so it is tried in about one choice out of a hundred.

    Args:
        names: The peers.
        seed: Of the random draws.

    Example:
        >>> flow = FlowControl(["a", "b"], seed=0)
        >>> for _ in range(20):
        ...     flow.failed("a")
        >>> flow.choose(), flow.scores
        ('b', {'a': 11, 'b': 1000})
    """

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._scores = dict.fromkeys(names, HIGHEST_SCORE)
        self._random = random.Random(seed)

    @property
    def scores(self) -> dict[str, int]:
        """A copy of the scores by name."""
        return dict(self._scores)

    def choose(self, without: Collection[str] = ()) -> str | None:
        """Draw a peer.

        Args:
            without: Peers that are not wanted now.

        Returns:
            The name of a peer, or None if there is none.
        """
        drawn = {
            name: score + self._random.randint(LOWEST_SCORE, HIGHEST_SCORE)
            for name, score in self._scores.items()
            if name not in without
        }
        if not drawn:
            return None
        highest = max(drawn.values())
        chosen = self._random.choice([name for name, value in drawn.items() if value == highest])
        for name in drawn:
            if name != chosen:
                self._add(name, _PASSED_OVER)
        return chosen

    def succeeded(self, name: str) -> None:
        """The peer has answered in full."""
        self._add(name, _REWARD)

    def failed(self, name: str) -> None:
        """The peer was silent, refused, or sent what cannot be used."""
        self._add(name, -_PENALTY)

    def _add(self, name: str, points: int) -> None:
        score = self._scores[name] + points
        self._scores[name] = min(max(score, LOWEST_SCORE), HIGHEST_SCORE)

"""A link as a user describes it: how much it carries, how far it reaches, how steady it is."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Link:
    r"""What connects a worker with the others, to be emulated on machines that are closer together.

    A message of B bytes takes :math:`8 B / (10^6\,` ``mbit_per_s`` :math:`)` seconds to leave and
    ``latency_s`` to reach the other end, up to ``jitter_s`` more by chance.

    Args:
        mbit_per_s: Megabits (a million bits) per second, in each direction; ``math.inf`` for no
            limit.
        latency_s: From one end to the other, one way, in seconds.
        jitter_s: The most by which a message is later than that, in seconds.

    Raises:
        TypeError: If a value is no number.
        ValueError: If a value is out of range.

    Example:
        >>> Link(mbit_per_s=100, latency_s=0.03).seconds(1_000_000)
        0.08
    """

    mbit_per_s: float
    latency_s: float = 0.0
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        """Check types and ranges."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{field.name} of a link must be a number, got {value!r}.")
        if not self.mbit_per_s > 0:
            raise ValueError(
                "mbit_per_s of a link must be positive (inf for no limit), got "
                f"{self.mbit_per_s!r}."
            )
        for name in ("latency_s", "jitter_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} of a link is in seconds, at least 0 and finite, got "
                    f"{getattr(self, name)!r}."
                )

    def seconds(self, num_bytes: float) -> float:
        """How long so many bytes take to leave."""
        return 8e-6 * num_bytes / self.mbit_per_s

    def slower(self, other: Link) -> Link:
        """What a message meets that passes through both: the worse of each."""
        return Link(
            min(self.mbit_per_s, other.mbit_per_s),
            max(self.latency_s, other.latency_s),
            max(self.jitter_s, other.jitter_s),
        )


LINKS = {
    "wan": Link(100, 0.03, 0.003),
    "dsl": Link(20, 0.02, 0.005),
    "lan": Link(1000, 0.0002),
    "datacentre": Link(25_000, 0.00002),
}
"""Links by name: between two sites, from a home, within a building, within a rack."""

"""What communication cost: bytes, seconds, rounds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Statistics:
    """Counters of one worker since the start of training, and figures of its last round.

    Attributes:
        rounds: Completed rounds.
        bytes_sent: Payload bytes this worker has sent; a ring all-reduce of B bytes counts
            2 (N - 1) / N * B.
        bytes_saved: By how much more it would have sent without compression.
        wait_s: Seconds this worker has been blocked in exchanges.
        staleness: Between sending and applying: rounds (0, 1 with overlap, or a part of one), or
            local steps (of the last round by the clock, or by which a peer's clock was behind).
        outer_grad_norm: Norm of the last outer gradient; None unless monitored.
        consensus_distance: Root mean square distance of the workers' parameters to their mean
            right before the last measured round; None unless monitored.
        losses: The workers' last training losses at the last round, NaN where unknown.
        members: Workers of the last round, where they come and go; None where they do not.
        repaired: How often a member was found to have drifted, and got the others' state.
        emulated_s: Seconds that messages were under way on links that are emulated; None if none
            are.
        emulated_wait_s: Those of them that this worker has been blocked for.
        emulated_bytes: Bytes of these messages: of rounds, what this worker has sent; of fetches,
            what has come. ``bytes_sent`` has what is shown or saved between rounds, too.
    """

    rounds: int = 0
    bytes_sent: int = 0
    bytes_saved: int = 0
    wait_s: float = 0.0
    staleness: float = 0
    outer_grad_norm: float | None = None
    consensus_distance: float | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    members: int | None = None
    repaired: int = 0
    emulated_s: float | None = None
    emulated_wait_s: float = 0.0
    emulated_bytes: int = 0

    def state_dict(self) -> dict[str, float]:
        """The counters that go on after a resume."""
        state = {"rounds": self.rounds, "bytes_sent": self.bytes_sent, "wait_s": self.wait_s}
        if self.bytes_saved:
            state["bytes_saved"] = self.bytes_saved
        if self.emulated_s is not None:
            names = ("emulated_s", "emulated_wait_s", "emulated_bytes")
            state |= {name: getattr(self, name) for name in names}
        return state

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on counting from a checkpoint."""
        self.rounds = int(state["rounds"])
        self.bytes_sent = int(state["bytes_sent"])
        self.bytes_saved = int(state.get("bytes_saved", 0))
        self.wait_s = float(state["wait_s"])
        if self.emulated_s is not None:
            self.emulated_s = float(state.get("emulated_s", 0.0))
            self.emulated_wait_s = float(state.get("emulated_wait_s", 0.0))
            self.emulated_bytes = int(state.get("emulated_bytes", 0))

    def count_compressed(self, num_bytes: int, without: int) -> None:
        """A message was sent in so many bytes, and would have taken others ``without``."""
        self.bytes_sent += num_bytes
        self.bytes_saved += without - num_bytes

    def begin_emulation(self) -> None:
        """From now on links are emulated."""
        self.emulated_s = self.emulated_s or 0.0

    def count_emulated(self, seconds: float, waited_s: float, num_bytes: int = 0) -> None:
        """Messages were under way for so long, and waited for so long of it."""
        self.emulated_bytes += num_bytes
        self.emulated_s = (self.emulated_s or 0.0) + seconds
        self.emulated_wait_s += min(seconds, waited_s)

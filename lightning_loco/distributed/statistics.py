"""Statistics of communication: bytes, seconds and rounds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Statistics:
    """Counters of one rank since the start of training, and metrics of its worker's last round.

    Attributes:
        rounds: Completed rounds.
        bytes_sent: Payload bytes sent by this rank; a ring all-reduce of B bytes counts as
            2 (N - 1) / N * B.
        bytes_saved: How many more bytes it would have sent without compression.
        wait_s: Seconds for which this rank was blocked in exchanges.
        other_ranks_bytes_sent: Bytes sent by the other ranks of its worker until the last round.
        longest_wait_s: Longest wait of a rank of its worker until then, in seconds.
        staleness: Delay between sending and applying: in rounds (0, or 1 with overlap, or a
            fraction), or in local steps (of the last round with a time-based schedule, or by which
            a peer was behind).
        outer_grad_norm: Norm of the last pseudo-gradient; None unless monitored.
        consensus_distance: Root mean square distance of the workers' parameters to their mean,
            just before the last measured round; None unless monitored.
        losses: Last training loss of each worker at the last round; NaN if unknown.
        members: Number of workers in the last round of an elastic group; None without one.
        repaired: How often a member had drifted from the others and has received their state.
        emulated_s: Seconds that messages spent on emulated links; None if none are emulated.
        emulated_wait_s: The part of them for which this worker was blocked.
        emulated_bytes: Bytes of these messages: bytes sent in rounds, bytes received in fetches.
            Unlike ``bytes_sent`` it excludes messages of validation and checkpoints.
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
    other_ranks_bytes_sent: int = 0
    longest_wait_s: float = 0.0

    @property
    def worker_bytes_sent(self) -> int:
        """Payload bytes sent by all ranks of the worker."""
        return self.bytes_sent + self.other_ranks_bytes_sent

    @property
    def worker_wait_s(self) -> float:
        """Seconds for which the worker was blocked: those of the rank that has waited most."""
        return max(self.wait_s, self.longest_wait_s)

    def state_dict(self) -> dict[str, float]:
        """Return the counters that continue after a resume."""
        state = {"rounds": self.rounds, "bytes_sent": self.bytes_sent, "wait_s": self.wait_s}
        if self.bytes_saved:
            state["bytes_saved"] = self.bytes_saved
        if self.emulated_s is not None:
            names = ("emulated_s", "emulated_wait_s", "emulated_bytes")
            state |= {name: getattr(self, name) for name in names}
        return state

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the counters of a checkpoint."""
        self.rounds = int(state["rounds"])
        self.bytes_sent = int(state["bytes_sent"])
        self.bytes_saved = int(state.get("bytes_saved", 0))
        self.wait_s = float(state["wait_s"])
        if self.emulated_s is not None:
            self.emulated_s = float(state.get("emulated_s", 0.0))
            self.emulated_wait_s = float(state.get("emulated_wait_s", 0.0))
            self.emulated_bytes = int(state.get("emulated_bytes", 0))

    def count_compressed(self, num_bytes: int, num_bytes_uncompressed: int) -> None:
        """Count a message that was sent in ``num_bytes``, because it was compressed."""
        self.bytes_sent += num_bytes
        self.bytes_saved += num_bytes_uncompressed - num_bytes

    def start_emulation(self) -> None:
        """Count messages on emulated links from now on."""
        self.emulated_s = self.emulated_s or 0.0

    def count_emulated(self, seconds: float, waited_s: float, num_bytes: int = 0) -> None:
        """Count messages that took ``seconds``, and for which this worker waited ``waited_s``."""
        self.emulated_bytes += num_bytes
        self.emulated_s = (self.emulated_s or 0.0) + seconds
        self.emulated_wait_s += min(seconds, waited_s)

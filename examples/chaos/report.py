"""Summary of a disturbed run, from the logs of its workers."""

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Record:
    """Events of a run. Times are in seconds since the epoch.

    Attributes:
        lines: Lines that each worker logged.
        absent: Start and end of each suspension of a worker.
        killed_at: Times at which workers were killed.
        lighthouse_back: Times at which the lighthouse had been restarted.
    """

    lines: dict[int, list[dict]] = field(default_factory=dict)
    absent: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    killed_at: list[float] = field(default_factory=list)
    lighthouse_back: list[float] = field(default_factory=list)


def rounds_of(record: Record) -> dict[int, dict[int, dict]]:
    """Return the line of each worker, by round."""
    by_round: dict[int, dict[int, dict]] = defaultdict(dict)
    for number, lines in record.lines.items():
        for line in lines:
            if "round" in line:
                by_round[line["round"]][number] = line
    return by_round


def differing_rounds(record: Record) -> list[str]:
    """Describe each round that did not end with the same state on all its members."""
    found = []
    for number, made in sorted(rounds_of(record).items()):
        ended: dict[int, list[str]] = defaultdict(list)
        for worker, line in made.items():
            ended[line["checksum"]].append(f"{worker} at {line['time']:.3f}")
        if len(ended) > 1:
            found.append(f"round {number}: {' / '.join(map(', '.join, ended.values()))}")
    return found


def wait_after(kill: float, ends: list[float], lighthouse_back: list[float]) -> float:
    """Return the time from a kill, or from a later restart of the lighthouse, to the next round."""
    end = min((end for end in ends if end > kill), default=kill)
    return end - max([kill, *(back for back in lighthouse_back if kill < back < end)])


def summarize(record: Record) -> dict[str, float]:
    """Return the figures of the table."""
    by_round = rounds_of(record)
    spans = {}
    for number, written in record.lines.items():
        lines = [line for line in written if "round" in line]
        if lines:
            spans[number] = (lines[0], lines[-1])
    took_part = live = 0
    for made in by_round.values():
        when = min(line["time"] for line in made.values())
        for number, (first, last) in spans.items():
            sleeps = any(began < when < ended for began, ended in record.absent[number])
            if first["time"] <= when <= last["time"] and not sleeps:
                live += 1
                took_part += number in made
    ends = sorted(min(line["time"] for line in made.values()) for made in by_round.values())
    waits = [wait_after(at, ends, record.lighthouse_back) for at in record.killed_at]
    losses = [line["loss"] for lines in record.lines.values() for line in lines if "loss" in line]
    return {
        "rounds": len(by_round),
        "lost": max(by_round) - min(by_round) + 1 - len(by_round),
        "different": len(differing_rounds(record)),
        "part": took_part / max(1, live),
        "longest wait": max(waits, default=0.0),
        "weight": sum(next(iter(made.values()))["weight"] for made in by_round.values()),
        "loss": sum(losses) / len(losses) if losses else float("nan"),
    }

"""Tables that others have published, beside what the costs and the plan of this package say.

Each cell is: published, ours, and ours relative to it, in bold if it is off by more than 20 %.
Nothing is trained or measured here, so all numbers are the same on every machine.

  goodput          Decoupled DiLoCo: share of useful time at one failure per chip and year
  streaming        Streaming DiLoCo: bandwidth for a share of the time in which workers compute
  diloco_measured  share of the time in which four GPUs computed on shaped links
  noloco           a tree all-reduce beside pairs, with random latencies and step times
  ft_diloco        loss by local steps per round: the law of the plan where it does not hold
  charles          loss by parameters and workers: the law of the plan on runs that it was fitted
                   to, and on others

How to read it: docs/results/published.md says which settings had to be assumed, which published
numbers are taken from summaries, and why cells are off.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import numpy as np

from lightning_loco._util.codecs import Encoding
from lightning_loco.costs import Array, Link, Links, LinkTimes
from lightning_loco.costs.method_costs import ENCODINGS, StepTimes, as_method, estimate
from lightning_loco.tools.plan import planner
from lightning_loco.tools.plan.failures import (
    BATCHES,
    FAILURES,
    Learners,
    Members,
    Recovery,
    Restarts,
)
from lightning_loco.tools.plan.loss import diloco_gap
from lightning_loco.topology import RandomMatching


def cell(published: float, ours: float) -> str:
    """Return a published number, ours, and their ratio, in bold if it is off by more than 20 %."""
    ratio = ours / published
    mark = "**" if abs(ratio - 1) > 0.2 else ""
    return f"{published:g} · {ours:.3g} · {mark}{ratio:.2f}{mark}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    for row in (header, ["---"] * len(header), *rows):
        print("|", " | ".join(row), "|")
    print()


def bisect(low: float, high: float, is_low: Callable[[float], bool]) -> float:
    """Return where ``is_low`` ends, within 0.1 %."""
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return high


# ------------------------------------------------------------------------------------- goodput

GOODPUT: dict[str, tuple[float, ...]] = {  # Douillard et al., arXiv:2604.21428; from summaries
    "data parallel": (27, 18),
    "elastic": (58, 40),
    "2 learners": (70,),
    "8 learners": (88, 80),
    "16 learners": (93, 86),
}
CHIPS = (1.2e6, 2.4e6)  # of the columns, in percent
YEAR_S = 365 * 24 * 3600.0  # between the failures of a chip
STEP_S, FRAGMENTS = 1.0, 24  # of learners, which push one after each local step
SLICE, AWAY_S = 256, 600.0  # chips that an elastic job loses in a failure, and for how long


def goodput() -> None:
    """Print the table of goodput.

    The seconds that a failure costs are those with which the first two rows have the published
    goodput at 1.2M chips. All else follows.
    """

    def percent(recovery: Recovery) -> float:
        runs = [recovery.simulate(Random(seed), FAILURES).of_method() for seed in range(BATCHES)]
        return 100 * statistics.fmean(run.computing for run in runs)

    def restarts(chips: float, lost_s: float) -> Recovery:
        return Restarts(YEAR_S / chips, lost_s, STEP_S, 0.0)

    def elastic(chips: float, lost_s: float) -> Recovery:
        """Half of the time is lost when a slice leaves, and half when it is back."""
        n, half_s = round(chips / SLICE), lost_s / 2
        return Members(n, YEAR_S / SLICE, AWAY_S, half_s, STEP_S, 1, half_s, True)

    def whole(chips: float, lost_s: float, fragments: int = 1) -> Recovery:
        return Learners(YEAR_S / chips, lost_s, 0.0, STEP_S, fragments)

    def fitted(job: Callable[[float, float], Recovery], row: str) -> float:
        return bisect(1, 200, lambda lost_s: percent(job(CHIPS[0], lost_s)) > GOODPUT[row][0])

    restart_s, elastic_s = fitted(restarts, "data parallel"), fitted(elastic, "elastic")
    whole_s = [fitted(whole, row) for row in ("data parallel", "elastic")]
    rows = []
    for row, published in GOODPUT.items():
        count = int(row.split()[0]) if row[0].isdigit() else 1
        for chips, expected in zip(CHIPS, published, strict=False):
            part, is_static = chips / count, row == "data parallel"
            job = restarts(part, restart_s) if is_static else elastic(part, elastic_s)
            other = whole(part, whole_s[not is_static], FRAGMENTS if count > 1 else 1)
            ours = [cell(expected, percent(one)) for one in (job, other)]
            rows.append([f"{row}, {chips / 1e6:g}M chips", *ours])
    print(
        f"A failure costs {restart_s:.1f} s (data parallel) or {elastic_s:.1f} s; in the last "
        f"column {whole_s[0]:.1f} s or {whole_s[1]:.1f} s.\n"
    )
    print_table(["goodput in %", "ours", "learners fail as a whole; none in a restart"], rows)


# ----------------------------------------------------------------------------------- streaming

UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
STREAMING = {  # Douillard et al., arXiv:2501.18512, Table 4: Gbit/s for these utilisations
    ("1B", "data parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "DiLoCo"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "overlapped"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "overlapped, 4 bits"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "DiLoCo"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "overlapped"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "overlapped, 4 bits"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "data parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "DiLoCo"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "overlapped"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "overlapped, 4 bits"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
MODELS = {"1B": (10**9, 0.1, 8), "10B": (10**10, 0.8, 16), "100B": (10**11, 4.9, 36)}
"""Parameters, seconds of a local step, and fragments of three layers, as in the paper."""


def streaming() -> None:
    """Print the bandwidths of two workers; results are applied one or two local steps later."""

    def utilisation(gbit_per_s: float, size: str, method: str, delay: int) -> float:
        numel, step_s, fragments = MODELS[size]
        links = Links(Link(1000 * gbit_per_s))
        if method == "data parallel":
            job = planner.PlannedRun(numel, 2, links, step_s, 1, 1000, bytes_per_gradient=2)
            return planner._every_step(planner.CANDIDATES[0], job).utilisation
        encoding = ENCODINGS["e3m0"] if "4 bits" in method else Encoding(1, 2)
        rounds = as_method("diloco", 100, None, encoding)
        if delay:
            rounds = as_method("streaming_diloco", 100, None, encoding, fragments, delay)
        steps, times = StepTimes([step_s, step_s]), LinkTimes(links, 2)
        costs = estimate(rounds, numel, steps, times, fragments, fragments)
        return float(costs.utilisation.mean())

    def needed(share: float, *rounds: Any) -> float:
        return bisect(0.01, 10_000, lambda gbit_per_s: utilisation(gbit_per_s, *rounds) < share)

    rows = []
    for (size, method), published in STREAMING.items():
        for delay in (1, 2) if "overlapped" in method else (0,):
            name = f"{size}, {method}" + (f", {delay} late" if delay else "")
            ours = [needed(share, size, method, delay) for share in UTILISATIONS]
            rows.append([name, *map(cell, published, ours)])
    print_table(["Gbit/s", *(f"{100 * share:g} %" for share in UTILISATIONS)], rows)


# ------------------------------------------------------------------------------ diloco_measured

MBIT_PER_S = (50, 200, 1000, 5000)
MEASURED = {  # github.com/Adnan082/diloco-measured, README and records; percent
    1: (0.0696, 0.320, 1.74, 7.76),
    8: (0.545, 2.48, 12.35, 40.24),
    32: (2.41, 10.01, 36.01, 68.10),
    128: (11.55, 36.09, 71.52, 87.00),
}
COUNTED = {32: 35, 128: 180}
"""Local steps per exchange in the records that were counted, where they are not H."""


def diloco_measured() -> None:
    """Print the utilisation of four workers with 30,846,720 parameters, by H and bandwidth."""

    def percent(every: int, mbit_per_s: float) -> float:
        steps = StepTimes([0.0266 if every == 1 else 0.0253] * 4)  # as recorded
        times = LinkTimes(Links(Link(mbit_per_s)), 4)
        costs = estimate(as_method("diloco", every), 30_846_720, steps, times)
        return 100 * float(costs.utilisation.mean())

    rows = []
    for every, published in MEASURED.items():
        for counted in dict.fromkeys((every, COUNTED.get(every, every))):
            name = f"H = {every}" + (f", {counted} counted" if counted != every else "")
            ours = [percent(counted, mbit_per_s) for mbit_per_s in MBIT_PER_S]
            rows.append([name, *map(cell, published, ours)])
    print_table(["computing, %", *(f"{one} Mbit/s" for one in MBIT_PER_S)], rows)


# -------------------------------------------------------------------------------------- noloco

# Kolehmainen et al., arXiv:2506.10911, section 5.3
NODES = (4, 16, 64, 256, 1024)
SPREADS = (0.5, 1.0, 2.5)  # standard deviation of the latency, relative to its mean
INNER_STEPS, ROUNDS = 100, 250


class LogNormalSteps(StepTimes):
    """Local steps with log-normal times, mu = 1 and sigma^2 = 0.5."""

    def of_step(self, step: int) -> Array:
        """Return the seconds of a step of each worker."""
        draws = np.random.default_rng((self.seed, step))
        return draws.lognormal(1, math.sqrt(0.5), len(self.step_s))


def noloco() -> None:
    """Print how much longer a tree all-reduce takes than pairs, and DiLoCo than NoLoCo."""
    matching = RandomMatching()

    def with_latencies(
        edges: Iterable[Sequence[int]], n: int, spread: float, seed: int
    ) -> LinkTimes:
        """Return links with a random latency of each message, whose mean is 1 s."""
        sigma = math.sqrt(math.log1p(spread**2))
        draws = np.random.default_rng((seed, n))
        pairs = [
            (sender, receiver, Link(math.inf, float(draws.lognormal(-(sigma**2) / 2, sigma))))
            for edge in edges
            for sender, receiver in (edge, edge[::-1])
        ]
        return LinkTimes(Links(Link(math.inf), pairs=tuple(pairs)), n)

    def pairs_s(n: int, spread: float, seed: int) -> float:
        """Return the mean seconds until both of a pair have the other's message."""
        partners = np.array([matching.partner(worker, n, seed) for worker in range(n)])
        edges = [edge for edge in enumerate(partners.tolist()) if edge[0] < edge[1]]
        times = with_latencies(edges, n, spread, seed)
        latency_s = times.all_neighbors(0, matching, seed).latency_s
        return float(np.maximum(latency_s, latency_s[partners]).mean())

    def tree_s(n: int, spread: float, seed: int) -> float:
        """Return the seconds of sums to the root of a binary tree, and of the result back."""
        children = np.arange(1, n)
        edges = np.stack([children, (children - 1) // 2])
        times = with_latencies(edges.T.tolist(), n, spread, seed)
        borders = 2 ** np.arange(1, int(math.log2(n)) + 1) - 1  # the first child of each level
        levels = np.split(edges, borders[1:] - 1, axis=1)
        ready_s = np.zeros(n)
        for senders, receivers in [*levels[::-1], *(level[::-1] for level in levels)]:
            arrival_s = ready_s[senders] + times.route(senders, receivers).latency_s
            np.maximum.at(ready_s, receivers, arrival_s)
        return float(ready_s.max())

    def ratio(n: int, spread: float) -> float:
        """Return the ratio of means, with two messages in a pair, one after the other."""
        seeds = range(10 + 2000 // n)
        means = [statistics.fmean(f(n, spread, seed) for seed in seeds) for f in (tree_s, pairs_s)]
        return means[0] / (2 * means[1])

    rows = []
    for n in NODES:
        equal = cell(math.log2(n), ratio(n, 0.0))  # the paper's equation 5
        rows.append([f"{n:,}", equal, *(f"{ratio(n, one):.3g}" for one in SPREADS)])
    print_table(["tree / pair", "equal latencies", *(f"{one:g}" for one in SPREADS)], rows)

    times = LinkTimes(Links(Link(math.inf)), NODES[-1])
    steps = LogNormalSteps([1.0] * NODES[-1])
    methods = as_method("diloco", INNER_STEPS), as_method("noloco", INNER_STEPS, matching)
    diloco_s, noloco_s = (estimate(one, 1, steps, times, ROUNDS).time_s.max() for one in methods)
    name = f"{NODES[-1]:,} workers, {INNER_STEPS} local steps"
    print_table(["time of DiLoCo / NoLoCo", ""], [[name, cell(1.2, diloco_s / noloco_s)]])


# ------------------------------------------------------------------------- ft_diloco and charles

FT_DILOCO = {25: 2.8, 50: 4.7, 100: 6.3, 200: 7.4, 500: 9.4}
"""github.com/Neumann-Labs/ft-diloco, README: percent above one worker's loss on equal tokens."""


def ft_diloco() -> None:
    """Print the gaps of two workers with 51M parameters, 3,000 local steps, 98.3M tokens."""
    parameters, tokens = 51e6, 98.3e6
    rows = []
    for every, published in FT_DILOCO.items():
        gap = diloco_gap(parameters, 2, every, tokens / parameters)
        assert gap is not None
        rows.append([f"{every}", f"{3000 // every}", cell(published, gap.percent), str(gap)])
    print_table(["H", "rounds", "% above the baseline", "range"], rows)


Losses = dict[float, tuple[float, ...]]
CHARLES: Losses = {  # Charles et al., arXiv:2503.09799, Tables 4, 5: of DDP and 1, 2, 4, 8 workers
    35e6: (3.485, 3.482, 3.508, 3.554, 3.621),
    90e6: (3.167, 3.162, 3.182, 3.213, 3.265),
    180e6: (2.950, 2.943, 2.957, 2.981, 3.019),
    335e6: (2.784, 2.777, 2.788, 2.808, 2.841),
    550e6: (2.653, 2.645, 2.657, 2.673, 2.698),
    1.3e9: (2.460, 2.451, 2.464, 2.472, 2.493),
    2.4e9: (2.326, 2.317, 2.323, 2.332, 2.351),
    4e9: (2.224, 2.219, 2.220, 2.230),
    10e9: (2.090, 2.086, 2.086, 2.096),
}
OTHERS: Losses = {  # arXiv:2501.18512, Tables 5, 6: of DDP, 2 and 4 workers, H = 30, then H = 100
    35e6: (3.51, 3.53, 3.60, 3.56, 3.64),
    100e6: (3.19, 3.21, 3.25, 3.22, 3.29),
    200e6: (2.97, 2.98, 3.02, 3.00, 3.05),
    300e6: (2.80, 2.81, 2.84, 2.83, 2.87),
    500e6: (2.67, 2.67, 2.70, 2.69, 2.73),
    1e9: (2.49, 2.48, 2.50, 2.50, 2.53),
}


def charles() -> None:
    """Print the gaps to DDP; the last number is the ratio of losses, not of gaps."""

    def print_gaps(table: Losses, columns: Sequence[tuple[int, int]], delay: int) -> None:
        rows = []
        for parameters, (ddp, *losses) in table.items():
            cells = []
            for (workers, every), loss in zip(columns, losses, strict=False):
                gap = diloco_gap(parameters, workers, every, 20, delay)
                assert gap is not None
                published = loss / ddp
                ratio = (1 + gap.percent / 100) / published
                cells.append(f"{100 * (published - 1):+.1f} · {gap.percent:+.1f} · {ratio:.3f}")
            missing = ["-"] * (len(columns) - len(losses))
            rows.append([f"{parameters / 1e6:,g}M", *cells, *missing])
        header = [f"N = {workers}, H = {every}" for workers, every in columns]
        print_table(["% above DDP, P", *header], rows)

    print_gaps(CHARLES, [(workers, 30) for workers in (1, 2, 4, 8)], 0)
    print_gaps(OTHERS, [(2, 30), (4, 30), (2, 100), (4, 100)], 1)


PARTS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (goodput, streaming, diloco_measured, noloco, ft_diloco, charles)
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables that are named, or all."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    names = parser.parse_args(arguments).parts or list(PARTS)
    if unknown := set(names) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(PARTS)}.")
    for name in names:
        PARTS[name]()


if __name__ == "__main__":
    main()

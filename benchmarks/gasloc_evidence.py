"""GASLoC beside its baselines: how fast it reaches consensus, and what it costs in loss.

  python benchmarks/gasloc_evidence.py consensus       rounds of gossip alone, from noise
  python benchmarks/gasloc_evidence.py every_step      a round after every local step (H = 1)
  python benchmarks/gasloc_evidence.py virtual_time    equal virtual time on slow links

consensus     The factor per round by which workers come closer, on rings, tori and hypercubes of 8
              to 64 workers: plain gossip, the momentum that is optimal on the graph, and the
              defaults of GASLoC. Rounds per factor e against chi, and the exponents of chi.
every_step    A byte MLP with SGD and a warm-up, on 8 workers that each read another part of the
              text: D-PSGD, CHOCO-SGD, A2CiD2 and GASLoC on four graphs. The learning rate of
              each method is the best of a few on the ring, for two seeds that are not used again.
virtual_time  The same MLP with AdamW and windows from the whole text, until the virtual time is
              over: DDP, DiLoCo, streaming DiLoCo and GASLoC, on one slow link and in two data
              centres, or other networks. Messages take as long as for a model that is
              ``--scale`` times larger.

How to read it: means over the seeds, with standard deviations. ``p`` is the two-sided p-value of
the paired differences to the row of GASLoC (all signs of the differences are equally likely without
a difference, and all are tried): with 5 seeds it cannot be below 1/16, with 10 not below 1/512. All
trainings are in the CSV file, one a line.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
from gossip_baselines import A2CiD2, ChocoSGD, Int4Differences
from harness import mean_and_deviation, paired_p, print_table
from torch import Tensor, nn

from lightning_loco import DiLoCo, GASLoC, NeighborAverage, Simulation, StreamingDiLoCoStrategy
from lightning_loco.algorithms import Algorithm, RoundInfo
from lightning_loco.app.demo.data import standard_library
from lightning_loco.costs import NETWORKS, Link, Links, LinkTimes
from lightning_loco.costs.method_costs import StepTimes, as_method, estimate
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EverySteps
from lightning_loco.topology import (
    Topology,
    chi,
    get_topology,
    gossip_radius,
    optimal_gossip,
    spectral_gap,
)

CONTEXT, EMBEDDING, HIDDEN, BATCH = 8, 16, 64, 32
TUNING_SEEDS = (1000, 1001)
Record = dict[str, Any]


def values_of(records: list[Record], key: str, **where: Any) -> list[float]:
    """The values of a column, in order of the seeds, in the rows that have these values."""
    return [r[key] for r in records if all(r[name] == value for name, value in where.items())]


def p_against(records: list[Record], key: str, base: str, **where: Any) -> str:
    """The p-value of the differences between a method and the ``base``, seed by seed."""
    others = values_of(records, key, **where)
    bases = values_of(records, key, **{**where, "method": base})
    is_finite = all(map(math.isfinite, [*others, *bases]))
    if where["method"] == base or len(bases) != len(others) or not is_finite:
        return "-"
    return f"{paired_p([a - b for a, b in zip(others, bases, strict=True)]):.3f}"


# ------------------------------------------------------------------------------- consensus


def graphs_of(options: argparse.Namespace) -> list[tuple[str, int]]:
    """The graphs and numbers of workers of the first part."""
    return [(name, n) for name in ("ring", "torus", "hypercube") for n in options.sizes]


def gossip_methods(graph: str, num_workers: int) -> dict[str, GASLoC]:
    """Gossip as settings of GASLoC: without momentum, with the optimal one, and the defaults."""
    best = optimal_gossip(get_topology(graph), num_workers)
    return {
        "plain": GASLoC(1.0, momentum=0.0),
        "optimal": GASLoC(1.0, best.gossip_step, best.momentum, "local"),
        "default": GASLoC(1.0, momentum_on="local"),
        "gossiped": GASLoC(1.0),
    }


def measured_rate(algorithm: Algorithm, topology: Topology, num_workers: int, seed: int) -> float:
    """The factor per round of the consensus distance, from noise, after the first rounds.

    GASLoC is elementwise, so that one vector may hold the parameters of all workers.
    """
    torch.manual_seed(seed)
    matrix = topology.mixing_matrix(num_workers)
    x = torch.randn(num_workers, 64, dtype=torch.float64)
    x -= x.mean(0)
    size, state = x.shape, algorithm.init(x.flatten())
    distances = [float(x.norm())]
    while distances[-1] > 1e-11 * distances[0] and len(distances) < 4000:
        info = RoundInfo(len(distances) - 1)
        message = algorithm.propose(state["start"].clone(), state, info)
        received = (matrix @ message.view(size)).flatten()
        distances.append(float(algorithm.update(None, message, received, state, info).norm()))
    first = len(distances) // 2
    return float((distances[-1] / distances[first]) ** (1 / (len(distances) - 1 - first)))


def consensus(options: argparse.Namespace) -> Iterator[Record]:
    """Measure all rates."""
    for graph, n in graphs_of(options):
        topology = get_topology(graph)
        condition, gap = chi(topology, n), spectral_gap(topology, n)
        for (method, algorithm), seed in itertools.product(
            gossip_methods(graph, n).items(), options.seeds
        ):
            ready = algorithm.prepare(n, topology)
            rate = measured_rate(ready, topology, n, seed)
            yield {
                **{"graph": graph, "workers": n, "method": method, "seed": seed},
                **{"chi": condition, "spectral_gap": gap, "rate": rate},
                "predicted": gossip_radius(
                    topology, n, ready.gossip_step, ready.momentum, ready.momentum_on
                ),
                "rounds_per_e": -1 / math.log(rate),
            }
        print(f"{graph}, {n} workers", flush=True)


def exponent(records: list[Record], method: str, seed: int, graph: str | None = None) -> float:
    """The slope of log(rounds per factor e) over log(chi)."""
    where = {"method": method, "seed": seed} | ({} if graph is None else {"graph": graph})
    x = [math.log(value) for value in values_of(records, "chi", **where)]
    y = [math.log(value) for value in values_of(records, "rounds_per_e", **where)]
    return statistics.linear_regression(x, y).slope


def show_consensus(records: list[Record], options: argparse.Namespace) -> None:
    """The rates of each graph, and the exponents."""
    methods = ("plain", "optimal", "default", "gossiped")
    rows = []
    for graph, n in graphs_of(options):
        where = {"graph": graph, "workers": n}
        first = next(r for r in records if r["graph"] == graph and r["workers"] == n)
        cells = [f"{graph} {n}", f"{first['spectral_gap']:.4f}", f"{first['chi']:.2f}"]
        for method in methods:
            cells.append(
                mean_and_deviation(values_of(records, "rounds_per_e", method=method, **where), 2)
            )
        cells.append(p_against(records, "rounds_per_e", "optimal", method="plain", **where))
        rows.append(cells)
    heads = [f"rounds per e, {method}" for method in methods]
    print_table(["graph", "spectral gap", "chi", *heads, "p, plain to optimal"], rows)
    rows = []
    for graph in (None, "ring", "torus", "hypercube"):
        if len(options.sizes) < 2:
            continue
        slopes = {m: [exponent(records, m, seed, graph) for seed in options.seeds] for m in methods}
        rows.append([graph or "all", *(mean_and_deviation(slopes[m], 3) for m in methods)])
    if rows:
        print_table(["exponent of chi", *methods], rows)


def draw_consensus(records: list[Record], path: Path) -> None:
    """Rounds per factor e against chi, with the lines of theory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    for method, color in (("plain", "tab:blue"), ("optimal", "tab:red"), ("gossiped", "tab:green")):
        for graph, marker in (("ring", "o"), ("torus", "s"), ("hypercube", "^")):
            x = values_of(records, "chi", method=method, graph=graph)
            y = values_of(records, "rounds_per_e", method=method, graph=graph)
            panel.loglog(x, y, marker, color=color, label=f"{method}, {graph}", markersize=5)
    ends = sorted(values_of(records, "chi"))
    line = [ends[0] * (ends[-1] / ends[0]) ** (i / 20) for i in range(21)]
    panel.loglog(line, [c / 2 for c in line], ":", color="gray", label="chi / 2")
    panel.loglog(line, [math.sqrt(c) / 2 for c in line], "--", color="gray", label="sqrt(chi) / 2")
    panel.set_xlabel("chi of the graph")
    panel.set_ylabel("rounds per factor e")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
    figure.savefig(path, dpi=110)


# --------------------------------------------------------------------------------- the task


class ByteMLP(nn.Module):
    """Predicts a byte from the 8 before it; 29 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, EMBEDDING)
        self.hidden = nn.Linear(CONTEXT * EMBEDDING, HIDDEN)
        self.output = nn.Linear(HIDDEN, 256)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte, of windows ``(B, 9)``."""
        inputs = self.embedding(windows[:, :-1]).flatten(1)
        hidden = torch.nn.functional.gelu(self.hidden(inputs))
        return nn.functional.cross_entropy(self.output(hidden), windows[:, -1])


class Text:
    """The source of the Python standard library, whose end is for validation."""

    def __init__(self) -> None:
        text = torch.from_numpy(standard_library(4_000_000).copy()).long()
        self._text = text[: -len(text) // 20]
        held_out = text[-len(text) // 20 :]
        starts = torch.linspace(0, len(held_out) - CONTEXT - 1, 4096).long()
        self.validation = held_out[starts[:, None] + torch.arange(CONTEXT + 1)]

    def batches(self, worker: int, num_workers: int, seed: int, own_part: bool) -> Iterator[Tensor]:
        """Random windows of a worker, from its part of the text or from all."""
        share = len(self._text) // num_workers if own_part else len(self._text)
        first = worker * share if own_part else 0
        generator = torch.Generator().manual_seed(seed * 1000 + worker)
        while True:
            starts = torch.randint(share - CONTEXT - 1, (BATCH,), generator=generator)
            yield self._text[first + starts[:, None] + torch.arange(CONTEXT + 1)]


def new_models(num_workers: int, seed: int) -> list[ByteMLP]:
    """Models of all workers; the simulation makes them equal to the first."""
    torch.manual_seed(seed)
    return [ByteMLP() for _ in range(num_workers)]


@torch.no_grad()
def validation_loss(params: Tensor, text: Text) -> float:
    """Of a model with these parameters ``(P,)``."""
    model = ByteMLP()
    nn.utils.vector_to_parameters(params, model.parameters())
    return float(model.loss(text.validation))


def local_steps(
    models: list[ByteMLP],
    batches: list[Iterator[Tensor]],
    make: Callable[[Any], torch.optim.Optimizer],
    warmup_steps: int = 0,
) -> Callable[[int], None]:
    """The function that takes a local step of a worker; its learning rate rises at first."""
    optimizers = [make(model.parameters()) for model in models]
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda t: min(1.0, (t + 1) / (warmup_steps + 1)))
        for one in optimizers
    ]

    def local_step(worker: int) -> None:
        optimizers[worker].zero_grad()
        models[worker].loss(next(batches[worker])).backward()
        optimizers[worker].step()
        schedulers[worker].step()

    return local_step


# ------------------------------------------------------------------------------- every step

GRAPHS = ("ring", "grid", "hypercube", "random_matching")
WARMUP = 20
RATES = (0.5, 1.0, 2.0, 4.0)
CODEC = Int4Differences()
EVERY_STEP: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "d_psgd": (NeighborAverage(), {"overlap": True, "warm_start": False}),
    "choco_sgd_int4": (ChocoSGD(0.5, CODEC), {"compression": CODEC}),
    "a2cid2": (A2CiD2(), {}),
    "gasloc_plain": (GASLoC(1.0, momentum=0.0), {}),
    "gasloc": (GASLoC(1.0, momentum_on="local"), {}),
    "gasloc_gossiped": (GASLoC(1.0), {}),
}


def train_every_step(
    method: str, graph: str, lr: float, seed: int, text: Text, options: argparse.Namespace
) -> Record:
    """One training with a round after every step."""
    algorithm, settings = EVERY_STEP[method]
    n, began = options.workers, time.perf_counter()
    models = new_models(n, seed)
    shares = [text.batches(worker, n, seed, own_part=True) for worker in range(n)]
    simulation = Simulation(models, algorithm, topology=graph, **settings)
    step = local_steps(models, shares, lambda params: torch.optim.SGD(params, lr), WARMUP)
    record = {"graph": graph, "method": method, "seed": seed, "lr": lr}
    try:
        simulation.run(step, options.steps)
        loss = validation_loss(simulation.consensus(), text)
        distance = simulation.consensus_distance()
    except RuntimeError:  # NaN on all workers
        loss = distance = math.inf
    return {
        **record,
        "loss": loss if math.isfinite(loss) else math.inf,
        "distance": distance if math.isfinite(distance) else math.inf,
        "bytes": simulation.costs[0].bytes_sent,
        "seconds": time.perf_counter() - began,
    }


def every_step(options: argparse.Namespace) -> Iterator[Record]:
    """Choose learning rates on the ring, and make all trainings."""
    text, methods = Text(), options.methods or EVERY_STEP
    best = dict.fromkeys(methods, options.rates[0])
    for method in methods if len(options.rates) > 1 else ():
        tried = {}
        for lr in options.rates:
            losses = [
                train_every_step(method, "ring", lr, seed, text, options)["loss"]
                for seed in TUNING_SEEDS
            ]
            tried[lr] = statistics.fmean(losses)
            if math.isinf(tried[lr]):
                break
        best[method] = min(tried, key=lambda lr: tried[lr])
        found = ", ".join(f"{lr:g}: {loss:.3f}" for lr, loss in tried.items())
        print(f"{method}: lr {best[method]:g} ({found})", flush=True)
    for seed, graph, method in itertools.product(options.seeds, options.graphs, best):
        if method.startswith("choco") and graph == "random_matching":
            continue  # its estimates need the same neighbours in all rounds
        record = train_every_step(method, graph, best[method], seed, text, options)
        print(f"seed {seed}, {graph}, {method}: {record['loss']:.4f}", flush=True)
        yield record


def show_every_step(records: list[Record], options: argparse.Namespace) -> None:
    """One table for each graph."""
    for graph in options.graphs:
        rows = []
        for method in dict.fromkeys(r["method"] for r in records if r["graph"] == graph):
            where = {"graph": graph, "method": method}
            rows.append(
                [
                    method,
                    f"{values_of(records, 'lr', **where)[0]:g}",
                    mean_and_deviation(values_of(records, "loss", **where), 4),
                    p_against(records, "loss", "gasloc", **where),
                    mean_and_deviation(values_of(records, "distance", **where), 4),
                    f"{values_of(records, 'bytes', **where)[0] / 1e6:.1f}",
                ]
            )
        head = ["method", "lr", "validation loss", "p", "consensus distance", "MB sent"]
        print_table([f"{graph}: {head[0]}", *head[1:]], rows)


def draw_groups(records: list[Record], group: str, base: str, label: str, path: Path) -> None:
    """The loss of each method in each group of rows, with its standard deviation."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(r[group] for r in records))
    methods = list(dict.fromkeys(r["method"] for r in records))
    figure = Figure(figsize=(3.2 * max(2, len(groups)), 3.6), layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, groups, strict=True):
        for number, method in enumerate(methods):
            losses = values_of(records, "loss", method=method, **{group: name})
            if losses and all(map(math.isfinite, losses)):
                panel.errorbar(
                    number,
                    statistics.fmean(losses),
                    statistics.stdev(losses) if len(losses) > 1 else 0.0,
                    fmt="o",
                    color="tab:red" if method.startswith(base) else "tab:blue",
                    capsize=4,
                )
        panel.set_title(str(name), fontsize=9)
        panel.set_xticks(range(len(methods)), methods, rotation=60, ha="right", fontsize=8)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(label)
    figure.savefig(path, dpi=110)


# ----------------------------------------------------------------------------- virtual time


Rounds = Callable[[int, int], RoundSettings]
"""From H and the duration of an all-reduce, both in local steps, to the settings of rounds."""


def gasloc(topology: str, overlap: bool = False) -> Rounds:
    """GASLoC as in ``conf/``: with momentum on the result of gossip."""
    algorithm = GASLoC()
    return lambda every, _: RoundSettings(algorithm, EverySteps(every, overlap), topology)


def streaming(every: int, exchange: int) -> RoundSettings:
    """Two fragments in turn, with the shortest delay that hides an exchange."""
    delay = min(math.ceil(exchange / 2), every - 1)
    return StreamingDiLoCoStrategy(
        every, 2, delay, mix=0.25, outer_lr=0.6, outer_momentum=0.8
    ).settings


VIRTUAL_TIME: dict[str, Rounds | None] = {
    "ddp": None,
    "diloco": lambda every, _: RoundSettings(DiLoCo(0.9, 0.6), EverySteps(every)),
    "streaming_diloco": streaming,
    "gasloc": gasloc("ring"),
    "gasloc_overlap": gasloc("ring", overlap=True),
    "gasloc_random_matching": gasloc("random_matching"),
}


def scaled(links: Links, scale: float) -> Links:
    """The links on which messages take ``scale`` times as long; latencies stay."""

    def slower(link: Link) -> Link:
        return dataclasses.replace(link, mbit_per_s=link.mbit_per_s / scale)

    between = links.between_sites
    return dataclasses.replace(
        links,
        default=slower(links.default),
        workers=tuple((worker, slower(link)) for worker, link in links.workers),
        between_sites=None if between is None else slower(between),
        uplink_mbit_per_s=links.uplink_mbit_per_s / scale,
    )


def train_virtual_time(
    method: str, network: str, seed: int, text: Text, options: argparse.Namespace
) -> Record:
    """One training until the time is over."""
    n, began = options.workers, time.perf_counter()
    links, models = scaled(NETWORKS[network], options.scale), new_models(n, seed)
    shares = [text.batches(worker, n, seed, own_part=False) for worker in range(n)]
    rounds = VIRTUAL_TIME[method]

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, options.lr)

    numel = sum(p.numel() for p in models[0].parameters())
    step_times = StepTimes([options.step_s] * n)
    costs = estimate(as_method("ddp"), numel, step_times, LinkTimes(links, n))
    if rounds is None:
        steps = int(options.seconds / costs.seconds_per_round)
        optimizer = adamw(models[0].parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            for share in shares:
                (models[0].loss(next(share)) / n).backward()
            optimizer.step()
        params = nn.utils.parameters_to_vector(models[0].parameters()).detach()
        sent, busy = costs.bytes_per_round * steps, options.step_s / costs.seconds_per_round
    else:
        speeds = [1 / options.step_s] * n
        exchange = math.ceil(costs.seconds_per_round / options.step_s - 1)
        settings = rounds(options.sync_every, exchange)
        simulation = Simulation.from_settings(models, settings, speeds=speeds, links=links)
        simulation.run(local_steps(models, shares, adamw), seconds=options.seconds)
        steps, params = round(statistics.fmean(simulation.steps)), simulation.consensus()
        sent = statistics.fmean(worker.bytes_sent for worker in simulation.costs)
        busy = statistics.fmean(worker.utilisation for worker in simulation.costs)
    return {
        **{"network": network, "method": method, "seed": seed},
        **{"loss": validation_loss(params, text), "steps": steps},
        **{"bytes": sent * options.scale, "utilisation": busy},
        "seconds": time.perf_counter() - began,
    }


def virtual_time(options: argparse.Namespace) -> Iterator[Record]:
    """Make all trainings."""
    text, methods = Text(), options.methods or VIRTUAL_TIME
    for seed, network, method in itertools.product(options.seeds, options.networks, methods):
        record = train_virtual_time(method, network, seed, text, options)
        loss, steps = record["loss"], record["steps"]
        print(f"seed {seed}, {network}, {method}: {loss:.4f}, {steps} steps", flush=True)
        yield record


def show_virtual_time(records: list[Record], options: argparse.Namespace) -> None:
    """One table for each network."""
    for network in dict.fromkeys(r["network"] for r in records):
        rows = []
        for method in dict.fromkeys(r["method"] for r in records):
            where = {"network": network, "method": method}
            rows.append(
                [
                    method,
                    mean_and_deviation(values_of(records, "loss", **where), 4),
                    p_against(records, "loss", "gasloc", **where),
                    f"{statistics.fmean(values_of(records, 'steps', **where)):.0f}",
                    f"{100 * statistics.fmean(values_of(records, 'utilisation', **where)):.0f} %",
                    f"{statistics.fmean(values_of(records, 'bytes', **where)) / 1e6:.0f}",
                ]
            )
        head = ["validation loss", "p", "local steps", "utilisation", "MB sent"]
        print_table([f"{network}: method", *head], rows)


PARTS: dict[str, tuple[Callable[..., Iterator[Record]], Callable[..., None]]] = {
    "consensus": (consensus, show_consensus),
    "every_step": (every_step, show_every_step),
    "virtual_time": (virtual_time, show_virtual_time),
}


def main() -> None:
    options = harness.parse(
        __doc__,
        parts=list(PARTS),
        seeds=0,  # how many: 10 for consensus, else 5
        sizes=[8, 16, 32, 64],  # workers of consensus
        workers=8,
        methods=[],  # all of the part
        graphs=list(GRAPHS),
        steps=100,  # local steps of every_step
        rates=list(RATES),
        sync_every=20,  # of virtual_time
        lr=3e-3,  # of AdamW, in virtual_time
        networks=["one_slow_link", "two_datacentres"],
        seconds=75.0,  # virtual time
        step_s=0.25,  # virtual time of a local step
        scale=100.0,  # size of the model of the messages
        out=Path,  # default: outputs/gasloc_PART.csv
        png=Path,
        quick={
            **{"seeds": 2, "sizes": [8, 16], "workers": 4, "steps": 4, "rates": [0.5]},
            **{"graphs": ["ring", "random_matching"], "seconds": 5.0, "sync_every": 4},
        },
        choices={"networks": NETWORKS},
    )
    train, show = PARTS[options.part]
    options.seeds = range(options.seeds or (10 if options.part == "consensus" else 5))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out = options.out or harness.OUTPUTS / f"gasloc_{options.part}.csv"
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        records: list[Record] = []
        for record in train(options):
            if not records:
                writer = csv.DictWriter(file, record)
                writer.writeheader()
            writer.writerow(record)
            file.flush()
            records.append(record)
    show(records, options)
    print(f"All values are in {out}")
    if options.png:
        if options.part == "consensus":
            draw_consensus(records, options.png)
        else:
            group = "graph" if options.part == "every_step" else "network"
            draw_groups(records, group, "gasloc", "validation loss", options.png)
        print(f"The figure is in {options.png}")


if __name__ == "__main__":
    main()

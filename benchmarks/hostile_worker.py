"""One hostile worker of four: the validation loss by attack and by mean of the pseudo-gradients.

Measured: the validation loss of the demo under DiLoCo with the settings of ``conf/``, after
``--steps`` local steps of each worker. The last worker takes its local steps like the others, but
from the first round on sends something else than its pseudo-gradient (``--attacks``):

  none        its pseudo-gradient: all four are honest
  sign_flip   the negative of it
  scaled      100 times as much
  noise       its sum with Gaussian noise of standard deviation 1 for each parameter

The baseline is three honest workers, each on the same quarter of the text as in the other rows,
with the plain mean. The workers are simulated (:class:`lightning_loco.Simulation`: the same numbers
as real processes), so the losses do not depend on the machine's load.

  python benchmarks/hostile_worker.py
  python benchmarks/hostile_worker.py --attacks sign_flip --aggregates trimmed_mean --seeds 0 1 2

How to read it: ``to three honest`` is the loss above the baseline's, in percent. The robust
means should stay within 5 %. The plain mean should not, which shows that an attack is one; without
an attack there is no bound. With several seeds the losses are medians with quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import torch
from common import QUICK_SIZES, against, at_least, make_parser, print_machine, print_table, spread
from equal_time import batches, validate
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from lightning_loco import DiLoCo, Simulation
from lightning_loco.app.demo.data import ByteTextData
from lightning_loco.app.demo.model import ByteGPT

WORKERS, HOSTILE = 4, 3
BOUND = 5.0
ATTACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda pseudo_gradient: pseudo_gradient,
    "sign_flip": torch.neg,
    "scaled": lambda pseudo_gradient: 100 * pseudo_gradient,
    "noise": lambda pseudo_gradient: pseudo_gradient + torch.randn_like(pseudo_gradient),
}
AGGREGATES = ("mean", "trimmed_mean", "geometric_median")


class Training(NamedTuple):
    """One training of the table.

    Attributes:
        attack: Of the last worker; None if there are only the three honest ones.
        aggregate: How the pseudo-gradients are averaged.
        seed: Of weights, batches and noise.
    """

    attack: str | None
    aggregate: str
    seed: int

    def train(self, options: argparse.Namespace) -> float:
        """The validation loss."""
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        sizes = QUICK_SIZES if options.quick else {}
        models = [
            ByteGPT(**sizes, lr=1e-3, total_steps=options.steps)
            for _ in range(HOSTILE if self.attack is None else WORKERS)
        ]
        made: list[Any] = [model.configure_optimizers() for model in models]
        data = ByteTextData(context=models[0].hparams["context"])
        data.check(WORKERS)
        shares = [batches(data, worker, WORKERS, self.seed) for worker in range(WORKERS)]
        algorithm = DiLoCo(outer_lr=0.9, outer_momentum=0.6, aggregate=self.aggregate)
        simulation = Simulation(models, algorithm, sync_every=options.sync_every)
        steps = [0] * len(models)
        outer = torch.empty(0)

        def local_step(worker: int) -> None:
            nonlocal outer
            model = models[worker]
            attacks = worker == HOSTILE and self.attack not in (None, "none")
            if attacks and steps[worker] % options.sync_every == 0:
                outer = parameters_to_vector(model.parameters()).detach().clone()
            made[worker]["optimizer"].zero_grad()
            model.loss(next(shares[worker])).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            made[worker]["optimizer"].step()
            made[worker]["lr_scheduler"]["scheduler"].step()
            steps[worker] += 1
            if attacks and steps[worker] % options.sync_every == 0:
                # A round follows, which sends outer - local.
                local = parameters_to_vector(model.parameters()).detach()
                sent = ATTACKS[str(self.attack)](outer - local)
                vector_to_parameters(outer - sent, model.parameters())

        simulation.run(local_step, num_rounds=options.steps // options.sync_every)
        return validate(models[0], data)  # a round was the last, so all are equal


def fit(training: Training, options: argparse.Namespace) -> float:
    """The loss of one training, in its own process."""
    return training.train(options)


def fit_all(options: argparse.Namespace) -> dict[Training, float]:
    """The losses of all trainings."""
    wanted = [
        Training(attack, aggregate, seed)
        for seed in options.seeds
        for attack, aggregate in [
            (None, "mean"),
            *((attack, a) for attack in options.attacks for a in options.aggregates),
        ]
    ]
    losses: dict[Training, float] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        under_way = {pool.submit(fit, training, options): training for training in wanted}
        for future in as_completed(under_way):
            training = under_way[future]
            losses[training] = future.result()
            name = f"{training.attack or 'three honest'}, {training.aggregate}"
            print(f"{name}, seed {training.seed}: {losses[training]:.4f}", flush=True)
    return losses


def row(
    attack: str | None, aggregate: str, losses: dict[Training, float], options: argparse.Namespace
) -> list[str]:
    """One line of the table."""
    found = [losses[Training(attack, aggregate, seed)] for seed in options.seeds]
    base = [losses[Training(None, "mean", seed)] for seed in options.seeds]
    name = "three honest workers" if attack is None else attack
    if attack is None:
        return [name, aggregate, spread(found, 4), "-", "-", "-"]
    ratios = [loss / other for loss, other in zip(found, base, strict=True)]
    gaps = [100 * (ratio - 1) for ratio in ratios]
    judge = at_least if aggregate == "mean" else against
    bound = "-" if attack == "none" else judge(statistics.median(gaps), BOUND, 1)
    return [name, aggregate, spread(found, 4), spread(ratios, 3), spread(gaps, 1), bound]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--aggregates", nargs="+", choices=AGGREGATES, default=list(AGGREGATES))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sync-every", type=int, default=10)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.sync_every = 20, 5
    if options.steps % options.sync_every:
        parser.error("--steps must be a multiple of --sync-every, so that a round is the last")
    print_machine()
    losses = fit_all(options)
    print_table(
        ["attack", "aggregate", "validation loss", "ratio", "to three honest %", "bound, %"],
        [
            row(None, "mean", losses, options),
            *(
                row(attack, aggregate, losses, options)
                for attack in options.attacks
                for aggregate in options.aggregates
            ),
        ],
    )


if __name__ == "__main__":
    main()

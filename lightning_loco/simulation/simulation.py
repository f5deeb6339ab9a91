"""Run any algorithm with any number of workers in one process, for tests, teaching and planning."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_loco.algorithms import Algorithm, State
from lightning_loco.comm import Statistics, WorkerGroup
from lightning_loco.comm.checks import check_model, first_difference
from lightning_loco.comm.flat import FlatLayout
from lightning_loco.rounds import RoundSettings
from lightning_loco.rounds.exchange import make_exchange
from lightning_loco.rounds.parcels import Part


class Simulation:
    """Workers that take turns: local steps of each, then one round of all.

    Computes what the processes of a real run compute, in the same order; only the exchange is
    replaced by its :meth:`simulate`. Every worker starts from the parameters of the first one.

    Args:
        models: One module per worker, all alike.
        algorithm: What a round computes.
        sync_every: Local steps between rounds, or one number per worker.
        overlap: Apply a round's result one round later.
        warm_start: With overlap, make the first round a blocking one.
        topology: Neighbours, for gossip: a topology, a name, a graph or a matrix.

    Attributes:
        states: The algorithm's state of each worker.
        round_index: Number of completed rounds.

    Raises:
        ValueError: If there is no model, or the settings do not fit.

    Example:
        >>> import torch
        >>> from lightning_loco.algorithms import LocalSGD
        >>> models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        >>> simulation = Simulation(models, LocalSGD(), sync_every=1)
        >>> def local_step(worker):
        ...     models[worker].weight.data.fill_(float(worker))
        >>> simulation.run(local_step, num_rounds=1)
        >>> [model.weight.item() for model in models]
        [0.5, 0.5]
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        algorithm: Algorithm,
        *,
        sync_every: int | Sequence[int] = 1,
        overlap: bool = False,
        warm_start: bool = True,
        topology: Any | None = None,
    ) -> None:
        if not models:
            raise ValueError("A simulation needs at least one model, one per worker; got none.")
        n = len(models)
        settings = RoundSettings(algorithm, sync_every, overlap, warm_start, topology).prepare(n)
        self.settings = settings
        self.algorithm = settings.algorithm
        self.round_index = 0
        self._layouts = [
            FlatLayout((name, p) for name, p in model.named_parameters() if p.requires_grad)
            for model in models
        ]
        for worker, (model, layout) in enumerate(zip(models, self._layouts, strict=True)):
            check_model(model)
            if layout.schema() != self._layouts[0].schema():
                difference = first_difference(layout.schema(), self._layouts[0].schema())
                raise ValueError(
                    f"Worker {worker} holds a different model than worker 0: {difference}. "
                    "Build the same model for every worker."
                )
            model.load_state_dict(models[0].state_dict())
        start = self._layouts[0].new_flat()
        self.states: list[State] = [self.algorithm.init(start.clone()) for _ in models]
        self._exchange = make_exchange(
            self.algorithm, WorkerGroup(0, 1), Statistics(), settings.topology
        )
        self._under_way: list[Tensor] | None = None

    @property
    def num_workers(self) -> int:
        """Number of workers N."""
        return len(self._layouts)

    def run(self, local_step: Callable[[int], None], num_rounds: int) -> None:
        """Alternate local phases and rounds.

        Args:
            local_step: Called with the number of a worker; makes one optimizer step of its model.
            num_rounds: How many rounds to make.
        """
        for _ in range(num_rounds):
            for worker in range(self.num_workers):
                for _ in range(self.settings.steps_of(worker)):
                    local_step(worker)
            self.make_round()

    @torch.no_grad()
    def make_round(self) -> None:
        """Exchange and apply, for all workers."""
        params = [self._read(worker) for worker in range(self.num_workers)]
        messages = [
            self.algorithm.propose(p, state) for p, state in zip(params, self.states, strict=True)
        ]
        warming_up = self.settings.warm_start and self.round_index == 0
        if not self.settings.overlap or warming_up:
            received = self._exchange.simulate(messages, self.round_index)
            self._apply(params, received)
        else:
            received = self._exchange.simulate(messages, self.round_index)
            fresh = [torch.empty_like(p) for p in params]
            if self._under_way is None:
                for p, state in zip(fresh, self.states, strict=True):
                    self.algorithm.restart(p, state)
                self._write(fresh)
            else:
                self._apply(fresh, self._under_way)
            self._under_way = received
        self.round_index += 1

    @torch.no_grad()
    def drain(self) -> None:
        """Apply what overlap has left under way."""
        if self._under_way is not None:
            self._apply([torch.empty_like(p) for p in self._under_way], self._under_way)
            self._under_way = None

    def _read(self, worker: int) -> Tensor:
        layout = self._layouts[worker]
        params = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
        for chunk in layout.chunks():
            part = params[chunk.start : chunk.stop]
            Part(chunk, part, self.algorithm, self.states[worker]).read_local()
        return params

    def _apply(self, params: list[Tensor], received: list[Tensor]) -> None:
        for p, r, state in zip(params, received, self.states, strict=True):
            self.algorithm.apply(p, r, state)
        self._write(params)

    def _write(self, params: list[Tensor]) -> None:
        for layout, p in zip(self._layouts, params, strict=True):
            layout.write(p)

    def params(self) -> list[Tensor]:
        """A flat copy of each worker's parameters, ``(P,)``."""
        return [layout.new_flat() for layout in self._layouts]

    def consensus(self) -> Tensor:
        """The consensus parameters ``(P,)``: outer parameters, or the mean over the workers."""
        key = self.algorithm.consensus_key
        if key is not None:
            outer: Tensor = self.states[0][key]
            return outer.clone()
        return torch.stack(self.params()).mean(0)

    def consensus_distance(self) -> float:
        """Root mean square distance of the workers' parameters to their mean."""
        params = torch.stack(self.params()).double()
        return math.sqrt(float((params - params.mean(0)).square().sum(1).mean()))

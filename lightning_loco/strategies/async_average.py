"""AsyncModelAverageStrategy: averaging by the clock, while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_loco.compression import Codec, ErrorFeedback
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.engine.constructors import ClockEngine, clock_settings
from lightning_loco.links.links import LinkLike
from lightning_loco.strategies.arguments import CommonArguments, spelled_out
from lightning_loco.strategies.local_training import optimized_by
from lightning_loco.strategies.loco import LocoStrategy


class AsyncModelAverageStrategy(LocoStrategy):
    """Average the workers' models again and again in the background; nobody waits for a straggler.

    Every ``interval_s`` seconds a snapshot of each worker's parameters leaves between two local
    steps, and between two later ones the parameters move by the mean of the snapshots minus one's
    own. See :class:`~lightning_loco.algorithms.ModelAverage` for the formula and
    :class:`~lightning_loco.ClockEngine` for what happens when.

    Workers may take different numbers of steps. Before validation, checkpoints and the end of
    training the averaging comes to rest by itself, and those who arrive early take part in the
    rounds of the others until all are there. When rounds fall depends on the clock, so two runs
    are never equal bit for bit; a resumed run goes on from the workers' exact states.

    Args:
        interval_s: Pause between the end of a round and the next one, in seconds; 0 for none.
        warmup_steps: Local steps at the start whose gradients are averaged as in DDP.
        topology: Average with the neighbours of a topology only. Default: with all workers.
        compression: How messages are written on the wire, as in :class:`LocoStrategy`.
        link: A slower link to emulate, as in :class:`LocoStrategy`.
        evaluate: As in :class:`LocoStrategy`, like all arguments that follow.

    Raises:
        ValueError: If a value is out of range, at construction or before training starts.
        TypeError: If a value has the wrong type or an argument is unknown.

    Example::

        Trainer(strategy=AsyncModelAverageStrategy(interval_s=0.5), devices=8)
    """

    @spelled_out(LocoStrategy.__init__)
    def __init__(
        self,
        interval_s: float = 0.5,
        warmup_steps: int = 0,
        topology: Any | None = None,
        compression: Codec | ErrorFeedback | str | None = None,
        *,
        link: LinkLike | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        settings = clock_settings(interval_s, warmup_steps, topology, compression, link)
        self._init_with(settings, **common)

    def make_engine(self, group: WorkerGroup) -> ClockEngine:
        """An engine whose rounds begin after pauses and end when everything has arrived."""
        assert self.lightning_module is not None
        optimized = optimized_by(self.optimizers)
        return ClockEngine.from_settings(self.lightning_module, self.settings, group, optimized)

    @property
    def _clock(self) -> ClockEngine:
        assert isinstance(self._engine, ClockEngine)
        return self._engine

    def prepare_step(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Average the gradients after the backward pass while warming up."""
        clock = self._clock

        def averaged() -> Any:
            output = closure()
            clock.average_gradients(p for group in optimizer.param_groups for p in group["params"])
            return output

        return averaged if clock.is_warming_up else closure

    def abort(self) -> None:
        """Stop the averaging during ``fit``; every worker must call it, twice does no harm."""
        self._clock.abort()

    def resume(self) -> None:
        """Go on averaging after :meth:`abort`; every worker must call it, twice does no harm."""
        self._clock.resume()

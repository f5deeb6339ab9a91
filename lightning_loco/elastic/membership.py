"""What a user says about members that come and go."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import warnings

from lightning_loco.algorithms import Algorithm, Mix
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.elastic.store import is_address
from lightning_loco.engine.membership import Link
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EverySteps, Staggered
from lightning_loco.topology import TOPOLOGIES, Topology, get_topology

TYPICAL = 8
"""The number of workers that ``"auto"`` settings are chosen for, unless others need less."""

LARGEST = 32
"""Up to so many workers are checked; there may be more."""

_LOGGERS = ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors")

_NAME = re.compile(r"[\w.-]{1,100}")
_ADDRESS = re.compile(r"(http://)?[^/\s]+:\d{1,5}")


@dataclasses.dataclass(frozen=True)
class Elastic:
    """Workers come and go, and the others go on: every job is one worker.

    A lighthouse (of torchft) hears which workers are alive, and who of them takes part is settled
    anew before every exchange. A worker that comes gets the state of the run from another one, or
    with gossip the mean of the others' states, and takes part in the very next exchange with weight
    0. An exchange in which a worker is lost is repeated by those that are left, with the same
    messages. One exchange is under way at a time: results of fragments, or with a delay, must land
    before the next round begins.

    Args:
        lighthouse: ``"host:port"`` of the lighthouse: start ``lightning-loco lighthouse`` there.
        min_workers: With fewer, the rounds wait. At least 1.
        name: Of this worker in messages. Default: the host's name.
        host: Name or address under which the other workers reach this machine. Default: the address
            under which the lighthouse sees it.
        timeout_s: Longest wait for a round to come about, in seconds.
        check_every: Compare the members' outer parameters and outer state in every that many
            rounds, equal on all members; one that has drifted goes on from those of most. 0 or None
            for never. Local SGD has none: after every round all models are equal.

    Raises:
        ValueError: If a value is out of range.

    Example::

        engine = StepEngine(model, DiLoCo(), membership=Elastic("10.0.0.1:29510"))
        engine.join()
    """

    lighthouse: str
    min_workers: int = 2
    name: str | None = None
    host: str | None = None
    timeout_s: float = 600.0
    check_every: int | None = 10

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if not (isinstance(self.lighthouse, str) and _ADDRESS.fullmatch(self.lighthouse)):
            raise ValueError(
                "lighthouse must be an address such as '10.0.0.1:29510', got "
                f"{self.lighthouse!r}. Start one with `lightning-loco lighthouse`."
            )
        if type(self.min_workers) is not int or self.min_workers < 1:
            raise ValueError(f"min_workers must be at least 1, got {self.min_workers!r}.")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name must be of letters, digits, dots, dashes and underscores, got {self.name!r}."
            )
        if self.host is not None and (
            self.host.count(":") == 1 or not is_address(f"{self.host}:1")
        ):
            raise ValueError(
                f"host must be a name or an address without a port, got {self.host!r}."
            )
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is in seconds and must be positive, got {self.timeout_s}.")
        if self.check_every is not None and (
            type(self.check_every) is not int or self.check_every < 0
        ):
            raise ValueError(
                "check_every counts rounds and must be at least 1, or 0 for no comparison, got "
                f"{self.check_every!r}."
            )

    def prepare(self, algorithm: Algorithm, topology: Topology | None) -> Algorithm:
        """Fill in ``"auto"``; see :class:`lightning_loco.engine.membership.Membership`."""
        if algorithm.exchange == "neighbors" and topology is not None:
            return prepare_for_any_number(algorithm, topology)
        ready = algorithm.prepare(1, topology)
        if ready != algorithm.prepare(2, topology):
            raise ValueError(
                "membership=Elastic(...) needs an algorithm that does the same with any number of "
                f"workers, got {type(algorithm).__name__}. Use DiLoCo (algorithm=async_diloco)."
            )
        return ready

    def connect(self, settings: RoundSettings, group: WorkerGroup) -> Link:
        """Connect an engine; see :class:`lightning_loco.engine.membership.Membership`."""
        algorithm = settings.algorithm
        if algorithm.exchange not in ("mean", "neighbors") or algorithm.num_scalars:
            raise ValueError(
                "membership=Elastic(...) needs an algorithm that averages over all workers or "
                f"neighbours, and tells no numbers of its own, got {type(algorithm).__name__}. Use "
                "DiLoCo, Async or Streaming DiLoCo, Local SGD, NoLoCo or GASLoC."
            )
        check_schedule(settings)
        if group.num_workers > 1:
            raise ValueError(
                "With membership=Elastic(...) every job is one worker, but this one has "
                f"{group.num_workers} ranks. Start {group.num_workers} jobs with devices=1 instead."
            )
        if importlib.util.find_spec("torchft") is None:
            raise ValueError(
                "membership=Elastic(...) needs torchft: pip install 'lightning-loco[elastic]'."
            )
        _quiet_torchft()
        from lightning_loco.elastic.connection import ElasticLink

        return ElasticLink(self, settings)


def prepare_for_any_number(algorithm: Algorithm, topology: Topology) -> Algorithm:
    """Check an algorithm for 1 to 32 workers; ``"auto"`` becomes what suits 8 of them.

    If gossip then diverges with another number of workers, it becomes what suits that number.

    Args:
        algorithm: One that exchanges with neighbours.
        topology: Built anew whenever the number of members changes.

    Raises:
        ValueError: If the topology does not exist for one of these numbers, with those that do, or
            if the algorithm does not work with one of them.
    """
    if (missing := _why_not_always(topology)) is not None:
        raise ValueError(
            "Where workers come and go, the topology must exist for any number of them. "
            f"{missing} Those that do: {', '.join(for_any_number())}."
        ) from missing
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ready = algorithm.prepare(TYPICAL, topology)
        numbers = range(1, LARGEST + 1)
        if diverging := next((n for n in numbers if not _works(ready, n, topology)), None):
            ready = algorithm.prepare(diverging, topology)
        for count in numbers:
            ready.prepare(count, topology)
    if said:
        warnings.warn(said[0].message, stacklevel=2)
    return ready


def _works(ready: Algorithm, num_workers: int, topology: Topology) -> bool:
    try:
        ready.prepare(num_workers, topology)
    except ValueError:
        return False
    return True


def for_any_number() -> list[str]:
    """The names of the topologies that exist for any number of workers."""
    return [name for name in TOPOLOGIES if _why_not_always(get_topology(name)) is None]


def _why_not_always(topology: Topology) -> ValueError | None:
    """What is wrong with the first number of workers that a topology does not exist for."""
    try:
        for count in range(1, LARGEST + 1):
            topology.check_num_workers(count)
    except ValueError as error:
        return error
    return None


def check_schedule(settings: RoundSettings) -> None:
    """Refuse schedules that members cannot keep, such as several rounds under way at a time.

    With one at a time the state of the run is known when a round begins, and a newcomer can take
    part in that round.

    Args:
        settings: Prepared.

    Raises:
        ValueError: If rounds do not come after a fixed number of local steps, if several may be
            under way at once, or if local parameters are kept and nothing is equal on all members.
    """
    schedule, algorithm = settings.schedule, settings.algorithm
    if not isinstance(schedule, (EverySteps, Staggered)):
        raise ValueError(
            f"membership=Elastic(...) cannot make {schedule}: rounds must come after a fixed "
            "number of local steps. Use one number for sync_every."
        )
    is_partial = isinstance(schedule, Staggered) or isinstance(settings.merge_policy, Mix)
    if is_partial and not algorithm.replicated:
        raise ValueError(
            "With membership=Elastic(...) fragments, delay and mix need outer parameters that are "
            f"equal on all members, got {type(algorithm).__name__}. Use Streaming or Async DiLoCo, "
            "or leave them out."
        )
    if isinstance(schedule, Staggered):
        _check_delay(schedule.of_worker(0))


def _check_delay(schedule: Staggered) -> None:
    longest = schedule.shortest_gap
    if schedule.delay > longest:
        raise ValueError(
            "With membership=Elastic(...) a result must land before the next round begins: delay "
            f"must be at most sync_every // fragments = {schedule.sync_every} // "
            f"{schedule.fragments} = {longest}, got {schedule.delay}. Use delay={longest}, fewer "
            "fragments or a larger sync_every."
        )


def _quiet_torchft() -> None:
    """Let torchft say warnings only; its part in Rust reads that when it is imported.

    What the user has set stays: the level of a logger, or the variable ``RUST_LOG``.
    """
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
    os.environ.setdefault("RUST_LOG", "warn")

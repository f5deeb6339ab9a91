"""``Elastic``: the settings of a run whose workers join and leave."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import socket

from lightning_loco.algorithms import Algorithm, Mix
from lightning_loco.algorithms.algorithm import has_own
from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.elastic.quorum import is_address
from lightning_loco.engine.engine import RoundHooks
from lightning_loco.engine.exchanges.exchange import Exchange
from lightning_loco.engine.settings import RoundSettings
from lightning_loco.schedules import EverySteps, Staggered
from lightning_loco.topology import Topology

_TORCHFT_LOGGERS = ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors")

_NAME = re.compile(r"[\w.-]{1,100}")
_LIGHTHOUSE = re.compile(r"(http://)?[^/\s]+:\d{1,5}")


@dataclasses.dataclass(frozen=True)
class Elastic:
    """Elastic membership: workers may join and leave during a run; every job is one worker.

    The job may have several ranks (``replica_size``, or a ``LocoModelParallelStrategy``).

    A lighthouse (of torchft) tracks which workers are alive and decides before every exchange which
    of them take part. A worker that joins receives the state of the run from another one, and
    takes part in the next exchange with weight 0. If a worker is lost during an exchange, the
    remaining ones repeat it with the same messages. There is one exchange at a time: with fragments
    or a delay, a result must be applied before the next round starts.

    Args:
        lighthouse: ``"host:port"`` of the lighthouse, which ``lightning-loco lighthouse`` starts.
        min_workers: Least number of workers in a round, at least 1; rounds wait for more.
        name: Name of this worker in messages. Default: the name of its host.
        host: Name or address under which the other workers reach this host. Default: the address
            under which the lighthouse sees it, on each host of a worker of several ranks.
        timeout_s: Longest wait for a round to start, in seconds.
        check_every: Number of rounds after which the members compare their outer parameters and
            outer state, equal on all members; a member that differs from most receives theirs. 0 or
            None for never. Local SGD has no outer state: after every round all models are equal.

    Raises:
        ValueError: If a value is out of range.

    Example::

        engine = StepEngine(model, DiLoCo(), membership=Elastic("10.0.0.1:29510"))
        engine.start()
    """

    lighthouse: str
    min_workers: int = 2
    name: str | None = None
    host: str | None = None
    timeout_s: float = 600.0
    check_every: int | None = 10

    def __post_init__(self) -> None:
        if not (isinstance(self.lighthouse, str) and _LIGHTHOUSE.fullmatch(self.lighthouse)):
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

    def prepare(self, algorithm: Algorithm, topology: Topology | None, is_late: bool) -> Algorithm:
        """Check the algorithm; see :class:`lightning_loco.engine.settings.Membership`."""
        return prepare_for_members(algorithm, topology, is_late)

    def connect(self, settings: RoundSettings, group: WorkerGroup) -> tuple[Exchange, RoundHooks]:
        """Connect an engine; see :class:`lightning_loco.engine.engine.ConnectingMembership`."""
        check_settings(settings)
        if group.num_workers > 1:
            num_ranks = group.num_workers * group.replica_size
            raise ValueError(
                "With membership=Elastic(...) every job is one worker, but the ranks of this one "
                f"are {group.num_workers} workers. Start {group.num_workers} jobs instead, or make "
                f"all {num_ranks} ranks one worker: replica_size={num_ranks}, or as many in "
                "LocoModelParallelStrategy."
            )
        if importlib.util.find_spec("torchft") is None:
            raise ValueError(
                "membership=Elastic(...) needs torchft. Run in a checkout of lightning_loco: "
                "pip install -c constraints.txt -e '.[elastic]'"
            )
        _set_torchft_log_levels()
        # Only now, since torchft is optional, and reads the log level when it is imported.
        from lightning_loco.elastic.connection import ElasticConnection
        from lightning_loco.elastic.hooks import ElasticHooks

        connection = ElasticConnection(
            settings,
            group,
            lighthouse=self.lighthouse,
            min_workers=self.min_workers,
            name=self.name or socket.gethostname(),
            host=self.host,
            timeout_s=self.timeout_s,
            check_every=self.check_every or 0,
        )
        return connection, ElasticHooks(connection)


def prepare_for_members(
    algorithm: Algorithm, topology: Topology | None, is_late: bool
) -> Algorithm:
    """Prepare an algorithm for members that come and go; ValueError if it is not for them."""
    if algorithm.exchange != "mean":
        raise ValueError(
            "membership=Elastic(...) needs an algorithm that averages over all workers, got "
            f"{algorithm}. Use DiLoCo, Async or Streaming DiLoCo, Delayed Nesterov or Local SGD."
        )
    prepared = algorithm.prepare(1, topology, is_late=is_late)
    # The number of members changes, so what "auto" chooses must not depend on it.
    if prepared != algorithm.prepare(3, topology):
        raise ValueError(
            "membership=Elastic(...) needs an algorithm that does the same with any number of "
            f"workers, got {type(algorithm).__name__}. Use DiLoCo (algorithm=async_diloco)."
        )
    return prepared


def check_settings(settings: RoundSettings) -> None:
    """Raise ValueError for algorithms and schedules that members cannot follow."""
    algorithm = settings.algorithm
    if algorithm.gathers or has_own(algorithm, "scalars") or settings.is_partial:
        raise ValueError(
            "membership=Elastic(...) needs an algorithm that averages over all workers, sends all "
            f"parameters, and exchanges no numbers of its own, got {algorithm}. Use DiLoCo, Async "
            "or Streaming DiLoCo, Delayed Nesterov or Local SGD."
        )
    _check_schedule(settings)


def _check_schedule(settings: RoundSettings) -> None:
    """Refuse schedules that elastic members cannot follow, such as several pending rounds.

    With one pending round at a time the state of the run is known when a round starts, and a
    joining worker can take part in that round. ValueError if rounds do not come after a fixed
    number of local steps, if several could be pending at once, or if local parameters are kept and
    nothing is equal on all members.
    """
    schedule, algorithm = settings.schedule, settings.algorithm
    if not isinstance(schedule, (EverySteps, Staggered)):
        raise ValueError(
            f"membership=Elastic(...) cannot run {schedule}: rounds must come after a fixed number "
            "of local steps. Use one number for sync_every."
        )
    is_partial = isinstance(schedule, Staggered) or isinstance(settings.merge_policy, Mix)
    if is_partial and not algorithm.replicated:
        raise ValueError(
            "With membership=Elastic(...) fragments, delay and mix need outer parameters that are "
            f"equal on all members, got {type(algorithm).__name__}. Use Streaming or Async DiLoCo, "
            "or leave them out."
        )
    if not isinstance(schedule, Staggered):
        return
    staggered = schedule.of_worker(0)
    longest = staggered.shortest_gap
    if staggered.delay > longest:
        raise ValueError(
            "With membership=Elastic(...) a result must be applied before the next round starts: "
            f"delay must be at most sync_every // fragments = {staggered.sync_every} // "
            f"{staggered.fragments} = {longest}, got {staggered.delay}. Use delay={longest}, fewer "
            "fragments or a larger sync_every."
        )


def _set_torchft_log_levels() -> None:
    """Let torchft log warnings only; its part in Rust reads the level when it is imported.

    Settings of the user have priority: the level of a logger, or the variable ``RUST_LOG``.
    """
    for name in _TORCHFT_LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
    os.environ.setdefault("RUST_LOG", "warn")

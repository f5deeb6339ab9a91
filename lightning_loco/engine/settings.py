"""The settings of rounds, checked before any process or tensor exists."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor
from typing_extensions import NotRequired, TypedDict, Unpack

from lightning_loco._util.checks import check_bytes
from lightning_loco._util.plain import plain
from lightning_loco.algorithms import Algorithm, MergePolicy, Restart, State
from lightning_loco.algorithms.algorithm import has_own
from lightning_loco.compression import (
    Codec,
    Compensated,
    Compression,
    ErrorFeedback,
    as_compression,
    check_compression,
)
from lightning_loco.costs import LinkLike, Links, as_links
from lightning_loco.model.flat import CHUNK_ELEMENTS, Cuts
from lightning_loco.schedules import EverySteps, Schedule
from lightning_loco.topology import Topology, as_topology, get_topology

PENDING_BUCKETS = 2
"""Buckets that are sent at once if not all have memory of their own: one travels while the result
of the other is applied."""

BUCKET_BYTES = 64 * 2**20
_LARGE = 2**20
_FEWEST_ELEMENTS = 1024
WHOLE_MODEL_BYTES = 2**40
"""Enough for any model to be one bucket."""


@runtime_checkable
class Membership(Protocol):
    """Which workers take part in rounds, if that changes during a run."""

    @property
    def min_workers(self) -> int:
        """Rounds wait while there are fewer workers."""

    def prepare(self, algorithm: Algorithm, topology: Topology | None, is_late: bool) -> Algorithm:
        """Check an algorithm and fill in ``"auto"`` settings, as :meth:`Algorithm.prepare` does.

        The result must not depend on the current number of workers; ValueError if it would.
        """


# Its annotations are types and not strings, because LightningCLI reads them at run time.
class RoundOptions(TypedDict):
    """The fields of :class:`RoundSettings` that users choose whatever the method is."""

    compression: NotRequired[Codec | ErrorFeedback | Compensated | str | None]
    bucket_bytes: NotRequired[int]
    membership: NotRequired[Membership | None]
    link: NotRequired[LinkLike | None]
    outer_device: NotRequired[Literal["cpu"] | None]


@dataclasses.dataclass(frozen=True)
class RoundSettings:
    """The settings of rounds.

    Args:
        algorithm: What a round computes.
        schedule: When rounds begin and end.
        topology: Who exchanges with whom. Default: the algorithm's own.
        compression: How messages are compressed: a codec, its name, an ``ErrorFeedback`` or
            ``Compensated``. Default: not at all.
        merge_policy: How a late result and the local steps taken since become local parameters.
            Default: the algorithm's own.
        bucket_bytes: Memory for messages that are being sent, in bytes. Overlapped rounds use as
            much as they need.
        num_workers: Set by :meth:`prepare`.
        membership: Which workers take part. Default: all ranks, during the whole run.
        link: Links to emulate. Default: none.
        outer_device: ``"cpu"`` to keep the state of rounds and all messages in the host's memory.
            Default: where the parameters are.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    algorithm: Algorithm
    schedule: Schedule = EverySteps()
    topology: Any | None = None
    compression: Any | None = None
    merge_policy: MergePolicy | None = None
    bucket_bytes: int = BUCKET_BYTES
    num_workers: int = 1
    membership: Membership | None = None
    link: Links | None = None
    outer_device: Literal["cpu"] | None = None

    def __post_init__(self) -> None:
        for name, kind, example in (
            ("algorithm", Algorithm, "DiLoCo()"),
            ("schedule", Schedule, "EverySteps(100)"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                article = "an" if kind is Algorithm else "a"
                raise TypeError(
                    f"{name} must be {article} {kind.__name__} such as {example}, got {value!r}."
                )
        if not isinstance(self.compression, Compression):
            check_compression(self.compression)
        check_bytes("bucket_bytes", self.bucket_bytes)
        if not isinstance(self.membership, Membership | None):
            raise TypeError(f"membership must be Elastic(...) or None, got {self.membership!r}.")
        if not isinstance(self.link, Links | None):
            raise TypeError(f"link must be as_links('wan') or None, got {self.link!r}.")
        if self.outer_device not in (None, "cpu"):
            raise ValueError(
                "outer_device must be 'cpu' for the host's memory, or None for the memory of the "
                f"parameters' device, got {self.outer_device!r}."
            )
        if self.link is not None and self.membership is not None:
            raise ValueError(
                "link=... delays the exchanges of workers that are there during the whole run, and "
                "not the exchanges of elastic members. Drop link or membership."
            )
        if self.is_overlapped and self.algorithm.merge_policy is None:
            raise ValueError(
                "overlap=True needs an algorithm with outer parameters, or one that keeps the"
                f" progress made meanwhile, got {type(self.algorithm).__name__}. Use DiLoCo"
                " (algorithm=async_diloco), GASLoC or ModelAverage, or overlap=False."
            )

    def with_options(self, **options: Unpack[RoundOptions]) -> "RoundSettings":
        """Return these settings with other options; TypeError for an unknown one."""
        values: dict[str, Any] = {**options}
        if "link" in options:
            values["link"] = as_links(options["link"])
        return dataclasses.replace(self, **values)

    @property
    def is_overlapped(self) -> bool:
        """Whether local steps continue while rounds are pending, at least after the first ones."""
        return self.schedule.is_overlapped(2**31)

    @property
    def is_partial(self) -> bool:
        """Whether messages are shorter than the parameters."""
        return self.algorithm.message_length(_LARGE) < _LARGE

    def prepare(self, num_workers: int, seed: int = 0) -> "RoundSettings":
        """Check everything against the number of workers and resolve ``"auto"`` settings.

        ``seed`` is the run's seed, equal on all workers, for random default topologies. ValueError
        if settings do not fit each other or the number of workers.
        """
        topology = None if self.topology is None else as_topology(self.topology)
        if topology is None and (name := self.algorithm.default_topology) is not None:
            topology = get_topology(name, seed)
        self.schedule.check(num_workers)
        if self.link is not None:
            self.link.check(num_workers)
        merge_policy = self.merge_policy or self.algorithm.merge_policy or Restart()
        if not isinstance(merge_policy, MergePolicy):
            raise TypeError(
                f"merge_policy must be an object such as KeepProgress(), got {merge_policy!r}."
            )
        is_late = self.is_overlapped and isinstance(merge_policy, Restart)
        if self.membership is None:
            algorithm = self.algorithm.prepare(num_workers, topology, is_late=is_late)
        else:
            algorithm = self.membership.prepare(self.algorithm, topology, is_late)
        if algorithm.granularity is None and self.schedule.num_fragments > 1:
            raise ValueError(
                f"{type(algorithm).__name__} needs the whole vector of parameters at once and "
                f"cannot be exchanged in {self.schedule.num_fragments} parts. Use fragments=1, or "
                "DiLoCo with its own outer optimizer."
            )
        if self.is_overlapped and merge_policy.keeps_progress and has_own(algorithm, "on_send"):
            raise ValueError(
                f"{type(algorithm).__name__} decides itself where local steps restart, and takes "
                f"no merge policy but Restart(), got {merge_policy!r}. Leave it out, or use DiLoCo."
            )
        self._check_messages(algorithm)
        compression = self._prepared_compression()
        return dataclasses.replace(
            self,
            algorithm=algorithm,
            topology=topology,
            compression=compression,
            merge_policy=merge_policy,
            num_workers=num_workers,
        )

    def _check_messages(self, algorithm: Algorithm) -> None:
        """Refuse settings that need messages of one vector per worker where there are others."""
        name = type(algorithm).__name__
        if unknown := sorted(algorithm.reads - {"local", "message"}):
            raise ValueError(
                f"{name}.reads must be of 'local' and 'message', got {', '.join(unknown)}."
            )
        if has_own(algorithm, "weight") and algorithm.exchange != "mean":
            raise ValueError(
                f"{name} gives its messages weights, which only a mean can have: a mixing matrix "
                "has its own. Drop the method weight, or use exchange='mean'."
            )
        if self.is_partial and self.is_overlapped:
            raise ValueError(
                f"{name} sends a part of the parameters, which needs blocking rounds. Use "
                "overlap=False."
            )
        if self.compression is not None and (self.is_partial or algorithm.gathers):
            what = "a part of the parameters" if self.is_partial else "every message to all workers"
            raise ValueError(
                f"{name} sends {what}, which cannot be compressed. Use compression=None."
            )
        if algorithm.gathers and algorithm.exchange != "mean":
            raise ValueError(f"{name} can gather messages only in place of a mean.")

    def _prepared_compression(self) -> Compression | None:
        if isinstance(self.compression, Compression):
            return self.compression
        algorithm = self.algorithm
        made = as_compression(self.compression, algorithm.exchange, algorithm.sends_parameters)
        if (
            made is not None
            and made.stays_in_model
            and (self.is_overlapped or self.membership is not None)
        ):
            reason = "elastic members do not know of it"
            if self.is_overlapped:
                reason = "results that are applied late would overwrite it"
            raise ValueError(
                f"{self.compression} leaves what is lost in the worker's model, and {reason}. Use "
                f"compression=ErrorFeedback({made.codec}), or blocking rounds of a fixed "
                "number of workers."
            )
        return made

    @property
    def consensus_key(self) -> str | None:
        """The entry of the algorithm's state that is the consensus; None for the workers' mean."""
        is_mean = self.compression is not None and self.compression.stays_in_model
        return None if is_mean else self.algorithm.consensus_key

    def init_residual(self, params: Tensor) -> State:
        """The compression's state of a worker; ``params`` ``(P,)`` are equal on all workers."""
        return {} if self.compression is None else self.compression.init(params)

    def describe(self) -> dict[str, Any]:
        """Return all settings that affect numbers, as plain values for comparisons."""
        fields = dataclasses.fields(self.algorithm)
        return {
            "algorithm": type(self.algorithm).__name__,
            **{field.name: plain(getattr(self.algorithm, field.name)) for field in fields},
            "schedule": type(self.schedule).__name__,
            **self.schedule.describe(),
            "topology": plain(self.topology),
            "compression": plain(self.compression),
            "merge_policy": plain(self.merge_policy),
            "bucket_bytes": self.bucket_bytes,
        }

    @property
    def granularity(self) -> int | None:
        """Lengths of slices are multiples of this; None if the vector cannot be sliced.

        Slices of whole tensors have any length, and the last block of a bucket is padded.
        """
        own = self.algorithm.granularity
        if own is None or self.compression is None or self.algorithm.whole_tensors:
            return own
        return math.lcm(own, self.compression.codec.block)

    def bucket_elements(self, numel: int, itemsize: int) -> int:
        """Longest bucket, in elements, such that all that are being sent fit ``bucket_bytes``."""
        if self.granularity is None or self.membership is not None:
            return max(1, numel)
        topology, copies = self.topology, self.num_workers if self.algorithm.gathers else 1
        if topology is not None:
            workers = range(self.num_workers)
            copies = max(len(topology.weights(w, self.num_workers, 0)) for w in workers)
        if not self.is_overlapped:
            copies *= self.schedule.num_fragments  # each has its own memory
        return max(_FEWEST_ELEMENTS, self.bucket_bytes // (PENDING_BUCKETS * copies * itemsize))

    def cuts(
        self,
        numel: int,
        itemsize: int,
        longest: int = CHUNK_ELEMENTS,
        boundaries: tuple[int, ...] = (),
    ) -> Cuts:
        """Where to cut a vector of parameters into chunks of equal length, if possible.

        An element has ``itemsize`` bytes, and a chunk about ``longest`` elements. Chunks end at the
        ``boundaries`` of fragments.
        """
        if self.granularity is None:
            return Cuts()
        bucket = self.bucket_elements(numel, itemsize)
        chunk = min(bucket, longest)
        if numel <= bucket:
            chunk = math.ceil(numel / max(1, round(numel / longest)))
            chunk += -chunk % self.granularity  # or little would be left for one more
        return Cuts(chunk, self.granularity, boundaries, self.algorithm.whole_tensors)

    def fragment_slices(self, sizes: Mapping[str, int]) -> list[list[range]]:
        """The slices of each fragment; ValueError unless they cover each parameter once."""
        fragments = self.schedule.fragment_slices(sizes)
        slices = sorted((p.start, p.stop) for fragment in fragments for p in fragment if p)
        starts, ends = [start for start, _ in slices], [end for _, end in slices]
        is_covered = [0, *ends] == [*starts, sum(sizes.values())]
        if not is_covered or not all(any(fragment) for fragment in fragments):
            raise ValueError(f"The fragments of {self.schedule} do not cover each parameter once.")
        name = type(self.algorithm).__name__
        if self.algorithm.whole_tensors and not set(ends) <= set(
            itertools.accumulate(sizes.values())
        ):
            raise ValueError(
                f"{name} needs whole tensors, and the fragments of {self.schedule} end within "
                "some. Use pattern='strided' or 'contiguous', which keep layers together."
            )
        granularity = self.algorithm.granularity or 1
        if any(start % granularity for start in starts):
            raise ValueError(
                f"The fragments of {self.schedule} must begin at multiples of {granularity}, "
                f"which {name} is made of, and begin at {starts}."
            )
        return fragments

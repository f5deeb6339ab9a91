"""Settings of a learner, checked before any thread or socket is created."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from lightning_loco._util.plain import plain
from lightning_loco.algorithms.decoupled_diloco import DecoupledDiLoCo
from lightning_loco.algorithms.outer_lr import OuterLR
from lightning_loco.algorithms.outer_momentum import OuterMomentum
from lightning_loco.algorithms.outer_optimizer import OuterOptimizer
from lightning_loco.algorithms.stale_correction import StaleCorrection
from lightning_loco.compression import CODECS, Codec, check_compression
from lightning_loco.costs import Link, LinkLike, Links, as_links
from lightning_loco.model.flat import CHUNK_ELEMENTS, Cuts
from lightning_loco.syncer.merge_rounds import MergeSettings
from lightning_loco.transport import read_certificate

DEFAULT_PORT = 29600
"""Port of a syncer whose address has none."""

_LONGEST_NAME = 300
"""Of a learner, in bytes of JSON: the header of a push has 1,024."""

_ADDRESS = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::(\d{1,5}))?")


class Address(NamedTuple):
    """Where a syncer listens.

    Example:
        >>> Address.of("[::1]:29601"), str(Address.of("node7"))
        (Address(host='::1', port=29601), 'node7:29600')
    """

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """Read ``HOST:PORT``, ``HOST`` or ``[IPv6]:PORT``; ValueError for anything else."""
        found = _ADDRESS.fullmatch(text)
        port = DEFAULT_PORT if found is None or found[2] is None else int(found[2])
        if found is None or not 0 < port < 2**16:
            raise ValueError(f"syncer must be 'HOST:PORT', such as 'node7:29600', got {text!r}.")
        return cls(found[1].strip("[]"), port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclasses.dataclass(frozen=True)
class DecoupledSettings:
    """How a learner takes part in a run.

    Args:
        algorithm: How pushes are merged.
        rounds: When fragments are merged. Fewer fragments are used if the model has fewer elements.
        compression: Codec of the pseudo-gradients on the wire, or its name. Default: none.
        syncer: ``"HOST:PORT"`` of the syncer. Default: worker 0 of the job has one.
        key_file: Key file of the run, written by ``lightning-loco keys FILE``.
        name: Unique name of this learner; with ``syncer`` only. Default: host name and process id.
        count_tokens: Returns the number of tokens in a batch. Default: the number of samples.
        link: Links to emulate, between each worker and worker 0, or the syncer. Default: none.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or contradicts another one.
        FileNotFoundError: If the key file does not exist.
    """

    algorithm: DecoupledDiLoCo
    rounds: MergeSettings = MergeSettings()
    compression: Codec | str | None = None
    syncer: str | None = None
    key_file: str | Path | None = None
    name: str | None = None
    count_tokens: Callable[[Any], float] | None = None
    link: Links | None = None

    topology: ClassVar[None] = None
    outer_device: ClassVar[None] = None
    granularity: ClassVar[int] = 1
    consensus_key: ClassVar[str] = "outer"

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, DecoupledDiLoCo):
            raise TypeError(f"algorithm must be a DecoupledDiLoCo(), got {self.algorithm!r}.")
        if not (self.count_tokens is None or callable(self.count_tokens)):
            raise TypeError(
                f"count_tokens must be a function of a batch, got {self.count_tokens!r}."
            )
        check_compression(self.compression)
        if not isinstance(self.compression, str | Codec | None) or (
            self.codec is not None and self.codec.is_sparse
        ):
            raise ValueError(
                "compression must be a codec that sends every value, since what is lost is not "
                f"sent later, got {self.compression!r}. Use 'bf16', 'int8' or 'e3m0'."
            )
        if self.syncer is not None:
            Address.of(self.syncer)
            _check_name(self.name)
            method = self.algorithm
            if callable(method.outer_lr) or method.outer_optimizer is not None:
                raise ValueError(
                    "A syncer elsewhere gets the method in a message, which cannot hold functions: "
                    "leave outer_optimizer out and make outer_lr a number, or leave syncer out."
                )
        elif self.name is not None:
            raise ValueError(
                f"name={self.name!r} is of a learner of a syncer elsewhere: give its address, "
                "syncer='HOST:PORT', or leave name out."
            )
        if self.key_file is not None:
            read_certificate(self.key_file)

    @property
    def codec(self) -> Codec | None:
        """Codec of pseudo-gradients on the wire; None for no compression."""
        if isinstance(self.compression, str):
            return None if self.compression == "none" else CODECS[self.compression]()
        return self.compression

    def learner_name(self, worker: int) -> str:
        """Return the name of a worker of this job as a learner."""
        if self.syncer is None:
            return f"worker{worker}"
        return self.name or f"{socket.gethostname()}-{os.getpid()}"

    def link_of(self, worker: int, num_workers: int) -> Link | None:
        """Return the link of a worker to the syncer; None without emulation, or beside it."""
        if self.link is None or (self.syncer is None and worker == 0):
            return None
        return self.link.of_size(num_workers).between(worker, 0)

    def prepare(self, num_workers: int, seed: int = 0) -> DecoupledSettings:
        """Check the settings against the number of workers of this job, or raise ValueError."""
        if self.syncer is not None and num_workers > 1:
            raise ValueError(
                f"A job with syncer={self.syncer!r} is one learner, and this one has {num_workers} "
                "workers. Use devices=1, make its ranks one worker with replica_size, or leave "
                "syncer out for a run within this job."
            )
        if self.link is not None:
            self.link.check(num_workers)
        if self.syncer is None and self.rounds.min_quorum > num_workers:
            raise ValueError(
                f"min_quorum={self.rounds.min_quorum} is more than the {num_workers} workers of "
                "this job, so no fragment would ever be merged."
            )
        return self

    def fragment_slices(self, sizes: Mapping[str, int]) -> list[list[range]]:
        """The whole vector: ranks of a worker have the same parameters."""
        return [[range(sum(sizes.values()))]]

    def cuts(
        self, numel: int, itemsize: int, longest: int, boundaries: tuple[int, ...] = ()
    ) -> Cuts:
        """Cut the parameters into chunks of about ``longest`` elements."""
        return Cuts(min(longest, CHUNK_ELEMENTS), 1, boundaries)

    def describe(self) -> dict[str, Any]:
        """Return all settings that must be equal on all workers, as plain values."""
        fields = dataclasses.fields(self.algorithm)
        return {
            "algorithm": type(self.algorithm).__name__,
            **{field.name: plain(getattr(self.algorithm, field.name)) for field in fields},
            **plain(self.rounds)[1],
            "compression": plain(self.codec),
            "syncer": self.syncer,
        }


def _check_name(name: str | None) -> None:
    """Raise ValueError for a name that no message, or no line of a log, could hold."""
    if name is None:
        return
    fits = isinstance(name, str) and name and name.isprintable()
    if not fits or len(json.dumps(name)) > _LONGEST_NAME:
        shown = name if len(str(name)) < _LONGEST_NAME else f"{str(name)[:20]}..."
        raise ValueError(
            "name must have at least one character, all printable, and at most "
            f"{_LONGEST_NAME} bytes as JSON, got {shown!r}."
        )


def decoupled_diloco(
    sync_every: int,
    fragments: int,
    delay: int,
    min_quorum: int,
    outer_lr: OuterLR,
    outer_momentum: OuterMomentum,
    nesterov: bool,
    outer_optimizer: OuterOptimizer | None,
    aggregate: Literal["radial", "mean"],
    weight: Literal["tokens", "steps", "equal"],
    mix: float,
    correction: StaleCorrection | None,
    grace: float,
    keep_late: bool,
    syncer: str | None,
    key_file: str | Path | None,
    name: str | None,
    count_tokens: Callable[[Any], float] | None,
    compression: Codec | str | None,
    link: LinkLike | None,
) -> DecoupledSettings:
    """Return the settings of :class:`~lightning_loco.DecoupledDiLoCoStrategy`."""
    algorithm = DecoupledDiLoCo(
        outer_lr, outer_momentum, nesterov, outer_optimizer, aggregate, weight, mix, correction
    )
    rounds = MergeSettings(
        fragments, sync_every, min_quorum, delay=delay, grace=grace, keep_late=keep_late
    )
    return DecoupledSettings(
        algorithm, rounds, compression, syncer, key_file, name, count_tokens, as_links(link)
    )

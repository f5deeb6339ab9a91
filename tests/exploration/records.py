"""The records of which a history consists. A world adds those that make sense in it."""

from __future__ import annotations

from typing import NamedTuple


class Applied(NamedTuple):
    """A worker has applied the result of a round.

    Attributes:
        worker: Its name.
        round_index: The round.
        outer: The outer parameters after it; empty if the method has none.
        group: The members of the round, if they change.
    """

    worker: str
    round_index: int
    outer: tuple[float, ...]
    group: str = ""


class Merged(NamedTuple):
    """A result was computed from messages.

    Attributes:
        round_index: The round.
        weights: The share of each sender in the result.
        is_of_messages: The messages that it contains, each with the number of the local step up to
            which it reports: no message may be in two results.
    """

    round_index: int
    weights: tuple[float, ...]
    is_of_messages: tuple[tuple[str, int], ...] = ()


class Stopped(NamedTuple):
    """A worker has stopped, as all have agreed, after so many local steps."""

    worker: str
    step: int
    reason: str


class Ended(NamedTuple):
    """A worker has ended by itself, with an error or without one (empty)."""

    worker: str
    step: int
    error: str
    time_s: float


class Read(NamedTuple):
    """A worker has read samples of the training data: their positions in the stream of a run."""

    worker: str
    positions: tuple[int, ...]
    run: str = ""


class Sent(NamedTuple):
    """A worker has sent a message of a round, perhaps again."""

    worker: str
    run: str
    round_index: int
    message: tuple[float, ...]


class Began(NamedTuple):
    """A worker has begun a run with others, while ``ahead`` had the state of another one."""

    worker: str
    group: str
    ahead: tuple[str, ...]


class Overtaken(NamedTuple):
    """A worker had to take the state of the run from others, although it had it already."""

    worker: str
    round_index: int


class Finished(NamedTuple):
    """A worker has ended regularly, after all its rounds.

    Attributes:
        worker: Its name.
        run: Names its run.
        may_differ: Whether it may have other outer parameters than the others.
        outer: Its outer parameters.
    """

    worker: str
    run: str
    may_differ: bool
    outer: tuple[float, ...]


class Shown(NamedTuple):
    """A worker has put the consensus into its model, as for a save; its outer parameters."""

    worker: str
    values: tuple[float, ...]
    outer: tuple[float, ...]


class Harmed(NamedTuple):
    """Something was done to a worker: it was killed, frozen, made to raise an error, or to stop.

    ``life`` counts how often the job was started before; ``kind`` is the kind of the fault.
    """

    worker: str
    life: int
    kind: str
    time_s: float


class Failed(NamedTuple):
    """A worker has raised an error at ``time_s``: the name of its type, and its text."""

    worker: str
    life: int
    kind: str
    text: str
    time_s: float


class Gone(NamedTuple):
    """The process of a worker has ended, for whatever reason."""

    worker: str
    life: int
    time_s: float


class Counted(NamedTuple):
    """How many steps a worker has taken, and how many it has counted."""

    worker: str
    taken: int
    counted: int


class Mixed(NamedTuple):
    """A worker has mixed its message of a bucket with those of its neighbours in a round."""

    worker: str
    life: int
    num_workers: int
    round_index: int
    bucket: int
    sent: tuple[float, ...]
    received: tuple[float, ...]


class Compared(NamedTuple):
    """What was found in this run, and what another order of events, without faults, has led to."""

    worker: str
    what: str
    found: str
    expected: tuple[str, ...]


class Reported(NamedTuple):
    """How long a worker has waited until others had read all its reports, in seconds."""

    worker: str
    seconds: float


class Healed(NamedTuple):
    """Whether a worker whose parameters held NaN has finite ones a few rounds later."""

    worker: str
    what: str
    is_finite: bool


# ------------------------------------------------------------------------- pairwise gossip

Values = tuple[float, ...]


class Published(NamedTuple):
    """A node has made parameters the latest ones, or has withdrawn them (no values).

    Attributes:
        life: The node, with the number of its life.
        name: The node.
        model: Checksum of its model.
        tag: Clock and loss.
        values: What a peer decodes.
    """

    life: str
    name: str
    model: int
    tag: tuple[float, float]
    values: Values


class Overwritten(NamedTuple):
    """A node begins to write parameters to memory, which held earlier ones.

    Attributes:
        life: The node.
        readers: How many threads send those earlier ones.
        is_latest: Whether they are the latest ones, which the next peer would get.
    """

    life: str
    readers: int
    is_latest: bool


class Unpublished(NamedTuple):
    """A node had no memory for its parameters, because so many of its snapshots are being sent."""

    life: str
    being_read: int


class Reset(NamedTuple):
    """A node has dropped what it had received, and published its present parameters."""

    life: str


class FetchStarted(NamedTuple):
    """A node has begun to fetch."""

    life: str


class Fetched(NamedTuple):
    """A fetch has ended.

    Attributes:
        life: The node that has fetched.
        peer: Whose parameters it has accepted; empty if none.
        tag: Their clock and loss.
        values: The parameters.
        is_stopped: Whether the node was closed.
        seconds: How long it took.
        limit_s: How long it may take, with what the node was delayed.
    """

    life: str
    peer: str
    tag: tuple[float, float]
    values: Values
    is_stopped: bool
    seconds: float
    limit_s: float


class Chosen(NamedTuple):
    """A node has chosen a peer, has passed over others, and has these scores of all."""

    life: str
    peer: str
    passed: tuple[str, ...]
    scores: dict[str, int]


class Blamed(NamedTuple):
    """A peer has lost points with a node, which may be closing."""

    life: str
    peer: str
    is_closing: bool


class Exchanged(NamedTuple):
    """A node has blended in the parameters of a peer.

    Attributes:
        life: The node.
        peer: The peer.
        model: Checksum of the node's model.
        tag: Clock and loss of the peer's parameters.
        values: The peer's parameters.
        factor: Their share.
        before: The node's parameters right before.
        base: Those of which the share is replaced; the rest is progress.
        after: Those after it.
        clocks: The node's clock before and after it.
    """

    life: str
    peer: str
    model: int
    tag: tuple[float, float]
    values: Values
    factor: float
    before: Values
    base: Values
    after: Values
    clocks: tuple[float, float]


class Closed(NamedTuple):
    """A node was closed; it took so long and may take so long; these tasks and counts are left."""

    life: str
    seconds: float
    limit_s: float
    left: tuple[str, ...]
    counts: dict[str, int]


class Resumed(NamedTuple):
    """A worker has resumed from these parameters, and then has these."""

    worker: str
    saved: Values
    values: Values


class Waited(NamedTuple):
    """The training of a worker has waited so long, and may wait so long."""

    worker: str
    seconds: float
    limit_s: float


# ------------------------------------------------------------------------- checkpoints


class SaveStarted(NamedTuple):
    """A worker of a life of a run has begun a save to a path."""

    life: str
    rank: int
    path: str
    stamp: str


class Prepared(NamedTuple):
    """All workers have written their own files of a save."""

    path: str
    stamp: str


class Filed(NamedTuple):
    """A worker is about to write its own file of a save."""

    stamp: str
    rank: int


class Committing(NamedTuple):
    """A save is complete, and a worker is about to replace the main file.

    After that it deletes the saves ``before``.
    """

    path: str
    stamp: str
    rank: int
    before: tuple[str, ...]


class Saved(NamedTuple):
    """A save has returned on one of the workers."""

    life: str
    rank: int
    path: str
    stamp: str
    num_workers: int


class SaveFailed(NamedTuple):
    """A save has raised an error on one of the workers.

    Attributes:
        text: The error.
        is_of_all: Whether all workers must get it, and not only those that wait for another one.
        is_excused: Whether something has happened to the run, or another one saves, too.
    """

    life: str
    rank: int
    path: str
    stamp: str
    text: str
    is_of_all: bool
    is_excused: bool


class Removed(NamedTuple):
    """A checkpoint is about to be deleted, because it is no longer wanted."""

    path: str


class Found(NamedTuple):
    """Somebody has read a checkpoint: the stamp of the save; empty without one; or an error."""

    reader: str
    path: str
    stamp: str
    error: str


class Left(NamedTuple):
    """After a save that no other one disturbs: its stamp, all stamps, and all side files."""

    path: str
    stamp: str
    stamps: tuple[str, ...]
    names: tuple[str, ...]

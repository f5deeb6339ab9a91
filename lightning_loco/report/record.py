"""The record of a run: what its page shows, as a file of JSON.

``run.json`` is one object with the fields of :class:`RunRecord`, and ``"format": 1``. Everything in
it is text, numbers, lists and maps, so that other programs can write and read it: a simulation, or
a training loop without Lightning.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

FORMAT = 1
"""Version of the file format."""

RECORD_FILE = "run.json"
"""Name of the file in the folder of a run."""

MAX_POINTS = 1000
"""Points that a curve keeps at most."""

CurveKind = Literal["train_loss", "validation", "learning_rate", "consensus", "metric"]
"""The quantity of a curve, which has its own chart."""

Point = tuple[int, float, float | None, float, float, float]
"""Step, seconds, bytes or None, then the mean, smallest and largest of the values."""

Event = tuple[int, str, float, float]
"""Number of a lane, kind, start and end in seconds since the start of the run."""


def replace_file(file: Path, text: str) -> None:
    """Write a file atomically: a reader finds the old text or the new one."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, file)
    finally:
        new.unlink(missing_ok=True)


class Curve:
    """A curve that grows with a run and keeps at most ``max_points`` points.

    A point has a local step, the seconds since the start of the run, the bytes that the worker had
    sent, and the mean, the smallest and the largest of the values it stands for. When the limit is
    reached, neighbours become one point, and from then on each point stands for twice as many
    values. Step, seconds and bytes are taken from the last of them. Values that are not finite are
    counted, and are not part of a point.

    Args:
        kind: Which chart the curve belongs to.
        name: Its name in the legend.
        lane: Number of the worker or rank; None if it is of all of them.
        max_points: At least 2, and even.

    Attributes:
        points: Those that are complete.
        values_per_point: How many values a complete point stands for.
        not_finite: How many values were NaN or infinite.
    """

    def __init__(
        self, kind: CurveKind, name: str, lane: int | None = None, max_points: int = MAX_POINTS
    ) -> None:
        self.kind, self.name, self.lane = kind, name, lane
        self.max_points = max_points
        self.points: list[Point] = []
        self.values_per_point = 1
        self.not_finite = 0
        self._open: list[Point] = []

    def add(self, step: int, seconds: float, num_bytes: float | None, value: float) -> None:
        """Add a value, with the bytes that were sent so far, or None if that is not known."""
        if not math.isfinite(value):
            self.not_finite += 1
            return
        self._open.append((step, seconds, num_bytes, value, value, value))
        if len(self._open) < self.values_per_point:
            return
        self.points.append(merged(self._open))
        self._open = []
        if len(self.points) >= self.max_points:
            self.points = [merged(self.points[i : i + 2]) for i in range(0, len(self.points), 2)]
            self.values_per_point *= 2

    def to_json(self) -> dict[str, Any]:
        """Return the curve as plain values, the values of an incomplete last point included."""
        rest = [merged(self._open)] if self._open else []
        return {
            "kind": self.kind,
            "name": self.name,
            "lane": self.lane,
            "values_per_point": self.values_per_point,
            "not_finite": self.not_finite,
            "points": [[round_to(number) for number in point] for point in [*self.points, *rest]],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the curve of :meth:`to_json`."""
        lane = value.get("lane")
        curve = cls(value["kind"], str(value["name"]), None if lane is None else int(lane))
        curve.values_per_point = int(value.get("values_per_point", 1))
        curve.not_finite = int(value.get("not_finite", 0))
        curve.points = [_point(row) for row in value["points"]]
        return curve


def merged(points: Sequence[Point]) -> Point:
    """Return one point for several neighbours of equal weight."""
    step, seconds, num_bytes, *_ = points[-1]
    _, _, _, means, lows, highs = zip(*points, strict=True)
    mean = math.fsum(mean / len(points) for mean in means)  # a sum of losses may overflow
    return step, seconds, num_bytes, mean, min(lows), max(highs)


def round_to(number: float | None, digits: int = 7) -> float | None:
    """Round to significant digits, which shortens a file; integers are kept."""
    return number if number is None or isinstance(number, int) else float(f"{number:.{digits}g}")


def _point(row: Sequence[Any]) -> Point:
    step, seconds, num_bytes, *values = row
    mean, low, high = map(_finite, values)
    if _finite(step) < 0:
        raise ValueError(f"a local step is {step}")
    sent = None if num_bytes is None else _finite(num_bytes)
    return int(step), _finite(seconds), sent, mean, low, high


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a value is {number}, not a finite number")
    return number


def _of_lanes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    return [{str(name): _finite(number) for name, number in row.items()} for row in rows]


def _as_json(value: Any) -> Any:
    """Return a value with numbers that are not finite as text, because JSON has none of them."""
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A topology to draw: between which workers messages are sent.

    Attributes:
        name: Of the topology.
        num_workers: Number of workers.
        edges: Pairs of workers that exchange: in every round, or in one round of a period.
        spectral_gap: 1 for the exact mean after a round, 0 for no mixing; None if not known.
        note: A remark.
    """

    name: str
    num_workers: int
    edges: tuple[tuple[int, int], ...]
    spectral_gap: float | None = None
    note: str = ""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the drawing of its fields; ValueError if an edge names no worker."""
        count, gap = int(value["num_workers"]), value.get("spectral_gap")
        edges = tuple((int(first), int(second)) for first, second in value["edges"])
        if any(not 0 <= worker < count for edge in edges for worker in edge):
            raise ValueError(f"an edge of the topology names none of the {count} workers")
        gap = None if gap is None else _finite(gap)
        return cls(str(value["name"]), count, edges, gap, str(value.get("note", "")))


@dataclasses.dataclass
class RunRecord:
    """The record of a run.

    Attributes:
        title: Such as ``"GASLoC, 4 workers"``.
        started: Date and time of the start, as text.
        ended: How it ended: ``""`` if as planned, otherwise the error or the signal.
        seconds: Duration of the training.
        lanes: Names of the workers, or of their ranks.
        curves: All curves.
        events: The events of each lane, at most the first and the last thousands. The kinds that
            have their own colors are ``"compute"``, ``"wait"``, ``"sync point"``,
            ``"validation"``, ``"checkpoint"``, and, drawn below the lane, ``"round"`` and
            ``"send"``.
        shares: For each lane the seconds of each kind, of all events. Time within several events
            counts for the innermost one only, apart from ``"round"`` and ``"send"``.
        goodput: For each lane the shares of its time by name, which add up to 1.
        events_left_out: How many events are counted in ``shares`` only.
        numbers: Rows of the table of results: a name, and a number or text.
        bytes_sent: Bytes that a worker sent; None if not known.
        ddp_bytes: Bytes that DDP would have sent in the same steps; None if that is no comparison.
        wait_s: Seconds for which a rank was blocked in exchanges, mean over the ranks; None if only
            ``shares`` have it. It includes waits within sync points and checkpoints.
        topology: None if all workers exchange with all, or with none.
        settings: Settings by name, maybe in groups.
        versions: Versions of programs by name.
        warnings: Texts, and how often each has come.
        notes: Sentences for the page, for example on what was not measured.
    """

    title: str
    started: str = ""
    ended: str = ""
    seconds: float = 0.0
    lanes: list[str] = dataclasses.field(default_factory=list)
    curves: list[Curve] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)
    shares: list[dict[str, float]] = dataclasses.field(default_factory=list)
    goodput: list[dict[str, float]] = dataclasses.field(default_factory=list)
    events_left_out: int = 0
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    bytes_sent: float | None = None
    ddp_bytes: float | None = None
    wait_s: float | None = None
    topology: Drawing | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    warnings: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    def of_kind(self, kind: CurveKind) -> list[Curve]:
        """Return the curves of a kind that have points."""
        return [curve for curve in self.curves if curve.kind == kind and curve.points]

    def save(self, folder: Path) -> None:
        """Write ``run.json`` into a folder."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["curves"] = [curve.to_json() for curve in self.curves]
        fields["events"] = [
            [lane, kind, round(start_s, 6), round(end_s, 6)]
            for lane, kind, start_s, end_s in self.events
        ]
        fields |= {name: _as_json(fields[name]) for name in ("numbers", "settings")}
        if self.topology is not None:
            fields["topology"] = dataclasses.asdict(self.topology)
        text = json.dumps({"format": FORMAT, **fields}, allow_nan=False)
        replace_file(folder / RECORD_FILE, text + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that :meth:`save` has written, given itself or its folder.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is of another format, or holds something else.
        """
        file = path / RECORD_FILE if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(
                f"There is no {file}. Name the folder of a run: train.py and ReportCallback write "
                f"{RECORD_FILE} there when training ends."
            )
        try:
            value = json.loads(file.read_text(encoding="utf-8"), parse_constant=_finite)
            if not isinstance(value, dict) or value.get("format") != FORMAT:
                raise ValueError(f'it has no "format": {FORMAT}')
            return cls._from_json(value)
        except KeyError as error:
            raise ValueError(
                f"{file} is no record of a run that can be read: it has no {error}."
            ) from error
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{file} is no record of a run that can be read: {error}.") from error

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Self:
        lanes = [str(name) for name in value["lanes"]]
        events = [
            (int(lane), str(kind), _finite(start), _finite(end))
            for lane, kind, start, end in value["events"]
        ]
        if any(not 0 <= lane < len(lanes) for lane, *_ in events):
            raise ValueError("an event is of no lane")
        optional = ("bytes_sent", "ddp_bytes", "wait_s")
        numbers = {name: value.get(name) for name in optional}
        topology = value.get("topology")
        return cls(
            title=str(value["title"]),
            started=str(value.get("started", "")),
            ended=str(value.get("ended", "")),
            seconds=_finite(value.get("seconds", 0)),
            lanes=lanes,
            curves=[Curve.from_json(curve) for curve in value["curves"]],
            events=events,
            shares=_of_lanes(value["shares"]),
            goodput=_of_lanes(value.get("goodput", [])),
            events_left_out=int(value.get("events_left_out", 0)),
            numbers=dict(value.get("numbers", {})),
            topology=None if topology is None else Drawing.from_json(topology),
            settings=dict(value.get("settings", {})),
            versions={str(k): str(v) for k, v in value.get("versions", {}).items()},
            warnings={str(k): int(v) for k, v in value.get("warnings", {}).items()},
            notes=[str(note) for note in value.get("notes", [])],
            **{name: None if n is None else _finite(n) for name, n in numbers.items()},
        )

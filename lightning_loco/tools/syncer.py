"""``lightning-loco syncer``: merges what decoupled learners push, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import ipaddress
import logging
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_loco._util.text import format_seconds
from lightning_loco.syncer.contract import Contract
from lightning_loco.syncer.service import SyncerClient, SyncerServer
from lightning_loco.syncer.settings import Address
from lightning_loco.syncer.snapshot import Snapshot
from lightning_loco.syncer.syncer import Syncer
from lightning_loco.syncer.tape import Tape
from lightning_loco.tools.addresses import check_bind, read_address
from lightning_loco.transport import JobCertificate, read_certificate, text_without_key_file

log = logging.getLogger(__name__)

_EXAMPLE = "[::]:29600"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK_S = 0.2
_STATUS_TIMEOUT_S = 10.0
_MOST_NAMED = 8
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 2**20
_OWN_FILES = re.compile(r"syncer\.lock|syncer\.json\.new|tape|fragment_\d+_start\.pt")
"""What a syncer leaves that was killed before a run began."""


class CannotRun(Exception):
    """The folder or the port cannot be used; the text says why, and what to do."""


def run(args: argparse.Namespace) -> int:
    """Run a syncer, or show the status of one. Returns the exit status.

    Raises:
        ValueError: If this machine cannot listen there, or the key file cannot be used.
        FileNotFoundError: If there is no key file.
    """
    certificate = None if args.key_file is None else read_certificate(args.key_file)
    if args.status is not None:
        return show_status(args.status, certificate)
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s"
    )
    _return_memory()
    folder = Path(args.folder)
    try:
        with locked(folder):
            return Command(args, folder, certificate).run()
    except CannotRun as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _return_memory() -> None:
    """Have the C library return large blocks to the system.

    The pushes of a run come in many threads, and glibc would keep what they have freed for each of
    them: a multiple of what is in use.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and keep other syncers from it until the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "syncer.lock").open("ab")
    except OSError as error:
        raise CannotRun(f"The folder {folder} cannot be used: {error}.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotRun(
                f"Another syncer uses the folder {folder}. Stop it first, or name another folder "
                "with --folder."
            ) from None
        except OSError as error:
            log.warning(
                "The folder %s cannot be locked (%s): start no second syncer there.", folder, error
            )
        yield


def _check_folder(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    strange = [name for name in names if not _OWN_FILES.fullmatch(name)]
    if strange and "syncer.json" not in names:
        raise CannotRun(
            f"The folder {folder} has {strange[0]} and no syncer.json, so it is damaged, or not of "
            "a syncer. Name a new folder with --folder, or copy this one back from a backup."
        )


class Command:
    """A syncer behind a port, for one folder.

    Args:
        args: Of the command line.
        folder: Of the run.
        certificate: Certificate of the job, or None.
    """

    def __init__(
        self, args: argparse.Namespace, folder: Path, certificate: JobCertificate | None
    ) -> None:
        self._args, self._folder = args, folder
        self._signals: list[int] = []
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: self._signals.append(number))
        host, port = check_bind(args.bind, _EXAMPLE)
        _check_folder(folder)
        try:
            keeps_tape = args.tape or args.keep_pushes
            self._tape = Tape(folder / "tape", time.time, args.keep_pushes) if keeps_tape else None
            saved = self._saved_syncer()
            self._server = SyncerServer(self._begin, host=host, port=port, certificate=certificate)
            self._server.syncer = saved
        except (OSError, RuntimeError) as error:
            raise CannotRun(str(error)) from error
        if certificate is None and not _is_loopback(host):
            how = "--key-file FILE here and key_file=FILE to the learners"
            log.warning("%s", text_without_key_file(how))
        log.info("The syncer listens at %s.", Address(host, self._server.server.port))

    def _saved_syncer(self) -> Syncer | None:
        """Return the syncer of the run in the folder; None if there is no run."""
        folder = self._folder
        try:
            plain = Snapshot(folder).load_contract()
            if plain is not None:
                syncer = self._open(Contract.from_plain(plain))
                rounds = syncer.rounds
                log.info(
                    "It continues the run of %s at round %d (epoch %d).",
                    folder,
                    rounds.committed,
                    rounds.epoch,
                )
                return syncer
        except ValueError as error:
            raise CannotRun(f"The run of {folder} cannot be continued: {error}") from error
        log.info("The first learner that joins begins a run in %s.", folder)
        return None

    def _begin(self, contract: Contract) -> Syncer:
        syncer = self._open(contract)
        log.info(
            "A run begins in %s: %d fragments, %s elements.",
            self._folder,
            len(contract.lengths),
            f"{sum(contract.lengths):,}",
        )
        return syncer

    def _open(self, contract: Contract) -> Syncer:
        # The time is later than the epochs of a run whose folder was lost, so that learners that
        # are still there follow this one.
        return Syncer(
            contract,
            self._folder,
            save_every=self._args.save_every,
            first_epoch=int(time.time()),
            tape=self._tape,
        )

    def run(self) -> int:
        """Answer learners until there is a reason to stop. Returns the exit status."""
        self._server.start()
        reason = self._wait_for_a_reason()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # another one must not break the last save
        self._server.close()
        status, saved = self._save()
        if self._tape is not None:
            self._tape.close()
        log.log(logging.ERROR if status else logging.INFO, "The syncer ends %s %s", reason, saved)
        return status

    def _wait_for_a_reason(self) -> str:
        args, now = self._args, time.monotonic()
        line_at, idle_since, joins = now + args.log_every, now, 0
        while not self._signals:
            time.sleep(_LOOK_S)
            status, now = self._server.status(), time.monotonic()
            if status.get("failure") is not None:
                return f"because a merge has failed ({status['failure']})."
            if status and now >= line_at:
                log.info("%s", describe(status))
                line_at = now + args.log_every
            if status.get("learners") or status.get("joins", 0) > joins:
                idle_since, joins = now, status["joins"]
            is_idle = joins > 0 and args.idle_exit is not None
            if is_idle and now - idle_since >= args.idle_exit:
                return f"after {format_seconds(args.idle_exit)} without a learner."
        return f"because of {signal.Signals(self._signals[0]).name}."

    def _save(self) -> tuple[int, str]:
        """Save what is not saved; return the exit status and a sentence."""
        syncer = self._server.syncer
        if syncer is None or not syncer.has_started:
            return 0, "No run has begun."
        log.info("%s", describe(syncer.status()))
        if syncer.failure is not None:
            return 1, f"Start it again: it continues with what is saved in {self._folder}."
        try:
            syncer.close()
        except OSError as error:
            return 1, f"Its last merges cannot be saved in {self._folder}: {error}."
        return 0, f"Round {syncer.rounds.committed} is saved in {self._folder}."


def _is_loopback(host: str) -> bool:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(str(one[4][0])).is_loopback for one in found)


# ---------------------------------------------------------------------------- status


def describe(status: dict[str, Any]) -> str:
    """Return the status of a syncer in a line."""
    learners = [_describe_learner(*one) for one in status["learners"].items()]
    more = len(learners) - _MOST_NAMED
    named = learners[:_MOST_NAMED] + ([f"and {more} more"] if more > 0 else [])
    return "; ".join([*_totals(status), *named])


def _totals(status: dict[str, Any]) -> list[str]:
    learners, least = len(status["learners"]), status["min_quorum"]
    waits = f" (waits for {least})" if learners < least else ""
    measured, persistence = status["measured_sync_every"], status["persistence"]
    return [
        f"round {status['committed']}",
        f"learners {learners}{waits}",
        f"merges {status['merges']}",
        f"pushes {status['pushes']}, {status['late']} of them late",
        f"refused {status['refused']}",
        f"sync_every {'not measured yet' if measured is None else f'{measured:.1f} measured'}",
        *([] if persistence is None else [f"persistence {persistence:.2f}"]),
    ]


def _describe_learner(name: str, one: dict[str, Any]) -> str:
    step_s, share = one["step_s"], one["merged_share"]
    took = "step time not known yet" if step_s is None else f"{format_seconds(step_s)} per step"
    return f"{name}: {took}, {'no step yet' if share is None else f'{share:.0%} merged'}"


def show_status(address: str, certificate: JobCertificate | None) -> int:
    """Print the status of a syncer. Returns the exit status."""
    host, port = read_address("--status", address, _EXAMPLE)
    client = SyncerClient(host, port, certificate, timeout_s=_STATUS_TIMEOUT_S)
    try:
        status = client.status()
    except (OSError, ValueError) as error:
        print(
            f"error: The syncer at {address} does not answer: {error}. Check that it runs, that "
            "its port can be reached from here, and that --key-file is that of the run.",
            file=sys.stderr,
        )
        return 1
    finally:
        client.close()
    if not status:
        print(f"syncer at {address}: no learner has joined")
        return 0
    print("\n".join([f"syncer at {address}, epoch {status['epoch']}", *table(status)]))
    return 0


def table(status: dict[str, Any]) -> list[str]:
    """Return the status as lines: totals, open rounds, and a row for each learner."""
    lines = _totals(status)
    for number, names in status["open"].items():
        lines.append(f"open round {number}, pushed by {', '.join(names) or 'none'}")
    if not status["learners"]:
        return lines
    rows = [("learner", "steps", "per step", "merged", "heard of")]
    for name, one in status["learners"].items():
        step_s, share = one["step_s"], one["merged_share"]
        rows.append(
            (
                name,
                f"{one['steps']:,}",
                "-" if step_s is None else format_seconds(step_s),
                "-" if share is None else f"{share:.0%}",
                f"{format_seconds(one['seen_s'])} ago",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        *lines,
        "",
        *(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ),
    ]

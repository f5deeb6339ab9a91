"""One key file per job: who has it may read the parameters, others are refused (CURVE).

All peers of a job share one pair of keys, so that a single file has to be handed out. Write one
with ``python -m lightning_loco.peers.keys FILE`` and copy it to every machine by a safe way.
"""

from __future__ import annotations

import argparse
import hmac
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"lightning_loco"
_HEAD = "lightning_loco keys 1"


class Keys(NamedTuple):
    """The job's pair of CURVE keys, as 40 printable characters each."""

    public: bytes
    secret: bytes

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is not bound yet answer holders of these keys only."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.zap_domain = _ZAP_DOMAIN

    def present(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is not connected yet prove that it holds these keys."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


class Doorkeeper:
    """Answers a context's questions whether a client may come in (the ZAP protocol).

    It has no thread: whoever polls the guarded socket polls :attr:`socket` too, and calls
    :meth:`answer` when there is something.

    Args:
        context: The context of the guarded socket; nothing may be bound in it yet.
        keys: The keys that clients must hold.

    Attributes:
        socket: To be polled.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ADDRESS)
        self._public = z85.decode(keys.public)

    def answer(self) -> None:
        """Answer one question."""
        frames = self.socket.recv_multipart()
        known = len(frames) == 7 and frames[0] == b"1.0" and frames[5] == b"CURVE"
        allowed = known and hmac.compare_digest(frames[6], self._public)
        verdict = (b"200", b"OK") if allowed else (b"400", b"another key")
        request_id = frames[1] if len(frames) > 1 else b""
        self.socket.send_multipart([b"1.0", request_id, *verdict, b"", b""])


def write_key_file(path: str | Path) -> Keys:
    """Make new keys and write them to a new file that only its owner can read.

    Raises:
        FileExistsError: If there is such a file.
    """
    public, secret = zmq.curve_keypair()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{_HEAD}\n{public.decode()}\n{secret.decode()}\n")
    return Keys(public, secret)


def read_key_file(path: str | Path) -> Keys:
    """Read a key file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If others can read it, or it holds something else.
    """
    mend = f"Write a new one with: python -m lightning_loco.peers.keys {path}"
    try:
        # The open file is the one that is checked, whatever happens to its name meanwhile.
        with Path(path).open(encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = file.read(1000).splitlines()
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no key file {str(path)!r}. {mend}") from None
    except UnicodeDecodeError:
        mode, lines = 0o600, []
    if mode & 0o077:
        raise ValueError(
            f"The key file {str(path)!r} has mode {mode:o}, so others than its owner may read or "
            f"change it. Run: chmod 600 {path}"
        )
    if len(lines) == 3 and lines[0] == _HEAD:
        keys = Keys(lines[1].encode(), lines[2].encode())
        with suppress(ValueError, zmq.ZMQError):
            if len(keys.secret) == 40 and zmq.curve_public(keys.secret) == keys.public:
                return keys
    raise ValueError(f"{str(path)!r} is not a key file. {mend}")


def main() -> None:
    """Write a key file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", help="does not exist yet; copy it to all machines of the job")
    path = parser.parse_args().file
    try:
        write_key_file(path)
    except FileExistsError:
        parser.error(f"{path} exists. Name another file, or delete it first.")
    print(f"Wrote {path} (mode 600). Copy it to every machine and pass key_file={path}.")


if __name__ == "__main__":
    main()

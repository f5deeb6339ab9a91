"""One certificate per job: who holds its file may connect, and everybody else is refused.

The file holds a certificate that is signed by itself, and its private key. Both sides of a
connection present it and accept no other, so that a single file has to be handed out.
"""

from __future__ import annotations

import os
import ssl
import stat
import subprocess
from pathlib import Path
from typing import NamedTuple

_DAYS = 3650
_COMMAND = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
    *("-nodes", "-sha256", "-days", str(_DAYS), "-subj", "/CN=lightning_loco job"),
    *("-keyout", "-", "-out", "-"),
)


class JobCertificate(NamedTuple):
    """What both sides of a connection need to know that the other holds the same file.

    Attributes:
        server: Of connections that are accepted.
        client: Of connections that are made.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext


def write_certificate(path: str | Path) -> None:
    """Write a new certificate and key to a new file that only its owner can read.

    It is valid for ten years. The program ``openssl`` makes it.

    Raises:
        FileExistsError: If there is such a file.
        RuntimeError: If there is no ``openssl``, or it fails.

    Example::

        write_certificate("job.pem")
        Trainer(strategy=PairwiseGossipStrategy(nodes="nodes.yaml", name="a", key_file="job.pem"))
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        try:
            made = subprocess.run(_COMMAND, capture_output=True, check=True, timeout=60)
        except BaseException as error:
            os.unlink(path)
            if isinstance(error, FileNotFoundError):
                raise RuntimeError(
                    "There is no openssl on this machine to write the file with. Install it, or "
                    "write the file on another machine and copy it."
                ) from None
            if isinstance(error, subprocess.SubprocessError):
                told = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
                raise RuntimeError(f"openssl failed: {told or error}") from None
            raise
        file.write(made.stdout)


def read_certificate(path: str | Path) -> JobCertificate:
    """Read the file of a job.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If others can read it, or it holds something else.
    """
    remedy = f"Write a new one with: lightning-loco keys {path}"
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no key file {str(path)!r}. {remedy}") from None
    if mode & 0o077:
        raise ValueError(
            f"The key file {str(path)!r} has mode {mode:o}, so others than its owner may read or "
            f"change it. Run: chmod 600 {path}"
        )
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server, client = contexts
    client.check_hostname = False
    server.num_tickets = 0  # connections stay open, and only replies may come over them
    for context in contexts:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(path, password=_no_password)
            context.load_verify_locations(path)
        except (ssl.SSLError, ValueError):
            raise ValueError(f"{str(path)!r} is not a key file. {remedy}") from None
    return JobCertificate(server, client)


def _no_password() -> str:
    """Keep OpenSSL from asking for one at the terminal."""
    raise ValueError("a key with a password")

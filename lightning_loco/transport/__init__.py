"""Requests and replies over TCP, for what collectives cannot do: reading from a worker at any time.

A *request* and its *reply* are a *note*, a few bytes of bounded length, and a *body* of any length
that is received into memory which exists already. Everything has a deadline. With the certificate
of a job both sides prove that they hold it, and what travels is encrypted (TLS 1.3).
"""

from lightning_loco.transport.certificate import (
    JobCertificate,
    read_certificate,
    write_certificate,
)
from lightning_loco.transport.client import Client, Reply
from lightning_loco.transport.connection import (
    MAX_NOTE_BYTES,
    CertificateRefused,
    MalformedMessage,
)
from lightning_loco.transport.server import Request, Server

__all__ = [
    "MAX_NOTE_BYTES",
    "CertificateRefused",
    "Client",
    "JobCertificate",
    "MalformedMessage",
    "Reply",
    "Request",
    "Server",
    "read_certificate",
    "write_certificate",
]

"""Requests and replies over TCP, for what collectives cannot do: reading from a worker at any time.

A *request* and a *reply* each consist of a *header* of at most 1,024 bytes and a *body* of any
length, which is received into preallocated memory. Every operation has a deadline. With the
certificate of a job, connections are encrypted (TLS 1.3) and both sides prove that they hold it.
"""

from lightning_loco.transport.certificate import (
    JobCertificate,
    read_certificate,
    text_without_key_file,
    write_certificate,
)
from lightning_loco.transport.client import Client, Reply
from lightning_loco.transport.connection import (
    MAX_HEADER_BYTES,
    CertificateRefused,
    MalformedMessage,
    address_towards,
)
from lightning_loco.transport.request_server import Request, Server

__all__ = [
    "MAX_HEADER_BYTES",
    "CertificateRefused",
    "Client",
    "JobCertificate",
    "MalformedMessage",
    "Reply",
    "Request",
    "Server",
    "address_towards",
    "read_certificate",
    "text_without_key_file",
    "write_certificate",
]

"""Certificates: holders of the file can connect; all others are refused immediately."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_loco.transport import (
    CertificateRefused,
    MalformedMessage,
    read_certificate,
    write_certificate,
)
from tests.harness.limits import wait_until
from tests.harness.sockets import asking, new_certificate, serving


def test_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = new_certificate(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_text()
    assert "PRIVATE KEY" in content
    assert "BEGIN CERTIFICATE" in content
    assert new_certificate(tmp_path, "other.pem").read_text() != content
    with pytest.raises(FileExistsError):
        write_certificate(path)
    assert path.read_text() == content


def test_no_file_is_left_if_openssl_is_missing_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no openssl on this machine.*on another machine"):
        new_certificate(tmp_path)
    program = tmp_path / "openssl"
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no entropy')\n")
    program.chmod(0o700)
    with pytest.raises(RuntimeError, match="openssl failed: no entropy"):
        new_certificate(tmp_path)
    assert list(tmp_path.iterdir()) == [program]


def test_key_file_with_permissions_for_others_is_refused(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    path = new_certificate(tmp_path)
    for mode in (0o640, 0o604, 0o620, 0o644):
        with subtests.test(f"{mode:o}"):
            path.chmod(mode)
            with pytest.raises(ValueError, match=f"has mode {mode:o}.*chmod 600 {path}"):
                read_certificate(path)


def test_files_that_are_not_key_files_are_refused(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    path = new_certificate(tmp_path)
    content = path.read_text()
    other = new_certificate(tmp_path, "other.pem").read_text()
    encrypted = subprocess.run(
        ["openssl", "pkey", "-in", path, "-aes128", "-passout", "pass:word"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    certificate = content[content.index("-----BEGIN CERTIFICATE") :]
    for name, damaged in {
        "empty": "",
        "no text": "\xff\xfe",
        "no key": certificate,
        "no certificate": content.replace(certificate, ""),
        "the key of another": other[: other.index("-----BEGIN CERTIFICATE")] + certificate,
        "password-protected key": encrypted + certificate,
        "cut": content[:-200],
        "keys of an earlier version": "lightning_loco keys 1\n" + 2 * ("x" * 40 + "\n"),
    }.items():
        with subtests.test(name):
            path.write_text(damaged, encoding="latin-1")
            with pytest.raises(ValueError, match="is not a key file. Write a new one with: light"):
                read_certificate(path)


def test_error_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no key file.*lightning-loco keys"):
        read_certificate(tmp_path / "keys")


def test_holders_of_the_same_file_talk_encrypted(tmp_path: Path) -> None:
    path = new_certificate(tmp_path)
    server_side, client_side = (read_certificate(path) for _ in range(2))
    with serving(certificate=server_side) as server, asking(server, client_side) as client:
        for size in (0, 1, 2**14, 2**14 + 1, 3_000_001):
            body = bytes(range(256)) * (size // 256) + bytes(size % 256)
            reply = client.request(b"head", body, timeout_s=20)
            memory = memoryview(bytearray(size))
            reply.receive_into(memory, timeout_s=20)
            assert (reply.header, bytes(memory)) == (b"head", body)
        assert client._connection is not None
        secured: Any = client._connection._socket
        assert secured.version() == "TLSv1.3"


def test_connections_without_the_same_certificate_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    ours, other = (read_certificate(new_certificate(tmp_path, name)) for name in ("a", "b"))
    anonymous = ours._replace(client=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    anonymous.client.check_hostname = False
    anonymous.client.verify_mode = ssl.CERT_NONE
    old = ours._replace(client=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    old.client.check_hostname = False
    old.client.load_cert_chain(tmp_path / "a")
    old.client.load_verify_locations(tmp_path / "a")
    old.client.maximum_version = ssl.TLSVersion.TLSv1_2
    for name, server_side, client_side in (
        ("another certificate", ours, other),
        ("no TLS on the client", ours, None),
        ("no TLS on the server", None, ours),
        ("a client without a certificate", ours, anonymous),
        ("an older TLS version on the client", ours, old),
    ):
        caplog.clear()
        requests = []
        with (
            subtests.test(name),
            serving(requests.append, certificate=server_side) as server,
            asking(server, client_side) as client,
        ):
            for _ in range(2):
                with pytest.raises((ConnectionError, ssl.SSLError)):
                    client.request(b"head", timeout_s=60)
            assert not requests
            wait_until(lambda: server.malformed == 2, "the malformed message was not counted")
            assert len(caplog.records) == 1


_CA = """[ca]
default_ca = all
[all]
database = {0}/index
serial = {0}/serial
new_certs_dir = {0}
default_md = sha256
policy = any
x509_extensions = extensions
[any]
commonName = supplied
[extensions]
basicConstraints = critical, CA:TRUE
"""


def key_file_with_dates(folder: Path, begin_s: float, end_s: float) -> Path:
    """Write a key file that is valid between two times from now, in seconds."""
    folder.mkdir()
    (folder / "index").touch()
    (folder / "serial").write_text("01")
    (folder / "ca").write_text(_CA.format(folder))
    new_certificate(folder, "key")
    begin, end = (
        time.strftime("%y%m%d%H%M%SZ", time.gmtime(time.time() + s)) for s in (begin_s, end_s)
    )
    subject = ["-subj", "/CN=lightning_loco job"]
    for command in (
        ["req", "-new", "-key", "key", *subject, "-out", "request"],
        ["ca", "-batch", "-config", "ca", "-selfsign", "-keyfile", "key", "-in", "request"]
        + ["-startdate", begin, "-enddate", end, "-notext", "-out", "certificate"],
    ):
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
    key = (folder / "key").read_text()
    path = folder / "job.pem"
    path.touch(mode=0o600)
    certificate = (folder / "certificate").read_text()
    path.write_text(key[: key.index("-----BEGIN CERTIFICATE")] + certificate)
    return path


DAY_S = 86_400


def test_a_key_file_that_is_not_valid_now_is_refused(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Clocks may differ by five minutes."""
    for begin_s, end_s, is_valid in (
        (-DAY_S, DAY_S, True),
        (-2 * DAY_S, -DAY_S, False),
        (-DAY_S, -10, False),
        (3600, DAY_S, False),
        (200, DAY_S, True),
    ):
        with subtests.test(begin_s=begin_s, end_s=end_s):
            path = key_file_with_dates(tmp_path / f"{begin_s} {end_s}", begin_s, end_s)
            if is_valid:
                read_certificate(path)
                continue
            year = time.gmtime(time.time() + end_s).tm_year
            text = f"job.pem' is valid from .* to .* {year} GMT, but the clock .* says .* keys "
            with pytest.raises(ValueError, match=text):
                read_certificate(path)


def test_the_cause_of_a_refused_connection_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides: the error names a clock, not the other side's key file."""
    early = read_certificate(key_file_with_dates(tmp_path / "early", 200, DAY_S))
    expired = key_file_with_dates(tmp_path / "expired", -DAY_S, -DAY_S / 2)
    real_time = time.time
    with monkeypatch.context() as patch:  # it was valid at the start of the run
        patch.setattr(time, "time", lambda: real_time() - 0.75 * DAY_S)
        late = read_certificate(expired)
    other, ours = (read_certificate(new_certificate(tmp_path, name)) for name in ("a", "b"))
    by_clock = "by the clock of one of the two machines the key file is not valid now"
    for server_side, client_side, text in (
        (early, early, by_clock),
        (late, late, by_clock),
        (ours, other, "it has another key file, or none"),
    ):
        caplog.clear()
        with (
            serving(certificate=server_side) as server,
            asking(server, client_side) as client,
        ):
            with pytest.raises(CertificateRefused, match=text):
                client.request(b"head", timeout_s=60)
            wait_until(lambda: server.malformed == 1, "the refusal was not counted")
            assert text in caplog.text


def test_bytes_that_were_changed_on_the_way_are_no_refused_certificate(tmp_path: Path) -> None:
    certificate = read_certificate(new_certificate(tmp_path))
    with serving(certificate=certificate) as server, asking(server, certificate) as client:
        client.request(b"head", timeout_s=60)
        assert client._connection is not None
        changed = b"\x17\x03\x03\x00\x20" + bytes(32)  # a TLS record with a wrong checksum
        socket.socket.send(client._connection._socket, changed)
        with pytest.raises(MalformedMessage, match="changed on the way .*BAD_RECORD_MAC"):
            client._connection.receive_header(timeout_s=60)


@pytest.mark.process
def test_command_writes_a_key_file_and_does_not_overwrite_it(tmp_path: Path) -> None:
    path = tmp_path / "job.pem"
    command = [sys.executable, "command.py", "keys", str(path)]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, env=os.environ) for _ in range(2)
    )
    assert (first.returncode, first.stderr) == (0, "")
    assert f"key_file={path}" in first.stdout
    assert second.returncode == 1
    assert f"{path} exists. Name another file, or delete it first." in second.stderr
    read_certificate(path)
    nowhere = subprocess.run(
        [*command[:-1], "/nowhere/job.pem"], capture_output=True, text=True, env=os.environ
    )
    assert nowhere.returncode == 1
    assert nowhere.stderr == "Cannot write /nowhere/job.pem: No such file or directory.\n"

"""Messages that a correct worker never sends: a node ignores them and continues to serve."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_loco.algorithms.pairwise_average import Tag
from lightning_loco.gossip.protocol import PARAMETERS, ReplyHeader, pack_reply, pack_request
from tests.harness.flooder import flooding
from tests.harness.gossip_nodes import fetch, peers, serving, two_nodes
from tests.harness.limits import SOON_S, wait_until
from tests.harness.programs import Program, python_script
from tests.harness.sockets import (
    MB,
    message,
    new_certificate,
    raw_connection,
    resident_bytes,
    wait_until_closed,
)

pytestmark = pytest.mark.recovery

NUMEL = 500_000


def invalid_messages(count: int, good: bytes) -> Iterator[bytes]:
    """Return messages that violate the protocol in various ways."""
    draw = random.Random(0)
    for number in range(count):
        match number % 5:
            case 0:
                yield message(draw.randbytes(draw.randrange(300)))
            case 1:
                yield message(good[: draw.randrange(len(good))])
            case 2:
                yield message(good + draw.randbytes(1 + draw.randrange(500)))
            case 3:
                yield message(good, b"body")
            case 4:
                yield message(pack_reply(ReplyHeader(PARAMETERS, (1, 2))), bytes(1000))


@pytest.mark.parametrize("compression", [None, "int8"])
def test_node_survives_a_thousand_invalid_messages(
    caplog: pytest.LogCaptureFixture, compression: str | None
) -> None:
    with two_nodes(NUMEL, compression=compression) as (here, there):
        flat = torch.randn(NUMEL)
        there.publish(flat, Tag(1, 2))
        assert fetch(here) is not None
        before, count = resident_bytes(), 1000
        for data in invalid_messages(count, pack_request(there.wire_format.model_id)):
            with raw_connection(there.port) as connection, contextlib.suppress(OSError):
                connection.sendall(data)
                wait_until_closed(connection)
        wait_until(
            lambda: there.statistics.malformed == count, "some malformed messages were not counted"
        )
        assert resident_bytes() - before < 16 * MB
        for _ in range(3):
            received = fetch(here)
            assert received is not None
            lost = (received.params - flat).abs().max()
            assert lost == 0 if compression is None else 0 < lost < 0.02
            assert received.tag == Tag(1, 2)
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "Dropped a message from 127.0.0.1" in lines[0]


def test_readers_that_never_read_only_delay_newer_snapshots() -> None:
    """Such readers hold the memory of the next snapshot, for at most twice the timeout."""
    numel = 5_000_000
    with two_nodes(numel, fetch_timeout_s=1.0) as (here, there), contextlib.ExitStack() as stack:
        for value in range(1, 7):
            there.publish(torch.full((numel,), float(value)), Tag(value, value))
            stack.enter_context(raw_connection(there.port)).sendall(
                message(pack_request(there.wire_format.model_id))
            )
            time.sleep(0.3)
        deadline, seen = time.monotonic() + SOON_S, 0.0
        while seen < 100:
            there.publish(torch.full((numel,), 100.0), Tag(100, 100))
            received = fetch(here)
            if received is not None:
                assert received.params.unique().tolist() == [received.tag.clock]
                seen = received.tag.clock
            assert time.monotonic() < deadline


SAVING = """
import resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from pathlib import Path
import torch
from lightning.pytorch import Callback
from lightning_loco import PairwiseGossipStrategy
from tests.harness.small_model import TinyModule, make_loader, quiet_trainer

folder = Path({folder!r})

class Save(Callback):
    def on_train_start(self, *_):
        print("serving", flush=True)
        while not (folder / "flood started").exists():
            time.sleep(0.01)

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(folder / f"{{trainer.global_step}}.ckpt")

torch.set_num_threads(1)
strategy = PairwiseGossipStrategy(
    1.0, nodes={nodes!r}, name="p0", key_file={key_file!r}, fetch_timeout_s=0.5
)
trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=20, callbacks=[Save()])
trainer.fit(TinyModule(), make_loader(0, 20))
print("ended", flush=True)
"""


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("has_keys", [False, True])
def test_trainer_saves_checkpoints_despite_thousands_of_idle_connections(
    tmp_path: Path, has_keys: bool
) -> None:
    """The process may open 1,024 files, and cannot raise this limit."""
    key_file = str(new_certificate(tmp_path)) if has_keys else None
    own, other = peers(2)
    nodes = [node._asdict() for node in (own, other)]
    text = SAVING.format(folder=str(tmp_path), nodes=nodes, key_file=key_file)
    with Program(python_script(tmp_path, text), tmp_path) as program, serving(other, 1.0):
        program.wait_for("serving")
        with flooding("idle", "", own.port, 60):
            (tmp_path / "flood started").touch()
            code, output = program.finish(60)
    assert code == 0, output
    assert "ended" in output
    for step in range(1, 21):
        saved = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)
        assert saved["global_step"] == step

"""The thread that serves this worker's parameters, chunk by chunk, to whoever asks."""

from __future__ import annotations

import errno
import logging

import zmq

from lightning_loco.background import BackgroundThread
from lightning_loco.peers.answers import Answers
from lightning_loco.peers.keys import Keys
from lightning_loco.peers.listener import Listener
from lightning_loco.peers.model import Model
from lightning_loco.peers.publications import Publications
from lightning_loco.peers.router import Router

log = logging.getLogger(__name__)


class ServingThread(BackgroundThread):
    """Answer requests for chunks of the publications until closed.

    Requests have at most 1 KiB, only a few of them wait for each client, and clients that do not
    read for half a minute are cut off. Anything malformed is dropped, with one line in the log for
    each address and 20 in all. When there are too many clients, idle ones lose their connection.

    Args:
        model: What is served; requests for another model, or another compression, are
            refused.
        publications: Where the parameters are.
        host: Address to listen at; ``"0.0.0.0"`` for all networks of this machine.
        port: Port to listen at; None or 0 for any that is free.
        keys: Only clients with these keys are answered; None answers everybody.
        max_clients: Connections that are held at once, at least 1.

    Attributes:
        port: Where it listens.

    Raises:
        RuntimeError: If the port is taken or the host is not an address of this machine.
    """

    def __init__(
        self,
        model: Model,
        publications: Publications,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        keys: Keys | None = None,
        max_clients: int = 64,
    ) -> None:
        super().__init__("loco-peer-serving")
        self._answers = Answers(model, publications)
        self._door = _open_door(self._answers, host, port or 0, max_clients, keys)
        self.port = self._door.port

    @property
    def bytes_sent(self) -> int:
        """Bytes of parameters handed out."""
        return self._answers.bytes_sent

    @property
    def malformed(self) -> int:
        """Messages dropped."""
        return self._answers.malformed

    def run(self) -> None:
        """Answer until the door is closed."""
        try:
            self._door.serve()
        except Exception:
            log.exception("Parameters are no longer served to peers.")
        finally:
            self._door.close()

    def close(self) -> None:
        """End the thread and free the port; a second call does nothing."""
        if self.ident is None:
            self._door.close()
        self._door.stop()
        if self.is_alive():
            self.join()

    def end_with_process(self) -> float:
        """Answer nobody any more."""
        self._door.stop()
        return super().end_with_process()


def _open_door(
    answers: Answers, host: str, port: int, max_clients: int, keys: Keys | None
) -> Listener | Router:
    try:
        if keys is None:
            return Listener(answers, host, port, max_clients)
        return Router(answers, host, port, max_clients, keys)
    except (OSError, zmq.ZMQError) as error:
        if error.errno == errno.EADDRINUSE:
            raise RuntimeError(
                f"Port {port} of {host} is taken, so parameters cannot be served there. End "
                "the process that listens on it, choose another port for this worker, or "
                "leave the port out to get a free one."
            ) from None
        raise RuntimeError(
            f"Cannot listen on port {port} of {host!r}: {error}. Use host='0.0.0.0' for all "
            "networks of this machine, or one of its own addresses."
        ) from None

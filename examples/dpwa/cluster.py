"""Starts all nodes of a file on this machine, one process each, and stops them.

Run it: python examples/dpwa/cluster.py (the nodes of config.yaml beside it)
Another file: python examples/dpwa/cluster.py CONFIG.yaml
Stop it: Ctrl-C, or end this process; the nodes are ended then.
"""

import signal
import subprocess
import sys
from pathlib import Path

from lightning_loco.gossip import read_nodes

HERE = Path(__file__).resolve().parent


def main(config_file: str) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    peers, _ = read_nodes(config_file)
    command = (sys.executable, str(HERE / "train.py"))
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for peer in peers:
            nodes.append(subprocess.Popen([*command, peer.name, config_file]))
        sys.exit(any([node.wait() for node in nodes]))
    except KeyboardInterrupt:
        print("the nodes are stopped", flush=True)
    finally:
        for node in nodes:
            node.terminate()
            node.wait()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(HERE / "config.yaml"))

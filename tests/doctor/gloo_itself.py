"""Where gloo itself listens, asked of a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

SCRIPT = """
import json, os, socket
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
own = set()
for name in os.listdir("/proc/self/fd"):
    if os.path.islink(f"/proc/self/fd/{name}"):
        own.add(os.readlink(f"/proc/self/fd/{name}"))
found = []
for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
    for line in open(f"/proc/self/net/{table}").readlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            address, port = words[1].split(":")
            raw = bytes.fromhex(address)
            parts = [raw[i:i + 4][::-1] for i in range(0, len(raw), 4)]
            found.append([socket.inet_ntop(family, b"".join(parts)), int(port, 16)])
print(json.dumps(found))
dist.destroy_process_group()
"""


def gloo_listens_at(*before: str, **environ: str) -> Sequence[tuple[str, int]]:
    """Addresses and ports of one process group.

    Args:
        before: Words of a command that starts the process.
        environ: Variables beside those of this process.
    """
    done = subprocess.run(
        [*before, sys.executable, "-c", SCRIPT],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(address, port) for address, port in json.loads(done.stdout)]

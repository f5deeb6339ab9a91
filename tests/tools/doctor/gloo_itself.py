"""Find out, in another process, where gloo listens."""

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
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            address, port = fields[1].split(":")
            raw = bytes.fromhex(address)
            parts = [raw[i:i + 4][::-1] for i in range(0, len(raw), 4)]
            found.append([socket.inet_ntop(family, b"".join(parts)), int(port, 16)])
print(json.dumps(found))
dist.destroy_process_group()
"""


def gloo_listens_at(*before: str, **environ: str) -> Sequence[tuple[str, int]]:
    """Return the addresses and ports of one process group.

    Args:
        before: A command that starts the process, such as ``ip netns exec``.
        environ: Further environment variables.
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

"""How many files this process may have open: connections need them, and so do checkpoints."""

from __future__ import annotations

import sys

if sys.platform != "win32":
    import resource

_FOR_OTHERS = 4096
_PER_PEER = 16
_SHARE = 8
_SPARE_CLIENTS = 32


def make_room(num_peers: int) -> int:
    """Raise this process's limit of open files, if its hard limit allows that.

    Args:
        num_peers: From which this worker reads, and which read from it.

    Returns:
        How many connections others may hold at once: twice as many as there are peers, and 32; but
        no more than an eighth of the limit, so that strangers leave most of the files to others.
    """
    wanted = 2 * num_peers + _SPARE_CLIENTS
    if sys.platform == "win32":
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _FOR_OTHERS + _PER_PEER * num_peers
    if soft != resource.RLIM_INFINITY and soft < enough:
        soft = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft // _SHARE))

"""Names for the phases of a round in the output of ``torch.profiler``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler


def labelled(name: str) -> AbstractContextManager[object]:
    """A ``record_function`` while somebody profiles; nothing otherwise.

    Without a profiler a label would still cost more than packing a small tensor.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(name)
    return nullcontext()

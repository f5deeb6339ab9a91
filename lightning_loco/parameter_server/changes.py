"""Noticing that somebody else than the optimizer has written parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_loco.distributed.devices import has_streams
from lightning_loco.parameters.fingerprint import crc32

_PLACES = 32
_SAMPLE = torch.Size([_PLACES, 16])
"""Of a parameter; a processor reads 16 elements side by side at once."""


class ChangeWatch:
    """Notices when a worker's parameters are no longer those that the server has given it.

    Changes in place and new memory show in PyTorch's own counters. Changes through ``.data`` do
    not: of each parameter some hundred elements are compared, at places evenly spread.

    Args:
        params: What to watch, at least one.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._marks: list[tuple[int, int]] = []
        self._small: list[Tensor] = []
        self._samples: list[Tensor] = []
        self._seen = torch.empty(0)
        self._differs = torch.zeros((), dtype=torch.bool, pin_memory=has_streams(params[0].device))

    @torch.no_grad()
    def note(self) -> None:
        """Remember the parameters as they are now."""
        pointers = [mark[1] for mark in self._marks]
        self._marks = [(param._version, param.data_ptr()) for param in self._params]
        if pointers != [mark[1] for mark in self._marks]:
            samples = [_sample(param) for param in self._params]
            self._small = [sample for sample in samples if sample.shape != _SAMPLE]
            self._samples = [sample for sample in samples if sample.shape == _SAMPLE]
        self._seen = self._look()

    @torch.no_grad()
    def digest(self) -> str | None:
        """A checksum of all parameters, if they have changed since :meth:`note`; else None."""
        if self._has_marks_of_now() and torch.equal(self._look(), self._seen):
            return None
        return self._checksum()

    @torch.no_grad()
    def begin_digest(self, stream: torch.cuda.Stream) -> Callable[[], str | None]:
        """As :meth:`digest`, on a GPU that is not waited for.

        Args:
            stream: Where to copy.

        Returns:
            What waits for the digest, in any thread; to be called before the parameters change.
        """
        differs = self._look().ne(self._seen).any() if self._has_marks_of_now() else None
        looked = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._seen.device))
        with torch.cuda.stream(stream):
            if differs is not None:
                self._differs.copy_(differs, non_blocking=True)
            looked.record(stream)

        def finish() -> str | None:
            looked.synchronize()
            if differs is not None and not self._differs:
                return None
            with torch.cuda.stream(stream):
                return self._checksum()

        return finish

    def _has_marks_of_now(self) -> bool:
        return [(param._version, param.data_ptr()) for param in self._params] == self._marks

    def _checksum(self) -> str:
        checksum = 0
        for param in self._params:
            checksum = crc32(param, checksum)
        return f"{checksum:08x}"

    def _look(self) -> Tensor:
        lines = [sample if sample.ndim == 1 else sample.reshape(-1) for sample in self._small]
        if self._samples:
            lines.append(torch.cat(self._samples).view(-1))
        return torch.cat(lines)


def _sample(param: Tensor) -> Tensor:
    """A view of a tensor: some places, all of a small one, rows if the memory has gaps."""
    values, size = param.detach(), param.numel()
    if values.is_contiguous():
        values = values.view(-1)
    elif values.untyped_storage().nbytes() == values.nbytes:
        values = values.as_strided((size,), (1,), 0)
    if size < _SAMPLE.numel():
        return values
    if not values.is_contiguous():
        return values[:: size // _SAMPLE.numel()]
    return values.as_strided(_SAMPLE, (size // _PLACES, 1))

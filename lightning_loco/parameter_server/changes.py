"""Whether a worker's parameters were changed outside the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_loco.distributed.devices import has_streams
from lightning_loco.model.fingerprint import crc32

_NUM_ROWS = 32
_SAMPLE = torch.Size([_NUM_ROWS, 16])
"""Elements of a parameter that are compared; a CPU reads 16 adjacent ones at once."""


class ChangeDetector:
    """Detects whether a worker's parameters, at least one, were changed outside the optimizer.

    In-place changes and new memory show in PyTorch's version counters and pointers. Changes through
    ``.data`` do not, so some 500 evenly spaced elements of each parameter are compared as well.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._versions: list[tuple[int, int]] = []
        self._small: list[Tensor] = []
        self._samples: list[Tensor] = []
        self._recorded = params[0].new_empty(0)
        self._differs = torch.zeros(
            (), dtype=torch.bool, pin_memory=has_streams(params[0].device), device="cpu"
        )

    @torch.no_grad()
    def record(self) -> None:
        """Record the parameters as unchanged."""
        pointers = [version[1] for version in self._versions]
        self._versions = [(param._version, param.data_ptr()) for param in self._params]
        if pointers != [version[1] for version in self._versions]:
            samples = [_sample(param) for param in self._params]
            self._small = [sample for sample in samples if sample.shape != _SAMPLE]
            self._samples = [sample for sample in samples if sample.shape == _SAMPLE]
        self._recorded = self._sampled_values()

    @torch.no_grad()
    def changed_checksum(self) -> str | None:
        """Return a checksum of all parameters if they have changed since :meth:`record`."""
        if self._has_same_versions() and torch.equal(self._sampled_values(), self._recorded):
            return None
        return self._checksum()

    @torch.no_grad()
    def start_checksum(self, stream: torch.cuda.Stream) -> Callable[[], str | None]:
        """Start :meth:`changed_checksum` on a GPU without blocking; ``stream`` copies.

        Returns a function that waits for it, in any thread; call it before the parameters change.
        """
        differs = None
        if self._has_same_versions():
            differs = self._sampled_values().ne(self._recorded).any()
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._recorded.device))
        with torch.cuda.stream(stream):
            if differs is not None:
                self._differs.copy_(differs, non_blocking=True)
            copied.record(stream)

        def finish() -> str | None:
            copied.synchronize()
            if differs is not None and not self._differs:
                return None
            with torch.cuda.stream(stream):
                return self._checksum()

        return finish

    def _has_same_versions(self) -> bool:
        return [(param._version, param.data_ptr()) for param in self._params] == self._versions

    def _checksum(self) -> str:
        checksum = 0
        for param in self._params:
            checksum = crc32(param, checksum)
        return f"{checksum:08x}"

    def _sampled_values(self) -> Tensor:
        values = [sample if sample.ndim == 1 else sample.reshape(-1) for sample in self._small]
        if self._samples:
            values.append(torch.cat(self._samples).view(-1))
        return torch.cat(values)


def _sample(param: Tensor) -> Tensor:
    """Return a view of some elements: all of a small tensor, slices if its memory has gaps."""
    values, size = param.detach(), param.numel()
    if values.is_contiguous():
        values = values.view(-1)
    elif values.untyped_storage().nbytes() == values.nbytes:
        values = values.as_strided((size,), (1,), 0)
    if size < _SAMPLE.numel():
        return values
    if not values.is_contiguous():
        return values[:: size // _SAMPLE.numel()]
    return values.as_strided(_SAMPLE, (size // _NUM_ROWS, 1))

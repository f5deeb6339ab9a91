"""A chunk of the flat vector: the views of parameters it is made of, and copying to and from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """The views of a chunk, side by side with their places in a flat vector, dtype by dtype.

    On a GPU, torch 2.5 to 2.10 copy wrong values if the tensors of one list have several dtypes.
    """

    by_dtype: list[tuple[list[Tensor], list[Tensor]]]

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each view with its place."""
        for views, parts in self.by_dtype:
            yield from zip(views, parts, strict=True)

    def pack(self) -> None:
        """Copy the parameters into the flat vector."""
        for views, parts in self.by_dtype:
            torch._foreach_copy_(parts, views)

    def unpack(self) -> None:
        """Copy the flat vector into the parameters."""
        for views, parts in self.by_dtype:
            torch._foreach_copy_(views, parts)


class DistantWindow(NamedTuple):
    """A chunk beside its place in a flat vector in the memory of another device.

    The views are gathered where they are, so that one stretch of memory crosses over.
    """

    chunk: Chunk
    flat: Tensor

    def pack(self) -> None:
        """Copy the parameters into the flat vector, and wait until they are there."""
        near = self._near()
        self.chunk.window(near).pack()
        self.flat.copy_(near)

    def unpack(self) -> None:
        """Copy the flat vector into the parameters; it may be changed at once."""
        near = self._near()
        near.copy_(self.flat)
        self.chunk.window(near).unpack()

    def _near(self) -> Tensor:
        return torch.empty_like(self.flat, device=self.chunk.device, pin_memory=False)


class Chunk:
    """The slice ``start:stop`` of the flat vector, and the views of parameters it is made of."""

    def __init__(self, start: int, views: list[Tensor]) -> None:
        self.start = start
        self.views = views
        self._sizes = [view.numel() for view in views]
        self._shapes = [view.shape if view.ndim > 1 else None for view in views]
        self.stop = start + sum(self._sizes)
        self._dtypes = {view.dtype for view in views}

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.views[0].device

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split_with_sizes(flat, self._sizes)
        return [p if s is None else p.view(s) for p, s in zip(parts, self._shapes, strict=True)]

    def is_rounded(self, dtype: torch.dtype) -> bool:
        """Whether a parameter is stored in a narrower dtype than ``dtype``."""
        return any(view.dtype != dtype for view in self.views)

    def rounding_error(self, flat: Tensor) -> Tensor:
        """What unpacking ``flat`` would lose because parameters are stored in narrower dtypes."""
        pairs = zip(self._parts(flat), self.views, strict=True)
        return torch.cat([(part - part.to(view.dtype)).reshape(-1) for part, view in pairs])

    def window(self, flat: Tensor) -> Window:
        """Tie the chunk to ``flat``, ``(len(self),)`` on the same device, for many copies."""
        views, parts = self.views, self._parts(flat)
        if len(self._dtypes) == 1:
            return Window([(views, parts)])
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for view, part in zip(views, parts, strict=True):
            of_dtype = by_dtype.setdefault(view.dtype, ([], []))
            of_dtype[0].append(view)
            of_dtype[1].append(part)
        return Window(list(by_dtype.values()))

    def tied(self, flat: Tensor) -> Window | DistantWindow:
        """Tie the chunk to ``flat``, ``(len(self),)`` on any device, for many copies."""
        is_near = flat.device.type == self.device.type
        return self.window(flat) if is_near else DistantWindow(self, flat)

    def pack(self, flat: Tensor) -> None:
        """Copy the parameters into ``flat``, of shape ``(len(self),)``, on any device."""
        self.tied(flat).pack()

    def unpack(self, flat: Tensor) -> None:
        """Copy ``flat``, of shape ``(len(self),)``, on any device, into the parameters."""
        self.tied(flat).unpack()

"""Changes of parameters outside the optimizer are always detected."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_loco.parameter_server.changes import ChangeDetector
from tests.harness.gpu import with_streams


def large(size: int = 100_003) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


TENSORS: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.tensor(1.0),
    "small": lambda: torch.arange(1.0, 7.0).view(2, 3),
    "large": large,
    "transposed": lambda: large(6_000).view(100, 60).T,
    "part of another": lambda: large(6_000).view(100, 60)[:, 3:50],
    "every other": lambda: large(6_000)[::2],
    "second half": lambda: large(6_000)[3_000:],
    "double": lambda: large().double(),
    "bfloat16": lambda: large().bfloat16(),
}


def change_nothing(param: Tensor) -> None:
    pass


def tracked(param: Tensor) -> None:
    with torch.no_grad():
        param.view(-1)[-1:].add_(1) if param.is_contiguous() else param[-1].add_(1)


def clip(param: Tensor) -> None:
    param.data.clamp_(-0.5, 0.5)


def load(param: Tensor) -> None:
    param.data = param.data.clone()
    param.data.add_(1)


def test_changes_are_detected_without_blocking(subtests: pytest.Subtests) -> None:
    for (kind, make), change in itertools.product(
        TENSORS.items(), (change_nothing, tracked, clip, load)
    ):
        with subtests.test(kind, change=change.__name__), with_streams():
            params = [nn.Parameter(TENSORS["small"]()), nn.Parameter(make())]
            detector = ChangeDetector(params)
            detector.record()
            change(params[1])
            assert detector.start_checksum(torch.cuda.Stream())() == detector.changed_checksum()


def test_changes_are_detected(subtests: pytest.Subtests) -> None:
    for (kind, make), change in itertools.product(TENSORS.items(), (tracked, clip, load)):
        with subtests.test(kind, change=change.__name__):
            params = [nn.Parameter(TENSORS["small"]()), nn.Parameter(make())]
            detector = ChangeDetector(params)
            detector.record()
            assert detector.changed_checksum() is None
            change(params[1])
            checksum = detector.changed_checksum()
            assert checksum is not None
            assert (
                ChangeDetector([param.detach().clone() for param in params]).changed_checksum()
                == checksum
            )
            detector.record()
            assert detector.changed_checksum() is None
            clip(params[1])
            params[0].data.mul_(2)
            assert detector.changed_checksum() not in (None, checksum)


@pytest.mark.parametrize("kind", ["part of another", "every other", "second half"])
def test_other_elements_of_the_memory_are_ignored(kind: str) -> None:
    param = TENSORS[kind]()
    others = torch.ones(6_000, dtype=torch.bool)
    others.as_strided(param.shape, param.stride(), param.storage_offset()).fill_(False)
    detector = ChangeDetector([param])
    detector.record()
    whole = torch.empty(0).set_(param.untyped_storage(), 0, (6_000,), (1,))
    whole[others] += 1
    assert detector.changed_checksum() is None
    whole[~others] += 1
    assert detector.changed_checksum() is not None


def test_gradients_and_forward_passes_are_ignored() -> None:
    layer = nn.Linear(3, 2)
    detector = ChangeDetector(list(layer.parameters()))
    detector.record()
    layer(torch.ones(1, 3)).sum().backward()
    layer.zero_grad()
    layer.train(False).requires_grad_(False)
    assert detector.changed_checksum() is None

"""The contract of a run, as plain values and back."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

from lightning_loco.algorithms import CGAD, DecoupledDiLoCo, HeLoCo, TensorRange
from lightning_loco.compression import E3M0, BFloat16, Codec, Int8
from lightning_loco.syncer.contract import Contract, first_difference
from lightning_loco.syncer.merge_rounds import MergeSettings

TENSORS = [[TensorRange(0, 4, is_embedding=True), TensorRange(4, 6)], [TensorRange(0, 2)]]
SETTINGS = MergeSettings(fragments=2, sync_every=10, min_quorum=3)


def make(method: DecoupledDiLoCo | None = None, codec: Codec | None = None) -> Contract:
    parameters = {"weight": [[2, 4], "float32"]}
    return Contract(
        method or DecoupledDiLoCo(), SETTINGS, TENSORS, parameters, torch.float64, codec
    )


@pytest.mark.parametrize("correction", [None, HeLoCo(), CGAD(0.2, 4)])
@pytest.mark.parametrize("codec", [None, BFloat16(), Int8(block=128), E3M0()])
def test_a_contract_is_read_as_it_was_written(correction: Any, codec: Codec | None) -> None:
    contract = make(DecoupledDiLoCo(0.7, 0.9, mix=0.5, correction=correction), codec)
    assert Contract.from_plain(json.loads(json.dumps(contract.as_plain()))) == contract
    assert contract.lengths == [6, 2]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"format": 2}, "has format 2, and this version of lightning_loco reads 1"),
        ({"format": None}, "has format None"),
        ({"dtype": "int8"}, "cannot be read: KeyError"),
        ({"dtype": []}, "cannot be read: TypeError"),
        ({"method": {}}, "has '.*', which cannot be read"),
        ({"settings": {"fragments": 2, "color": 1}}, "cannot be read: TypeError"),
        ({"settings": {"fragments": -1}}, "fragments must be an integer and at least 1"),
        ({"tensors": [[[0, 1, False]]]}, "tensors of 1 fragments, and not of 2"),
        ({"tensors": [[[0, 1, False]], []]}, "do not follow each other"),
        ({"tensors": [[[0, 1, False]], [[1, 2, False]]]}, "do not follow each other"),
        ({"tensors": [[[0, 1, False]], [[0, 0, False]]]}, "do not follow each other"),
        ({"compression": ["Codec", {}]}, "cannot be read: TypeError"),
        ({"compression": ["ErrorFeedback", {}]}, "is no codec"),
        ({"compression": ["as_compression", {}]}, "cannot be read"),
        ({"compression": ["OfAnotherVersion", {}]}, "cannot be read: AttributeError"),
    ],
)
def test_what_is_no_contract(changed: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Contract.from_plain({**make().as_plain(), **changed})


def test_functions_are_not_read() -> None:
    optimizer = functools.partial(torch.optim.AdamW, lr=0.1)
    for method in (
        DecoupledDiLoCo(outer_optimizer=optimizer),
        DecoupledDiLoCo(outer_lr=lambda merge: 0.5),
    ):
        with pytest.raises(ValueError, match="has 'a function', .* make the Syncer in Python"):
            Contract.from_plain(make(method).as_plain())


def test_the_first_difference_has_its_path() -> None:
    own, other = make().as_plain(), make(DecoupledDiLoCo(outer_lr=0.5)).as_plain()
    assert first_difference(own, other) == "method.outer_lr is 0.5 there and 0.7 here"
    assert first_difference(own, make().as_plain()) is None
    assert first_difference(own, {**own, "new": 1}) == "new is 1 there and None here"
    assert first_difference({"a": {"b": 1, "c": 1}}, {"a": {"c": 1, "b": 1}}) == (
        "a.order has 'c' there where it has 'b' here"
    )

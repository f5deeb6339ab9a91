"""What the learners and the syncer of a run must agree on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco import compression
from lightning_loco._util.plain import plain
from lightning_loco.algorithms.decoupled_diloco import DecoupledDiLoCo, TensorRange
from lightning_loco.algorithms.stale_correction import CGAD, HeLoCo
from lightning_loco.compression import Codec
from lightning_loco.syncer.merge_rounds import MergeSettings

_FORMAT = 1
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_CORRECTIONS = {kind.__name__: kind for kind in (CGAD, HeLoCo)}


class Contract(NamedTuple):
    """What is equal in all learners of a run and in their syncer.

    Attributes:
        method: How pushes are merged.
        settings: When fragments are merged.
        tensors: For each fragment, where its tensors are.
        parameters: A description of each parameter, by name, see :func:`describe`; they are only
            compared.
        dtype: Of the fragments, float32 or float64.
        codec: Encodes pushes on the wire; None sends them as they are.
    """

    method: DecoupledDiLoCo
    settings: MergeSettings
    tensors: list[list[TensorRange]]
    parameters: Mapping[str, Any] = {}
    dtype: torch.dtype = torch.float32
    codec: Codec | None = None

    @property
    def lengths(self) -> list[int]:
        """Number of elements of each fragment."""
        return [tensors[-1].end for tensors in self.tensors]

    def as_plain(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return {
            "format": _FORMAT,
            "method": plain(self.method)[1],
            "settings": plain(self.settings)[1],
            "parameters": dict(self.parameters),
            "dtype": str(self.dtype).removeprefix("torch."),
            "compression": plain(self.codec),
            "tensors": [[list(one) for one in tensors] for tensors in self.tensors],
        }

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Contract:
        """Read a value of :meth:`as_plain`; ValueError if it is another one, or has functions."""
        try:
            if value["format"] != _FORMAT:
                raise ValueError(
                    f"The contract has format {value['format']}, and this version of "
                    f"lightning_loco reads {_FORMAT}. Use the same version everywhere."
                )
            tensors = [
                [TensorRange(int(begin), int(end), bool(kind)) for begin, end, kind in one]
                for one in value["tensors"]
            ]
            if not all(tensors) or not all(_follow_each_other(one) for one in tensors):
                raise ValueError("The tensors of a fragment do not follow each other.")
            settings = MergeSettings(**value["settings"])
            if len(tensors) != settings.fragments:
                raise ValueError(
                    f"There are tensors of {len(tensors)} fragments, and not of "
                    f"{settings.fragments}."
                )
            return cls(
                read_method(value["method"]),
                settings,
                tensors,
                dict(value["parameters"]),
                _DTYPES[value["dtype"]],
                _read_codec(value["compression"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"The contract cannot be read: {error!r}.") from error


def describe(parameter: Tensor) -> list[Any]:
    """Return shape and dtype of a parameter; with strides if it is not stored row by row.

    A fragment has its elements in the order of memory.

    Example:
        >>> describe(torch.zeros(2, 3)), describe(torch.zeros(3, 2).t())
        ([[2, 3], 'torch.float32'], [[2, 3], 'torch.float32', [1, 2]])
    """
    shape, strides = [*parameter.shape], [*parameter.stride()]
    is_by_row = torch.empty_strided(shape, strides, device="meta").is_contiguous()
    return [shape, str(parameter.dtype), *([] if is_by_row else [strides])]


def _follow_each_other(tensors: list[TensorRange]) -> bool:
    ends = [0, *(one.end for one in tensors)]
    begins = [one.begin for one in tensors]
    return begins == ends[:-1] and all(one.begin < one.end for one in tensors)


def first_difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Name the first entry in which two plain contracts differ; None if they are equal as JSON.

    The order counts as well: parameters follow each other in it in the fragments.

    Example:
        >>> first_difference({"settings": {"fragments": 24}}, {"settings": {"fragments": 8}})
        'settings.fragments is 8 there and 24 here'
    """
    for key in [*own, *(key for key in other if key not in own)]:
        here, there = own.get(key), other.get(key)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            if (inside := first_difference(here, there)) is not None:
                return f"{key}.{inside}"
        elif json.dumps(here) != json.dumps(there):
            return f"{key} is {there!r} there and {here!r} here"
    for here, there in zip(own, other, strict=False):
        if here != there:
            return f"order has {there!r} there where it has {here!r} here"
    return None


def read_method(fields: Mapping[str, Any]) -> DecoupledDiLoCo:
    """Return a method from its fields as plain values.

    Raises:
        ValueError: If it has a function, such as an outer optimizer, or a class that is not of this
            package.
    """
    try:
        known = {field.name for field in dataclasses.fields(DecoupledDiLoCo)}
        values = {name: fields[name] for name in known}
        if (correction := values["correction"]) is not None:
            values["correction"] = _CORRECTIONS[correction[0]](**correction[1])
        if values["outer_optimizer"] is not None or isinstance(values["outer_lr"], str):
            raise KeyError("a function")
        return DecoupledDiLoCo(**values)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"The method {dict(fields)} has {error}, which cannot be read from a file or a "
            "message. Use the numbers and corrections of the package, or make the Syncer in Python "
            "with the method itself."
        ) from error


def _read_codec(value: Any) -> Codec | None:
    if value is None:
        return None
    name, fields = value
    kind = getattr(compression, name)
    if not issubclass(kind, Codec):
        raise TypeError(f"{name} is no codec")
    codec: Codec = kind(**fields)
    return codec

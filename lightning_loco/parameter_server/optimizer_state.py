"""An optimizer's state on the wire: names and numbers in a note, tensors one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.parameter_server.protocol import Lane, Wire


class OptimizerState(NamedTuple):
    """The state of a ``torch.optim`` optimizer, in the format of its ``state_dict``.

    Attributes:
        values: ``values[parameter][name]``: a tensor or a number.
        groups: The settings of each parameter group, without its parameters.
    """

    values: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Take it from an optimizer.

        Raises:
            TypeError: If it holds anything but tensors and plain values.
        """
        content = optimizer.state_dict()
        for number, entry in content["state"].items():
            for name, value in entry.items():
                if not isinstance(value, (Tensor, bool, int, float, str, type(None))):
                    raise TypeError(
                        f"{type(optimizer).__name__} keeps a {type(value).__name__} as {name!r} of "
                        f"parameter {number}, which cannot go into a checkpoint of the workers: "
                        "only tensors and plain values can. Use another optimizer, or train "
                        "without checkpoints."
                    )
        return cls(content["state"], [_plain(group) for group in content["param_groups"]])

    def put_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Give it to an optimizer of the same parameters."""
        content = optimizer.state_dict()
        for present, group in zip(content["param_groups"], self.groups, strict=True):
            present.update(group)
        content["state"] = self.values
        optimizer.load_state_dict(content)

    def describe(self) -> dict[str, Any]:
        """All but the contents of the tensors, as a note can hold it."""
        entries = [
            [number, name, _describe(value)]
            for number, entry in self.values.items()
            for name, value in entry.items()
        ]
        return {"entries": entries, "groups": self.groups}

    def send(self, wire: Wire, describe: Callable[[dict[str, Any]], None]) -> None:
        """Send it: first the description, by ``describe``, then the tensors."""
        describe(self.describe())
        for entry in self.values.values():
            for value in entry.values():
                if isinstance(value, Tensor) and value.numel():
                    tensor = value.detach().cpu().contiguous()
                    wire.wait(wire.send(tensor.reshape(-1), Lane.STATE), "the optimizer's state")

    @classmethod
    def receive(cls, wire: Wire, description: dict[str, Any]) -> OptimizerState:
        """Receive what :meth:`send` sends, once the description has come.

        Raises:
            RuntimeError: If the description is of another form.
        """
        values: dict[int, dict[str, Any]] = {}
        for number, name, described in description["entries"]:
            value = described
            if isinstance(described, dict):
                value = _memory_for(described, wire.name)
                if value.numel():
                    wire.wait(wire.receive(value.view(-1), Lane.STATE), "the optimizer's state")
            values.setdefault(number, {})[name] = value
        return cls(values, [_with_tuples(group) for group in description["groups"]])

    @classmethod
    def join(cls, states: list[OptimizerState]) -> OptimizerState:
        """Put together the states of several servers, each with its share of the parameters."""
        values = {number: entry for state in states for number, entry in state.values.items()}
        return cls(dict(sorted(values.items())), states[0].groups)

    def share(self, numbers: list[int]) -> OptimizerState:
        """The part of the state that belongs to some parameters."""
        return OptimizerState({n: self.values[n] for n in numbers if n in self.values}, self.groups)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    return value


def _memory_for(described: dict[str, Any], sender: str) -> Tensor:
    match described:
        case {"shape": [*shape], "dtype": str(name)} if all(type(n) is int for n in shape):
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype):
                return torch.empty(shape, dtype=dtype)
    raise RuntimeError(f"{sender} has described no tensor: {str(described)[:100]}")


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        if isinstance(value, Tensor):
            value = value.item()
        if isinstance(value, (bool, int, float, str, tuple, type(None))):
            plain[name] = value
    return plain


def _with_tuples(group: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in group.items()}

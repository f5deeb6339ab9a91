"""The optimizer's hyper-parameters and state, as they are sent between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_loco.parameter_server.protocol import Hyperparameters, RankConnection


class HyperparameterSync:
    """Keeps hyper-parameters equal on two ranks: each one sends its changes."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = groups
        self._known: Hyperparameters | None = None

    def all(self) -> Hyperparameters:
        """Return all hyper-parameters, for a rank that has none yet."""
        self._known = read_hyperparameters(self._groups)
        return self._known

    def changes(self) -> Hyperparameters | None:
        """Return changed hyper-parameters for the other rank; None if nothing has changed."""
        present = read_hyperparameters(self._groups)
        if present == self._known:
            return None
        self._known = present
        return present

    def update(self, values: Hyperparameters | None) -> None:
        """Write the hyper-parameters that the other rank has sent."""
        if values is not None:
            write_hyperparameters(self._groups, values)
            self._known = read_hyperparameters(self._groups)


def read_hyperparameters(groups: Sequence[dict[str, Any]]) -> Hyperparameters:
    """Return the numbers of parameter groups, as values that JSON supports."""
    return [
        {name: plain for name, value in group.items() if (plain := _plain(value)) is not None}
        for group in groups
    ]


def write_hyperparameters(groups: Sequence[dict[str, Any]], values: Hyperparameters) -> None:
    """Write numbers into parameter groups, in place."""
    for group, numbers in zip(groups, values, strict=True):
        for name, value in numbers.items():
            old = group.get(name)
            if isinstance(old, Tensor):
                old.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _plain(value: object) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 and not value.is_complex() else None
    if isinstance(value, tuple) and value and all(isinstance(v, (int, float)) for v in value):
        return list(value)
    return None


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
        """Return an optimizer's state; TypeError unless it is tensors and plain values only."""
        content = optimizer.state_dict()
        for index, entry in content["state"].items():
            for name, value in entry.items():
                if not isinstance(value, (Tensor, bool, int, float, str, type(None))):
                    raise TypeError(
                        f"{type(optimizer).__name__} keeps a {type(value).__name__} as {name!r} of "
                        f"parameter {index}, which cannot be saved in a checkpoint of the workers: "
                        "only tensors and plain values can. Use another optimizer, or train "
                        "without checkpoints."
                    )
        groups = [_without_params(group) for group in content["param_groups"]]
        return cls(content["state"], groups)

    def load_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the state into an optimizer of the same parameters."""
        content = optimizer.state_dict()
        for present, group in zip(content["param_groups"], self.groups, strict=True):
            present.update(group)
        content["state"] = self.values
        optimizer.load_state_dict(content)

    @classmethod
    def join(cls, states: list[OptimizerState]) -> OptimizerState:
        """Combine the states of several servers, each with its shard of the parameters."""
        values = {index: entry for state in states for index, entry in state.values.items()}
        return cls(dict(sorted(values.items())), states[0].groups)

    def select(self, indices: list[int]) -> OptimizerState:
        """Return the state of some parameters."""
        return OptimizerState(
            {index: self.values[index] for index in indices if index in self.values}, self.groups
        )

    def describe(self) -> dict[str, Any]:
        """Return everything except the contents of the tensors, for a message."""
        entries = [
            [index, name, _describe(value)]
            for index, entry in self.values.items()
            for name, value in entry.items()
        ]
        return {"entries": entries, "groups": self.groups}

    def send(
        self, connection: RankConnection, send_description: Callable[[dict[str, Any]], None]
    ) -> None:
        """Send the state: first the description, by ``send_description``, then the tensors."""
        send_description(self.describe())
        values = (value for entry in self.values.values() for value in entry.values())
        tensors = (value for value in values if isinstance(value, Tensor))
        connection.send_all(tensors, "the optimizer's state")

    @classmethod
    def receive(cls, connection: RankConnection, description: dict[str, Any]) -> OptimizerState:
        """Receive what :meth:`send` sends after the description; RuntimeError if it is invalid."""
        entries, values = description["entries"], dict[int, dict[str, Any]]()
        described = (value for _, _, value in entries if isinstance(value, dict))
        shapes = (_without_memory(tensor, connection.name) for tensor in described)
        tensors = connection.receive_all(shapes, "the optimizer's state")
        for index, name, value in entries:
            received = next(tensors) if isinstance(value, dict) else value
            values.setdefault(index, {})[name] = received
        return cls(values, [_with_tuples(group) for group in description["groups"]])


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    return value


def _without_memory(described: dict[str, Any], sender: str) -> Tensor:
    match described:
        case {"shape": [*shape], "dtype": str(name)} if all(type(n) is int for n in shape):
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype):
                return torch.empty(shape, dtype=dtype, device="meta")
    raise RuntimeError(f"{sender} has described an invalid tensor: {str(described)[:100]}")


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
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

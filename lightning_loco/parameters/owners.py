"""Where a module holds the parameters that are exchanged."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class ParameterOwners:
    """Knows which attribute of which module holds each parameter, and notices when none does.

    Args:
        model: Holds the parameters.
        names: Theirs, at the start.
        tensors: The parameters.

    Attributes:
        found: Module and attribute that hold each parameter, and the parameter.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._model = model
        self._names = names
        self._tensors = tensors
        self.find()

    def find(self) -> None:
        """Look all places up.

        Raises:
            RuntimeError: If none holds a parameter any more, naming it.
        """
        names = {id(p): name for name, p in self._model.named_parameters()}
        self.found: list[tuple[nn.Module, str, Tensor]] = []
        for old_name, tensor in zip(self._names, self._tensors, strict=True):
            if id(tensor) not in names:
                raise RuntimeError(
                    f"Parameter {old_name!r} was replaced by another object during fit, but only "
                    "the objects of its start are exchanged. Write into the parameter instead "
                    "(parameter.data.copy_(values)), or call fit again after the replacement."
                )
            path, _, name = names[id(tensor)].rpartition(".")
            self.found.append((self._model.get_submodule(path), name, tensor))

    def check(self) -> None:
        """Look them up anew if something has changed; raises as :meth:`find` does."""
        if any(getattr(module, name, None) is not p for module, name, p in self.found):
            self.find()

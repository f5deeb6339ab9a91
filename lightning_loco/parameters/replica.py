"""This worker's copy of the model, and its exchange against the consensus and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.parameters.consensus import pruning_masks
from lightning_loco.parameters.flat import Cuts, FlatLayout
from lightning_loco.parameters.running_statistics import RunningStatistics
from lightning_loco.parameters.untracked import UntrackedParameters


class Local(NamedTuple):
    """What of the consensus is set aside, flat: this worker's own values."""

    params: Tensor
    buffers: Tensor
    others: Tensor


class Replica:
    """The exchanged parameters and the floating-point buffers of one worker.

    Args:
        model: The module to train.
        cuts: How to cut the exchanged parameters into chunks.
        exchanged: Its parameters that are exchanged. Default: all that require gradients.
        device: Where they are exchanged. Default: where they are.

    Attributes:
        model: The module.
        layout: The exchanged parameters.
        frozen: Names and parameters that do not require gradients.
        left_out: Names and parameters that require gradients, but are not exchanged.
        places: Where the module holds the exchanged parameters.
        others: All that are not exchanged, compared between the workers.
        running: Statistics of BatchNorm among the buffers.
        copy_on_write: Keeps the exchanged parameters as they are while gradients are computed.

    Note:
        Buffers (BatchNorm statistics, say) are local in training and averaged into the consensus,
        and so are other parameters that differ between the workers. Only persistent buffers count;
        integer buffers stay each worker's own, and so do pruning masks.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Cuts,
        exchanged: Iterable[Tensor] | None = None,
        device: torch.device | None = None,
    ) -> None:
        persistent = set(model.state_dict(keep_vars=True)) - {
            name for name, _ in pruning_masks(model)
        }
        named = list(model.named_parameters())
        if exchanged is None:
            exchanged = [p for _, p in named if p.requires_grad]
        chosen = {id(p) for p in exchanged}
        self.layout = FlatLayout(((n, p) for n, p in named if id(p) in chosen), cuts, device)
        self._buffers = FlatLayout(
            ((n, b) for n, b in model.named_buffers() if n in persistent and b.is_floating_point()),
            Cuts(cuts.chunk_elements),
        )
        self.frozen = [(n, p) for n, p in named if not p.requires_grad]
        self.left_out = [(n, p) for n, p in named if p.requires_grad and id(p) not in chosen]
        self.others = UntrackedParameters(model, self.layout.tensors, cuts.chunk_elements)
        self.running = RunningStatistics(model)
        self.copy_on_write = CopyOnWrite(self.layout)
        self.model = model
        self._chunk_elements = cuts.chunk_elements
        self.places = ParameterOwners(model, self.layout.names, self.layout.tensors)
        self._local: Local | None = None
        self.find_buffers()

    @property
    def shows_consensus(self) -> bool:
        """Whether the module holds the consensus at present, instead of the local parameters."""
        return self._local is not None

    @property
    def buffers(self) -> FlatLayout:
        """The floating-point buffers as the module holds them now.

        Code puts new tensors in their places or resizes them, as the observers of quantization do
        in their first forward pass.
        """
        if any(getattr(m, n, None) is not b or b.shape != s for m, n, b, s in self._buffer_places):
            self.find_buffers()
        return self._buffers

    def find_buffers(self) -> None:
        """Look up the buffers in all modules, including modules that have been replaced."""
        now, found = dict(self.model.named_buffers()), []
        self._buffer_places: list[tuple[nn.Module, str, Tensor, torch.Size]] = []
        for name, old in zip(self._buffers.names, self._buffers.tensors, strict=True):
            new = now.get(name, old)
            buffer = new if new.is_floating_point() else old
            found.append((name, buffer))
            if buffer is now.get(name):
                path, _, leaf = name.rpartition(".")
                owner = self.model.get_submodule(path)
                self._buffer_places.append((owner, leaf, buffer, buffer.shape))
        self._buffers = FlatLayout(found, Cuts(self._chunk_elements))

    def put_back_buffers(self, flat: Tensor) -> None:
        """Write buffers as they were before; if one has been resized since, all stay as they are.

        Args:
            flat: What :attr:`buffers` held then.
        """
        layout = self.buffers
        if layout.numel == flat.numel():
            layout.write(flat)

    def local(self) -> tuple[Tensor, Tensor]:
        """This worker's own flat parameters and buffers, whatever the module holds now.

        They are in the host's memory: checkpoints are no reason to have them on a GPU twice.
        """
        if self._local is not None:
            return self._local.params, self._local.buffers
        return self.layout.set_aside(), self.buffers.set_aside()

    def local_others(self) -> tuple[list[str], Tensor]:
        """Names and flat values of the other parameters that are this worker's own, likewise."""
        differing = self.others.differing
        return differing.names, self._local.others if self._local else differing.set_aside()

    def set_local(self, params: Tensor, buffers: Tensor) -> None:
        """Overwrite the local parameters and buffers."""
        self._local = None
        self.layout.write(params)
        self.buffers.write(buffers)

    def keep_local(self) -> None:
        """Set the local values aside, until :meth:`show_local` brings them back."""
        self.copy_on_write.release()
        self.places.find()
        self.find_buffers()
        layouts = self.layout, self.buffers, FlatLayout(())
        self._local = Local(*(layout.set_aside() for layout in layouts))

    def find_differing(self, group: WorkerGroup) -> tuple[FlatLayout, FlatLayout]:
        """Of what is not exchanged, the parameters and the buffers that differ between the workers.

        All must call it, after :meth:`keep_local`; sets those parameters aside as well.
        """
        assert self._local is not None
        others, buffers = self.others.compare(group, self.buffers)
        self._local = self._local._replace(others=others.set_aside())
        return others, buffers

    def forget_local(self) -> None:
        """Go on with what the module holds now, instead of the values set aside."""
        self._local = None

    def show_local(self) -> None:
        """Put the local values back."""
        if self._local is not None:
            local, self._local = self._local, None
            self.others.differing.write(local.others)
            self.layout.write(local.params)
            self.put_back_buffers(local.buffers)

    def sample(self, max_elements: int, round_index: int) -> Tensor:
        """About ``max_elements`` trainable elements, as float64; others in every round."""
        stride = max(1, -(-self.layout.numel // max_elements))
        return self.layout.every(stride, (round_index * 7919) % stride).double()


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


class CopyOnWrite:
    """Keeps parameters as they are between a forward pass and the end of the optimizer's step.

    A round that would change them in between (another worker makes one, and this one calls a
    collective in its ``training_step``) works on copies instead. At the end of the step the
    parameters move by what the round has changed, so that it lands right before the step, whose
    gradients it does not know. Without such a round no copies are made.

    Args:
        layout: The parameters; its ``tensors`` are the copies while there are any.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self._layout = layout
        self._parameters: list[Tensor] = []
        self._start: list[Tensor] = []

    def hold(self) -> None:
        """From here on the parameters must stay; a second call does nothing."""
        self._layout.before_write = self._replace

    @torch.no_grad()
    def release(self) -> None:
        """The step is over: let the parameters move by what has changed, if anything has."""
        self._layout.before_write = None
        if not self._parameters:
            return
        changed = self._layout.tensors
        for parameter, now, start in zip(self._parameters, changed, self._start, strict=True):
            wide = torch.promote_types(parameter.dtype, torch.float32)
            parameter.copy_(parameter.to(wide) + (now.to(wide) - start.to(wide)))
        self._layout.tensors = self._parameters
        self._layout.chunks()
        self._parameters, self._start = [], []

    def _replace(self) -> None:
        if not self._parameters:
            self._parameters = self._layout.tensors
            self._start = [_copy(parameter) for parameter in self._parameters]
            self._layout.tensors = [_copy(parameter) for parameter in self._parameters]
            self._layout.chunks()


def _copy(tensor: Tensor) -> Tensor:
    """With the same strides, so that the flat vector keeps its order and its cuts."""
    data = tensor.detach()
    memory = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=data.device)
    return memory.copy_(data)

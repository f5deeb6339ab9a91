"""This worker's copy of the model: local parameters, while the module may hold the consensus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_loco.distributed.worker_group import WorkerGroup
from lightning_loco.model.consensus import pruning_masks
from lightning_loco.model.flat import Cuts, FlatLayout, local_tensor
from lightning_loco.model.ownership import Ownership, ResultSharing, whole_positions
from lightning_loco.model.running_statistics import RunningStatistics
from lightning_loco.model.same_model import broadcast_inside
from lightning_loco.model.unexchanged import UnexchangedValues
from lightning_loco.model.worker_vectors import WorkerVectors


class LocalValues(NamedTuple):
    """Flat copies of this worker's own values, while the module holds the consensus."""

    params: Tensor
    buffers: Tensor
    unexchanged: Tensor


class Replica:
    """The exchanged parameters and the floating-point buffers of one worker.

    Args:
        model: The module to train.
        cuts: How to cut the exchanged parameters into chunks.
        exchanged: Parameters of the module to exchange. Default: all that require gradients.
        device: Device of messages. Default: the parameters' device.
        ownership: Which of their elements this rank exchanges. Default: all.

    Attributes:
        model: The module.
        parameters: The exchanged parameters, by name.
        layout: Where they are in a flat vector, which consists of the elements that this rank owns.
        fragments: By fragment, slices of that vector.
        num_parameters: Number of elements of the exchanged parameters, of which this rank may hold
            a part.
        frozen: Names and parameters that do not require gradients.
        left_out: Names and parameters that require gradients, but are not exchanged.
        owners: The modules that hold the exchanged parameters.
        unexchanged: All values that are not exchanged, compared between the workers.
        running_statistics: Statistics of BatchNorm among the buffers.
        copy_on_write: Protects the exchanged parameters while gradients are computed from them.
        vectors: Gathers and cuts vectors of the layout; None for a worker of one rank, which owns
            all elements.

    Note:
        Buffers (BatchNorm statistics, for example) are local during training and averaged into the
        consensus, and so are other parameters that differ between the workers. Only persistent
        buffers count. Integer buffers and pruning masks of each worker are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Cuts,
        exchanged: Iterable[Tensor] | None = None,
        device: torch.device | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        persistent = set(model.state_dict(keep_vars=True)) - {
            name for name, _ in pruning_masks(model)
        }
        named = list(model.named_parameters())
        if exchanged is None:
            exchanged = [p for _, p in named if p.requires_grad]
        ids = {id(p) for p in exchanged}
        self.parameters = parameters = {n: p for n, p in named if id(p) in ids}
        owned = None if ownership is None else ownership.owned
        self.layout = FlatLayout(
            ((n, local_tensor(p)) for n, p in parameters.items()),
            cuts,
            device,
            owned,
            whole_positions(parameters.values()),
        )
        self.num_parameters = sum(p.numel() for p in parameters.values())
        numel = self.layout.numel
        self._ownership = ownership or Ownership([[range(numel)]], [], numel)
        self.fragments = self._ownership.fragment_slices()
        self._sharing: ResultSharing | None = None
        self.vectors: WorkerVectors | None = None
        buffers = [(n, b) for n, b in model.named_buffers() if n in persistent]
        self._buffers = FlatLayout(
            ((n, local_tensor(b)) for n, b in buffers if b.is_floating_point()),
            Cuts(cuts.chunk_elements),
        )
        self.frozen = [(n, p) for n, p in named if not p.requires_grad]
        self.left_out = [(n, p) for n, p in named if p.requires_grad and id(p) not in ids]
        self.unexchanged = UnexchangedValues(model, parameters.values(), cuts.chunk_elements)
        self.running_statistics = RunningStatistics(model)
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.copy_on_write = CopyOnWrite(self.layout, self.reshard if self._sharded else None)
        self.model = model
        self._chunk_elements = cuts.chunk_elements
        self.owners = ParameterOwners(model, self.layout.names, list(parameters.values()))
        self._local: LocalValues | None = None
        self._find_buffers()

    @property
    def shows_consensus(self) -> bool:
        """Whether the module holds the consensus now, instead of the local parameters."""
        return self._local is not None

    # --------------------------------------------- a worker of several ranks

    def reshard(self) -> None:
        """Drop copies of whole parameters, which FSDP2 keeps until a backward pass.

        It would use them again in the next one, even if the shards have changed. Not between a
        forward and a backward pass.
        """
        reshard(self._sharded)

    def check_owners(self) -> None:
        """Raise RuntimeError if a parameter was replaced, see :class:`ParameterOwners`.

        Between a forward and a backward pass the modules of FSDP2 hold copies of the parameters.
        """
        if self._sharded and self.copy_on_write.is_holding:
            return
        self.reshard()
        self.owners.check()

    def connect(self, group: WorkerGroup) -> None:
        """Connect to the ranks of the same worker that hold the same values; all must call it."""
        if group.inner is not None:
            self._sharing = ResultSharing(self._ownership, self.layout, group)
            self.vectors = WorkerVectors(self._ownership, group, holds_shards=False)

    def use_held_vectors(self, group: WorkerGroup) -> None:
        """Let checkpoints have vectors of each rank's elements, in place of the whole worker's.

        Call it after :meth:`connect`.
        """
        self.vectors = WorkerVectors(self._ownership, group, holds_shards=True)

    def share(self, fragment: int | None = None) -> None:
        """Take the elements that other ranks of this worker own from them; all must call it.

        ``fragment`` is the only one whose elements have changed, or None.
        """
        if self._sharing is not None:
            self._sharing.share(fragment)

    def share_unexchanged(self, group: WorkerGroup) -> None:
        """Take the buffers, and other values that are not exchanged, from the worker's first rank.

        All ranks of the worker must call it, after :meth:`compare_unexchanged`.
        """
        if group.inner is None:
            return
        differing = group.gather_inside(self.unexchanged.differing.names, "sharing buffers")
        names = set().union(*differing)
        named = dict(self.model.named_parameters())
        buffers = dict(self.model.named_buffers())
        tensors = [buffers[name] for name in self.buffers.names if name in buffers]
        tensors += [named[name] for name in sorted(names)]
        broadcast_inside(tensors, group, "sharing buffers")

    # ---------------------------------------------------------------- buffers

    @property
    def buffers(self) -> FlatLayout:
        """The floating-point buffers that the module holds now.

        They are looked up again if they were replaced or resized, as the observers of quantization
        do in their first forward pass.
        """
        if any(getattr(m, n, None) is not b or b.shape != s for m, n, b, s in self._buffer_slots):
            self._find_buffers()
        return self._buffers

    def _find_buffers(self) -> None:
        """Look up the buffers in all modules, including modules that have been replaced."""
        now, found = dict(self.model.named_buffers()), []
        self._buffer_slots: list[tuple[nn.Module, str, Tensor, torch.Size]] = []
        for name, old in zip(self._buffers.names, self._buffers.tensors, strict=True):
            new = now.get(name, old)
            buffer = new if new.is_floating_point() else old
            found.append((name, local_tensor(buffer)))
            if buffer is now.get(name):
                path, _, leaf = name.rpartition(".")
                owner = self.model.get_submodule(path)
                self._buffer_slots.append((owner, leaf, buffer, buffer.shape))
        self._buffers = FlatLayout(found, Cuts(self._chunk_elements))

    def restore_buffers(self, flat: Tensor) -> None:
        """Write an earlier flat copy of :attr:`buffers`; do nothing if one was resized since."""
        layout = self.buffers
        if layout.numel == flat.numel():
            layout.write(flat)

    # ------------------------------------------------ local values, consensus

    def local(self) -> tuple[Tensor, Tensor]:
        """Return flat copies of the local parameters and buffers, also if the consensus is shown.

        They are in the host's memory, so that a checkpoint needs no further memory of a GPU.
        """
        if self._local is not None:
            return self._local.params, self._local.buffers
        return self.layout.new_flat_on_cpu(), self.buffers.new_flat_on_cpu()

    def local_unexchanged(self) -> tuple[list[str], Tensor]:
        """Return names and flat local values of the unexchanged parameters that differ."""
        differing = self.unexchanged.differing
        values = self._local.unexchanged if self._local else differing.new_flat_on_cpu()
        return differing.names, values

    def set_local(self, params: Tensor, buffers: Tensor) -> None:
        """Overwrite the local parameters and buffers; the module then holds them."""
        self._local = None
        self.reshard()
        self.layout.write_held(params)
        self.buffers.write(buffers)

    def keep_local(self) -> None:
        """Copy the local values, before the consensus is written into the module."""
        self.copy_on_write.release()
        self.reshard()
        self.owners.find()
        self._find_buffers()
        layouts = self.layout, self.buffers, FlatLayout(())
        self._local = LocalValues(*(layout.new_flat_on_cpu() for layout in layouts))

    def compare_unexchanged(self, group: WorkerGroup) -> tuple[FlatLayout, FlatLayout]:
        """Find the unexchanged parameters and the buffers that differ between the workers.

        All workers must call it, after :meth:`keep_local`. Copies those parameters as well.
        """
        assert self._local is not None
        params, buffers = self.unexchanged.compare(group, self.buffers)
        self._local = self._local._replace(unexchanged=params.new_flat_on_cpu())
        return params, buffers

    def discard_local(self) -> None:
        """Discard the local values: the present values of the module are the new ones."""
        self._local = None

    def show_local(self) -> None:
        """Write the local values into the module, if it holds the consensus."""
        if self._local is not None:
            self.reshard()
            local, self._local = self._local, None
            self.unexchanged.differing.write(local.unexchanged)
            self.layout.write_held(local.params)
            self.restore_buffers(local.buffers)

    def sample(self, max_elements: int, round_index: int) -> Tensor:
        """Copy at most ``max_elements`` trainable elements, as float64; others in every round."""
        stride = max(1, -(-self.layout.numel // max_elements))
        return self.layout.subsample(stride, (round_index * 7919) % stride).double()


def reshard(modules: Iterable[nn.Module]) -> None:
    """Drop copies of whole parameters that modules of FSDP2 hold, so that they hold shards."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


class ParameterOwners:
    """The modules that hold the exchanged parameters, also after a parameter has moved.

    Names are the names at the start. ``slots`` are the module and the attribute that hold each
    parameter, and the parameter.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._model = model
        self._names = names
        self._tensors = tensors
        self.find()

    def find(self) -> None:
        """Look up the slots of all parameters; RuntimeError, which names it, if one has none."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        self.slots: list[tuple[nn.Module, str, Tensor]] = []
        for old_name, tensor in zip(self._names, self._tensors, strict=True):
            if id(tensor) not in names:
                raise RuntimeError(
                    f"Parameter {old_name!r} was replaced by another object during fit, but only "
                    "the objects of its start are exchanged. Write into the parameter instead "
                    "(parameter.data.copy_(values)), or call fit again after the replacement."
                )
            path, _, name = names[id(tensor)].rpartition(".")
            self.slots.append((self._model.get_submodule(path), name, tensor))

    def check(self) -> None:
        """Look up the slots again if one has changed; raises the error of :meth:`find`."""
        if any(getattr(module, name, None) is not p for module, name, p in self.slots):
            self.find()


class CopyOnWrite:
    """Copies of the parameters for rounds between a forward pass and the end of the optimizer step.

    Such a round runs if this worker calls a collective in its ``training_step`` while another
    worker has a round to run. It must not change the parameters, from which gradients are being
    computed, so it works on copies, which are the ``tensors`` of the layout meanwhile. At the end
    of the step, the parameters move by the change of the round, as if it had come just before the
    step. Without such a round, nothing is copied.

    Outside of that time rounds call ``otherwise``, if it is given, before they read or write.
    """

    def __init__(self, layout: FlatLayout, otherwise: Callable[[], None] | None = None) -> None:
        self._layout = layout
        self._otherwise = layout.before_write = otherwise
        self._parameters: list[Tensor] = []
        self._start: list[Tensor] = []

    @property
    def is_holding(self) -> bool:
        """Whether the parameters are protected now."""
        return self._layout.before_write == self._copy_parameters

    def hold(self) -> None:
        """Protect the parameters from now on; a second call does nothing."""
        self._layout.before_write = self._copy_parameters

    @torch.no_grad()
    def release(self) -> None:
        """End the protection, and apply the changes of a round to the parameters."""
        self._layout.before_write = self._otherwise
        if not self._parameters:
            return
        if self._otherwise is not None:
            self._otherwise()
        changed = self._layout.tensors
        for parameter, now, start in zip(self._parameters, changed, self._start, strict=True):
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            parameter.copy_(parameter.to(dtype) + (now.to(dtype) - start.to(dtype)))
        self._layout.tensors = self._parameters
        self._layout.chunks()
        self._parameters, self._start = [], []

    def _copy_parameters(self) -> None:
        if not self._parameters:
            self._parameters = self._layout.tensors
            self._start = [_copy(parameter) for parameter in self._parameters]
            self._layout.tensors = [_copy(parameter) for parameter in self._parameters]
            self._layout.chunks()


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides, so that the flat vector keeps its order and its chunks."""
    data = tensor.detach()
    memory = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=data.device)
    return memory.copy_(data)

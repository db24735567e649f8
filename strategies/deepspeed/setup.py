"""Prepares a module for DeepSpeed's engine (split, converted to a dtype), and restores it afterwards.

DeepSpeed gives parameters other storage and another dtype, and leaves attributes on modules and parameters. The user's
module has to survive that: after a fit it has its own dtypes, classes and attributes again, so that it can be copied,
pickled, and trained under another strategy. tests/strategies/test_deepspeed.py compares all attributes of a module
before and after a fit.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...framework.checkpoint.write_plan import Shard
from ...framework.core.errors import ConfigurationError
from ...framework.core.norms import BatchNorm, InstanceNorm
from ...framework.diagnostics.program_state import ENGINE_ATTRIBUTES
from ...framework.distributed.world import World
from ...framework.parallel.deferred import Deferred
from ...framework.parallel.full_tensors import assembled, device_of_whole
from ...framework.parallel.meta_device import replace_tensors, share_tensors, tensors_of, without_data
from .engine import Splitter
from .flat_groups import FlatGroups, Piece, even_piece, full_shape, full_size, is_split, local_piece, partition_of
from .state import EngineState


def rebind(module: nn.Module, optimizers: Sequence[Optimizer], new: Mapping[int, Tensor]) -> None:
    """Replace parameters in a module and in the optimizers' groups.

    Args:
        new: the new parameters, by the ``id`` of the old ones.
    """
    before = dict(module.named_parameters())
    replace_tensors(module, lambda _, tensor: new.get(id(tensor)))
    after = {id(old): fresh for (name, old), fresh in zip(before.items(), module.parameters(), strict=True)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [after.get(id(one), one) for one in group["params"]]


def check_elements(module: nn.Module) -> None:
    """Refuse parameters without elements: stage 3 would take one for a parameter that it has not gathered.

    Raises:
        ConfigurationError: naming one of them.
    """
    for name, parameter in module.named_parameters():
        if not nn.parameter.is_lazy(parameter) and 0 in full_shape(parameter):
            raise ConfigurationError(
                f"'{name}' has no elements, and ZeRO stage 3 cannot gather such a parameter: make it a buffer, or use "
                "strategy='zero2'."
            )


def check_memory(module: nn.Module, strategy: str) -> None:
    """Refuse parameters that share memory with other tensors: the engine gives each memory of its own.

    Raises:
        ConfigurationError: naming two of them.
    """
    places: dict[int, tuple[int, int, str]] = {}
    for name, tensor in (*module.named_buffers(), *module.named_parameters()):
        if not (tensor.is_meta or is_split(tensor) or nn.parameter.is_lazy(tensor)):
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            length = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
            places[id(tensor)] = tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size(), name
    parameters = {name for name, _ in module.named_parameters()}
    reached, last = 0, ""
    for start, end, name in sorted(places.values()):
        if start < reached and start < end and {name, last} & parameters:
            raise ConfigurationError(
                f"'{last}' and '{name}' share memory, and strategy={strategy!r} moves each parameter to memory of its "
                "own, so that a change of one would not be one of the other: use one nn.Parameter at both places, or "
                "copy its values."
            )
        if end > reached:
            reached, last = end, name


class UnsplitValues:
    """The values of parameters before they are split, one at a time.

    Parameters on the meta device are replaced by ones that take no memory. Stage 3 splits one parameter after the
    other, so the full model never has to fit into the memory of a rank. Constructing it is collective.

    Args:
        deferred: the recipes of the parameters that were built without data.
        supplied: the names of the tensors that are loaded later, and need no values.

    Raises:
        ConfigurationError: on all ranks, if rank 0 has no data for a parameter and no recipe either.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        world: World,
        deferred: Deferred,
        supplied: Collection[str],
    ) -> None:
        self._world = world
        recipes = {name: deferred.recipe(one) for name, one in module.named_parameters() if one.is_meta}
        made = {name: recipe for name, recipe in recipes.items() if recipe is not None and name not in supplied}
        without_data(module, world, {*made, *supplied})
        # A tensor that is expanded from one element has a shape and a device, and the memory of one element.
        empty = {
            id(one): torch.empty((), dtype=one.dtype, device=world.device).expand(one.shape)
            for one in module.parameters()
            if one.is_meta
        }
        empty |= {id(one): torch.empty_like(one, device=world.device) for one in module.buffers() if one.is_meta}
        if empty:
            rebind(module, optimizers, empty)
        parameters = dict(module.named_parameters())
        self._recipes = {id(parameters[name]): recipe for name, recipe in made.items()}
        self._supplied = {id(parameters[name]) for name in supplied if name in parameters}

    def value(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter's full value on the device of rank 0, and on other ranks memory for it."""
        world, recipe = self._world, self._recipes.pop(id(parameter), None)
        if world.rank != 0 or id(parameter) in self._supplied:
            return torch.empty(parameter.shape, dtype=parameter.dtype, device=world.device)
        return (parameter.data if recipe is None else recipe.value().to(parameter.dtype)).to(world.device).contiguous()


@torch.no_grad()
def broadcast_module(module: nn.Module, world: World, supplied: Collection[str]) -> None:
    """Make tensors contiguous, and copy rank 0's to all ranks but those that are loaded later. Collective."""
    for _, tensor in tensors_of(module):
        if not tensor.is_contiguous():
            # The engine flattens parameters, which orders their elements as a contiguous tensor has them.
            tensor.data = tensor.data.contiguous()
    share_tensors(module, world, supplied)


@torch.no_grad()
def split_parameters(
    module: nn.Module, splitter: Splitter, world: World, dtype: torch.dtype | None, origins: UnsplitValues
) -> dict[int, Tensor]:
    """Split every parameter over the ranks, one after the other, from rank 0's data. Collective.

    Args:
        splitter: splits a parameter.
        dtype: the dtype to compute in, or None to keep each parameter's own.
        origins: the values of the parameters.

    Returns:
        This rank's fp32 pieces of the parameters that lose precision in ``dtype``, by ``id``. The engine makes its
        masters from the converted parameters, so these are written into the masters afterwards.
    """
    exact: dict[int, Tensor] = {}
    for parameter in list(module.parameters()):
        if is_split(parameter):
            # Left so by an earlier fit. A parameter on a disk shows a placeholder without dims.
            own = partition_of(parameter)
            if dtype is not None and own.dim() > 0 and own.dtype != dtype:
                piece, _ = local_piece(parameter, world)
                exact[id(parameter)] = piece.float().clone()
                own.data = own.data.to(dtype)
            continue
        full = origins.value(parameter)
        if dtype is not None and full.is_floating_point() and full.dtype != dtype:
            full = world.broadcast(full)
            start, length = even_piece(full.numel(), world)
            # Cloned, so that the piece does not keep the full fp32 tensor alive.
            exact[id(parameter)] = full.reshape(-1).narrow(0, start, length).float().clone()
            full = full.to(dtype)
        parameter.data = full
        splitter.split(parameter)
        del full  # before the next one takes memory
    for buffer in module.buffers():
        buffer.data = world.broadcast(buffer.data.to(world.device).contiguous())
    return exact


def full_precision_weights(module: nn.Module, dtype: torch.dtype | None) -> dict[int, Tensor]:
    """Return the data of the parameters that lose precision in ``dtype``, by ``id``."""
    if dtype is None:
        return {}
    return {id(one): one.data for one in module.parameters() if one.is_floating_point() and one.dtype != dtype}


class _ExactStatistics:
    """Runs a batch norm layer whose weights are bf16 or fp16 and whose running statistics are fp32.

    The engine converts parameters and leaves buffers alone; torch's kernels accept only one dtype for both.
    """

    def forward(self: Any, *inputs: Any) -> Any:
        """Call the layer's own ``forward`` with its weights in the statistics' dtype."""
        statistics = self.running_mean
        # A shallow copy, so that hooks and buffers are shared: the statistics are updated in place.
        layer = copy.copy(self)
        layer._parameters = {
            name: one if one is None or statistics is None else one.to(statistics.dtype)
            for name, one in ((name, getattr(self, name)) for name in self._parameters)
        }
        plain: Any = super(_ExactStatistics, layer)
        return plain.forward(*inputs)


def allow_exact_statistics(module: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """Let batch norm layers keep fp32 statistics beside weights of a lower dtype; return the layers' own classes."""
    classes: dict[nn.Module, type[nn.Module]] = {
        part: type(part) for part in module.modules() if isinstance(part, BatchNorm | InstanceNorm) and part.affine
    }
    for layer, own in classes.items():
        # No ordinary way: the user's module refers to the layer, so it has to stay the same object, and in a copy of
        # the module a `forward` set on the instance would use the statistics of the original.
        # A subclass with the same name: neither isinstance checks nor what users print of the module change.
        layer.__class__ = type(own.__name__, (_ExactStatistics, own), {"__module__": own.__module__})
    return classes


def restore_classes(classes: Mapping[nn.Module, type[nn.Module]]) -> None:
    """Undo ``allow_exact_statistics``. A layer whose class has been changed since keeps that class."""
    for layer, own in classes.items():
        if issubclass(type(layer), _ExactStatistics):
            # No ordinary way: the layer, which is the user's object, gets its own class back.
            layer.__class__ = own


@torch.no_grad()
def load_full_precision(
    groups: FlatGroups, module: nn.Module, exact: Mapping[int, Tensor], world: World
) -> dict[int, Tensor]:
    """Write fp32 weights into the engine's masters, which it made from converted parameters.

    Returns:
        This rank's fp32 pieces of the parameters without a master, which are not trained, by ``id``. Without them a
        checkpoint of a bf16 run would hold rounded weights of frozen layers.
    """
    for number, pieces in enumerate(groups.groups) if exact else ():
        with groups.opened(number, write=True) as (flat, _):
            for piece in pieces:
                if id(piece.parameter) in exact:
                    target = flat.narrow(0, piece.offset, piece.length)
                    target.copy_(_cut(exact[id(piece.parameter)], piece))
    untrained = {}
    for parameter in module.parameters():
        found = exact.get(id(parameter))
        if found is None or id(parameter) in groups.trained:
            continue
        start, length = even_piece(found.numel(), world)
        untrained[id(parameter)] = found if is_split(parameter) else found.reshape(-1).narrow(0, start, length).clone()
    return untrained


def _cut(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a full parameter. Of a split parameter ``tensor`` is that piece already."""
    flat = tensor.reshape(-1)
    return flat if is_split(piece.parameter) else flat.narrow(0, piece.start, piece.length)


@torch.no_grad()
def gather_weights(module: nn.Module, state: EngineState, dtypes: Mapping[int, torch.dtype], here: bool) -> None:
    """Give parameters their full weights in their own dtypes, one after the other. Collective.

    A rank whose device cannot hold them moves the module to the CPU.

    Args:
        dtypes: the dtypes before set-up, by the parameter's ``id``.
        here: whether this rank gets the weights. Otherwise its parameters are left on the meta device.
    """
    world = state.world
    left: dict[int, Tensor] = {}
    gathered = [each for each in module.parameters() if is_split(each)] if here else []
    sizes = [full_size(each) * dtypes[id(each)].itemsize for each in gathered]
    device = device_of_whole(sizes, world.device)
    for parameter, start, piece in state.pieces(module):
        shape, dtype = full_shape(parameter), dtypes[id(parameter)]
        if not is_split(parameter) and parameter.dtype == dtype:
            # In stages 1 and 2 it is a view of the engine's flat tensor, which would stay alive with it.
            parameter.data = parameter.data.clone()
            continue
        full = assembled(Shard.flat(piece, shape, start), shape, dtype, world)
        parameter.grad = None
        if here:
            parameter.data = full.to(device)
        else:
            left[id(parameter)] = torch.empty(shape, dtype=dtype, device="meta")
    if left:
        replace_tensors(module, lambda _, tensor: left.get(id(tensor)))
    if device != world.device:
        module.to(device)


# ---- DeepSpeed's attributes ----------------------------------------------------------------------------------------

COUNTS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
"""Attributes of modules in which stage 3 counts the parts of a backward pass; the first forward pass sets them.

Private to DeepSpeed, which offers nothing to go through a graph twice.
"""
# What steps set on parameters; users may set attributes of their own.
_PREFIXES = ("ds_", "_ds_", "_hp_")
# The names that engines have added, in all fits of this process: an earlier one may have left them on a module.
_ON_MODULES = ENGINE_ATTRIBUTES
_ON_MODULES.update(COUNTS)
_ON_PARAMETERS: set[str] = set()


class OriginalAttributes:
    """The attributes of a module and its parameters before set-up; ``restore`` removes those that DeepSpeed adds."""

    def __init__(self, module: nn.Module) -> None:
        self.dtypes = {id(one): one.dtype for one in module.parameters()}
        self.requires_grad = {id(one): one.requires_grad for one in module.parameters()}
        self._of_modules = [(part, set(vars(part))) for part in module.modules()]
        self._of_parameters = [(one, set(vars(one))) for one in module.parameters()]

    def note_added(self) -> None:
        """Take the attributes that are new since the construction for DeepSpeed's."""
        _ON_MODULES.update(*(vars(part).keys() - names for part, names in self._of_modules))
        _ON_PARAMETERS.update(*(vars(one).keys() - names for one, names in self._of_parameters))

    def restore(self, module: nn.Module) -> None:
        """Remove DeepSpeed's attributes, and set ``requires_grad`` as it was."""
        ordinary = type(nn.Module()._parameters)
        for part in module.modules():
            if type(part._parameters).__module__.startswith("deepspeed."):
                # A dict that gathers a parameter, collectively, when it is looked up.
                # Not through nn.Module.__setattr__, which looks names up in the dict that is replaced.
                object.__setattr__(part, "_parameters", ordinary(part._parameters.items()))
            for name in _ON_MODULES & set(vars(part)):
                delattr(part, name)
        for parameter in module.parameters():
            for name in list(vars(parameter)):
                if name in _ON_PARAMETERS or name.startswith(_PREFIXES):
                    delattr(parameter, name)
            if id(parameter) in self.requires_grad:
                parameter.requires_grad_(self.requires_grad[id(parameter)])

"""A module before and after its time under DeepSpeed's engine: split, put in its dtype, given back as it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ...framework.distributed.world import World
from ...framework.parallel.meta_device import replace_tensors, tensors_of, without_data
from ...framework.parallel.strategy import StepAdapter, StepFunction
from .pieces import FlatGroups, Piece, even_piece, is_split, kept_piece, whole_shape
from .state import EngineState


class TensorsOnlyAdapter(StepAdapter):
    """Shows DeepSpeed's hooks tensors in containers that they can look into, whatever the step returns."""

    def forward(self, step: StepFunction, *args: Any, **kwargs: Any) -> Any:
        """Call ``step``; what it returns is in ``taken`` where the hooks do not get it itself."""
        output = step(*args, **kwargs)
        if output is None or output.__class__ in (Tensor, tuple, list) or _plain_dict(output):
            return output
        tensors: list[Tensor] = []
        apply_to_collection(output, Tensor, tensors.append)
        self.__dict__["taken"] = output
        return tensors

    def unpack(self, output: Any) -> Any:
        """Return what the step returned, with the tensors that came out of the hooks."""
        if "taken" not in self.__dict__:
            return output
        tensors = iter(output)
        return apply_to_collection(self.__dict__.pop("taken"), Tensor, lambda _: next(tensors))


def _plain_dict(output: Any) -> bool:
    return output.__class__ is dict and all(key.__class__ is str for key in output)


class Marks:
    """What a module and its parameters carry before DeepSpeed adds to it."""

    def __init__(self, module: nn.Module) -> None:
        self.dtypes = {id(one): one.dtype for one in module.parameters()}
        self.requires_grad = {id(one): one.requires_grad for one in module.parameters()}

    def erase(self, module: nn.Module) -> None:
        """Take off whatever DeepSpeed added."""
        for part in module.modules():
            original = part.__dict__.get("_original_parameters")
            if original is not None:
                # DeepSpeed's own dict gathers the parameters that are looked up in it.
                part.__dict__["_parameters"] = type(original)(part._parameters.items())
            for name in _ON_MODULES & set(part.__dict__):
                del part.__dict__[name]
        for parameter in module.parameters():
            for name in list(parameter.__dict__):
                if name in _ON_PARAMETERS or name.startswith(_PREFIXES):
                    delattr(parameter, name)
            if id(parameter) in self.requires_grad:
                parameter.requires_grad_(self.requires_grad[id(parameter)])


_ON_MODULES = {
    "_external_params",
    "ds_external_parameters",
    "all_parameters",
    "_original_parameters",
    "ds_inflight_param_registry",
    "ds_id",
    "ds_recompute_parameters",
    "ds_grads_remaining",
    "ds_model_granularity",
    "pre_bwd_fn",
    "post_bwd_fn",
    "applied_pre_backward_ref_cnt",
    "_ds_child_entered",
}
_PREFIXES = ("ds_", "_ds_", "_hp_", "_z3_")
_ON_PARAMETERS = {
    "load_hp_checkpoint_state",
    "param_idx_in_group",
    "_dp_group",
    "grad_accum",
    "get_full_hp_grad",
    "set_full_hp_grad",
    "get_full_hp_param",
    "set_full_hp_param",
    "_index_in_param_group",
    "_zero_optimizer",
    "reduce_gradients_at_owner",
    "partition_gradients",
    "all_gather",
    "all_gather_coalesced",
    "aligned_size",
    "item",
    "nvme_swapper",
    "partition_numel",
    "is_external_param",
    "padding_size",
    "convert_to_zero_parameters",
    "partition",
    "comm_dtype",
}


def rebind(module: nn.Module, optimizers: Sequence[Optimizer], new: Mapping[int, Tensor]) -> None:
    """Put other parameters, by the identity of the old, in the module and in the optimizers' groups."""
    before = dict(module.named_parameters())
    replace_tensors(module, lambda _, tensor: new.get(id(tensor)))
    after = {id(old): fresh for (name, old), fresh in zip(before.items(), module.parameters(), strict=True)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [after.get(id(one), one) for one in group["params"]]


def fill_missing(module: nn.Module, optimizers: Sequence[Optimizer], world: World) -> None:
    """Give parameters without data, of which rank 0 has some, what can be filled one by one. Collective.

    Raises:
        ConfigurationError: on all ranks; rank 0 has none either.
    """
    if not without_data(module, world):
        return
    # Expanded from one element, they take no memory.
    empty = {
        id(one): torch.empty((), dtype=one.dtype, device=world.device).expand(one.shape)
        for one in module.parameters()
        if one.is_meta
    }
    if empty:
        rebind(module, optimizers, empty)


@torch.no_grad()
def make_alike(module: nn.Module, world: World) -> None:
    """Give all ranks rank 0's parameters and buffers. Collective."""
    for _, tensor in tensors_of(module):
        if not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()
        world.broadcast(tensor.data)


@torch.no_grad()
def split(module: nn.Module, converter: Any, world: World, dtype: torch.dtype | None) -> dict[int, Tensor]:
    """Split every parameter over the ranks, one after the other, from rank 0's. Collective.

    ``dtype`` is the one to compute in. Returns this rank's pieces of what loses precision by it, by identity.
    """
    exact: dict[int, Tensor] = {}
    for parameter in list(module.parameters()):
        part: Any = parameter
        if is_split(parameter):
            # What is on a disk was built in the dtype to compute in, and shows a placeholder without dims.
            if dtype is not None and part.ds_tensor.dim() > 0 and part.ds_tensor.dtype != dtype:
                piece, _ = kept_piece(part, world)
                exact[id(parameter)] = piece.float().clone()
                part.ds_tensor.data = part.ds_tensor.data.to(dtype)
            # Until here it may have shown its shape.
            part.data = part.ds_tensor.new_empty(0)
            continue
        whole = world.broadcast(parameter.data.to(world.device).contiguous())
        if dtype is not None and whole.is_floating_point() and whole.dtype != dtype:
            start, length = even_piece(whole.numel(), world)
            exact[id(parameter)] = whole.reshape(-1).narrow(0, start, length).float().clone()
            whole = whole.to(dtype)
        parameter.data = whole
        converter._convert_to_deepspeed_param(parameter)
        part.partition()
    for buffer in module.buffers():
        buffer.data = world.broadcast(buffer.data.to(world.device).contiguous())
    return exact


def whole_weights(module: nn.Module, dtype: torch.dtype | None) -> dict[int, Tensor]:
    """Return parameters that computing in ``dtype`` loses precision of, as they are, by identity."""
    if dtype is None:
        return {}
    return {id(one): one.data for one in module.parameters() if one.is_floating_point() and one.dtype != dtype}


class _ExactStatistics:
    """Layers that keep running statistics in fp32 beside low weights, which torch's kernels do not take together."""

    def forward(self: Any, *inputs: Any) -> Any:
        """Call the layer's own ``forward`` with its weights in the statistics' dtype."""
        kept = self.running_mean
        layer = copy.copy(self)
        # Buffers are shared, and written to in place.
        layer.__dict__["_parameters"] = {
            name: one if one is None or kept is None else one.to(kept.dtype)
            for name, one in ((name, getattr(self, name)) for name in self._parameters)
        }
        plain: Any = super(_ExactStatistics, layer)
        return plain.forward(*inputs)


def keep_statistics_exact(module: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """Have batch norm layers run with weights of a low dtype; return the layers' own classes."""
    kinds: dict[nn.Module, type[nn.Module]] = {
        part: type(part) for part in module.modules() if isinstance(part, _NormBase) and part.affine
    }
    for layer, kind in kinds.items():
        layer.__class__ = type(kind.__name__, (_ExactStatistics, kind), {"__module__": kind.__module__})
    return kinds


def give_classes_back(kinds: Mapping[nn.Module, type[nn.Module]]) -> None:
    """Undo ``keep_statistics_exact``; a layer that has got another class since keeps that."""
    for layer, kind in kinds.items():
        if issubclass(type(layer), _ExactStatistics):
            layer.__class__ = kind


@torch.no_grad()
def sharpen(groups: FlatGroups, module: nn.Module, exact: Mapping[int, Tensor], world: World) -> dict[int, Tensor]:
    """Write exact weights into the masters; return this rank's pieces of those that have none, by identity."""
    for number, pieces in enumerate(groups.groups) if exact else ():
        with groups.opened(number, write=True) as (flat, _):
            for piece in pieces:
                if id(piece.parameter) in exact:
                    target = flat.narrow(0, piece.offset, piece.length)
                    target.copy_(_cut(exact[id(piece.parameter)], piece))
    rest = {}
    for parameter in module.parameters():
        found = exact.get(id(parameter))
        if found is None or id(parameter) in groups.trained:
            continue
        start, length = even_piece(found.numel(), world)
        rest[id(parameter)] = found if is_split(parameter) else found.reshape(-1).narrow(0, start, length).clone()
    return rest


def _cut(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a whole parameter, or the piece itself, which is all that stage 3 has of it."""
    flat = tensor.reshape(-1)
    return flat if is_split(piece.parameter) else flat.narrow(0, piece.start, piece.length)


@torch.no_grad()
def give_back(module: nn.Module, state: EngineState, dtypes: Mapping[int, torch.dtype], here: bool) -> None:
    """Give parameters their whole weights where ``here``, one after the other, and none elsewhere. Collective."""
    world = state.world
    left: dict[int, Tensor] = {}
    for parameter, start, piece in state.pieces(module):
        shape, dtype = whole_shape(parameter), dtypes[id(parameter)]
        if not is_split(parameter) and parameter.dtype == dtype:
            # Computed with as it is, but in the engine's flat tensor.
            parameter.data = parameter.data.clone()
            continue
        kept = torch.float32 if piece.is_floating_point() else piece.dtype
        whole = torch.zeros(torch.Size(shape).numel(), dtype=kept, device=world.device)
        whole.narrow(0, start, piece.numel()).copy_(piece)
        # One rank alone has bits that are not zero: integers keep every one of them, those of -0.0 and NaN too.
        world.all_reduce(whole.view(torch.int32) if kept == torch.float32 else whole)
        parameter.grad = None
        if here:
            parameter.data = whole.view(shape).to(dtype)
        else:
            left[id(parameter)] = torch.empty(shape, dtype=dtype, device="meta")
    if left:
        replace_tensors(module, lambda _, tensor: left.get(id(tensor)))

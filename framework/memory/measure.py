"""Measures a model for a memory plan, on copies, so that the user's module stays unchanged.

- Sizes come from the shapes of a copy whose parameters have no data.
- Optimizer state comes from a step on parameters without data; the temporary memory of an update from its settings.
- Activations come from running a micro-batch: on a copy with data if that fits into memory, else on fake tensors, which
  have shapes but no data.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..api.train_module import TrainModule
from ..core.accelerators import has_own_memory, restart_peak
from ..core.errors import ConfigurationError
from ..core.optimizer_config import resolve_optimizers
from ..core.position_rng import RandomStream
from ..core.precision import DefaultDtype, Precision
from ..core.quantized_state import is_quantized, parts_of
from ..core.split_optimizer import optimizers_in
from ..core.torch_internals import FakeTensorMode, storage_key, tree_map
from ..parallel.blocks import repeated_blocks
from .formulas import ModelSize

# The number of views between a parameter and its cast that are followed.
_STEPS_TO_A_CAST = 4

Prepare = Callable[[nn.Module, Callable[[Tensor], Tensor]], Any]


@dataclass(frozen=True)
class Activations:
    """Bytes that the forward pass of one micro-batch saves for its backward pass."""

    kept: int
    casts: int = 0
    """Bytes of copies of parameters that autocast made. A strategy that stores them in that dtype has none."""


def without_data(module: TrainModule) -> TrainModule:
    """Return a copy on the meta device, on which ``configure_model`` has been called."""
    built: TrainModule = copied(module, lambda tensor: tensor.to("meta"))
    with torch.device("meta"):
        built.configure_model()
    return built


def copied(module: TrainModule, convert: Callable[[Tensor], Tensor]) -> TrainModule:
    """Return a copy of a module with its parameters and buffers converted. Ties and ``requires_grad`` are preserved."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        if is_lazy(parameter):
            continue
        memo[id(parameter)] = nn.Parameter(convert(parameter.detach()), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        if not is_lazy(buffer):
            memo[id(buffer)] = convert(buffer.detach())
    return copy.deepcopy(module, memo)


# ---- sizes ----------------------------------------------------------------------------------------------------------


def size_of(module: nn.Module) -> ModelSize:
    """Return a model's size from its shapes, assuming Adam's two moments. Lazy parameters count as 0."""
    parameters = [parameter for parameter in module.parameters() if not is_lazy(parameter)]
    elements = {id(parameter): elements_of(parameter) for parameter in parameters}
    total = sum(elements.values())
    parts = repeated_blocks(module)
    blocks = [sum(elements[id(p)] for p in part.parameters() if id(p) in elements) for part in parts]
    return ModelSize(
        trainable=sum(elements[id(parameter)] for parameter in parameters if parameter.requires_grad),
        frozen=sum(elements[id(parameter)] for parameter in parameters if not parameter.requires_grad),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers() if not is_lazy(buffer)),
        largest_block=max(blocks, default=0),
        outside_blocks=max(0, total - sum(blocks)) if blocks else 0,
        largest_parameter=max(elements.values(), default=0),
    )


def elements_of(parameter: Tensor) -> int:
    """Return the elements of the full parameter, also while DeepSpeed has split it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@dataclass(frozen=True)
class OptimizerSizes:
    """Memory of the optimizers of a module."""

    slots: float
    """Elements of state for each trainable element."""
    state_bytes: int
    """Bytes of state under torch's optimizers."""
    update_bytes: int
    """Bytes of temporary memory of an update by torch's optimizers."""
    count: int


def optimizer_state(module: TrainModule, precision: Precision, device_type: str) -> OptimizerSizes:
    """Measure the state of a module's optimizers, by a step on parameters and gradients without data.

    Args:
        module: a copy from ``without_data``, which is modified.
        device_type: the type of device on which the updates will be made.
    """
    precision.convert_module(module)
    optimizers, _ = resolve_optimizers(module.configure_optimizers())
    trainable = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    parts = [part for optimizer in optimizers for part in optimizers_in(optimizer)]
    slots = [slot for part in parts for slot in _slots(part)]
    state_bytes = sum(slot.numel() * slot.element_size() for slot in slots)
    in_updates = update_bytes(parts, device_type)
    return OptimizerSizes(
        sum(slot.numel() for slot in slots) / max(1, trainable), state_bytes, in_updates, len(optimizers)
    )


def _slots(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of state that an optimizer has after a step, without step counters."""
    for group in optimizer.param_groups:
        known: dict[Any, list[Any]] = {}
        for parameter in group["params"]:
            kept = list(optimizer.state.get(parameter, {}).values())
            if not kept and parameter.requires_grad:
                kind = parameter.shape, parameter.dtype
                kept = known[kind] = known.get(kind) or _after_a_step(optimizer, group, parameter)
            tensors = (slot for slot in kept if isinstance(slot, Tensor) and slot.dim() > 0)
            for slot in tensors:
                yield from parts_of(slot).values() if is_quantized(slot) else (slot,)


def _after_a_step(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> list[Any]:
    """Return the state of one parameter after a step of a copy of the optimizer on only this parameter."""
    # Fused kernels do not support meta tensors. The state is the same without them.
    plain: dict[str, Any] = {name: False for name in ("fused", "capturable", "foreach") if name in group}
    for device in ("meta", "cpu"):
        one = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=device))
        one.grad = torch.zeros_like(one)
        alone = _copy_of(optimizer)
        alone.state = defaultdict(dict)
        alone.param_groups = [{**group, **plain, "params": [one]}]
        try:
            # Some optimizers compile their update, which takes longer than the rest of a plan.
            with torch.compiler.set_stance("force_eager"):
                alone.step()
        except (RuntimeError, NotImplementedError):
            # Some optimizers read values. One parameter with data takes little memory.
            if device == "cpu":
                raise
        else:
            return list(alone.state[one].values())
    return []


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """Return a shallow copy with all of an optimizer's own attributes, of which ``copy.copy`` leaves out most."""
    alone = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        # A scheduler replaces `step` by one that is bound to the original.
        if name != "step" and name not in vars(alone):
            setattr(alone, name, value)
    return alone


# ---- temporary memory of an update ----------------------------------------------------------------------------------
# Torch's default on CUDA, ``foreach``, updates all parameters of a group at once and holds intermediate results of the
# group's size. Fused kernels hold none, and a loop over the parameters those of one parameter.


def update_bytes(optimizers: Iterable[Optimizer], device_type: str) -> int:
    """Return the bytes of the largest update of one parameter group: groups are updated one after the other."""
    return max((_of_group(each, group, device_type) for each in optimizers for group in each.param_groups), default=0)


def _of_group(optimizer: Optimizer, group: dict[str, Any], device_type: str) -> int:
    # The default is foreach on CUDA unless `differentiable`; other optimizers have no such setting.
    foreach = group.get("foreach", False)
    if foreach is None:
        foreach = device_type == "cuda" and not group.get("differentiable")
    if not foreach or group.get("fused"):
        return 0
    size: int = sum(each.numel() * each.element_size() for each in group["params"] if each.requires_grad)
    return _copies(optimizer, group) * size


def _copies(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """Return how many results of the size of the gradients exist at a time."""
    if isinstance(optimizer, torch.optim.SGD):
        # It works in place, but copies gradients to add the weight decay or to change their sign.
        return int(bool(group.get("weight_decay") or group.get("maximize")))
    # Such a copy, which is dropped again, and after it a root of the second moments or the like.
    return 1


# ---- activations ----------------------------------------------------------------------------------------------------


def measure_with_data(
    module: TrainModule, batch: Any, device: torch.device, precision: Precision, prepare: Prepare | None = None
) -> Activations:
    """Run a micro-batch on a copy of the module on ``device``; return what its forward pass saved.

    On a device that counts its memory this is the peak of allocated memory in either pass, without parameters and
    gradients. It also contains the temporary buffers of kernels, which can be larger than the saved tensors.
    ``prepare`` changes how the copy keeps tensors, and calls its second argument with those that autograd does not
    save.
    """
    built = copied(module, lambda tensor: tensor.to(device, copy=True))
    with device:
        built.configure_model()
    built.to(device).train()
    precision.convert_module(built)
    if not has_own_memory(device):
        return _watched(built, batch, precision, device, prepare)[0]
    restart_peak(device)
    before = torch.accelerator.memory_allocated(device)
    seen, loss = _watched(built, batch, precision, device, prepare)
    forward = torch.accelerator.max_memory_allocated(device) - before
    loss.backward()
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in built.parameters() if p.grad is not None)
    backward = torch.accelerator.max_memory_allocated(device) - before - gradients
    return Activations(max(0, forward - seen.casts, backward - seen.casts), seen.casts)


def measure_with_fake_tensors(
    module: TrainModule, batch: Any, precision: Precision, prepare: Prepare | None = None
) -> Activations:
    """Run a micro-batch on fake tensors; return what its forward pass would save. ``prepare``: as with data."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        built = copied(module, lambda tensor: torch.empty_like(tensor, device="cpu"))
        with DefaultDtype(precision.parameter_dtype):
            built.configure_model()
        precision.convert_module(built.train())
        batch = precision.convert_batch(batch)
        faked = tree_map(lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)
        return _watched(built, faked, precision, torch.device("cpu"), prepare)[0]


def _watched(
    module: TrainModule, batch: Any, precision: Precision, device: torch.device, prepare: Prepare | None = None
) -> tuple[Activations, Tensor]:
    """Run a step and add up the storages that it saves for backward, without those of parameters and buffers."""
    parameters = {id(parameter) for parameter in module.parameters()}
    known = {storage_key(tensor) for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, tuple[int, bool]] = {}
    # Freed storages would be reused, and two of them counted as one.
    alive: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        place = storage_key(tensor)
        if place not in known and place not in kept:
            kept[place] = tensor.untyped_storage().nbytes(), _is_cast_of(tensor, parameters)
            alive.append(tensor)
        return tensor

    if prepare is not None:
        prepare(module, record)
    with ExitStack() as stack:
        stack.enter_context(RandomStream(0).entered())
        if device.type != "cpu":
            # By default it opens every device of the machine.
            stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor))
        context = precision.forward_context(device.type)
        if context is not None:
            stack.enter_context(context)
        output = module.training_step(batch, 0)
    loss = output["loss"] if isinstance(output, Mapping) else output
    if loss is None:
        raise ConfigurationError("training_step returned None for the first batch.")
    alive.clear()
    casts = sum(size for size, is_cast in kept.values() if is_cast)
    return Activations(sum(size for size, _ in kept.values()) - casts, casts), loss


def _is_cast_of(tensor: Tensor, parameters: set[int]) -> bool:
    """Whether a tensor is a parameter cast to another dtype, or a view of one."""
    node, casts = tensor.grad_fn, False
    for _ in range(_STEPS_TO_A_CAST):
        if node is None:
            return False
        if hasattr(node, "variable"):
            return casts and id(node.variable) in parameters
        casts |= node.name().startswith("ToCopy")
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return False

"""Sharded tensors in the user's own code: an operation on one means the operation on the full tensor.

Torch's DTensor computes on shards, which serves optimizers. For other code it lacks these, which are added as long as
a sharded model exists, and only for tensors that are divided like its parameters:

- ``item()`` and the like return the number of the full tensor, also of a sum or norm that ranks hold in parts.
- An operation with an ordinary tensor, or one that DTensor does not know, gathers; its gradient is the mean over ranks.
- An operation in place with an ordinary tensor, ``p.data = ...``, and writing to a view of a shard change the shards.
- A pickle, as of ``torch.save``, is refused: programs call it on one rank alone.
- Random values are those of rank 0's full tensor: ranks would draw the same values for different shards.

All ranks must call these operations, which are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ...framework.checkpoint.write_plan import part_at
from ...framework.core.errors import ConfigurationError
from ...framework.core.torch_internals import tree_map_only, without_subclasses
from ...framework.distributed.world import World
from .local_shards import like, local_of, shape_and_offsets, whole_of_parts

_NUMBERS = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__complex__", "__index__"}
_NUMBERS |= {"__format__", "__contains__", "cpu", "equal", "allclose"}
_VIEWS = {"__getitem__", "select", "narrow", "view", "view_as", "reshape", "flatten", "ravel", "unflatten", "diagonal"}
_VIEWS |= {"split", "chunk", "unbind", "t", "transpose", "permute", "movedim", "squeeze", "unsqueeze", "unfold"}
_RANDOM = {"rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "dropout", "poisson", "normal"}
_RANDOM_IN_PLACE = {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "cauchy_", "log_normal_"}
_ALWAYS_FULL = {*_RANDOM_IN_PLACE, "__setitem__"}
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__"}
_DATA: Any = Tensor.data
_GRADIENT: Any = Tensor.grad


class FullSemantics:
    """Lets code that is not an optimizer compute with the sharded tensors of one model.

    The full semantics are on as long as an object exists, except while optimizers, phalanx and torch's FSDP compute.

    Args:
        meshes: those of its parameters.
        split: the ranks that split layers. Code of the user's in a step meets weights and activations that are divided
            over these alone.
    """

    _worlds: ClassVar[dict[DeviceMesh, World]] = {}
    _split: ClassVar[set[DeviceMesh]] = set()
    _number = 0
    _torch_own: Any = vars(DTensor)["__torch_function__"]

    def __init__(self, meshes: set[DeviceMesh], world: World, split: DeviceMesh | None = None) -> None:
        FullSemantics._number += 1
        if split is not None:
            FullSemantics._split.add(split)
        FullSemantics._worlds.update(dict.fromkeys(meshes, world))
        FullSemantics.switch_on()
        self.release: Callable[[], Any] = finalize(self, _leave)
        """Leaves DTensor as it was, after the last sharded model."""

    @staticmethod
    def switch_on() -> None:
        """Let operations mean those on full tensors, if there is a sharded model."""
        if FullSemantics._number:
            # No ordinary way: results of operations are of the class DTensor itself, whatever the parameters are.
            DTensor.__torch_function__ = classmethod(_call)  # type: ignore[assignment, method-assign]

    @staticmethod
    def switch_off() -> None:
        """Let operations compute on shards, without a Python call for each use of an attribute."""
        DTensor.__torch_function__ = FullSemantics._torch_own  # type: ignore[method-assign]

    @staticmethod
    def on() -> AbstractContextManager[None]:
        """Return a context in which operations mean those on full tensors, also within an update or a backward pass."""
        return FullSemantics._switched(FullSemantics.switch_on)

    @staticmethod
    def off() -> AbstractContextManager[None]:
        """Return a context in which operations compute on shards, such as those of phalanx and of torch's FSDP."""
        return FullSemantics._switched(FullSemantics.switch_off)

    @staticmethod
    @contextmanager
    def _switched(switch: Callable[[], None]) -> Generator[None, None, None]:
        back = FullSemantics.switch_on if FullSemantics._is_on() else FullSemantics.switch_off
        switch()
        try:
            yield
        finally:
            back()

    @staticmethod
    def _is_on() -> bool:
        return vars(DTensor)["__torch_function__"] is not FullSemantics._torch_own


def _leave() -> None:
    FullSemantics._number -= 1
    if not FullSemantics._number:
        FullSemantics._worlds.clear()
        FullSemantics._split.clear()
        FullSemantics.switch_off()


def _call(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call a function of torch that was given a DTensor."""
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_"):
        return _of_lists(func, name, args, kwargs)
    # Other functions with an underscore are those of optimizers and loss scalers.
    if name != "__get__" and (not name.startswith("_") or name.startswith("__")):
        given = list(_tensors((*args, *kwargs.values())))
        first = next((each for each in given if is_sharded(each)), None)
        if first is not None:
            return _computed(func, name, args, kwargs, given, first)
        is_split = any(isinstance(each, DTensor) and each.device_mesh in FullSemantics._split for each in given)
        # Other operations are those of layers, which torch computes on parts.
        if is_split and (name in _NUMBERS or any(not isinstance(each, DTensor) for each in given)):
            args, kwargs = tree_map_only(DTensor, DTensor.full_tensor, (tuple(args), kwargs))
            return func(*args, **kwargs)
    return _of_torch(func, args, kwargs)


def _computed(func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], first: Any) -> Any:
    if name == "register_hook" and hasattr(first, "add_gradient_hook"):
        return first.add_gradient_hook(*args[1:], **kwargs)
    if name == "__set__":
        return _set(func, *args)
    if name == "__eq__" and first is not given[-1] and len({*map(hash, given)}) == 1:
        return torch.ones(first.shape, dtype=torch.bool, device=local_of(first).device).as_subclass(_Same)
    if name == "__deepcopy__":
        return _copied(first, *args[1:])
    if name == "__reduce_ex__":
        raise no_pickle("a tensor")
    if func is torch.autograd.grad:
        return _differentiated(*args, **kwargs)
    if name in _NUMBERS:
        return _on_full(func, args, kwargs)
    if name in _RANDOM:
        return FullSemantics._worlds[first.device_mesh].broadcast(_on_full(func, args, kwargs))
    if (out := kwargs.get("out")) is not None:
        # torch would resize this rank's shard to the shape of the full result.
        if not isinstance(out, Tensor):
            raise ConfigurationError(
                f"{name} was called with out= several tensors, of which some are sharded: copy its results into them."
            )
        return _changed(_in_place(func, name, out, args, kwargs))
    mixed = any(not isinstance(each, DTensor) for each in given)
    is_init = getattr(func, "__module__", "") == "torch.nn.init"
    if name in _IN_PLACE or is_init or (name.endswith("_") and not name.endswith("__")):
        target = args[0] if args else kwargs.get("tensor", first)
        needs_full = mixed or is_init or name in _ALWAYS_FULL or hasattr(target, "view_of")
        return _written(func, name, args, kwargs, target, needs_full)
    return _on_full(func, args, kwargs) if mixed else _read(func, name, args, kwargs, first)


class _Same(Tensor):
    """The result of ``==`` for a parameter and its gathered copy, which a dict that holds one asks whether it is it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return ordinary tensors for all that is computed from the result."""
        return _of_torch(func, args, kwargs or {})

    def __bool__(self) -> bool:
        return True


def _of_torch(func: Any, args: Any, kwargs: Any) -> Any:
    return without_subclasses(func, *args, **kwargs)


def _of_lists(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run an operation on lists of tensors, for those of each mesh apart, as torch computes on one at a time."""
    targets = args[0]
    places: dict[Any, list[int]] = {}
    for place, target in enumerate(targets):
        places.setdefault(_mesh(target), []).append(place)
    results: dict[int, Any] = {}
    for chosen in places.values():
        given = [
            [_as_kind(targets[place], each[place]) for place in chosen]
            if isinstance(each, (list, tuple))
            else _as_kind(targets[chosen[0]], each)
            for each in args
        ]
        results |= zip(chosen, _of_torch(func, given, kwargs) or (), strict=False)
    if name.endswith("_"):
        for gather_again in {each.gather_again for each in targets if hasattr(each, "gather_again")}:
            gather_again()
    return [results[place] for place in range(len(targets))] if results else None


def _mesh(value: Any) -> DeviceMesh | None:
    return value.device_mesh if isinstance(value, DTensor) else None


def _as_kind(target: Any, value: Any) -> Any:
    """Return a tensor sharded like another one, or in full if that is not sharded."""
    if not isinstance(value, Tensor) or _mesh(value) == _mesh(target):
        return value
    value = full_value(value)
    return as_shard(target, value) if isinstance(target, DTensor) and value.ndim else value


def _written(func: Any, name: str, args: Any, kwargs: Any, target: Any, needs_full: bool) -> Any:
    """Run an operation in place on shards, or on the full tensor where DTensor cannot."""
    if not needs_full:
        try:
            result = _of_torch(func, args, kwargs)
        except (RuntimeError, NotImplementedError):
            pass
        else:
            _changed(target)
            return result
    return _changed(_in_place(func, name, target, args, kwargs))


def _read(func: Any, name: str, args: Any, kwargs: Any, first: Any) -> Any:
    """Run an operation on shards, or on the full tensor where DTensor cannot; remember of what a view is one."""
    try:
        result = _of_torch(func, args, kwargs)
    except (RuntimeError, NotImplementedError):
        if name == "backward":
            raise
        result = _on_full(func, args, kwargs)
        if name not in _VIEWS or (torch.is_grad_enabled() and first.requires_grad):
            return result
        # What is written to the view is written to the shards.
        mesh = first.device_mesh
        same = {"device_mesh": mesh, "placements": [Replicate()] * mesh.ndim, "run_check": False}
        result = tree_map_only(Tensor, partial(DTensor.from_local, **same), result)
    result = tree_map_only(DTensor, _reduced, result)
    if name in _VIEWS:
        for number, each in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            # DTensor may have gathered a copy.
            each.view_of = first, _nth(func, number, result), args, kwargs
    return result


def _reduced(tensor: Any) -> Any:
    """Return a result of which ranks hold parts that are no terms of a sum as the whole: torch would add them up."""
    parts = [each for each in tensor.placements if each.is_partial()]
    if not parts or (
        tensor.is_floating_point() and all(type(each) is Partial and each.is_partial("sum") for each in parts)
    ):
        return tensor
    return tensor.redistribute(placements=[Replicate() if each.is_partial() else each for each in tensor.placements])


def no_pickle(what: str) -> ConfigurationError:
    """Return the error for a pickle, which would hold this rank's shards alone."""
    return ConfigurationError(
        f"torch.save, or pickle, of {what} that is sharded would write the part that this rank has: call "
        "trainer.save_checkpoint or trainer.export, in a Fabric full_state_dict, or save parameter.full_tensor(), "
        "which all ranks must call."
    )


def _differentiated(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute derivatives by sharded parameters.

    Raises:
        ConfigurationError: one of them has no part in the outputs, as forward passes use gathered copies.
    """
    try:
        found = _of_torch(torch.autograd.grad, (outputs, inputs, *args), kwargs)
    except RuntimeError as error:
        if "not have been used in the graph" not in str(error):
            raise
        found = (None,)
    wanted = (inputs,) if isinstance(inputs, Tensor) else inputs
    if any(each is None and (len(found) == 1 or is_sharded(one)) for one, each in zip(wanted, found, strict=False)):
        raise ConfigurationError(
            "torch.autograd.grad was asked for the gradient of a sharded parameter, and forward passes use a gathered "
            "copy of it: call backward, or manual_backward, and read parameter.grad."
        )
    return found


def _copied(tensor: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy that is sharded in the same way; as in torch, without the gradient of a parameter."""
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError("only tensors that are not results of an operation with gradients can be deep-copied")
        twin: Any = like(tensor, local_of(tensor).clone())
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=False)
        elif tensor.grad is not None:
            twin.grad = like(tensor.grad, local_of(tensor.grad).clone())
        memo[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def _changed(tensor: Any) -> Any:
    """Gather a parameter again whose shards were changed, where it is gathered now. Collective."""
    if hasattr(tensor, "gather_again"):
        tensor.gather_again()
    return tensor


def _nth(func: Any, number: int, result: Any) -> Callable[..., Tensor]:
    several = isinstance(result, (tuple, list))
    return (lambda *args, **kwargs: func(*args, **kwargs)[number]) if several else func


def is_sharded(value: Any) -> bool:
    """Whether a value is divided like the parameters of a sharded model."""
    return isinstance(value, DTensor) and value.device_mesh in FullSemantics._worlds


def full_value(tensor: Any) -> Any:
    """Return the full tensor of a sharded one, with a gradient. Collective."""
    return _Full.apply(tensor) if is_sharded(tensor) else tensor  # type: ignore[no-untyped-call]


def check_shape(parameter: Tensor, value: Tensor) -> None:
    """Refuse ``parameter.data = value`` with another shape.

    Raises:
        ConfigurationError: the shapes differ.
    """
    if value.shape != parameter.shape:
        raise ConfigurationError(
            f"p.data = a tensor of shape {list(value.shape)}, and the parameter has the shape {list(parameter.shape)} "
            "and is sharded: change shapes in configure_model, before the strategy shards the model."
        )


def as_shard(parameter: Any, value: Tensor) -> Any:
    """Return a tensor that is divided like a parameter. Collective if it is divided otherwise."""
    if isinstance(value, DTensor):
        return (
            value if value.placements == parameter.placements else value.redistribute(placements=parameter.placements)
        )
    part = part_at(value, *shape_and_offsets(parameter))
    local = part.to(local_of(parameter), copy=True, memory_format=torch.contiguous_format)
    return like(parameter, local)


class _Full(torch.autograd.Function):
    """Gathers a tensor; its gradient is the mean over the ranks, of which each has a gradient of its own loss."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        return whole_of_parts(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        mesh = ctx.mesh
        part = DTensor.from_local(gradient.contiguous() / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
        goal = [Replicate() if each.is_partial() else each for each in ctx.placements]
        return part.redistribute(placements=goal)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _on_full(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(DTensor, full_value, (tuple(args), kwargs))
    return func(*args, **kwargs)


def _set(func: Any, target: Any, value: Any) -> None:
    """Assign ``data`` or ``grad``."""
    if func == _DATA.__set__:
        check_shape(target, value)
        with torch.no_grad():
            local_of(target).copy_(local_of(as_shard(target, value)))
        _changed(target)
        return
    if func == _GRADIENT.__set__ and isinstance(value, Tensor):
        value = as_shard(target, value)
    _of_torch(func, (target, value), {})


def _in_place(func: Any, name: str, target: Any, args: Any, kwargs: Any) -> Any:
    """Change a tensor by an operation on full tensors; of a sharded one, and of one that it views, the shards."""
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in _tensors((*args, *kwargs.values())))
    if needs_gradient and isinstance(target, DTensor):
        raise ConfigurationError(
            f"{name} changes a sharded tensor in place while gradients are recorded: use the operation that returns a "
            "new tensor, such as total = total + x, or torch.no_grad()."
        )
    if not isinstance(target, DTensor):
        _on_full(func, args, kwargs)
        return target

    def write(tensor: Tensor) -> None:
        given = tree_map_only(
            DTensor, lambda each: tensor if each is target else full_value(each), (tuple(args), kwargs)
        )
        func(*given[0], **given[1])

    with torch.no_grad():
        # From the view to the parameter, of which the view may be a copy.
        chain, root = [], target
        while hasattr(root, "view_of"):
            root, view, view_args, view_kwargs = root.view_of
            chain.append((view, view_args, view_kwargs))
        full = part = whole_of_parts(root).clone()
        for view, view_args, view_kwargs in reversed(chain):
            part = view(part, *view_args[1:], **view_kwargs)
        write(part)
        full = FullSemantics._worlds[root.device_mesh].broadcast(full) if _is_random(func, name) else full
        for held, value in ((root, full), (target, part)):
            local_of(held).copy_(local_of(as_shard(held, value)))
    return target


def _is_random(func: Any, name: str) -> bool:
    return name in _RANDOM_IN_PLACE or getattr(func, "__module__", "") == "torch.nn.init"

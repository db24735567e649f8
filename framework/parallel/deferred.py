"""Deferred initialization: parameters are built without data, and later get the values of an eager initialization.

Large layers are built with ``torch.empty`` and filled in place. In ``Deferred.recording`` such tensors are on the meta
device, and the operations that fill them are recorded together with the states of the random generators before each.
The parameters can then be filled one after the other, exactly as one process would have filled them, for any order of
layers and any number of initializations. All other tensors (buffers, tensors computed from numbers) get their data
immediately. An operation that changes several of these parameters at once, or one without a name that says so, is
executed on their values, which are then in memory until the model is set up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.errors import ConfigurationError
from ..core.torch_internals import storage_key, tree_flatten, tree_map, version_of
from .supplied import has_supplied_values, is_dispatched, is_supplying, read_into, supply


@dataclass
class Recipe:
    """The recorded operations that give a tensor its values."""

    base: Tensor
    device: torch.device
    steps: list[Step] = field(default_factory=list)

    def value(self, steps: Iterable[Step] | None = None) -> Tensor:
        """Return the tensor with its values."""
        with torch.no_grad(), torch.inference_mode(False):
            whole = torch.empty_like(self.base, device=self.device)
            for step in self.steps if steps is None else steps:
                step.run(whole)
        return whole


@dataclass
class View:
    """A tensor without data, or a view of one, at a certain moment."""

    recipe: Recipe
    steps: tuple[Step, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        """Return this view of the tensor with data."""
        return whole.as_strided(self.size, self.stride, self.offset)

    def now(self) -> Tensor:
        """Return the values that the view had at that moment."""
        return self.of(self.recipe.value(self.steps))

    def value(self) -> Tensor:
        """Return the values that the view has in the end."""
        return self.of(self.recipe.value())


def view_of(tensor: Tensor, recipe: Recipe) -> View:
    """Return the view that describes a tensor without data at this moment."""
    return View(recipe, tuple(recipe.steps), tensor.size(), tensor.stride(), int(tensor.storage_offset()))


@dataclass
class Step:
    """One operation that changes a tensor, and the states before it of the random generators that it advances."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: View
    states: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)

    def run(self, whole: Tensor) -> None:
        """Apply the operation to a tensor with data.

        Raises:
            ConfigurationError: the operation changes the tensor's shape.
        """
        target = self.target.of(whole)

        def real(value: Any) -> Any:
            if value is self.target:
                return target
            return value.now() if isinstance(value, View) else value

        # torch does not treat a view as a container, so it arrives here unchanged.
        args, kwargs = tree_map(real, (self.args, self.kwargs))
        with _in_states(self.states):
            self.function(*args, **kwargs)
        if target.shape != self.target.size:
            raise ConfigurationError(
                f"{getattr(self.function, '__name__', self.function)} changes the shape of a parameter from "
                f"{tuple(self.target.size)} to {tuple(target.shape)}, which a model that is built without data cannot "
                "follow: create the parameter in its final shape."
            )

    def record(self, whole: Tensor) -> None:
        """Apply the operation for the first time, which advances the generators; keep their states before it."""
        given = [each for each in tree_flatten((self.args, self.kwargs))[0] if isinstance(each, torch.Generator)]
        before = [(each, each.get_state()) for each in (_default_generator(whole.device), *given)]
        self.run(whole)
        self.states = [(each, state) for each, state in before if not torch.equal(state, each.get_state())]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


@contextmanager
def _in_states(states: list[tuple[torch.Generator, Tensor]]) -> Generator[None, None, None]:
    """Return a context in which generators have other states."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


# In place by their name, but without effect on values.
_HARMLESS = {"requires_grad_", "detach_", "share_memory_", "retain_grad", "_is_view"}
_HARMLESS |= {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"}  # other views of the same memory
# These overwrite all previous values, so that earlier steps need not be recorded.
_OVERWRITING = {"uniform_", "normal_", "zero_", "fill_", "copy_", "ones_", "zeros_", "constant_"}
# These compute with full intermediate tensors, all of which would be recorded.
_INITIALISERS = ("trunc_normal_", "orthogonal_")
_OVERWRITING |= set(_INITIALISERS)
_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]


class Deferred:
    """The recipes of all parameters that were built without data."""

    def __init__(self) -> None:
        self._recipes: Any = WeakTensorKeyDictionary()
        self._by_storage: dict[int, Recipe] = {}

    def recipe(self, parameter: Tensor) -> View | None:
        """Return the part of a recipe that is a parameter, or None if it was not built here."""
        recipe = self._by_storage.get(storage_key(parameter)) if parameter.is_meta else None
        found: View | None = self._recipes.get(parameter) if recipe is None else view_of(parameter, recipe)
        return found

    def keep(self, module: nn.Module) -> None:
        """Register a module's parameters again after a change of dtype, which gives them another storage."""
        for parameter in module.parameters():
            recipe = self.recipe(parameter)
            if recipe is not None:
                self._recipes[parameter] = recipe

    def forget(self, parameter: Tensor) -> None:
        """Release the recipe of a parameter."""
        self._recipes.pop(parameter, None)
        self._by_storage.pop(storage_key(parameter), None)

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Return a context in which layers are built without data."""
        recorder = _Recorder()

        def parameter_hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            view = recorder.view(parameter)
            if view is not None:
                self._recipes[parameter] = view

        def buffer_hook(module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
            view = recorder.view(buffer)
            return None if view is None else view.now()

        handles = [
            register_module_parameter_registration_hook(parameter_hook),
            register_module_buffer_registration_hook(buffer_hook),  # type: ignore[arg-type]
        ]
        initialisers = {name: getattr(nn.init, name) for name in _INITIALISERS}
        try:
            for name, function in initialisers.items():
                setattr(nn.init, name, _as_one_step(function))
            with recorder:
                yield
        finally:
            recorder.scratch.free()
            self._by_storage.update(recorder.known)
            for name, function in initialisers.items():
                setattr(nn.init, name, function)
            for handle in handles:
                handle.remove()


class _Recorder(TorchFunctionMode):
    """Intercepts all calls of torch functions; identifies tensors by their storage, which views and ``.data`` share."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Recipe] = {}
        self.scratch = Scratch()

    def find(self, value: Any) -> Recipe | None:
        """Return the recipe of a tensor that has no data yet."""
        if isinstance(value, Tensor) and value.is_meta:
            return self.known.get(storage_key(value))
        return None

    def view(self, value: Any) -> View | None:
        """Return the view that describes a tensor without data at this moment."""
        recipe = self.find(value)
        return None if recipe is None else view_of(value, recipe)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            return self._empty(args, kwargs)
        if func in (supply, has_supplied_values):
            return self._supplied(func, *args)
        tensors = [each for each in tree_flatten((args, kwargs))[0] if self.find(each) is not None]
        if not tensors:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args[0])
        if name in ("set_", "__set__") and len(args) == 2 and self.find(args[0]) is not None and _has_data(args[1]):
            # In place of sharing the other's memory, the tensor copies the values, in the end, as that memory then is.
            return self._fill(lambda tensor: tensor.copy_(args[1]), "copy_", args[:1], {})
        if name == "__set__" and is_lazy(args[0]) and (recipe := self.find(args[1])) is not None:
            # A lazy layer takes its shape from a batch, which needs the values that are filled in next.
            return func(args[0], recipe.value())
        if name == "__set__" or name in _HARMLESS:
            return func(*args, **kwargs)
        if name == "clone" and tensors[0].numel() == self.known[storage_key(tensors[0])].base.numel():
            return self._clone(tensors[0])
        if _in_place(name) or kwargs.get("out") is not None:
            return self._fill(func, name, args, kwargs)
        return self._read(func, args, kwargs, tensors)

    def _attribute(self, getter: Any, tensor: Tensor) -> Any:
        """Return an attribute as if the tensor had data, for initializers that check its device."""
        recipe = self.find(tensor)
        if recipe is not None and getter == _IS_META:
            return False
        if recipe is not None and getter == _DEVICE:
            return recipe.device
        return getter(tensor)

    def _empty(self, args: Any, kwargs: dict[str, Any]) -> Tensor:
        device = torch.empty(0, **({"device": kwargs["device"]} if kwargs.get("device") is not None else {})).device
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if device.type == "meta" or not dtype.is_floating_point or kwargs.get("out") is not None:
            return torch.empty(*args, **kwargs)
        with torch.inference_mode(False):
            tensor = torch.empty(*args, **{**kwargs, "device": "meta"})
        self.known[storage_key(tensor)] = Recipe(tensor.detach(), device)
        return tensor

    def _supplied(self, func: Any, tensor: Tensor, *read: Callable[[], Tensor]) -> Any:
        """Do the work of ``supply`` and ``has_supplied_values``."""
        if func is supply:
            return self._supply(tensor, *read)
        recipe = self.find(tensor)
        return func(tensor) if recipe is None else [step.function for step in recipe.steps] == [read_into]

    def _supply(self, tensor: Tensor, read: Callable[[], Tensor]) -> None:
        """Let a parameter get its values from elsewhere, also one that was built on the meta device."""
        recipe = self.find(tensor)
        if not is_supplying() or (recipe is None and not (tensor.is_meta and isinstance(tensor, nn.Parameter))):
            supply(tensor, read)
            return
        if recipe is None:
            recipe = Recipe(tensor.detach(), torch.device("cpu"))
            self.known[storage_key(tensor)] = recipe
        if tensor.numel() == recipe.base.numel():
            recipe.steps.clear()
        target = view_of(tensor, recipe)
        recipe.steps.append(Step(read_into, (target, read), {}, target))

    def _clone(self, tensor: Tensor) -> Tensor:
        """Return a copy without data, for ``copy.deepcopy`` of layers."""
        recipe = self.known[storage_key(tensor)]
        with torch.inference_mode(False):
            copy = torch.empty_like(recipe.base)
        self.known[storage_key(copy)] = Recipe(copy, recipe.device, list(recipe.steps))
        return copy.as_strided(tensor.size(), tensor.stride())

    def _fill(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record an operation that changes a tensor, and advance the generators as if it had been executed."""
        out = kwargs.get("out")
        given: Any = out if out is not None else args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        target = self.view(given)
        if target is None:
            return self._execute(func, args, kwargs)
        recipe = target.recipe

        def described(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return target if value is given else self.view(value) or value.detach().clone()

        step = Step(func, tree_map(described, tuple(args)), tree_map(described, dict(kwargs)), target)
        step.record(self.scratch.like(recipe.base, recipe.device))
        if name in _OVERWRITING and given.numel() == recipe.base.numel():
            recipe.steps.clear()
        recipe.steps.append(step)
        return given

    def _read(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Call functions of shapes and views unchanged, and functions of values with materialized tensors."""
        versions = [version_of(tensor) for tensor in tensors]
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            return self._execute(func, args, kwargs)
        # torch does not treat its own named results as containers.
        leaves = tree_flatten(list(result) if isinstance(result, tuple) else result)[0]
        made = [each for each in leaves if isinstance(each, Tensor)]
        known = {storage_key(tensor) for tensor in tensors}
        unchanged = versions == [version_of(tensor) for tensor in tensors]
        if unchanged and all(storage_key(each) in known for each in made):
            return result
        return self._execute(func, args, kwargs)

    def _execute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function with materialized tensors, and keep the values of those that it changes."""
        tensors = [each for each in tree_flatten((args, kwargs))[0] if self.find(each) is not None]
        recipes = [self.known[storage_key(tensor)] for tensor in tensors]
        # Tensors that share memory share it here, too.
        wholes = {id(recipe): (recipe, recipe.value()) for recipe in recipes}
        versions = {key: version_of(whole) for key, (_, whole) in wholes.items()}
        values: dict[int, Tensor] = {}
        for tensor, recipe in zip(tensors, recipes, strict=True):
            _, whole = wholes[id(recipe)]
            values[id(tensor)] = view_of(tensor, recipe).of(whole)
        args, kwargs = tree_map(lambda each: values.get(id(each), each), (args, kwargs))
        result = func(*args, **kwargs)
        for key, (recipe, whole) in wholes.items():
            if version_of(whole) != versions[key]:
                self._fill(Tensor.copy_, "copy_", (recipe.base, whole), {})
        given = {id(values[id(tensor)]): tensor for tensor in tensors}
        return tree_map(lambda each: given.get(id(each), each), result)


def _as_one_step(initialiser: Callable[..., Any]) -> Callable[..., Any]:
    """Return an initializer that torch passes to the recorder as a whole, not its intermediate computations."""

    @wraps(initialiser)
    def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_dispatched(tensor):
            return handle_torch_function(initialise, (tensor,), tensor, *args, **kwargs)
        return initialiser(tensor, *args, **kwargs)

    return initialise


def _has_data(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def _in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")


class Scratch:
    """One piece of memory, as large as the largest tensor so far.

    With a piece of memory for each tensor, the process would keep most of them after they are freed: the allocator of
    the C library returns memory to the system only where no small object lies behind it.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a contiguous tensor of another's shape and dtype, whose values are undefined.

        It shares its memory with those that were returned before.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        memory = self._memory
        if memory is None or memory.numel() < num_bytes or memory.device != device:
            # The old memory is freed first.
            memory = self._memory = None
            memory = self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return memory[:num_bytes].view(tensor.dtype).view(tensor.shape)

    def free(self) -> None:
        """Free the memory, also if something still refers to this object."""
        self._memory = None

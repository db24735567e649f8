"""``FabricModule``: a set-up module that is the user's own, called through precision and strategy."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.errors import ConfigurationError
from ..core.precision import Precision, at_least_fp32
from ..parallel.compilation import compilation_of
from .engine import Engine
from .window_rules import check_caller, check_single_pass

M = TypeVar("M", bound=nn.Module)


class _Calls:
    """Calls a module's methods in the precision's context and through the strategy."""

    def __init__(self, engine: Engine, precision: Precision, device_type: str) -> None:
        self.engine = engine
        self._precision = precision
        self._context = precision.forward_context(device_type)
        self._routes: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._shared_after = 0
        self._only_in_windows = engine.strategy.window_passes is not None

    def __call__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in self._routes:
            step = self._step(self.engine.module if name == "__call__" else getattr(self.engine.module, name))
            strategy = self.engine.strategy
            self._routes[name] = strategy.route(step, training=True), self._evaluation(step)
        train, evaluate = self._routes[name]
        trains = torch.is_grad_enabled()
        if self._only_in_windows:
            check_caller(self.engine, trains)
            # The strategy runs the step of a window without gradients too, to learn shapes.
            trains = self.engine.runs_window
        return (train if trains else evaluate)(*args, **kwargs)

    def _evaluation(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function for calls without gradients. The first call after an update is collective if the module
        has buffers: each rank has its own, such as running means, and all are to evaluate the same model.
        """
        strategy, module = self.engine.strategy, self.engine.module
        evaluate = strategy.route(step, training=False)
        if self._precision.replaces_layers:
            evaluate = _without_inference_mode(evaluate)
        if strategy.world.size == 1 or next(module.buffers(), None) is None:
            return evaluate

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._shared_after != self.engine.updates:
                self._shared_after = self.engine.updates
                strategy.sync_buffers(module)
            return evaluate(*args, **kwargs)

        return call

    def _step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        precision = self._precision
        converts, context = precision.converts_batch, self._context or nullcontext()
        if not converts and self._context is None:
            return function

        from lightning_utilities.core.apply_func import apply_to_collection

        def call(*args: Any, **kwargs: Any) -> Any:
            if converts:
                args, kwargs = precision.convert_batch(args), precision.convert_batch(kwargs)
            with context:
                output = function(*args, **kwargs)
            return apply_to_collection(output, Tensor, at_least_fp32)

        return call


def _without_inference_mode(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for calls without gradients. It leaves inference mode, which replaced layers do not support."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return evaluate(*args, **kwargs)

    return call


class _RoutedForward:
    """``forward`` of a set-up module: the forward pass in the precision's context and through the strategy.

    A data descriptor, which Python prefers to an attribute ``forward`` of the module itself, such as a compiled one:
    the instance dict is shared with the user's module.
    """

    def __get__(self, module: FabricModule | None, owner: type) -> Any:
        return self if module is None else module.__call__

    def __set__(self, module: FabricModule, value: Any) -> None:
        # No ordinary way: ``setattr`` would call this method again.
        vars(module)["forward"] = value


class FabricModule(nn.Module):
    """A set-up module: the user's own, of its own class and with its own attributes, called through the strategy.

    It and the original share one ``__dict__``, so parameters, buffers, hooks, attributes and ``state_dict`` are the
    same under the same names, whichever of the two is asked.
    """

    # In a slot, because the instance dict is shared with the user's module.
    __slots__ = ("_calls",)
    _calls: _Calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass in the precision's context and through the strategy."""
        return self._calls("__call__", args, kwargs)

    forward: Any = _RoutedForward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the module's gradients as ``zero_grad`` of its optimizers does, wherever the strategy stores them."""
        engine = self._calls.engine
        for optimizer in engine.optimizers:
            optimizer.zero_grad(set_to_none)
        if engine.window is None or not engine.is_trained:
            super().zero_grad(set_to_none)

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Let another method that computes a loss or an output be called as ``forward`` is.

        Raises:
            ConfigurationError: the module has no such method.
        """
        name = method if isinstance(method, str) else method.__name__
        if not callable(getattr(self._calls.engine.module, name, None)):
            raise ConfigurationError(f"mark_forward_method({name!r}): {type(self).__name__} has no such method.")

        def call(module: FabricModule, *args: Any, **kwargs: Any) -> Any:
            return module._calls(name, args, kwargs)

        # The class was created by `wrap_module` and has only this instance.
        setattr(type(self), name, call)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a pickle is that of the plain module: its engine belongs to the ranks of this run. The greatest of
        # one item is the item; a function of phalanx would make phalanx necessary to read the pickle.
        return max, ((self._calls.engine.module,),)


def wrap_module(engine: Engine, precision: Precision, device_type: str) -> Any:
    """Return the ``FabricModule`` of an engine's module."""
    module = engine.module
    kind = type(module)
    fields: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    if not hasattr(module, "no_sync"):
        fields["no_sync"] = _no_sync
    own = types.new_class(f"Fabric{kind.__name__}", (FabricModule, kind), exec_body=lambda space: space.update(fields))
    wrapped: Any = object.__new__(own)
    # No ordinary way: the two objects must share all attributes, also those that are assigned to either of them later.
    # torch and the user's methods read them from ``__dict__``, so delegation by ``__getattr__`` would not reach them.
    object.__setattr__(wrapped, "__dict__", module.__dict__)
    object.__setattr__(wrapped, "_calls", _Calls(engine, precision, device_type))
    for name in getattr(module, "forward_methods", ()):
        wrapped.mark_forward_method(name)
    return wrapped


def _no_sync(module: FabricModule) -> AbstractContextManager[None]:
    """Do not reduce gradients over ranks in the passes inside, as ``no_sync`` of ``DistributedDataParallel``."""
    check_single_pass(module._calls.engine.strategy, None, "no_sync")
    return module._calls.engine.without_sync()


def engine_of(module: nn.Module) -> Engine | None:
    """Return the engine of a set-up module, None for any other module."""
    return module._calls.engine if isinstance(module, FabricModule) else None


def unwrap(module: M) -> M:
    """Return the user's own module behind a set-up or compiled one, or the module itself."""
    engine = engine_of(module)
    if engine is not None:
        return engine.module  # type: ignore[return-value]
    original: M = compilation_of(module)[0]
    return original

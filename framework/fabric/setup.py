"""Checks of modules and optimizers that a Fabric is to set up, and what it makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..core.errors import ConfigurationError
from ..core.optimizer_config import check_kind, parameters_of
from ..core.wording import a_type
from .engine import Engine, FabricOptimizer
from .module import FabricModule, unwrap
from .prepared import Prepared


def check_objects(prepared: Prepared, module: nn.Module, optimizers: Iterable[Optimizer]) -> list[FabricOptimizer]:
    """Check a module and its optimizers.

    Returns:
        The optimizers that were set up with other modules, and update parameters of this one too.

    Raises:
        ConfigurationError: one of them was set up before, or the strategy takes a module together with an optimizer of
            its own, and an optimizer updates several modules.
    """
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"setup was given {a_type(module)}; it takes a module, then optimizers.")
    original = unwrap(module)
    if isinstance(module, FabricModule) or any(engine.module is original for engine in prepared.engines):
        raise ConfigurationError(f"this {type(original).__name__} is set up already; use what setup returned.")
    for optimizer in optimizers:
        check_optimizer(prepared, optimizer)
    own = set(original.parameters())
    shared = [one for one in prepared.optimizers if not own.isdisjoint(parameters_of(one.optimizer))]
    if prepared.strategy.traits.takes_one_optimizer:
        wider = [
            *(one.optimizer for one in shared),
            *(one for one in optimizers if not own.issuperset(parameters_of(one))),
        ]
        if wider:
            raise ConfigurationError(
                f"strategy={prepared.strategy.name!r} takes a module together with an optimizer of its own, and this "
                f"{type(wider[0]).__name__} also updates parameters outside of {type(original).__name__}: set up one "
                "module that holds all of them, such as an nn.ModuleDict, or give each module its own optimizer."
            )
    return shared


def check_optimizer(prepared: Prepared, optimizer: Any) -> None:
    """Check an optimizer.

    Raises:
        ConfigurationError: it is not one that can be set up, or was set up before.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"{a_type(optimizer)} was given as an optimizer to set up.")
    check_kind(optimizer)
    if any(optimizer is one or optimizer is one.optimizer for one in prepared.optimizers):
        raise ConfigurationError(f"this {type(optimizer).__name__} is set up already; use what setup returned.")


def engine_of_optimizer(prepared: Prepared, optimizer: Optimizer) -> Engine:
    """Return the engine of the first module that an optimizer updates.

    Raises:
        ConfigurationError: it updates no module that is set up.
    """
    parameters = set(parameters_of(optimizer))
    for engine in prepared.engines:
        if not parameters.isdisjoint(engine.module.parameters()):
            return engine
    raise ConfigurationError(
        f"setup_optimizers: {type(optimizer).__name__} updates no parameter of a module that is set up; call "
        "setup_module first, and build the optimizer on what it returns."
    )


def wrap_optimizer(prepared: Prepared, optimizer: Optimizer, engine: Engine) -> FabricOptimizer:
    """Return an optimizer of an engine's module, which may update parameters of other modules too."""
    wrapped, parameters = FabricOptimizer(optimizer, engine), set(parameters_of(optimizer))
    for other in prepared.engines:
        if not parameters.isdisjoint(other.module.parameters()):
            wrapped.add_engine(other)
    return wrapped


class NoInitialization(TorchFunctionMode):
    """Skips the functions of ``torch.nn.init``: parameters are loaded later."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)

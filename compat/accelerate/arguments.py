"""Translation of the arguments of ``Accelerator`` into those of ``Fabric``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError
from ...framework.core.optimizer_config import parameters_of
from ...framework.core.precision import LossScaler, Precision
from ...framework.distributed.world import placement
from ...framework.parallel.strategy import Strategy
from ...precisions import Float16Mixed
from ...strategies import DDPStrategy
from .configuration import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    ProfileKwargs,
)
from .plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin

_PRECISIONS = {None: "32-true", "no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "fp8": "fp8-mixed"}
_HANDLERS = (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, ProfileKwargs)


def by_class(handlers: Iterable[Any] | None) -> dict[type, Any]:
    """Return handlers by their class; refuse those that have no counterpart."""
    found = {type(handler): handler for handler in handlers or ()}
    for kind in found:
        if kind not in _HANDLERS:
            names = ", ".join(each.__name__ for each in _HANDLERS)
            raise ConfigurationError(f"kwargs_handlers got a {kind.__name__}; it takes objects of {names}.")
    return found


def strategy_of(
    given: str | Strategy,
    deepspeed: DeepSpeedPlugin | None,
    fsdp: FullyShardedDataParallelPlugin | None,
    handlers: Mapping[type, Any],
) -> str | Strategy:
    """Return the strategy that the plug-ins describe, or the one that is named."""
    if deepspeed is not None:
        return deepspeed.strategy
    if fsdp is not None:
        return fsdp.strategy
    ddp = handlers.get(DistributedDataParallelKwargs)
    several = placement().size > 1
    return DDPStrategy(**ddp.options()) if ddp is not None and given in ("auto", "ddp") and several else given


def precision_of(name: str | None, scaler: GradScalerKwargs | None) -> str | Precision:
    """Return the precision for a name of Accelerate's."""
    if name not in _PRECISIONS:
        known = ", ".join(str(each) for each in _PRECISIONS)
        raise ConfigurationError(f"mixed_precision={name!r} is not allowed: give one of {known}.")
    return _Scaled(scaler) if name == "fp16" and scaler is not None else _PRECISIONS[name]


class _Scaled(Float16Mixed):
    """fp16 with the loss scale of ``GradScalerKwargs``."""

    def __init__(self, scaler: GradScalerKwargs) -> None:
        self._scaler = scaler

    def loss_scaler(self) -> LossScaler | None:  # type: ignore[override]
        given = self._scaler
        if not given.enabled:
            return None
        return LossScaler(given.init_scale, given.growth_factor, given.backoff_factor, given.growth_interval)


def default_devices() -> int | str:
    """Return one rank, or under a launcher the ranks that it started."""
    return "auto" if placement().launcher is not None or placement().size > 1 else 1


def updates(optimizer: Optimizer, module: nn.Module) -> bool:
    """Whether an optimizer updates a parameter of a module."""
    own = {id(parameter) for parameter in module.parameters()}
    return any(id(parameter) in own for parameter in parameters_of(optimizer))

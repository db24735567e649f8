"""Normalizes the return value of ``configure_optimizers`` to lists of optimizers and ``SchedulerConfig`` objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from .errors import ConfigurationError, did_you_mean, is_count
from .schedules import OPTIONS, named_schedule
from .split_optimizer import optimizers_in
from .wording import a_type

_ZERO_GRAD = Optimizer.zero_grad
_FORMS = "an optimizer, a list of them, (optimizers, schedulers), or a dict with 'optimizer' and 'lr_scheduler'"


@dataclass
class SchedulerConfig:
    """A scheduler and when it steps: every ``frequency`` epochs or applied optimizer steps of the whole run."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Of a schedule that was given by name."""

    @property
    def needs_metric(self) -> bool:
        """Whether ``step`` must be called with the value of ``monitor``."""
        return isinstance(self.scheduler, ReduceLROnPlateau)


def drop_gradients(optimizer: Optimizer) -> None:
    """Set the gradients of an optimizer to None, as its ``zero_grad`` does, which is called if it is overridden.

    torch's own opens a range of the profiler: 5 us, a quarter of what a step costs over plain torch.
    """
    if type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def resolve_optimizers(
    returned: Any,
    module: nn.Module | None = None,
    steps_itself: bool = False,
    steps: Callable[[], float] | None = None,
) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers that ``configure_optimizers`` returned; both lists are empty for None.

    Args:
        returned: the value that ``configure_optimizers`` returned.
        module: the module whose parameters the optimizers update.
        steps_itself: whether the module advances its schedulers, which then need no ``step``.
        steps: returns the optimizer steps of the fit, for schedules by name; None leaves these out.

    Raises:
        ConfigurationError: the value has an unknown form, checkpoints cannot hold an optimizer's state, or an optimizer
            updates a tensor that is not a parameter of ``module``.
    """
    optimizers, schedulers = _resolved(returned)
    for config in schedulers:
        if isinstance(config.scheduler, str):
            config.scheduler = _named(config, optimizers, steps)
    schedulers = [config for config in schedulers if config.scheduler is not None]
    for optimizer in optimizers:
        check_kind(optimizer)
    for config in schedulers:
        if not steps_itself and not hasattr(config.scheduler, "step"):
            raise ConfigurationError(
                f"configure_optimizers: {_describe(config.scheduler)} is not a scheduler, as it has no step(): return "
                "one that has, or override lr_scheduler_step."
            )
    if module is not None:
        _check_parameters(optimizers, module)
    return optimizers, schedulers


def check_kind(optimizer: Optimizer) -> None:
    """Refuse optimizers whose state checkpoints cannot hold.

    Raises:
        ConfigurationError: it is one of them.
    """
    kinds = {kind.__name__ for part in optimizers_in(optimizer) for kind in type(part).__mro__}
    if "CPUOffloadOptimizer" in kinds:
        raise ConfigurationError(
            "CPUOffloadOptimizer steps its own copies of the parameters by other optimizers, which checkpoints and "
            "schedulers do not see: use an ordinary optimizer with strategy='fsdp-offload' or 'zero2-offload'."
        )


def switches_weights(optimizer: Any) -> bool:
    """Whether an optimizer trains other weights than those to evaluate, which ``train`` and ``eval`` switch."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group; a tensor stays the same one, which the update may have compiled."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _resolved(returned: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _from_dicts([returned])
    if isinstance(returned, Sequence):
        if _are_all(returned, Optimizer):
            return list(returned), []
        if returned and _are_all(returned, Mapping):
            return _from_dicts(returned)
        if len(returned) == 2:
            optimizers = [returned[0]] if isinstance(returned[0], Optimizer) else returned[0]
            schedulers = returned[1] if isinstance(returned[1], Sequence) else [returned[1]]
            if _are_all(optimizers, Optimizer):
                return _checked(list(optimizers), [_scheduler(item) for item in schedulers if item is not None])
    raise ConfigurationError(f"configure_optimizers returned {_describe(returned)}; it must return {_FORMS}.")


def _named(
    config: SchedulerConfig, optimizers: Sequence[Optimizer], steps: Callable[[], float] | None
) -> LambdaLR | None:
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"configure_optimizers: lr_scheduler={config.scheduler!r} is for one optimizer, and there are "
            f"{len(optimizers)}: make a scheduler for each."
        )
    if config.interval != "step":
        raise ConfigurationError(
            f"configure_optimizers: lr_scheduler={config.scheduler!r} steps after each optimizer step; leave out "
            f"interval={config.interval!r}."
        )
    return None if steps is None else named_schedule(config.scheduler, optimizers[0], steps(), **config.options)


def _are_all(items: Any, kind: type[Any]) -> bool:
    return isinstance(items, Sequence) and all(isinstance(item, kind) for item in items)


def _from_dicts(items: Sequence[Mapping[str, Any]]) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    optimizers: list[Optimizer] = []
    schedulers: list[SchedulerConfig] = []
    for item in items:
        extra = set(item) - {"optimizer", "lr_scheduler", "monitor", "frequency"}
        if isinstance(item.get("lr_scheduler"), str):
            extra -= set(OPTIONS)
        if extra or not isinstance(item.get("optimizer"), Optimizer):
            what = f"the key {sorted(extra)[0]!r}" if extra else "no optimizer under 'optimizer'"
            hint = did_you_mean(sorted(extra)[0], ("optimizer", "lr_scheduler", "monitor")) if extra else ""
            raise ConfigurationError(
                f"configure_optimizers returned a dict with {what}.{hint} It must return {_FORMS}."
            )
        optimizers.append(item["optimizer"])
        if item.get("lr_scheduler") is not None:
            given = item["lr_scheduler"]
            if isinstance(given, str):
                given = {"scheduler": given, **{name: item[name] for name in OPTIONS if name in item}}
            config = _scheduler(given)
            config.monitor = config.monitor or item.get("monitor")
            schedulers.append(config)
    return _checked(optimizers, schedulers)


def _scheduler(given: Any) -> SchedulerConfig:
    if isinstance(given, str):
        given = {"scheduler": given}
    if not isinstance(given, Mapping):
        return SchedulerConfig(given)
    by_name = isinstance(given.get("scheduler"), str)
    known: tuple[str, ...] = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")
    known += OPTIONS if by_name else ()
    for key in given:
        if key not in known:
            raise ConfigurationError(
                f"configure_optimizers: the scheduler's key {key!r} is not known.{did_you_mean(key, known)} "
                f"Known: {', '.join(known)}."
            )
    if "scheduler" not in given:
        raise ConfigurationError("configure_optimizers: a scheduler's dict needs the scheduler under 'scheduler'.")
    values = {key: value for key, value in given.items() if key != "reduce_on_plateau" and key not in OPTIONS}
    if by_name:
        values.setdefault("interval", "step")
        values["options"] = {key: given[key] for key in OPTIONS if key in given}
    config = SchedulerConfig(**values)
    if config.interval not in ("epoch", "step"):
        raise ConfigurationError(
            f"configure_optimizers: interval={config.interval!r} is not known; a scheduler steps by 'epoch' or 'step'."
        )
    if not is_count(config.frequency, 1):
        raise ConfigurationError(
            f"configure_optimizers: frequency={config.frequency!r} must be a whole number of at least 1."
        )
    return config


def _checked(
    optimizers: list[Optimizer], schedulers: list[SchedulerConfig]
) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    for config in schedulers:
        if config.needs_metric and config.monitor is None:
            raise ConfigurationError(
                "configure_optimizers: ReduceLROnPlateau needs the name of a metric: "
                "return {'scheduler': ..., 'monitor': 'val_loss'}."
            )
        mine = getattr(config.scheduler, "optimizer", None)
        if isinstance(mine, Optimizer) and not any(mine in (each, *optimizers_in(each)) for each in optimizers):
            raise ConfigurationError(
                f"configure_optimizers: {type(config.scheduler).__name__} schedules an optimizer that is not returned."
            )
    return optimizers, schedulers


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer updates, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_parameters(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Refuse tensors that are not parameters of the module: they would not be moved, reduced over ranks, or saved."""
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        foreign = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in known]
        if foreign:
            raise ConfigurationError(
                f"configure_optimizers: {type(optimizer).__name__} updates {len(foreign)} tensor"
                f"{'s that are not parameters' if len(foreign) > 1 else ' that is not a parameter'} of "
                f"{type(module).__name__} (of shape {', '.join(map(str, foreign[:3]))}): make the network that holds "
                "it an attribute of the module, and make the optimizer of self.parameters()."
            )
        if not any(parameter.requires_grad for parameter in parameters):
            raise ConfigurationError(
                f"configure_optimizers: no parameter of {type(optimizer).__name__} requires a gradient, so nothing "
                "would be trained: unfreeze some."
            )


def _describe(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{a_type(value)} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return a_type(value)

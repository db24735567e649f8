"""The optimizer that DeepSpeed's engine steps: DeepSpeed's equivalent of the user's optimizer, or a copy of it.

The engine puts flat pieces of the master weights where an optimizer had the module's parameters. So the user's
object is never passed to the engine: it holds the hyperparameters, which every step reads, and lends its state.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError
from ...framework.core.optimizer_config import switches_weights
from ...framework.core.quantized_state import quantizes
from ...framework.core.split_optimizer import Split, kind_of, optimizers_in
from ..limits import updates_all_parameters, updates_full_parameters
from .arguments import ZeroOptions
from .flat_groups import full_size
from .library import query_processor_once

_log = logging.getLogger(__name__)

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")
_NOT_FOLLOWED = ("params", "fused", "foreach")
# The packages whose optimizers are known.
_KNOWN = ("torch.optim.", "deepspeed.")
# Options of torch's Adam that DeepSpeed's Adam lacks.
_TORCH_ONLY = ("amsgrad", "maximize", "differentiable")


def trained_groups(optimizer: Optimizer) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """Return the groups that hold parameters trained by the engine, with these parameters."""
    return [(group, trained) for group in optimizer.param_groups if (trained := _trained(group))]


def _trained(group: Mapping[str, Any]) -> list[Tensor]:
    return [one for one in group["params"] if one.requires_grad and full_size(one)]


def check_optimizer(optimizer: Optimizer, groups: Sequence[Any], options: ZeroOptions) -> None:
    """Refuse an optimizer whose updates would differ, or that the engine does not support.

    Raises:
        ConfigurationError: the optimizer needs full tensors, trains no parameters, or does not support the offload.
    """
    name = kind_of(optimizer)
    parts = optimizers_in(optimizer)
    needy = [part for part in parts if updates_full_parameters(part) or updates_all_parameters(part)]
    if needy:
        raise ConfigurationError(
            f"{type(needy[0]).__name__} needs full tensors, and ZeRO stage {options.stage} leaves each rank flat "
            "pieces of them: use an optimizer that updates each element independently, such as AdamW, or "
            "strategy='ddp'."
        )
    switching = [part for part in parts if switches_weights(part)]
    if switching:
        raise ConfigurationError(
            f"{type(switching[0]).__name__} switches the weights between training and evaluation itself, and ZeRO "
            f"stage {options.stage} gives it flat copies of them: use torch.optim.AdamW, or strategy='fsdp'."
        )
    if quantizes(optimizer):
        raise ConfigurationError(
            f"{name} quantizes its state in blocks of a parameter, and ZeRO stage {options.stage} gives optimizers "
            "flat pieces of several: use torch.optim.AdamW, or strategy='fsdp'."
        )
    # After those that are refused by name: the trial step of others may compile code.
    mixing = [part for part in parts if not _is_elementwise(part)]
    if mixing:
        raise ConfigurationError(
            f"the update that {type(mixing[0]).__name__} makes of an element depends on other elements, as by a norm, "
            f"and ZeRO stage {options.stage} leaves each rank flat pieces of parameters: use an optimizer that updates "
            "each element independently, such as AdamW, or strategy='ddp'."
        )
    if not groups:
        raise ConfigurationError(
            f"{name} holds no parameter that requires gradients, so DeepSpeed has nothing to train: unfreeze some, or "
            "pass the parameters that must be trained."
        )
    if any(isinstance(part, torch.optim.Adagrad) for part in parts) and (len(groups) > 1 or parts != [optimizer]):
        raise ConfigurationError(
            f"{name} with {len(optimizer.param_groups)} parameter groups is not possible under DeepSpeed, which "
            "rebuilds it with one: use Adagrad with one group, or strategy='fsdp'."
        )
    forced = options.config.get("zero_force_ds_cpu_optimizer", False)
    if options.offload_optimizer and forced and not _adam_kind(optimizer):
        raise ConfigurationError(
            f"{name} cannot be offloaded as the config's zero_force_ds_cpu_optimizer asks: use torch.optim.AdamW or "
            "Adam, or set it to false, which steps torch's own on the CPU."
        )


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates some elements alone as it does among others; True if that cannot be tried."""
    if type(optimizer).__module__.startswith(_KNOWN):
        return True
    values = torch.linspace(-1.0, 1.0, 12)

    def updated(count: int) -> Tensor:
        parameter = nn.Parameter(values[:count].clone())
        tried = _copy_of(optimizer, [(optimizer.param_groups[0], [parameter])])
        for name, value in vars(tried).items():
            if isinstance(value, (list, dict)) and name not in ("state", "param_groups"):
                setattr(tried, name, copy.copy(value))
        for scale in (1.0, 0.3, 2.0):
            parameter.grad = scale * values.flip(0)[:count].square()
            tried.step()
        return parameter.detach()

    try:
        with torch.random.fork_rng(devices=()):
            some, again, among = updated(5), updated(5), updated(12)[:5]
    except Exception:
        return True
    # One that adds noise differs from itself.
    return not torch.equal(some, again) or torch.allclose(some, among, rtol=1e-3, atol=1e-6)


def check_one_dtype(module: nn.Module, optimizer: Optimizer, computes: torch.dtype | None, strategy: str) -> None:
    """Refuse trained parameters of several dtypes, which the engine would convert to one.

    Args:
        module: the module of the parameters, for their names.
        computes: the dtype to which a mixed precision converts all of them; None for fp32, which converts none.
        strategy: the name of the strategy.

    Raises:
        ConfigurationError: naming a parameter of each dtype.
    """
    trained = {id(one) for _, parameters in trained_groups(optimizer) for one in parameters}
    found: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters():
        if id(parameter) in trained and not (computes is not None and parameter.is_floating_point()):
            found.setdefault(parameter.dtype, name)
    if len(found) > 1 or any(dtype.is_complex for dtype in found):
        shown = " and ".join(f"'{name}' in {str(dtype).removeprefix('torch.')}" for dtype, name in found.items())
        raise ConfigurationError(
            f"strategy={strategy!r} trains parameters of one real dtype, and the module has {shown}: convert them to "
            "one dtype, or use strategy='ddp'."
        )


def engine_optimizer(optimizer: Optimizer, options: ZeroOptions) -> Optimizer:
    """Return the optimizer that the engine gets, over the parameters that it trains.

    ``torch.optim.Adam`` and ``AdamW`` step in torch's fused form, or in DeepSpeed's CPU form where state is offloaded;
    any other optimizer, and an Adam with options that those lack, is a copy of the user's optimizer.

    Raises:
        ConfigurationError: see ``check_optimizer``.
    """
    groups = trained_groups(optimizer)
    check_optimizer(optimizer, groups, options)
    on_cpu = options.offload_optimizer is not None
    kind = _adam_kind(optimizer)
    if kind is None:
        return _copy_of(optimizer, groups)
    if not on_cpu and not hasattr(optimizer, "adam_w_mode"):
        # One pass over the flat tensors, as DeepSpeed's FusedAdam makes, without anything to compile.
        is_fused = not any(group.get("differentiable") for group in optimizer.param_groups)
        form = {"fused": True, "foreach": False} if is_fused else {}
        return _copy_of(optimizer, [({**group, **form}, params) for group, params in groups])
    lacking = [name for name in _TORCH_ONLY if any(group.get(name) for group in optimizer.param_groups)]
    decoupled = {_is_decoupled(optimizer, group) for group, _ in groups}
    if len(decoupled) > 1:
        lacking.append("different decoupled_weight_decay")
    if lacking:
        _log.info("DeepSpeed: torch.optim.%s stays, as DeepSpeedCPUAdam has no %s.", kind, ", ".join(lacking))
        return _copy_of(optimizer, groups)
    own = [{"params": params, **{key: plain(group[key]) for key in _ADAM_KEYS}} for group, params in groups]
    if not on_cpu:
        return (torch.optim.AdamW if decoupled == {True} else torch.optim.Adam)(own, fused=True)
    mode = "AdamW" if decoupled == {True} else "Adam"
    _log.info("DeepSpeed: DeepSpeedCPUAdam in %s mode steps in the place of torch.optim.%s.", mode, kind)
    query_processor_once()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    made: Optimizer = DeepSpeedCPUAdam(own, adamw_mode=mode == "AdamW")
    made.register_step_pre_hook(partial(_forget_powers, torch.empty(0)))
    return made


def _adam_kind(optimizer: Optimizer) -> str | None:
    """Return the class name if the optimizer is exactly ``Adam`` or ``AdamW``."""
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return type(optimizer).__name__
    # DeepSpeed's own Adam, passed by the user.
    return type(optimizer).__name__ if hasattr(optimizer, "adam_w_mode") else None


def _is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    if hasattr(optimizer, "adam_w_mode"):
        return bool(optimizer.adam_w_mode)
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def _forget_powers(nothing: Tensor, optimizer: Any, *_: Any) -> None:
    """Reset the cached powers of the betas in DeepSpeed's CPU Adam.

    It caches the powers in the process and multiplies them by the betas in each step, which differs from a power in the
    last bit. A resumed run, whose process has no cache, would then differ from the uninterrupted run. A step with other
    betas, on tensors without elements, clears the cache.
    """
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 1, 0.0, 0.0, 0.0, 1.0, 0.0, True, *[nothing] * 4)


def _copy_of(optimizer: Optimizer, groups: Sequence[tuple[dict[str, Any], list[Tensor]]]) -> Optimizer:
    """Return an optimizer of the same class and settings, without state, over the given parameters."""
    if isinstance(optimizer, Split):
        own = [{**group, "params": list(params)} for group, params in groups]
        return optimizer.over(own, lambda part, theirs: _copy_of(part, [(group, group["params"]) for group in theirs]))
    copied = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # A scheduler has replaced the step method of the user's object, which counts calls; the copy must not have it.
        if name != "step":
            setattr(copied, name, value)
    # Those that the user has set expect the user's object; see `Following`.
    copied._optimizer_step_pre_hooks, copied._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    copied.state = defaultdict(dict)
    copied.param_groups = [{**group, "params": list(params)} for group, params in groups]
    return copied


def plain(value: Any) -> Any:
    """Return a hyperparameter as a number, as DeepSpeed expects it: the lr of torch's Adam may be a tensor."""
    if isinstance(value, Tensor):
        return value.item()
    return tuple(plain(one) for one in value) if isinstance(value, tuple) else value


class Following:
    """Lets the engine's update follow the user's optimizer: its hyperparameters and its hooks.

    Args:
        optimizer: the user's optimizer.
        inner: the optimizer that the engine steps.
        frozen: parameters that the engine does not train, and that must not be unfrozen.
        strategy: the name of the strategy, for errors.
    """

    def __init__(self, optimizer: Optimizer, inner: Optimizer, frozen: Sequence[Tensor], strategy: str) -> None:
        self._optimizer, self._frozen, self._strategy = optimizer, frozen, strategy
        # Not the dicts: load_state_dict replaces them.
        mine = [place for place, group in enumerate(optimizer.param_groups) if _trained(group)]
        self._pairs = [
            (place, own, tuple(key for key in own if key in optimizer.param_groups[place] and key not in _NOT_FOLLOWED))
            for place, own in zip(mine, inner.param_groups, strict=True)
        ]
        self._members = [(group["params"], len(group["params"])) for group in optimizer.param_groups]

    def _has_other_members(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        # The lists and their lengths: comparing all parameters would take longer than copying hyperparameters.
        return len(groups) != len(self._members) or any(
            group["params"] is not members or len(members) != count
            for group, (members, count) in zip(groups, self._members, strict=True)
        )

    def check_frozen(self) -> None:
        """Refuse parameters that were unfrozen. To be called where parameters are torch's own.

        Raises:
            ConfigurationError: the engine has no state for one of them.
        """
        if sum(map(_REQUIRES_GRAD, self._frozen)):
            raise ConfigurationError(
                f"a parameter was unfrozen during training under strategy={self._strategy!r}, whose flat tensors are "
                "fixed when it starts: set requires_grad before the set-up, with a learning rate of 0 for what is not "
                "to move yet, or use strategy='ddp' or 'fsdp'."
            )

    def before(self) -> None:
        """Call the hooks that user code has set on the step of its optimizer, which the engine does not call."""
        for hook in tuple(self._optimizer._optimizer_step_pre_hooks.values()):
            hook(self._optimizer, (), {})

    def after(self) -> None:
        """Call the hooks after the step."""
        for hook in tuple(self._optimizer._optimizer_step_post_hooks.values()):
            hook(self._optimizer, (), {})

    def __call__(self) -> None:
        """Copy every hyperparameter that has changed.

        Raises:
            ConfigurationError: parameters were added to the groups or removed.
        """
        groups = self._optimizer.param_groups
        if self._has_other_members(groups):
            raise ConfigurationError(
                f"the parameter groups of {type(self._optimizer).__name__} were changed during training under "
                f"strategy={self._strategy!r}, whose flat tensors are fixed when it starts: give the optimizer all "
                "parameters at the start, with a learning rate of 0 where they are not to move yet, or use "
                "strategy='ddp' or 'fsdp'."
            )
        for place, own, keys in self._pairs:
            group = groups[place]
            for key in keys:
                value = group[key]
                if value is not own[key] and own[key] != value:
                    own[key] = plain(value)

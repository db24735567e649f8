"""``lightning.pytorch.utilities``: the functions and types that programs import from there.

The functions that act on rank 0 alone are those of ``lightning_utilities``, which read the rank from
``rank_zero_only.rank``. It is set here for code that runs before any Trainer or Fabric, and by ``World`` in each rank.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

import torch
from lightning_utilities.core.imports import RequirementCache
from lightning_utilities.core.rank_zero import (
    rank_prefixed_message as rank_prefixed_message,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from torch import Tensor, nn
from torch.distributed import ReduceOp as ReduceOp
from torch.utils.flop_counter import FlopCounterMode

from ....framework.api.callback import Callback
from ....framework.api.data_module import DataModule
from ....framework.api.overriding import is_overridden as _differs
from ....framework.api.train_module import TrainModule
from ....framework.core.hyperparameters import AttributeDict
from ....framework.data.combined_loader import CombinedLoader
from ....framework.distributed.rank_zero import set_rank_zero_functions
from ....framework.distributed.seed import capture, restore
from ....framework.distributed.world import placement
from ....framework.fabric.collectives import to_device as move_data_to_device
from ..aliases import submodules_of
from . import types as types

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "disable_possible_user_warnings",
    "grad_norm",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]

Optimizable = torch.optim.Optimizer
_OMEGACONF_AVAILABLE = RequirementCache("omegaconf")
_RICH_AVAILABLE = RequirementCache("rich")
_TORCHVISION_AVAILABLE = RequirementCache("torchvision")

__getattr__ = submodules_of(__name__)
set_rank_zero_functions(placement().rank)


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Tensor], loss_fn: Callable[[Tensor], Tensor] | None = None
) -> int:
    """Return the floating-point operations of a forward pass and, with ``loss_fn``, of its backward pass.

    Build the model and its inputs on the meta device to count without computing.

    Args:
        model: the module that ``forward_fn`` calls; gradients of its parameters are not kept.
        forward_fn: runs a forward pass and returns its output.
        loss_fn: computes the loss from the output.
    """
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None  # backward would add to a gradient in place
    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    for parameter, gradient in kept:
        parameter.grad = gradient
    return int(counter.get_total_flops())


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and of all gradients together.

    Under a strategy that shards parameters use the callback ``GradientNormMonitor``, which combines the ranks' parts.

    Args:
        module: the module whose gradients are measured.
        norm_type: order p of the p-norm, or ``"inf"``.
        group_separator: stands between ``grad_{p}_norm`` and a parameter's name.

    Raises:
        ValueError: the order is not positive.
    """
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"norm_type={norm_type!r} is not allowed: give a number above 0, or 'inf'.")
    norms = {
        f"grad_{order}_norm{group_separator}{name}": torch.linalg.vector_norm(parameter.grad, order)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), order)
    return norms


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the ``__init__`` that a frame runs, without ``self`` and without ``*args``."""
    names, _, keywords, values = inspect.getargvalues(frame)
    found = {name: values[name] for name in names[1:]}
    return found if keywords is None else {**found, **values[keywords]}


class PossibleUserWarning(UserWarning):
    """The category by which programs filter Lightning's hints. phalanx does not emit it."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore warnings of the category ``PossibleUserWarning``.

    Args:
        module: a regular expression for the modules whose warnings are ignored; all by default.
    """
    warnings.filterwarnings("ignore", category=PossibleUserWarning, module=module)


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore the state of all random generators of this process at the end of the block.

    Args:
        include_cuda: accepted for compatibility with Lightning; generators of devices in use are always restored.
    """
    state = capture()
    try:
        yield
    finally:
        restore(state)


def is_overridden(method_name: str, instance: object, parent: type | None = None) -> bool:
    """Whether an object's method differs from that of its base class.

    Args:
        method_name: name of the method.
        instance: a module, a data module or a callback.
        parent: the base class; by default the one of phalanx that the object derives from.

    Raises:
        ValueError: the object derives from none of them, and ``parent`` is not given.
    """
    bases = (TrainModule, DataModule, Callback) if parent is None else (parent,)
    for base in bases:
        if isinstance(instance, base):
            return _differs(method_name, instance, base)
    if parent is None:
        raise ValueError(f"is_overridden got a {type(instance).__name__}: give parent, the class to compare it with.")
    return False


def get_torchvision_model(model_name: str, **kwargs: Any) -> nn.Module:
    """Return a model of torchvision, as ``torchvision.models.get_model`` does.

    Args:
        model_name: name of the model, such as ``"resnet18"``.
        kwargs: arguments of the model, such as ``weights="DEFAULT"``.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    models: Any = import_module("torchvision.models")
    model: nn.Module = models.get_model(model_name, **kwargs)
    return model


def cli_lightning_logo() -> None:
    """Print nothing: the logo is Lightning's."""

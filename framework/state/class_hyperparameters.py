"""Hyperparameters that are classes: a checkpoint holds their names, and only classes that are imported are found again.

Nothing is imported because of a file. As a module's constructor may call what it is given, only modules, optimizers and
schedulers are looked up by name; any other class must be the default of its argument.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from inspect import Parameter, getattr_static
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_KINDS = (nn.Module, Optimizer, LRScheduler)


def is_named_class(value: Any) -> bool:
    """Return whether a hyperparameter is a class that its name identifies."""
    return isinstance(value, type) and issubclass(value, _KINDS) and "<" not in value.__qualname__


def class_names(hparams: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the hyperparameters that are classes, as ``"package.module:Class"``."""
    return {name: _name(value) for name, value in hparams.items() if isinstance(value, type)}


def imported_classes(names: Any, parameters: Mapping[str, Parameter]) -> dict[str, type]:
    """Return the classes of ``class_names`` that this process has imported, or that are the default of their argument.

    Args:
        names: the names in a checkpoint.
        parameters: the parameters of the constructor that takes them.
    """
    found: dict[str, type] = {}
    for argument, name in names.items() if isinstance(names, dict) else ():
        default = parameters[argument].default if argument in parameters else None
        if isinstance(default, type) and name == _name(default):
            found[argument] = default
        elif isinstance(name, str) and (kind := _imported(name)) is not None:
            found[argument] = kind
    return found


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _imported(name: str) -> type | None:
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        # Not getattr, which may import a module or run a property.
        value = getattr_static(value, part, None)
    return value if is_named_class(value) and _name(value) == name else None

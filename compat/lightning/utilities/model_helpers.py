"""``lightning.pytorch.utilities.model_helpers``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from ....framework.api.callback import Callback
from ....framework.api.data_module import DataModule
from ....framework.api.overriding import is_overridden as _differs
from ....framework.api.train_module import TrainModule

__all__ = ["get_torchvision_model", "is_overridden"]


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

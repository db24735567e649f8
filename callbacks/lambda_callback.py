"""``LambdaCallback``: a callback whose hooks are functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError, unknown

_HOOKS = sorted(name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown"))


class LambdaCallback(Callback):
    """Call plain functions at hooks: ``LambdaCallback(on_train_epoch_end=lambda trainer, module: ...)``.

    Args:
        hooks: Functions by the name of their hook. A function takes the arguments of the hook of ``Callback``, without
            ``self``.

    Raises:
        UnknownNameError: A hook of this name does not exist.
        ConfigurationError: A value is not callable.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            if name not in _HOOKS:
                raise unknown("LambdaCallback: hook", name, _HOOKS)
            if not callable(function):
                raise ConfigurationError(f"LambdaCallback({name}={function!r}): give a function.")
            setattr(self, name, function)

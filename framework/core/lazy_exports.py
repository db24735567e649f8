"""Lazy imports of public names (PEP 562): a program loads only the modules that it uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def face(
    module: str, homes: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a module whose names are defined in other modules.

    Args:
        module: the ``__name__`` of the public module.
        homes: each public name and the module that defines it, relative to the public module's package.
        modules: the names that denote the module itself rather than an attribute of it.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        own = sys.modules[module]
        home = import_module(homes[name], own.__package__)
        value = home if name in modules else getattr(home, name)
        setattr(own, name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*homes, *vars(sys.modules[module])})

    return __getattr__, __dir__


def on_call(package: str, homes: Mapping[str, str]) -> Callable[[str], Callable[..., Any]]:
    """Return ``__getattr__`` for a package whose functions are imported when they are first called.

    ``from ..package import function`` then costs nothing, and the importing module needs no import inside a function.
    Each call looks the function up again, which takes about a microsecond: use it for functions that run a few times in
    a run. A class can be instantiated in this way, but not subclassed or used with ``isinstance``.

    Args:
        package: the ``__name__`` of the package.
        homes: each function and the module that defines it, relative to the package.
    """

    def __getattr__(name: str) -> Callable[..., Any]:
        # `from ..package import module` asks for the module here first, and imports it after this error.
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(homes[name], package), name)(*args, **kwargs)

        return call

    return __getattr__

"""A public face: a module whose names are fetched from others when they are first asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def face(
    module: str, homes: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a module whose names live elsewhere.

    Args:
        module: the ``__name__`` of the public module.
        homes: each public name and the module that defines it, relative to the public module's package.
        modules: the names that stand for the module itself rather than for an attribute of it.
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

"""A public face: a module whose names are fetched from others when they are first asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def face(module: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a module whose names live elsewhere.

    ``homes`` maps a name to its home, a module relative to the face's package. A home that is called as the name is
    what the name stands for.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        own = sys.modules[module]
        home = import_module(homes[name], own.__package__)
        value = home if homes[name].rpartition(".")[2] == name else getattr(home, name)
        setattr(own, name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*homes, *vars(sys.modules[module])})

    return __getattr__, __dir__

"""Lazy imports of public names (PEP 562): a program loads only the modules that it uses.

A table of homes maps each module, relative to the package, to the names that it defines, separated by spaces. The
module ``"."`` is the package itself, whose names are submodules. ``"alias=name"`` exports a name under another one.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from opcode import opmap
from types import MappingProxyType
from typing import Any

from .errors import did_you_mean


def face(
    module: str, homes: Mapping[str, str], absent: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` for a module whose names are defined in other modules.

    Args:
        module: the ``__name__`` of the public module.
        homes: the modules that define the public names, relative to the public module's package.
        absent: names of other libraries that users look for here, each with a sentence that says what to use instead.
            Access to one raises an ``ImportError`` with the sentence, as ``from module import name`` would replace the
            message of an ``AttributeError``.
    """
    table = _by_name(homes)

    def __getattr__(name: str) -> Any:
        if name in absent:
            raise ImportError(f"{module} has no {name}: {absent[name]}", name=name)
        if name not in table:
            close = did_you_mean(name, table)
            caller = sys._getframe(1)
            # Python replaces the message of an AttributeError, but only this statement may get another class of error.
            if close and caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
                raise ImportError(f"cannot import name {name!r} from {module!r}.{close}", name=module)
            listed = f"; it has {', '.join(sorted(table))}" if not close else f".{close}"
            raise AttributeError(f"module {module!r} has no attribute {name!r}{listed}")
        own, (home, attribute) = sys.modules[module], table[name]
        collects = gc.isenabled()
        # What is imported stays. A full collection in between walks every object of torch, which takes 90 ms: half the
        # time of the import of the Trainer.
        gc.disable()
        try:
            value = (
                import_module(f".{attribute}", own.__package__)
                if home == "."
                else getattr(import_module(home, own.__package__), attribute)
            )
        finally:
            if collects:
                gc.enable()
        setattr(own, name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*table, *vars(sys.modules[module])})

    return sorted(table), __getattr__, __dir__


def on_call(package: str, homes: Mapping[str, str]) -> Callable[[str], Callable[..., Any]]:
    """Return ``__getattr__`` for a package whose functions are imported when they are first called.

    ``from ..package import function`` then costs nothing, and the importing module needs no import inside a function.
    Each call looks the function up again, which takes about a microsecond: use it for functions that run a few times in
    a run. A class can be instantiated in this way, but not subclassed or used with ``isinstance``.

    Args:
        package: the ``__name__`` of the package.
        homes: the modules that define the functions, relative to the package.
    """
    table = _by_name(homes)

    def __getattr__(name: str) -> Callable[..., Any]:
        # `from ..package import module` asks for the module here first, and imports it after this error.
        if name not in table:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")

        home, attribute = table[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(home, package), attribute)(*args, **kwargs)

        return call

    return __getattr__


def _by_name(homes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the module and the attribute behind each exported name."""
    pairs = ((home, name.partition("=")) for home, names in homes.items() for name in names.split())
    return {alias: (home, attribute or alias) for home, (alias, _, attribute) in pairs}

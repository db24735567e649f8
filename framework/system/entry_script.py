"""``Script``: what this process runs, and how it is run again as it was started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

# Running these again in every rank would run all their tests until they come to the same place.
_TEST_RUNNERS = frozenset({"pytest", "py.test", "_pytest", "unittest", "nose2"})


@dataclass(frozen=True)
class Script:
    """A script, or a module, with everything that it was started with."""

    interpreter: list[str]
    """The interpreter and its own options."""
    target: str
    """A file, or the name of a module."""
    is_module: bool
    arguments: list[str]

    @classmethod
    def running(cls) -> Script:
        """Return what this process runs; ``can_rerun_script`` must hold."""
        main = sys.modules["__main__"]
        module = _module_name(main)
        target = os.path.abspath(str(main.__file__)) if module is None else module
        interpreter = [sys.executable, *_interpreter_flags(sys.orig_argv)]
        return cls(interpreter, target, module is not None, sys.argv[1:])

    @property
    def is_compiled(self) -> bool:
        """Whether it is a file of byte code."""
        return not self.is_module and self.target.endswith(".pyc")

    @property
    def command(self) -> list[str]:
        """The command that runs it."""
        return [*self.interpreter, *(["-m"] if self.is_module else []), self.target, *self.arguments]


def can_rerun_script() -> bool:
    """Whether this process runs a script or module that can be run again: not a notebook, an interpreter or tests."""
    main = sys.modules.get("__main__")
    if main is None or hasattr(sys, "ps1"):
        return False
    module = _module_name(main)
    if module is not None:
        return module.partition(".")[0] not in _TEST_RUNNERS
    file = getattr(main, "__file__", None)
    return file is not None and os.path.isfile(file) and os.path.basename(file) not in _TEST_RUNNERS


def _module_name(main: ModuleType) -> str | None:
    """Return the name after ``python -m``, or None for a script; a folder or an archive that is run counts as one."""
    spec = main.__spec__
    if spec is None or spec.name == "__main__":
        return None
    return spec.name.removesuffix(".__main__")


def _interpreter_flags(arguments: Sequence[str]) -> list[str]:
    """Return the interpreter's own options out of a whole command line, such as ``-X dev -W error -O``."""
    flags: list[str] = []
    rest = iter(arguments[1:])
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            break
        if argument.startswith("--"):
            flags += [argument, next(rest)] if argument == "--check-hash-based-pycs" else [argument]
            continue
        place = next((place for place, letter in enumerate(argument) if letter in "cmXW"), None)
        if place is not None and argument[place] in "cm":
            # What is to be run begins here, perhaps behind options in one word: -um module.
            flags += [argument[:place]] if place > 1 else []
            break
        flags.append(argument)
        if place == len(argument) - 1:
            flags.append(next(rest))
    return flags

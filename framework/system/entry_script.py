"""``Script``: the script or module that this process runs, and the command that runs it again."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

# Run again in every rank, these would repeat all of their tests up to the present one.
_TEST_RUNNERS = frozenset({"pytest", "py.test", "_pytest", "unittest", "nose2"})


@dataclass(frozen=True)
class Script:
    """A script or module, with the interpreter options and arguments that it was started with."""

    interpreter: list[str]
    """The interpreter and its own options."""
    target: str
    """A file, or the name of a module."""
    is_module: bool
    arguments: list[str]

    @classmethod
    def running(cls) -> Script:
        """Return the script of this process; ``can_rerun_script`` must hold."""
        main = sys.modules["__main__"]
        module = _module_name(main)
        target = os.path.abspath(str(main.__file__)) if module is None else module
        interpreter = [sys.executable, *_interpreter_flags(sys.orig_argv)]
        return cls(interpreter, target, module is not None, sys.argv[1:])

    @property
    def is_compiled(self) -> bool:
        """Whether the script is a byte-code file."""
        return not self.is_module and self.target.endswith(".pyc")

    @property
    def command(self) -> list[str]:
        """The command that runs the script."""
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
    """Return the name after ``python -m``, or None for a script, which may be a folder or an archive."""
    spec = main.__spec__
    if spec is None or spec.name == "__main__":
        return None
    return spec.name.removesuffix(".__main__")


def _interpreter_flags(arguments: Sequence[str]) -> list[str]:
    """Return the interpreter's own options in a command line, such as ``-X dev -W error -O``."""
    flags: list[str] = []
    rest = iter(arguments[1:])
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            break
        if argument.startswith("--"):
            flags += [argument, next(rest)] if argument == "--check-hash-based-pycs" else [argument]
            continue
        index = next((index for index, letter in enumerate(argument) if letter in "cmXW"), None)
        if index is not None and argument[index] in "cm":
            # The module or command follows, perhaps after options in the same word: -um module.
            flags += [argument[:index]] if index > 1 else []
            break
        flags.append(argument)
        if index == len(argument) - 1:
            flags.append(next(rest))
    return flags

"""``Script``: the script or module that this process runs, and the command that runs it again."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from ..core.package_paths import first_directory
from .environment import directory_of_start

# Run again in every rank, these would repeat all of their tests up to the present one.
_TEST_RUNNERS = frozenset({"pytest", "py.test", "_pytest", "unittest", "nose2"})


@dataclass(frozen=True)
class Script:
    """A script or module, with the interpreter options, arguments and directory that it was started with."""

    interpreter: list[str]
    """The interpreter and its own options."""
    target: str
    """A file, or the name of a module."""
    is_module: bool
    arguments: list[str]
    directory: str | None = None
    """The directory to start it in; None for the one of this process."""

    @classmethod
    def running(cls) -> Script:
        """Return the script of this process; ``can_rerun_script`` must hold."""
        main = sys.modules["__main__"]
        module = _module_name(main)
        target = os.path.abspath(str(main.__file__)) if module is None else module
        flags, given, arguments = _parsed(sys.orig_argv)
        file = str(getattr(main, "__file__", ""))
        if given != module and not _is_script(given, file):
            # A debugger or another program has started the script.
            arguments = sys.argv[1:]
        directory = _directory_of(given if module is None else _file_of(module, main), file)
        if directory is None or (module is not None and directory != sys.path[0]):
            directory = first_directory()
        return cls([sys.executable, *flags], target, module is not None, arguments, directory)

    @property
    def is_compiled(self) -> bool:
        """Whether the script is a byte-code file."""
        return not self.is_module and self.target.endswith(".pyc")

    @property
    def command(self) -> list[str]:
        """The command that runs the script."""
        return [*self.interpreter, *(["-m"] if self.is_module else []), self.target, *self.arguments]


def return_to_directory() -> None:
    """In a rank, undo a relative change of directory that its script has made for the second time.

    Ranks start in the first directory of the process that starts them, as far as it is known: this is for a script that
    is called by its absolute path, and changes the directory before it imports phalanx.
    """
    there, here = directory_of_start(), os.getcwd()
    if there and here.startswith(f"{there}{os.sep}") and there.endswith(here.removeprefix(there)):
        os.chdir(there)


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


def _file_of(module: str, main: ModuleType) -> str:
    """Return the path of a module below the folder that it is imported from."""
    name = module if main.__spec__ is None else main.__spec__.name
    return f"{name.replace('.', os.sep)}.py"


def _directory_of(given: str, file: str) -> str | None:
    """Return the directory in which a relative path means a file; None for another path.

    It is known even if the script has changed the directory before it imported phalanx.
    """
    name = f"{os.sep}{given}"
    is_below = given and not os.path.isabs(given) and file.endswith(name)
    return (file.removesuffix(name) or os.sep) if is_below else None


def _is_script(given: str, file: str) -> bool:
    """Whether a command line that names a script, or its folder, has started this file."""
    names = given, os.path.join(given, "__main__.py")
    return bool(given) and any(file == name or file.endswith(f"{os.sep}{name}") for name in names)


def _parsed(command: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return the interpreter's own options in a command line, such as ``-X dev -W error -O``, the script or module, and
    the arguments."""
    flags: list[str] = []
    rest = iter(command[1:])
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            return flags, argument, [*rest]
        if argument.startswith("--"):
            flags += [argument, next(rest)] if argument == "--check-hash-based-pycs" else [argument]
            continue
        index = next((index for index, letter in enumerate(argument) if letter in "cmXW"), None)
        if index is not None and argument[index] in "cm":
            # The module or command follows, perhaps after options in the same word: -um module.
            flags += [argument[:index]] if index > 1 else []
            return flags, argument[index + 1 :] or next(rest, ""), [*rest]
        flags.append(argument)
        if index == len(argument) - 1:
            flags.append(next(rest))
    return flags, "", []

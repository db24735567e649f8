"""Files and classes of the user that a command line names."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ..framework.core.errors import ConfigurationError, did_you_mean


def require_file(given: str, what: str = "file") -> None:
    """Refuse a file that does not exist.

    Args:
        given: the path on the command line.
        what: the kind of file, for the message.

    Raises:
        ConfigurationError: there is no such file; the message has the closest name in its folder.
    """
    path = Path(given)
    if not path.is_file():
        names = os.listdir(path.parent) if path.parent.is_dir() else []
        raise ConfigurationError(f"There is no {what} {given!r}.{did_you_mean(path.name, names)}")


def find_module(given: str, option: str = "--module ") -> Any:
    """Import the class that ``package.module:Class`` names; the working directory is searched too.

    Raises:
        ConfigurationError: the text is not of that form, or there is no such class.
    """
    name, _, attribute = given.partition(":")
    if not name or not attribute:
        raise ConfigurationError(f"{option}{given!r} must be of the form package.module:Class.")
    search_working_directory()
    try:
        module = import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"{option}{given!r} cannot be imported: {error}.") from error
    if not hasattr(module, attribute):
        raise ConfigurationError(f"{option}{given!r}: {name} has no {attribute}.{did_you_mean(attribute, dir(module))}")
    return getattr(module, attribute)


def search_working_directory() -> None:
    """Let the user's modules in the working directory be imported."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())

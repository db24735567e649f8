"""Import of a user's class that is named on the command line."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from ..framework.core.errors import ConfigurationError, did_you_mean


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

"""Files that a command line names: a missing one is answered with the closest name in its folder."""

from __future__ import annotations

import os
from pathlib import Path

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

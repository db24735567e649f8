"""URLs of object storage, and the local directories in which their objects are cached."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from ..core.errors import ConfigurationError, did_you_mean
from ..system.environment import cache_directory

Location: TypeAlias = "str | os.PathLike[str]"
"""A path, or a URL."""

# A path object of a URL has lost one of the slashes. One letter is a drive of Windows.
_URL = re.compile(r"(?P<protocol>[a-zA-Z][a-zA-Z0-9+.-]+):/{1,2}(?P<rest>.*)", re.DOTALL)
_LOCAL = ("file", "local")
# A slash at the beginning of a URL's rest: the path of a file has one, the name of a bucket has none.
_ROOT = "_root"


def is_url(location: object) -> bool:
    """Whether a location is a URL."""
    return _URL.fullmatch(str(location)) is not None


def local_place(location: Location) -> Path:
    """Return the local directory of a location: a path itself, for a URL the directory in which it is cached.

    Raises:
        ConfigurationError: the URL has an unknown protocol, or a password.
    """
    match = _URL.fullmatch(str(location))
    if match is None:
        if "://" in str(location):
            raise ConfigurationError(f"{str(location)!r} is neither a path nor a URL: write PROTOCOL://BUCKET/PATH.")
        return Path(location).expanduser()
    protocol, rest = match["protocol"].lower(), match["rest"]
    _check(protocol, rest, str(location))
    if protocol in _LOCAL:
        protocol, rest = "file", os.path.abspath("/" + rest)
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ConfigurationError(f"{str(location)!r} has '..' in it: write the URL without.")
    return _cache().joinpath(protocol, *([_ROOT] if rest.startswith("/") else []), *parts)


def url_of(path: Location) -> str | None:
    """Return the URL whose objects a local path caches; None for any other path.

    Example:
        >>> url_of(trainer.checkpoint_callback.best_model_path)
        's3://bucket/run/phalanx_logs/version_0/checkpoints/last.ckpt'
    """
    path = local_place(path) if is_url(path) else path
    try:
        protocol, *parts = Path(os.path.abspath(path)).relative_to(_cache()).parts
    except ValueError:
        return None
    return f"{protocol}://" + "/".join(["", *parts[1:]] if parts[:1] == [_ROOT] else parts)


def portable(path: Location) -> str:
    """Return a path as other machines find it: the URL whose objects it caches, or itself. See ``local_place``."""
    return url_of(path) or os.fspath(path)


def _cache() -> Path:
    return cache_directory() / "remote"


def _check(protocol: str, rest: str, given: str) -> None:
    if ":" in rest.partition("/")[0].rpartition("@")[0]:
        raise ConfigurationError(
            f"A URL of {protocol} has a password in it: give it to the library of this protocol, in the environment."
        )
    if protocol in _LOCAL:
        return
    if find_spec("fsspec") is None:
        raise ConfigurationError(f"{given!r} needs fsspec, which is not installed: pip install 'fsspec>=2025.3'.")
    from fsspec.registry import get_filesystem_class, known_implementations, registry

    known = {*known_implementations, *registry}
    if protocol not in known:
        close = did_you_mean(protocol, known) or " Known are those of fsspec: s3, gs, az, hf and others."
        raise ConfigurationError(f"{given!r} has the unknown protocol {protocol!r}.{close}")
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        raise ConfigurationError(f"{given!r} needs a package that is not installed. {error}.") from None

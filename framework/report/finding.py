"""The runs below a directory, and the run that a name on the command line refers to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import ConfigurationError, did_you_mean
from ..storage.cached_url import url_of
from ..system.run_directory import CONFIG, REPORT
from .recorder import STATUS
from .run_files import is_run

# A search in a home directory must end: runs are root/name/version_n, and a root is rarely deeper than this.
_MOST_LEVELS = 5
_MOST_DIRECTORIES = 20_000
_SKIPPED = {"checkpoints", "ranks", "node_modules", "__pycache__", "site-packages"}


def find_runs(root: Path) -> list[Path]:
    """Return the directories of the runs below ``root``, which may be one itself, the newest first.

    Raises:
        ConfigurationError: there is no such directory.
    """
    if not root.is_dir():
        raise ConfigurationError(f"{str(root)!r} is not a directory: give one that holds runs, or none for this one.")
    return sorted(_below(root), key=lambda path: (_changed(path), str(path)), reverse=True)


def find_run(given: str | None) -> Path:
    """Return the directory of a run: the newest below the working directory, or the one that ``given`` refers to.

    Args:
        given: the path of a run or of a file in it, a directory of runs, of which the newest is taken, or the last
            parts of a run's path: ``phalanx_logs/version_3``, ``version_3`` or ``3``.

    Raises:
        ConfigurationError: there is no such run; the message has the closest name.
    """
    if given is None:
        found = find_runs(Path())
        if not found:
            raise ConfigurationError("There is no run below '.': give the directory of a run.")
        return found[0]
    path = Path(given)
    if is_run(path):
        return path
    if path.is_file() and is_run(path.parent):
        return path.parent
    if path.is_dir() and (below := find_runs(path)):
        return below[0]
    known = find_runs(Path())
    wanted = (given.strip("/"), f"version_{given}")
    for run in known:
        if any(f"/{run.absolute().as_posix()}".endswith(f"/{name}") for name in wanted):
            return run
    raise ConfigurationError(f"There is no run {given!r}.{_closest(given, [shown_path(run) for run in known])}")


def _closest(given: str, names: list[str]) -> str:
    """Return a hint at the run whose path, or the last part of it, is closest to a name."""
    last = {name.rpartition("/")[2]: name for name in reversed(names)}
    hint = did_you_mean(given, names) or did_you_mean(given, last)
    if hint or not names:
        return hint or " There are no runs here."
    return f" The newest one is {names[0]!r}."


def shown_path(path: Path) -> str:
    """Return a path as a user types it: relative if it is below the working directory, the URL if it caches one."""
    if (url := url_of(path)) is not None:
        return url
    try:
        return path.absolute().relative_to(Path.cwd()).as_posix() or "."
    except ValueError:
        return path.as_posix()


def _below(root: Path) -> Iterator[Path]:
    level, visited = [root], 0
    for _ in range(_MOST_LEVELS):
        following: list[Path] = []
        for path in level:
            visited += 1
            if visited > _MOST_DIRECTORIES:
                return
            if is_run(path):
                yield path
            else:
                following += _directories(path)
        level = following


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [path / name for name in sorted(names) if not name.startswith(".") and name not in _SKIPPED]


def _changed(path: Path) -> float:
    """Return when a run last wrote one of its documents."""
    times = [0.0]
    for name in (STATUS, REPORT, CONFIG):
        try:
            times.append(os.stat(path / name).st_mtime)
        except OSError:
            continue
    return max(times)

"""What a rank leaves behind when it fails: small files in a private directory, read by the process that started it."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core.errors import PhalanxError
from .traceback_summary import brief_traceback

INTERRUPTED = 130


@dataclass(frozen=True)
class Failure:
    """One rank's failure. ``seconds`` is the machine's monotonic clock, so failures of several ranks have an order."""

    rank: int
    pid: int
    seconds: float
    exit_code: int
    kind: str
    message: str
    traceback: str
    brief: str = ""
    """The traceback without what lies in phalanx and torch."""

    @classmethod
    def of(cls, rank: int, error: BaseException, hide: Callable[[str], str] = str) -> Failure:
        """Describe ``error``, which ends this process; ``hide`` takes out of a text what must not be read."""
        text = hide("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        kind, message, brief = type(error).__qualname__, hide(str(error)), hide(brief_traceback(error))
        return cls(rank, os.getpid(), time.monotonic(), exit_code_of(error), kind, message, text, brief)


def exit_code_of(error: BaseException) -> int:
    """Return what a process ends with when ``error`` is not caught."""
    if isinstance(error, PhalanxError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def record_failure(directory: str, failure: Failure) -> None:
    """Leave ``failure`` for the process that started this one."""
    _write_failure(_path(directory, failure.rank, "json"), failure)


def read_failure(directory: str, rank: int) -> Failure | None:
    """Return what ``rank`` recorded, or None if it recorded nothing."""
    return _read_failure(_path(directory, rank, "json"))


def record_trouble(directory: str, failure: Failure) -> None:
    """Note an error that is about to end ``rank``: what it does on its way out other ranks may fail of."""
    _write_failure(_path(directory, failure.rank, "trouble"), failure)


def read_trouble(directory: str, rank: int) -> Failure | None:
    """Return the error that is about to end ``rank``, or None."""
    return _read_failure(_path(directory, rank, "trouble"))


def forget_trouble(directory: str, rank: int) -> None:
    """The error did not end ``rank``: somebody caught it."""
    _path(directory, rank, "trouble").unlink(missing_ok=True)


def record_leaving(directory: str, rank: int) -> None:
    """Note the moment from which other ranks may fail because ``rank`` leaves them."""
    write_whole(_path(directory, rank, "leaving"), repr(time.monotonic()))


def read_leaving(directory: str, rank: int) -> float | None:
    """Return the monotonic time at which ``rank`` began to leave, or None if it did not."""
    text = _read(_path(directory, rank, "leaving"))
    return None if text is None else float(text)


def record_meeting(directory: str, rank: int) -> None:
    """Note that ``rank`` has met the others: from now on it may hold something that would be lost with it."""
    write_whole(_path(directory, rank, "met"), "")


def has_met(directory: str, rank: int) -> bool:
    """Whether ``rank`` has met the others."""
    return _path(directory, rank, "met").exists()


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: the file may be read at any moment, and this process may be killed."""
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8", errors="backslashreplace")
    draft.replace(path)


def _write_failure(path: Path, failure: Failure) -> None:
    write_whole(path, json.dumps(asdict(failure)))


def _read_failure(path: Path) -> Failure | None:
    text = _read(path)
    return None if text is None else Failure(**json.loads(text))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _path(directory: str, rank: int, kind: str) -> Path:
    return Path(directory) / f"rank_{rank}.{kind}"

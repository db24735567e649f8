"""``RankRecords``: small files in a private directory by which ranks report to the supervisor that started them.

error     the error that ended the rank, with a short traceback
pending   an error that is about to end it: other ranks may fail because of its exit
leaving   the time from which other ranks may fail because this one leaves the process group
joined    the rank has joined the process group, so its failure may lose work

A short traceback leaves out the frames in phalanx and torch between the user's own lines. Does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from ..core.errors import (
    INTERRUPTED as INTERRUPTED,
    CheckpointError,
    ConfigurationError,
    DataError,
    LoopError,
    LostRankError,
    MetricError,
    PhalanxError,
    StorageError,
)
from ..core.package_paths import OWN_FOLDERS


@dataclass(frozen=True)
class Failure:
    """The error of one rank. ``seconds`` is the machine's monotonic clock, by which failures of ranks are ordered."""

    rank: int
    pid: int
    seconds: float
    exit_code: int
    kind: str
    message: str
    traceback: str
    brief: str = ""
    """The traceback without the frames of phalanx and torch."""
    lost_rank: int | None = None
    """The rank whose end is the cause, if the error is a ``LostRankError``."""

    @classmethod
    def of(cls, rank: int, error: BaseException, hide: Callable[[str], str] = str) -> Failure:
        """Describe ``error``; ``hide`` removes secrets from a text."""
        text = hide("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        kind, message, brief = type(error).__qualname__, hide(str(error)), hide(brief_traceback(error))
        lost = error.lost_rank if isinstance(error, LostRankError) else None
        return cls(rank, os.getpid(), time.monotonic(), exit_code_of(error), kind, message, text, brief, lost)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``."""
    if isinstance(error, PhalanxError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


class RankRecords:
    """The records of the ranks of one attempt, in ``directory``. With None nothing is recorded.

    A record that cannot be written, as on a full disk, is left out: it must not become the error that ends the rank.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = None if directory is None else Path(directory)

    def failure(self, rank: int) -> Failure | None:
        """Return the error that ended ``rank``."""
        return self._failure(rank, "error")

    def pending_error(self, rank: int) -> Failure | None:
        """Return the error that is about to end ``rank``."""
        return self._failure(rank, "pending")

    def left_at(self, rank: int) -> float | None:
        """Return the monotonic time at which ``rank`` began to leave, or None if it did not."""
        text = self._read(rank, "leaving")
        return None if text is None else float(text)

    def has_joined(self, rank: int) -> bool:
        """Whether ``rank`` has joined the process group."""
        return self._read(rank, "joined") is not None

    def record_failure(self, failure: Failure) -> None:
        """Record the error that ends a rank.

        Raises:
            OSError: the file cannot be written; the rank then prints the error itself.
        """
        if self._directory is not None:
            write_atomically(self._path(self._directory, failure.rank, "error"), json.dumps(asdict(failure)))

    def record_pending_error(self, rank: int, error: BaseException, hide: Callable[[str], str] = str) -> None:
        """Record an error that is about to end a rank, before anything is torn down."""
        if self._directory is not None:
            self._write(rank, "pending", json.dumps(asdict(Failure.of(rank, error, hide))))

    def clear_pending_error(self, rank: int) -> None:
        """Remove the record of the pending error: the error was caught and did not end the rank."""
        if self._directory is not None:
            with contextlib.suppress(OSError):
                self._path(self._directory, rank, "pending").unlink(missing_ok=True)

    def record_leaving(self, rank: int) -> None:
        """Record that a rank leaves the process group now."""
        self._write(rank, "leaving", repr(time.monotonic()))

    def record_joined(self, rank: int) -> None:
        """Record that a rank has joined the process group."""
        self._write(rank, "joined", "")

    def _write(self, rank: int, kind: str, text: str) -> None:
        if self._directory is not None:
            with contextlib.suppress(OSError):
                write_atomically(self._path(self._directory, rank, kind), text)

    def _failure(self, rank: int, kind: str) -> Failure | None:
        text = self._read(rank, kind)
        return None if text is None else Failure(**json.loads(text))

    def _read(self, rank: int, kind: str) -> str | None:
        if self._directory is None:
            return None
        try:
            return self._path(self._directory, rank, kind).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    @staticmethod
    def _path(directory: Path, rank: int, kind: str) -> Path:
        return directory / f"rank_{rank}.{kind}"


def write_atomically(path: Path, text: str) -> None:
    """Write a file in full or not at all: it may be read at any moment, and this process may be killed."""
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8", errors="backslashreplace")
    draft.replace(path)


MOST_LINES = 28
_MESSAGE_HEAD, _MESSAGE_TAIL = 3, 6
_FRAME = '  File "'
# Their messages name what to change, so the frames that raised them are of no use.
_EXPLAINED = (ConfigurationError, CheckpointError, StorageError, DataError, LoopError, MetricError)


def brief_traceback(error: BaseException) -> str:
    """Return the traceback of ``error`` in at most ``MOST_LINES`` lines, the user's innermost line near the end.

    For an error that states what to change only the user's lines and the message are shown, without the frames that
    raised it. The traceback of a loader's worker, which arrives as a message, is shown in full at its end.
    """
    parts = traceback.format_exception(type(error), error, error.__traceback__)
    refused = isinstance(error, _EXPLAINED)
    if refused:
        # The message without the module of the exception's class, then the notes that were added to the exception.
        _, *notes = only = traceback.format_exception_only(type(error), error)
        parts[-len(only) :] = [f"{type(error).__name__}: {error}", *notes]
    if not hasattr(error, "add_note"):
        # Python before 3.11 shows no notes.
        parts += getattr(error, "__notes__", ())
    lines: list[str] = []
    for foreign, group in groupby(parts, _is_foreign):
        run = list(group)
        if foreign:
            # The frame that raised is shown, also in phalanx or torch.
            last = run[-1:] if not refused and _raises(run[-1], parts) else []
            left_out = 0 if refused else len(run) - len(last)
            lines += [f"  ... {left_out} frames in phalanx and torch"] if left_out else []
            run = last
        lines += [line for part in run for line in _shortened(part)]
    if len(lines) > MOST_LINES:
        head = MOST_LINES // 4
        tail = MOST_LINES - head - 1
        lines = [*lines[:head], f"  ... {len(lines) - head - tail} lines left out", *lines[-tail:]]
    return "\n".join(lines)


def shows_lines(error: BaseException) -> bool:
    """Whether the brief traceback of ``error`` has lines of code."""
    return any(line.startswith(_FRAME) for line in brief_traceback(error).splitlines())


def passes_phalanx(error: BaseException) -> bool:
    """Whether the traceback of ``error`` has frames of phalanx."""
    return any(frame.filename.startswith(OWN_FOLDERS) for frame in traceback.extract_tb(error.__traceback__))


def _is_foreign(part: str) -> bool:
    if not part.startswith(_FRAME):
        return False
    path = part[len(_FRAME) :].partition('"')[0]
    imports = path == importlib.__file__ or path.startswith("<frozen ")
    return imports or path.startswith(OWN_FOLDERS) or "site-packages/torch/" in path


def _raises(frame: str, parts: list[str]) -> bool:
    """Whether a frame is the innermost one of its traceback."""
    following = parts[parts.index(frame) + 1 :]
    return not following or not following[0].startswith(_FRAME)


def _shortened(part: str) -> list[str]:
    """Return the lines of a frame, or of an exception's message, without the middle of a long one."""
    lines = part.rstrip("\n").split("\n")
    tail = _MESSAGE_TAIL * 2 if any(line.startswith("Original Traceback") for line in lines) else _MESSAGE_TAIL
    if part.startswith(_FRAME) or len(lines) <= _MESSAGE_HEAD + tail + 1:
        return lines
    left_out = len(lines) - _MESSAGE_HEAD - tail
    return [*lines[:_MESSAGE_HEAD], f"  ... {left_out} lines left out", *lines[-tail:]]

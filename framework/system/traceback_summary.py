"""A short traceback: frames in phalanx and torch between the user's own lines are left out. Does not import torch."""

from __future__ import annotations

import traceback
from itertools import groupby

from ..core.errors import ConfigurationError
from ..core.package_paths import OWN_FOLDERS

MOST_LINES = 28
_MESSAGE_HEAD, _MESSAGE_TAIL = 3, 6
_FRAME = '  File "'


def brief_traceback(error: BaseException) -> str:
    """Return the traceback of ``error`` in at most ``MOST_LINES`` lines, the user's innermost line near the end.

    For a ``ConfigurationError`` only the user's lines and the message are shown, without the frames that raised it. The
    traceback of a loader's worker, which arrives as a message, is shown in full at its end.
    """
    parts = traceback.format_exception(type(error), error, error.__traceback__)
    refused = isinstance(error, ConfigurationError)
    if refused:
        # The message without the module of the exception's class, then the notes that were added to the exception.
        _, *notes = only = traceback.format_exception_only(type(error), error)
        parts[-len(only) :] = [f"{type(error).__name__}: {error}", *notes]
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


def _is_foreign(part: str) -> bool:
    if not part.startswith(_FRAME):
        return False
    path = part[len(_FRAME) :].partition('"')[0]
    return path.startswith(OWN_FOLDERS) or "site-packages/torch/" in path or path.startswith("<frozen ")


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

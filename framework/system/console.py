"""Text for streams whose encoding lacks some of its characters, such as ASCII and Latin-1."""

from __future__ import annotations

import sys
from typing import Any

# Frames, and the mark that rich puts where it cuts a text.
_ASCII = str.maketrans({**dict.fromkeys("┌┐└┘", "+"), "─": "-", "│": "|", "…": "."})


def encodable(text: str, stream: Any) -> str:
    """Return text that a stream can encode: unchanged if possible, else with ASCII frames and escaped characters."""
    # A stream in memory has no encoding.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def print_line(text: str) -> None:
    """Print one line, or one block of lines, in a single write, so that the output of other ranks cannot split it."""
    sys.stdout.write(encodable(text, sys.stdout) + "\n")
    sys.stdout.flush()


class EncodableStream:
    """The standard output, with texts that it cannot encode made ``encodable``; for libraries that write to a file."""

    def write(self, text: str) -> int:
        """Write a text."""
        return sys.stdout.write(encodable(text, sys.stdout))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

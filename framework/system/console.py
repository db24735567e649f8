"""Text on consoles: characters that a stream can encode, the width, folding, whole lines, and notebooks."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
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


def printable(text: str) -> str:
    """Return text in which control characters, changes of writing direction and lone surrogates are escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def terminal_columns() -> int | None:
    """Return the width of the terminal that the standard output is; None for a file, a pipe or a notebook."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    return None


def folded(line: str, columns: int | None, indent: str = "", breaks_words: bool = True) -> list[str]:
    """Return a line as lines of at most this width.

    Args:
        columns: the width; None: it is not folded.
        indent: the beginning of the second and further lines.
        breaks_words: whether a word that is wider is broken; otherwise it gets a line of its own, and can be copied.
    """
    if columns is None or len(line) <= columns:
        return [line]
    return textwrap.wrap(
        line, columns, subsequent_indent=indent, break_long_words=breaks_words, break_on_hyphens=False,
        replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip


def is_notebook() -> bool:
    """Whether this process runs the cells of a notebook, or was forked from one that does."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None and hasattr(module, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


def print_line(text: str) -> None:
    """Print one line, or one block of lines, in a single write, so that the output of other ranks cannot split it."""
    sys.stdout.write(encodable(text, sys.stdout) + "\n")
    sys.stdout.flush()


class EncodableStream:
    """The standard output, with texts that it cannot encode made ``encodable``; for libraries that write to a file."""

    def write(self, text: str) -> int:
        return sys.stdout.write(encodable(text, sys.stdout))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

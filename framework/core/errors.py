"""The exceptions that phalanx raises, as a tree, with their exit codes.

    PhalanxError                        exit code 1
    ├── ConfigurationError (ValueError)         78   an argument that breaks a rule; raised before any process starts
    │   ├── UnknownNameError (KeyError)         78   an unknown name; the message gives the closest known one
    │   └── UnknownArgumentError (TypeError)    78   an unknown argument; the message gives the closest known one
    ├── CheckpointError                         65   a checkpoint that is refused: missing, damaged, or of another model
    ├── StorageError (OSError)                  74   a directory that cannot be written
    ├── Preempted                               75   stopped from outside after saving: run the same command again
    ├── StalledError                            76   a section exceeded its time limit
    ├── CorruptionError                         77   a rank that has computed or held other numbers than it should
    ├── DataError                                1   a loader that yields no batch, or batches that break its contract
    ├── LoopError                                1   a step method that returns the wrong thing
    ├── MetricError                              1   a metric that is unknown, or logged differently on another rank
    ├── NonFiniteError                           1   a loss or gradient that is NaN or infinite
    ├── DesyncError                              1   ranks that are not at the same step
    └── RankError                                1   a rank of a launched function failed
        └── LostRankError                        1   a rank for which this one waits has ended

Every message says what was given, the rule, and the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Set
from typing import TypeGuard

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

# The longest list of known names in a message, which would hide the sentence otherwise.
_MOST_LETTERS = 100
# The shortest beginning of a name that is taken for an abbreviation.
_FEWEST_LETTERS = 4


class PhalanxError(Exception):
    """Root of all errors that phalanx raises. A launched rank exits with ``exit_code``."""

    exit_code: int = 1


class ConfigurationError(PhalanxError, ValueError):
    """An argument breaks a rule."""

    exit_code = 78


class UnknownNameError(ConfigurationError, KeyError):
    """A name is not known."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; a sentence should read as one.
        return str(self.args[0]) if self.args else ""


class UnknownArgumentError(ConfigurationError, TypeError):
    """A function or a class has no such argument."""


class CheckpointError(PhalanxError):
    """A checkpoint is refused."""

    exit_code = 65


class StorageError(PhalanxError, OSError):
    """A directory or file cannot be written."""

    exit_code = 74


class Preempted(PhalanxError):
    """The run was asked to end from outside and has saved its state."""

    exit_code = 75


class StalledError(PhalanxError):
    """A section of the run exceeded its time limit."""

    exit_code = 76


class CorruptionError(PhalanxError):
    """A rank has computed or held other numbers than it should, as a fault of memory or of a processor makes it."""

    exit_code = 77


class DataError(PhalanxError):
    """A loader yields no batch, or batches that break its contract."""


class LoopError(PhalanxError):
    """A step method returned something the loop cannot use."""


class MetricError(PhalanxError, KeyError, ValueError):
    """A metric is unknown, or differs between ranks."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NonFiniteError(PhalanxError):
    """A loss or gradient is NaN or infinite."""


class DesyncError(PhalanxError):
    """Ranks are not at the same step."""


class RankError(PhalanxError):
    """A rank of a launched function failed."""


class LostRankError(RankError):
    """A rank for which this one waits has ended. Its own error, if it has one, is the cause."""

    def __init__(self, message: str, lost_rank: int | None = None) -> None:
        super().__init__(message)
        self.lost_rank = lost_rank


def add_hint(error: BaseException, text: str) -> None:
    """Add a note to an error, which is shown after its message; before Python 3.11 by phalanx only."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]


def is_count(value: object, least: int) -> TypeGuard[int]:
    """Whether a value is an integer of at least ``least``; True and False do not count as integers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``" Did you mean 'x'?"`` for the known name closest to ``given``, or an empty string.

    ``prefix`` comes before the name where it is written: ``--trainer.`` before an argument of the Trainer.

    Case and punctuation do not count: ``ZeRO-3`` is close to ``zero3``. The beginning of one name alone is close to it.
    """
    plain = {_plain(name): name for name in known}
    close = [name for name in plain if name.startswith(_plain(given))]
    if len(close) != 1 or len(given) < _FEWEST_LETTERS:
        close = difflib.get_close_matches(_plain(given), plain, n=1, cutoff=0.6)
    return f" Did you mean {prefix + plain[close[0]]!r}?" if close else ""


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def unknown(what: str, given: str, known: Iterable[str], aliases: Iterable[str] = ()) -> UnknownNameError:
    """Build the error for an unknown name; the message gives the closest match, or known names.

    ``aliases`` are names that may be the closest match, and are not listed.
    """
    return UnknownNameError(f"{what}={given!r} is not known.{closest_or_known(given, known, aliases)}")


def closest_or_known(given: str, known: Iterable[str], aliases: Iterable[str] = (), prefix: str = "") -> str:
    """Return the closest known name and the list of known names, which takes no more than a line.

    A longer list is left out if there is a close name. Otherwise its first names and their number are given.
    """
    names = sorted(known) if isinstance(known, Set) else list(known)
    hint = did_you_mean(given, [*names, *aliases], prefix)
    listed = ", ".join(names)
    if len(listed) <= _MOST_LETTERS:
        return f"{hint} Known: {listed or 'none'}."
    if hint:
        return hint
    first = listed[:_MOST_LETTERS].rpartition(",")[0]
    return f" Known: {first} and {len(names) - first.count(',') - 1} more."

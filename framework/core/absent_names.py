"""Names of other libraries that a class of phalanx lacks: their access or use says in one sentence what to use instead.

``foreign_names.py`` has the sentences. A name without one keeps Python's own error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from .errors import ConfigurationError

T = TypeVar("T", bound=type)


class Absent:
    """A class attribute whose access raises ``AttributeError`` with the sentence of a table."""

    def __init__(self, owner: str, name: str, sentence: str) -> None:
        self._name, self.sentence = name, sentence

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no {self._name!r}: {self.sentence}.")


class AbsentValue:
    """A class attribute whose use raises ``ConfigurationError`` with the sentence of a table: a call, or as a dict key.

    For classes of ``nn.Module``, which replaces the message of every missing attribute by its own.
    """

    def __init__(self, owner: str, name: str, sentence: str) -> None:
        self._message, self.sentence = f"{owner} has no {name!r}: {sentence}.", sentence

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(self._message)

    def __hash__(self) -> int:
        raise ConfigurationError(self._message)

    def __eq__(self, other: object) -> bool:
        raise ConfigurationError(self._message)

    def __str__(self) -> str:
        raise ConfigurationError(self._message)


def lacks(table: Mapping[str, str], kind: type[Absent | AbsentValue] = Absent) -> Callable[[T], T]:
    """Return a class decorator: access to the names of a table, or use of their values, raises with their sentences.

    The names are class attributes, so that existing ones cost nothing and subclasses may define their own.
    """

    def decorate(cls: T) -> T:
        for name, sentence in table.items():
            setattr(cls, name, kind(cls.__name__, name, sentence.removesuffix(".")))
        return cls

    return decorate


def sentence_for(cls: type, name: str) -> str | None:
    """Return what to use instead of a name that a class lacks, None for any other name."""
    value = inspect.getattr_static(cls, name, None)
    return value.sentence if isinstance(value, Absent | AbsentValue) else None


def must_be_none(what: str, value: object, advice: str) -> None:
    """Refuse a value for an argument of another library that has no effect here.

    Raises:
        ConfigurationError: a value other than `None` was given.
    """
    if value is not None:
        raise ConfigurationError(f"{what} is not supported (must be None): {advice}.")

"""``Setting``: a read-only attribute of a Trainer with one of its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..core.errors import ConfigurationError
from .resolved_settings import Settings

T = TypeVar("T")


class Setting(Generic[T]):
    """A read-only attribute of a Trainer with one of its settings. Assigning it raises ``ConfigurationError``."""

    def __init__(self, read: Callable[[Settings], T]) -> None:
        self._read = read
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type) -> T:
        return self._read(trainer.settings)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise ConfigurationError(f"trainer.{self._name} is read when the Trainer is created: pass it to Trainer(...).")

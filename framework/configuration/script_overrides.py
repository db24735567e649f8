"""Overrides of the arguments that a script gives to its Trainer, from a command line."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from ..core.arguments import advice_for
from ..core.errors import ConfigurationError, UnknownArgumentError
from ..core.foreign_names import ARGUMENTS
from ..core.registry import CALLBACKS, LOGGERS, PRECISIONS, STRATEGIES, Registry, as_list
from ..trainer.settings import TrainerSettings

_PREFIX = "--trainer."
_NAMED: dict[str, Registry] = {
    "strategy": STRATEGIES,
    "precision": PRECISIONS,
    "callbacks": CALLBACKS,
    "logger": LOGGERS,
}
_CONSTANTS = {"None": None, "True": True, "False": False}


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a Trainer that options such as ``--trainer.devices 8`` give.

    Values are written as in JSON; other text is a string.

    Raises:
        ConfigurationError: an option is not one of the Trainer, has no value, or its value breaks a rule.
    """
    known = {each.name: each for each in fields(TrainerSettings)}
    overrides: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        option, separator, text = rest.pop(0).partition("=")
        name = option.removeprefix(_PREFIX)
        if not option.startswith(_PREFIX):
            raise UnknownArgumentError(f"{option!r} is not an option for scripts{_advice(option, list(known))}")
        if name not in known:
            raise UnknownArgumentError(
                f"{option!r} is not known{advice_for(name, known, ARGUMENTS['Trainer'], _PREFIX)}"
            )
        if not separator:
            if not rest or rest[0].startswith("--"):
                raise ConfigurationError(f"{option!r} needs a value: {option}=VALUE.")
            text = rest.pop(0)
        with naming_options(known):
            overrides[name] = _checked(name, _value(text), known[name].metadata["rule"])
    return overrides


@contextmanager
def naming_options(names: Collection[str]) -> Iterator[None]:
    """Let an error that begins with an argument of the Trainer name its option, as ``trainer.max_epochs``."""
    try:
        yield
    except ConfigurationError as error:
        text = str(error)
        if text.partition("=")[0] in names:
            error.args = (f"{_PREFIX.lstrip('-')}{text}", *error.args[1:])
        raise


def _advice(option: str, known: list[str]) -> str:
    name = option.lstrip("-")
    if option.startswith("-") and name in known:
        return f". Did you mean '{_PREFIX}{name}'?"
    return f": give those of the Trainer as {_PREFIX}NAME VALUE, and arguments of the script after '--'."


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return _CONSTANTS.get(text, text)


def _checked(name: str, value: Any, rule: Any) -> Any:
    """Return a value that obeys the rule of its argument."""
    if rule is not None:
        rule(name, value)
    if (registry := _NAMED.get(name)) is not None:
        for each in as_list(value):
            if isinstance(each, str) and each != "auto":
                registry.canonical(each)
    return value

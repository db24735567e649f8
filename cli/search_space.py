"""``parse_search``: the values that ``phalanx sweep --search`` tries, as distributions of Optuna."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from ..framework.core.errors import ConfigurationError

_FORMS = (
    "write values as 64,128, a range as 0.0:0.5, log:1e-5:1e-2 or int:2:8, and a range with steps as 0.0:0.5:0.1 or "
    "int:2:8:2"
)


def parse_search(texts: Sequence[str]) -> dict[str, BaseDistribution]:
    """Return the distribution of each searched name.

    Args:
        texts: such as ``"lr=log:1e-5:1e-2 width=64,128"``; names and values are separated by spaces.

    Raises:
        ConfigurationError: a part is not of a known form, a range is empty, or a name is given twice.
    """
    space: dict[str, BaseDistribution] = {}
    for part in itertools.chain.from_iterable(map(_split, texts)):
        name, separator, form = part.partition("=")
        name = name.removeprefix("--")
        if not separator or not name or not form:
            raise ConfigurationError(f"--search: {part!r} is not of the form NAME=VALUES: {_FORMS}.")
        if name in space:
            raise ConfigurationError(f"--search: {name!r} is given twice: leave one out.")
        space[name] = _distribution(part, form)
    if not space:
        raise ConfigurationError(f"--search is empty: give at least one NAME=VALUES; {_FORMS}.")
    return space


def grid(space: dict[str, BaseDistribution]) -> list[dict[str, Any]]:
    """Return all combinations of values; those of the last name change first.

    Raises:
        ConfigurationError: a range has no steps.
    """
    values = [_values(name, distribution) for name, distribution in space.items()]
    return [dict(zip(space, each, strict=True)) for each in itertools.product(*values)]


def _values(name: str, distribution: BaseDistribution) -> list[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    if isinstance(distribution, IntDistribution) and not distribution.log:
        return list(range(distribution.low, distribution.high + 1, distribution.step))
    if isinstance(distribution, FloatDistribution) and distribution.step is not None:
        count = round((distribution.high - distribution.low) / distribution.step)
        return [distribution.low + number * distribution.step for number in range(count + 1)]
    raise ConfigurationError(
        f"--search {name}: --sampler grid needs values, or a range with steps: write {name}=A,B,C or {name}=A:B:STEP."
    )


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"--search {text!r} cannot be read: {error}.") from None


def _distribution(part: str, form: str) -> BaseDistribution:
    pieces = form.split(":")
    kinds = [pieces.pop(0)] if pieces[0] in ("int", "log") else []
    if kinds == ["int"] and pieces[:1] == ["log"]:
        kinds.append(pieces.pop(0))
    if not kinds and len(pieces) == 1:
        choices = [_choice(each) for each in form.split(",")]
        if len(set(map(repr, choices))) < len(choices):
            raise ConfigurationError(f"--search: {part!r} has a value twice: leave one out.")
        return CategoricalDistribution(choices)
    is_whole, is_log = "int" in kinds, "log" in kinds
    try:
        low, high, *rest = [int(piece) if is_whole else float(piece) for piece in pieces]
        step = rest.pop(0) if rest else None
    except ValueError:
        raise ConfigurationError(f"--search: {part!r} is not of a known form: {_FORMS}.") from None
    if rest or (is_log and step is not None) or (step is not None and step <= 0):
        raise ConfigurationError(f"--search: {part!r} is not of a known form: {_FORMS}.")
    if not low < high or (is_log and low <= 0):
        positive = ", and the first above 0 for log" if is_log else ""
        raise ConfigurationError(
            f"--search: {part!r} is not a range: the first number must be below the second{positive}."
        )
    if is_whole:
        return IntDistribution(int(low), int(high), log=is_log, step=int(step or 1))
    return FloatDistribution(low, high, log=is_log, step=step)


def _choice(text: str) -> Any:
    """Return a number, true, false or null as JSON does, and other text as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text

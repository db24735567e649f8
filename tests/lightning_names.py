"""Comparison of the public names of a class of Lightning with those of its counterpart."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from torch import nn

from phalanx.framework.core.errors import ConfigurationError


def public(cls: type, instance: object = None) -> set[str]:
    """Return the public names of a class and of one of its objects, without those of ``nn.Module``."""
    attributes = vars(instance) if instance is not None else {}
    return {name for name in {*dir(cls), *attributes} - {*dir(nn.Module)} if not name.startswith("_")}


def missing(names: Iterable[str], mine: object) -> dict[str, str]:
    """Return the names that an object lacks, with the messages of their errors."""
    found = {}
    for name in sorted(names):
        try:
            getattr(mine, name)
        except ConfigurationError:
            continue
        except AttributeError as error:
            found[name] = str(error)
    return found


def without_sentence(names: Iterable[str], mine: object) -> dict[str, str]:
    """Return the names that an object lacks and whose error does not say what to use instead, with the errors."""
    return {
        name: message
        for name, message in missing(names, mine).items()
        if not re.fullmatch(rf"\w+ has no '{name}': [^.].+\.", message)
    }


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function without ``self``; an empty list if it has no signature."""
    try:
        given = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    return given[1:] if given and given[0].name in ("self", "cls") else given


def missing_arguments(theirs: Any, mine: Any) -> set[str]:
    """Return the public arguments of a function that its counterpart does not take.

    An argument whose place has another name in the counterpart can be passed by position, and counts as taken.
    """
    named = {each.name for each in parameters_of(theirs)}
    own = parameters_of(mine)
    if any(each.kind is each.VAR_KEYWORD for each in own):
        return set()
    lacking = set()
    for place, each in enumerate(parameters_of(theirs)):
        if each.name.startswith("_") or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            continue
        renamed = place < len(own) and own[place].kind is each.POSITIONAL_OR_KEYWORD and own[place].name not in named
        if each.name not in {other.name for other in own} and not renamed:
            lacking.add(each.name)
    return lacking


def methods_that_lack_arguments(theirs: type, mine: type) -> dict[str, set[str]]:
    """Return the common public methods of two classes that lack arguments, and those arguments."""
    common = {name for name in public(theirs) & public(mine) if inspect.isroutine(inspect.getattr_static(theirs, name))}
    found = {}
    for name in common | {"__init__"}:
        # A name without a counterpart raises on access or when it is called.
        if not isinstance(inspect.getattr_static(mine, name), FunctionType | classmethod | staticmethod):
            continue
        if lacking := missing_arguments(getattr(theirs, name), getattr(mine, name)):
            found[name] = lacking
    return found

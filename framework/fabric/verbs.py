"""``verb``: a method of one of a Fabric's parts as a method of the Fabric, with its signature and docstring."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def verb(part: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method that calls ``method`` of the object in the attribute ``part``."""

    def call(fabric: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(fabric, part), *args, **kwargs)

    functools.update_wrapper(call, method)
    return call

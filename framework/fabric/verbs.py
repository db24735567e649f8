"""Methods of a Fabric that are methods of one of its parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..core.arguments import is_from_call, refuse_unknown

P = ParamSpec("P")
R = TypeVar("R")


def verb(part: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method of a Fabric that calls ``method`` of its attribute ``part``; signature and docstring are kept."""

    def call(fabric: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(getattr(fabric, part), *args, **kwargs)
        except TypeError as error:
            if is_from_call(error):
                refuse_unknown(f"{type(fabric).__name__}.{method.__name__}", method, kwargs)
            raise

    functools.update_wrapper(call, method)
    return call

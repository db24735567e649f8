"""Methods of ``Fabric`` that call its parts, Accelerate's names for some, and names of Lightning's that it lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..core.arguments import is_from_call, refuse_unknown

P = ParamSpec("P")
R = TypeVar("R")

ABSENT = {
    "accelerator": "read the device from fabric.device",
    "run": "put the code into a function and call fabric.launch(function)",
    "sharded_model": "build the module in fabric.init_module()",
}
"""Names of Lightning's Fabric that have no counterpart here, with what to use instead."""


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

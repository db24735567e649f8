"""Methods of ``Fabric`` that are methods of its parts, and the names of Lightning's Fabric that it lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

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
        return method(getattr(fabric, part), *args, **kwargs)

    functools.update_wrapper(call, method)
    return call

"""A search for the largest batch size that fits into memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ...framework.core.arguments import names_arguments
from ...framework.diagnostics.out_of_memory import is_out_of_memory
from ...framework.distributed.devices import empty_caches

__all__ = ["find_executable_batch_size", "release_memory"]


@names_arguments
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Return a function that calls ``function(batch_size, ...)`` with smaller sizes until it fits into memory.

    On several ranks all must run out of memory in the same call; a rank that runs out alone leaves the others waiting.

    Args:
        function: takes the batch size as its first argument; without it a decorator is returned.
        starting_batch_size: the first size.
        reduce_batch_size_fn: returns the next size; by default 0.9 times the last one, rounded down.

    Raises:
        RuntimeError: not even a batch of one sample fits.
        TypeError: the caller passes the batch size.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        names = list(inspect.signature(function).parameters)
        if len(names) < len(args) + 1:
            raise TypeError(f"{function.__name__} gets the batch size as its first argument; call it without.")
        while size > 0:
            release_memory()
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            size = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(size * 0.9)
        raise RuntimeError("no batch size fits into memory: not even one sample does.")

    return call


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and empty the caches; return a None for each object, to assign to it."""
    count = len(objects)
    del objects  # the arguments' tuple would keep them alive through the collection
    empty_caches()
    return [None] * count

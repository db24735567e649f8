"""Functions that Accelerate offers beside its Accelerator: seeds, ranks of a notebook, and memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...framework.core.arguments import names_arguments
from ...framework.diagnostics.out_of_memory import is_out_of_memory
from ...framework.distributed.devices import empty_caches
from ...framework.distributed.seed import seed_everything
from ...framework.distributed.world import placement
from ...framework.fabric.fabric import Fabric
from ...framework.fabric.loaders import skip_first_batches

__all__ = ["find_executable_batch_size", "notebook_launcher", "release_memory", "set_seed", "skip_first_batches"]


@names_arguments
def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch on this rank.

    Args:
        seed: the seed.
        device_specific: add the rank to the seed.
        deterministic: let torch use deterministic algorithms only.
    """
    seed_everything(seed + placement().rank if device_specific else seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def notebook_launcher(
    function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int | None = None, **options: Any
) -> Any:
    """Run a function in forked ranks and return the result of rank 0.

    Args:
        function: creates its own Accelerator.
        args: its arguments.
        num_processes: the number of ranks; None for one on each GPU.
        options: accepted for compatibility with Accelerate.
    """
    fabric = Fabric(devices="auto" if num_processes is None else num_processes)
    return fabric.launch(lambda _: function(*args))


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

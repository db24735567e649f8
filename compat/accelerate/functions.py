"""Functions that Accelerate offers beside its Accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...framework.core.arguments import names_arguments
from ...framework.distributed.seed import seed_everything
from ...framework.distributed.world import placement
from ...framework.fabric.fabric import Fabric
from ...framework.fabric.loaders import skip_first_batches

__all__ = ["notebook_launcher", "set_seed", "skip_first_batches"]


@names_arguments
def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch on this rank.

    Args:
        seed: the seed.
        device_specific: add the rank to the seed.
        deterministic: let torch use deterministic algorithms only.
    """
    import torch

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

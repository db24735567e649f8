"""The strategies that ``strategy="auto"`` tries, and those that a plan proposes where memory does not suffice.

The module imports no strategy: a fit imports only the one that it uses.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..framework.core.degrees import Degrees


def candidates(world_size: int, degrees: Degrees) -> tuple[str, ...]:
    """Return the strategies that ``strategy="auto"`` tries, the fastest first; only one where the degrees decide.

    Degrees decide if they say how the ranks that are left share the state, or name an axis of one strategy alone.
    """
    if not degrees.used:
        return ("single" if world_size == 1 else "ddp", "fsdp", "zero3-offload", "zero3-nvme")
    if "pp" in degrees.used:
        return ("pipeline",)
    if degrees.dp_replicate == -1 or degrees.dp_shard == 1:
        return ("ddp",)
    if degrees.given.keys() & {"dp_shard", "dp_replicate"} or "ep" in degrees.used:
        return ("fsdp",)
    return ("ddp", "fsdp")


def smaller(world_size: int, local_size: int, least: float) -> Iterator[tuple[str, Degrees]]:
    """Yield strategies with degrees under which a rank holds less, the likeliest to fit first.

    Args:
        world_size: the number of ranks.
        local_size: the number of ranks of a node.
        least: the degree that is needed at least.
    """
    yield "fsdp", Degrees()
    for degree in (8, 4, 2):
        if degree >= least and world_size % degree == 0:
            yield "fsdp", Degrees(cp=degree)
            if local_size % degree == 0:
                yield "fsdp", Degrees(tp=degree)
            yield "fsdp", Degrees(ep=degree)
            yield "pipeline", Degrees(pp=degree)
